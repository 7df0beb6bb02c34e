"""From mixtures and their validation losses to the mixture that should be best, near a prior."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

FLOORS = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Where fits start: e^c as a share of the lowest loss."""
DELTA = 0.02
"""Residuals above this count linearly, as in the authors' program."""


@frozen(eq=False)
class Law:
    """The loss at a mixture, y(ω) = e^c + e^{t·ω}; ``error`` is the root mean square of what it
    misses.
    """

    floor: float
    slopes: Tensor
    error: float

    def __call__(self, mixtures: Tensor) -> Tensor:
        return np.exp(self.floor) + (mixtures @ self.slopes).exp()


def fit(mixtures: Tensor, losses: Tensor) -> Law:
    """The law of ``losses``, ``[J]``, at ``mixtures``, ``[J, S]``, of least Huber loss.

    For a given c the rest is linear, log(y − e^c) = t·ω: from its solution at each of eleven c,
    SciPy's ``least_squares`` goes on in (c, t) together, and the lowest end counts.

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
    """The mixture of least mean loss that stays near the prior q: argmin (1/P) Σ_p e^{t_p·ω} + kl ·
    KL(ω‖q) on the simplex.

    The sum is convex in ω, and with kl > 0 its minimiser has no weight of 0: so it is the one
    stationary point in z with ω = softmax(z), which SciPy's BFGS finds from log q.

    >>> law = Law(floor=0.0, slopes=torch.tensor([0.0, 0.0], dtype=torch.float64), error=0.0)
    >>> propose([law], torch.tensor([0.25, 0.75], dtype=torch.float64), kl=0.1)
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    slopes = torch.stack([law.slopes for law in laws]).numpy()
    log_prior = prior.double().log().numpy()

    def value(z: np.ndarray) -> tuple[float, np.ndarray]:
        log = log_softmax(z)
        omega = np.exp(log)
        rises = np.exp(slopes @ np.exp(log))
        far = log - log_prior
        by_weight = rises @ slopes / len(slopes) + kl * far
        return float(rises.mean() + kl * omega @ far), omega * (by_weight - omega @ by_weight)

    end = minimize(
        value, log_prior, jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 2000}
    ).x
    return torch.from_numpy(np.exp(log_softmax(end)))
