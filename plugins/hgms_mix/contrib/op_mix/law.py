"""Predict the best mixture near a prior from mixtures and their validation losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms.arguments import require
from hgms_core import NumericalError

FLOORS = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Starts of the fits: e^c as a share of the lowest loss."""
DELTA = 0.02
"""Residuals above this count linearly, as in the authors' program."""
FACTORS = tuple(4.0**power for power in range(8, -1, -1))
"""The values of kl of successive solutions, as multiples of the requested one."""
WRONG = 1e-4
"""Bound on the error of a proposal in the 1-norm, above which it is an error."""


@frozen(eq=False)
class Law:
    """The loss at a mixture, y(ω) = e^c + e^{t·ω}.

    ``error`` is the root mean square of the residuals.
    """

    floor: float
    slopes: Tensor
    error: float

    def __call__(self, mixtures: Tensor) -> Tensor:
        return np.exp(self.floor) + (mixtures @ self.slopes).exp()


def fit(mixtures: Tensor, losses: Tensor) -> Law:
    """Fit the law of ``losses``, ``[J]``, at ``mixtures``, ``[J, S]``, with the least Huber loss.

    For a given c the rest is linear, log(y − e^c) = t·ω. From its solution at each of eleven c,
    SciPy's ``least_squares`` optimises (c, t) together. The result is the lowest end.

    Examples
    --------
    >>> mixtures = torch.tensor(
    ...     [[1.0, 0.0], [0.5, 0.5], [0.25, 0.75], [0.0, 1.0]], dtype=torch.float64
    ... )
    >>> law = fit(mixtures, 1 + (mixtures @ torch.tensor([-1.0, 0.5], dtype=torch.float64)).exp())
    >>> law.slopes.round(decimals=3)
    tensor([-1.0000,  0.5000], dtype=torch.float64)
    """
    from scipy.optimize import least_squares

    omega = mixtures.double().numpy()
    y = losses.double().numpy()

    def residuals(at: np.ndarray) -> np.ndarray:
        return np.exp(at[0]) + np.exp(omega @ at[1:]) - y

    def slopes(at: np.ndarray) -> np.ndarray:
        return np.column_stack(
            [np.full(len(y), np.exp(at[0])), np.exp(omega @ at[1:])[:, None] * omega]
        )

    ends = []
    for share in FLOORS:
        linear = np.linalg.lstsq(omega, np.log(y - share * y.min()), rcond=None)[0]
        start = np.array([np.log(share * y.min()), *linear])
        ends.append(
            least_squares(
                residuals,
                start,
                slopes,
                loss="huber",
                f_scale=DELTA,
                xtol=1e-10,
                ftol=1e-12,
                gtol=1e-12,
            )
        )
    best = min(ends, key=lambda end: end.cost).x
    return Law(
        floor=float(best[0]),
        slopes=torch.from_numpy(best[1:]),
        error=float(np.sqrt(np.mean(residuals(best) ** 2))),
    )


def propose(laws: Sequence[Law], prior: Tensor, kl: float) -> Tensor:
    """Minimise the mean loss near the prior q over the simplex.

    The problem is min_ω (1/P) Σ_p e^{t_p·ω} + kl · KL(ω‖q). It is convex, and its dual is a convex
    problem in one variable m_p > 0 per validation set::

        min_m Σ_p m_p (log(P m_p) − 1) + kl · log Σ_s q_s e^{−(Tᵀm)_s / kl}
        ω_s ∝ q_s e^{−(Tᵀm)_s / kl},    and m_p = e^{t_p·ω} / P at the solution

    SciPy's Levenberg–Marquardt method solves the last equation for log m, first for a large kl, and
    from each solution for a smaller one. Let c be the derivative of the objective by ω. Then
    ‖ω − ω*‖₁ ≤ (max c − min c) / (2 kl), because KL is strongly convex in the 1-norm.

    Raises
    ------
    NumericalError
        ``not-converged`` if the bound stays above 1e-4.

    Examples
    --------
    >>> law = Law(floor=0.0, slopes=torch.tensor([0.0, 0.0], dtype=torch.float64), error=0.0)
    >>> propose([law], torch.tensor([0.25, 0.75], dtype=torch.float64), kl=0.1)
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    from scipy.optimize import root
    from scipy.special import softmax

    # a source that the prior excludes stays excluded
    allowed = prior.double().numpy() > 0
    slopes = torch.stack([law.slopes for law in laws]).double().numpy()[:, allowed]
    count = len(slopes)
    start = prior.double().numpy()[allowed]
    log_prior = np.log(start / start.sum())

    def mixture(log_m: np.ndarray, kl: float) -> np.ndarray:
        return np.asarray(softmax(log_prior - np.exp(log_m) @ slopes / kl))

    def equations(log_m: np.ndarray, kl: float) -> tuple[np.ndarray, np.ndarray]:
        omega = mixture(log_m, kl)
        mean = slopes @ omega
        covariance = (slopes * omega) @ slopes.T - np.outer(mean, mean)
        return log_m + np.log(count) - mean, np.eye(count) + covariance * np.exp(log_m) / kl

    with np.errstate(all="ignore"):
        log_m = slopes @ np.exp(log_prior) - np.log(count)
        for factor in FACTORS:
            log_m = root(equations, log_m, (factor * kl,), jac=True, method="lm", tol=1e-14).x
        omega = mixture(log_m, kl)
        residual = np.exp(slopes @ omega) / count - np.exp(log_m)
        bound = np.ptp(residual @ slopes) / (2 * kl)
    require(
        bound <= WRONG,
        "not-converged",
        f"the mixture of op-mix cannot be computed at kl={kl:g}: the bound on its error is "
        f"{bound:.1g} (1-norm)",
        place=("method", "kl"),
        hint="increase kl",
        error=NumericalError,
    )
    weights = np.zeros(len(allowed))
    weights[allowed] = omega
    return torch.from_numpy(weights)
