"""The response surface: a Gaussian process over the simplex, with noise per point.

The parameters of the process are uncertain too, and are integrated out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from attrs import frozen

from hgms.packages import optional_module
from hgms_core import Key
from hgms_mix.surface.noise import Noise, noise_of

COMPONENTS = 24
"""Number of parameter vectors in the mixture of processes."""
FREEDOM = 3
"""Minimum degrees of freedom for estimating the noise from repeats. With fewer, the noise is
a parameter of the surface.
"""
CENTRES = {"trend": (1.0, 1.0), "bend": (-1.0, 1.2), "length": (0.0, 0.7), "white": (-2.0, 1.0)}
"""Priors of the logarithms of (standardised) standard deviations and of lengths on the
simplex: (mean, standard deviation).
"""


def sklearn() -> Any:
    """Import scikit-learn's Gaussian processes on first use."""
    return optional_module(
        "sklearn.gaussian_process", "hgms mix surface", "sklearn", place=("surface",)
    )


@frozen(kw_only=True, eq=False)
class Surface:
    """A posterior over functions of a mixture.

    ``losses``, ``[G]``, are the mean losses of distinct mixtures.
    ``members`` are fitted processes with ``weights``. ``noise`` is None if no mixture was repeated.
    All deviations from the mean are multiplied by ``widening``.
    """

    losses: np.ndarray
    noise: Noise | None
    members: tuple[Any, ...]
    weights: np.ndarray
    shift: float
    scale: float
    widening: float = 1.0

    def posterior(self, mixtures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean, ``[Q]``, and covariance, ``[Q, Q]``, of the expected loss.

        Both are at ``mixtures``.
        """
        means, covariances = zip(
            *(member.predict(mixtures, return_cov=True) for member in self.members), strict=True
        )
        mean = np.einsum("k,kq->q", self.weights, means)
        apart = np.array(means) - mean
        covariance = np.einsum("k,kqr->qr", self.weights, covariances)
        covariance += np.einsum("k,kq,kr->qr", self.weights, apart, apart)
        return self.shift + self.scale * mean, (self.scale * self.widening) ** 2 * covariance

    def mean(self, mixtures: np.ndarray) -> np.ndarray:
        parts = [member.predict(mixtures) for member in self.members]
        return np.asarray(self.shift + self.scale * np.einsum("k,kq->q", self.weights, parts))

    def draws(self, mixtures: np.ndarray, count: int, key: Key) -> np.ndarray:
        """Return ``[count, Q]`` functions drawn from the posterior, at ``mixtures``."""
        generator = np.random.default_rng(key.derive())
        chosen = np.bincount(
            generator.choice(len(self.weights), size=count, p=self.weights),
            minlength=len(self.weights),
        )
        drawn = []
        for number, member in zip(chosen, self.members, strict=True):
            if number:
                mean, covariance = member.predict(mixtures, return_cov=True)
                # The posterior covariance is the prior minus the data term, so its rounding errors
                # scale with the prior.
                jitter = 1e-10 * member.kernel_.diag(mixtures).max()
                root = np.linalg.cholesky(covariance + jitter * np.eye(len(mean)))
                drawn.append(mean + generator.standard_normal((number, len(mean))) @ root.T)
        mean = self.mean(mixtures)
        return mean + self.widening * (self.shift + self.scale * np.concatenate(drawn) - mean)

    def leave_one_out_errors(self) -> np.ndarray:
        """Return the standardised leave-one-out errors.

        Each mixture is predicted from the others with the same parameters and without widening. For
        a surface with correct uncertainty, the errors are N(0, 1)::

            z_i = [K⁻¹y]_i / √[K⁻¹]_ii

        Notes
        -----
        Source: Rasmussen and Williams, *Gaussian Processes for Machine Learning*, 2006, section
        5.4.2.
        """
        errors = []
        variances = []
        for member in self.members:
            inverse = np.linalg.inv(member.L_ @ member.L_.T)
            variance = 1 / np.diag(inverse)
            errors.append(inverse @ member.y_train_ * variance)
            variances.append(variance)
        error = self.weights @ np.array(errors)
        variance = self.weights @ (np.array(variances) + (np.array(errors) - error) ** 2)
        return np.asarray(error / np.sqrt(variance))


def fit(mixtures: np.ndarray, losses: np.ndarray, key: Key) -> Surface:
    """Fit the surface of ``losses``, ``[N]``, of runs with ``mixtures``, ``[N, S]``::

        y = f(ω) + e,  f ~ GP(0, a² (1 + ω·ω') + b² Matérn₅⸝₂(ω, ω'; ℓ_1 … ℓ_S)),
            e ~ N(0, σ²(ω) / repeats)

    The terms are a linear trend, typical of mixing, and a bend with a length per source. If
    mixtures were repeated, σ² comes from the repeats (:func:`hgms_mix.surface.noise.noise_of`);
    otherwise it is another parameter. The parameters are integrated out: vectors are drawn from
    Student's t around the mode and weighted by likelihood and prior. ``COMPONENTS`` vectors are
    kept. If leave-one-out errors are larger than expected, the surface is widened by their root
    mean square.

    Notes
    -----
    Cost: O(G³) a few thousand times, for G distinct mixtures.
    """
    places, counts, values, noise = group_repeats(mixtures, losses)
    shift = float(values.mean())
    level = -np.inf if noise is None else noise.level
    scale = max(float(values.std()) or 1.0, float(np.exp(level / 2)))
    variance = np.zeros(len(values)) if noise is None else noise.variance(places) / counts
    alpha = np.maximum(variance / scale**2, 1e-8)
    members, weights = _members(places, (values - shift) / scale, alpha, noise is None, key)
    surface = Surface(
        losses=values, noise=noise, members=members, weights=weights, shift=shift, scale=scale
    )
    return attrs.evolve(
        surface, widening=max(float(np.sqrt(np.mean(surface.leave_one_out_errors() ** 2))), 1.0)
    )


def group_repeats(
    mixtures: np.ndarray, losses: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Noise | None]:
    """Return distinct mixtures, their run counts, their mean losses, and the noise.

    If repeats provide fewer than ``FREEDOM`` degrees of freedom, return every run separately, and
    None as noise.
    """
    places, inverse = np.unique(mixtures.round(6), axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    counts = np.bincount(inverse)
    values = np.bincount(inverse, weights=losses) / counts
    squares = np.bincount(inverse, weights=(losses - values[inverse]) ** 2)
    repeated = counts > 1
    if len(losses) - len(counts) < FREEDOM:
        return mixtures, np.ones(len(losses), dtype=int), losses, None
    freedoms = counts[repeated] - 1
    return (
        places,
        counts,
        values,
        noise_of(places[repeated], squares[repeated] / freedoms, freedoms),
    )


def _members(
    x: np.ndarray, y: np.ndarray, alpha: np.ndarray, white: bool, key: Key
) -> tuple[tuple[Any, ...], np.ndarray]:
    """Return processes with parameters from their posterior, and the weight of each process."""
    library = sklearn()
    kernel, centre, width = _kernel(x.shape[1], white)

    def regressor(theta: np.ndarray) -> Any:
        fitted = library.GaussianProcessRegressor(
            kernel.clone_with_theta(theta), alpha=alpha, optimizer=None
        ).fit(x, y)
        if white:  # the process predicts the expected loss; the noise of a run remains in the fit
            fitted.kernel_ = fitted.kernel_.k1
        return fitted

    likelihood = (
        library.GaussianProcessRegressor(kernel, alpha=alpha, optimizer=None)
        .fit(x, y)
        .log_marginal_likelihood
    )

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = likelihood(theta, eval_gradient=True, clone_kernel=False)
        apart = (theta - centre) / width
        return 0.5 * apart @ apart - value, apart / width - gradient

    generator = np.random.default_rng(key.derive())
    mode, root = _around_the_mode(loss, centre, width, generator)
    freedom = 5
    size = 8 * COMPONENTS
    steps = generator.standard_normal((size, len(mode)))
    steps /= np.sqrt(generator.chisquare(freedom, (size, 1)) / freedom)
    steps = np.vstack([np.zeros(len(mode)), steps])
    thetas = np.clip(mode + steps @ root.T, centre - 4 * width, centre + 4 * width)
    proposed = -0.5 * (freedom + len(mode)) * np.log1p((steps**2).sum(1) / freedom)
    logs = np.array([likelihood(theta, clone_kernel=False) for theta in thetas])
    logs -= 0.5 * (((thetas - centre) / width) ** 2).sum(1) + proposed
    shares = np.exp(logs - logs.max())
    # systematic resampling: the count of a vector represents its share
    ticks = (np.arange(COMPONENTS) + generator.random()) / COMPONENTS
    kept, counts = np.unique(
        np.searchsorted(np.cumsum(shares) / shares.sum(), ticks).clip(max=size), return_counts=True
    )
    return tuple(regressor(thetas[number]) for number in kept), counts / counts.sum()


def _kernel(sources: int, white: bool) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the kernel, and mean and standard deviation of the prior of each parameter.

    The priors are normal.
    """
    kernels = sklearn().kernels
    wide = (1e-12, 1e12)
    kernel = kernels.ConstantKernel(1.0, wide) * kernels.DotProduct(1.0, "fixed")
    kernel += kernels.ConstantKernel(1.0, wide) * kernels.Matern(np.ones(sources), wide, nu=2.5)
    parts = ["trend", "bend", *["length"] * sources]
    if white:
        kernel += kernels.WhiteKernel(1.0, wide)
        parts.append("white")
    # kernels are parametrised by variances, the priors by standard deviations
    twice = np.array([1.0 if part == "length" else 2.0 for part in parts])
    centre, width = (np.array([CENTRES[part][i] for part in parts]) * twice for i in (0, 1))
    return kernel, centre, width


def _around_the_mode(
    loss: Callable[[np.ndarray], tuple[float, np.ndarray]],
    centre: np.ndarray,
    width: np.ndarray,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum of ``loss`` (value, gradient), and a root of its inverse curvature there.

    Both define the proposal distribution of the parameters.
    """
    from scipy.optimize import minimize

    box = list(zip(centre - 4 * width, centre + 4 * width, strict=True))
    starts = [centre, *(centre + 0.7 * width * generator.standard_normal((2, len(centre))))]
    with warnings.catch_warnings():
        # ignore warnings of the optimiser: its result is only the centre of the proposal
        warnings.simplefilter("ignore")
        mode = min(
            (minimize(loss, start, jac=True, bounds=box) for start in starts),
            key=lambda result: result.fun,
        ).x
    step = 1e-3
    curvature = np.array(
        [
            (loss(mode + step * e)[1] - loss(mode - step * e)[1]) / (2 * step)
            for e in np.eye(len(mode))
        ]
    )
    values, vectors = np.linalg.eigh((curvature + curvature.T) / 2)
    return mode, vectors / np.sqrt(np.clip(values, 0.5 / width.max() ** 2, None))
