"""The mixtures of a design: repeated anchors, and points that fill the simplex.

The repeats measure the noise.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from attrs import frozen

from hgms.arguments import require
from hgms_core import Key


@frozen(kw_only=True)
class Point:
    """One run of the design: the weights of the sources in their order, the seed of sample
    and fine-tuning, and the role of the run.
    """

    weights: tuple[float, ...]
    seed: int
    role: Literal["prior", "vertex", "fill"]


def design(
    prior: np.ndarray, *, points: int | None, repeats: int, shrink: float, seed: int
) -> list[Point]:
    """Return the runs of a surface over ``len(prior)`` sources::

        anchors    prior, and (1 − shrink) e_s + shrink · prior for each source s;
                   each ``repeats`` times, with other seeds
        the rest   a scrambled Sobol sequence, mapped to Dirichlet(S · prior) by its
                   conditional quantiles

    For a uniform prior, the rest is spread evenly over the simplex. A longer design contains the
    runs of a shorter design as its beginning. Every run has a separate seed, so two runs differ by
    mixture and chance.

    Raises
    ------
    ConfigError
        Fewer points than the anchors require, or a source of weight zero in the prior.

    Examples
    --------
    >>> [
    ...     point.role
    ...     for point in design(np.array([0.5, 0.5]), points=8, repeats=2, shrink=0.1, seed=0)
    ... ]
    ['prior', 'vertex', 'vertex', 'prior', 'vertex', 'vertex', 'fill', 'fill']
    """
    sources = len(prior)
    require(
        (prior > 0).all(),
        "out-of-range",
        f"all weights of the prior must be greater than 0, but the smallest is {prior.min():g}",
        place=("surface", "prior"),
        hint="remove the source, or increase its weight",
    )
    anchors = [prior, *((1 - shrink) * np.eye(sources) + shrink * prior)]
    least = repeats * len(anchors)
    count = least + 4 * sources if points is None else points
    require(
        count >= least + sources,
        "out-of-range",
        f"points={count} must be at least {least + sources}: {len(anchors)} anchors x "
        f"{repeats} repeats + {sources}",
        place=("surface", "points"),
        hint=f"increase points{', or decrease repeats' if repeats > 2 else ''}",
    )
    key = Key(seed).fold("surface")
    runs = [
        Point(
            weights=_weights(anchor),
            seed=_seed(key.fold("anchor", number, turn)),
            role="vertex" if number else "prior",
        )
        for turn in range(repeats)
        for number, anchor in enumerate(anchors)
    ]
    for number, weights in enumerate(spread(prior, count - least, key.fold("fill"))):
        runs.append(
            Point(weights=_weights(weights), seed=_seed(key.fold("fill", number)), role="fill")
        )
    return runs


def spread(prior: np.ndarray, count: int, key: Key) -> np.ndarray:
    """Return the first ``count`` points of the sequence, ``[count, S]``, Dirichlet(S · prior)::

        ω_s = b_s · Π_{r<s} (1 − b_r),  b_s = the u_s-quantile of Beta(α_s, Σ_{r>s} α_r),
            α = S · prior

    Examples
    --------
    >>> points = spread(np.full(3, 1 / 3), 1024, Key(0))
    >>> points.mean(0).round(2)
    array([0.33, 0.33, 0.33])
    """
    from scipy.stats import beta, qmc

    sources = len(prior)
    alpha = sources * prior
    rest = np.cumsum(alpha[::-1])[::-1]
    sobol = qmc.Sobol(sources - 1, scramble=True, rng=np.random.default_rng(key.derive()))
    exponent = max(int(np.ceil(np.log2(max(count, 1)))), 0)
    # powers of two are balanced, and cause no warning of scipy
    uniform = sobol.random_base2(exponent)[:count]
    parts = beta.ppf(np.clip(uniform, 1e-9, 1 - 1e-9), alpha[:-1], rest[1:])
    left = np.cumprod(1 - parts, axis=1)
    return np.column_stack([parts[:, :1], parts[:, 1:] * left[:, :-1], left[:, -1:]])


def _weights(weights: np.ndarray) -> tuple[float, ...]:
    """Return rounded weights, so that a repeated mixture is identical in every file."""
    rounded = weights.round(6)
    rounded[rounded.argmax()] += 1 - rounded.sum()
    return tuple(float(weight) for weight in rounded.round(6))


def _seed(key: Key) -> int:
    return key.derive() % 2**31
