"""Uncertainty of a mixture's direction over rows.

It is a joint bootstrap of validation and source rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hgms.uncertainty.verdict import LEVEL, Effect, Uncertainty, over_sources
from hgms_core import Key

AT_ONCE = 2**23
"""Maximum number of values in memory at the same time."""


def over_rows(
    gains: Tensor, names: Sequence[str], prior: Tensor, key: Key, resamples: int = 4000
) -> Uncertainty:
    """Estimate the effects that move the sources' log-odds from the ``prior`` π, with intervals::

        u_s = h_s − Σ_r π_r h_r,
            h_s = mean over blocks v of validation rows and m of source rows of gains[v, s, m]

    ``gains`` are first-order effects η⟨∇f_v, ∇ℓ_{s,m}⟩, ``[V, S, M]``: the amount by which a step
    on block m of source s lowers the loss of validation block v. If u_s > 0, slightly more of s
    than in the prior lowers the validation loss. If all u_s = 0, the prior is stationary.

    Validation blocks and the blocks of each source are resampled independently (the pigeonhole
    bootstrap), and each resample is studentised: t* = (u* − u)/se(u*), with se² the variance of the
    means over v plus the variance of the means over m. The interval is u ± q se(u), with q the 95 %
    quantile of ``|t*|``. The p-value is the share of resamples with ``|t*|`` ≥ ``|u/se(u)|``,
    followed by Holm's rule.

    Use when there are few rows, which is common for validation rows. Source rows are resampled too:
    two halves of one source differ by chance through their rows, and more validation rows only
    increase the apparent certainty of this difference. The intervals cover rows, at these states of
    x and to first order. They do not cover seeds, the model, or the effect of many steps. At least
    4 blocks of a kind are required, because the spread of fewer blocks is not reliable.

    Notes
    -----
    Cost: ``resamples`` · V · S · M multiplications; no gradient.

    Source: Owen (2007), *The pigeonhole bootstrap*, Annals of Applied Statistics 1; Efron and
    Tibshirani (1993), chapter 12.

    Examples
    --------
    >>> gains = torch.randn(12, 2, 8, dtype=torch.float64, generator=Key(0).generator())
    >>> gains[:, 0] += 3.0  # the first source helps
    >>> certain = over_rows(gains, ["good", "useless"], torch.tensor([0.5, 0.5]), Key(1))
    >>> [effect.sign for effect in certain.effects]
    [1, -1]
    """
    gains = gains.double()
    validation, sources, blocks = gains.shape
    centring = torch.eye(sources, dtype=gains.dtype) - prior.to(gains)  # row s: e_s − π
    ones = (
        torch.ones(1, validation, dtype=gains.dtype),
        torch.ones(1, sources, blocks, dtype=gains.dtype),
    )
    (value,), (error,) = _estimate(gains, centring, *ones)
    ratio = torch.where(error > 0, value / error, 0.0)
    drawn = []
    step = max(1, AT_ONCE // (validation * sources + sources * blocks * 4))
    generator = key.fold("rows").generator()
    for first in range(0, resamples, step):
        size = min(step, resamples - first)
        ofv = _counts((size,), validation, generator)
        ofm = _counts((size, sources), blocks, generator)
        again, spread = _estimate(gains, centring, ofv, ofm)
        off = (again - value).abs()
        # a resample with only one distinct block has no spread, so its distance counts as infinite
        drawn.append(torch.where(spread > 0, off / spread, torch.where(off > 0, torch.inf, 0.0)))
    ratios = torch.cat(drawn)
    half = error * ratios.quantile(LEVEL, dim=0, interpolation="higher")
    chances = (1 + (ratios >= ratio.abs()).sum(0)) / (1 + resamples)
    adjusted = over_sources(chances.tolist())
    effects = [
        Effect(
            source=name,
            value=float(value[s]),
            low=float((value - half)[s]),
            high=float((value + half)[s]),
            null=0.0,
            p=adjusted[s],
        )
        for s, name in enumerate(names)
    ]
    return Uncertainty(over="validation and source rows", effects=tuple(effects), p=min(adjusted))


def _counts(lead: tuple[int, ...], size: int, generator: torch.Generator) -> Tensor:
    """Draw how often each of ``size`` blocks occurs in ``size`` draws with replacement.

    The result has shape ``[*lead, size]``.
    """
    drawn = torch.randint(size, (*lead, size), generator=generator)
    return torch.zeros(*lead, size, dtype=torch.float64).scatter_add_(
        -1, drawn, torch.ones(*lead, size, dtype=torch.float64)
    )


def _estimate(gains: Tensor, centring: Tensor, ofv: Tensor, ofm: Tensor) -> tuple[Tensor, Tensor]:
    """Compute u and its standard error, ``[B, S]``.

    The arguments are the counts of blocks, ``[B, V]`` and ``[B, S, M]``.
    """
    validation, _, blocks = gains.shape
    rows = torch.einsum("bsm,vsm->bvs", ofm, gains) / blocks
    columns = torch.einsum("bv,vsm->bsm", ofv, gains) / validation
    means = columns.mul(ofm).sum(2) / blocks
    directions = rows @ centring.T
    value = means @ centring.T
    by_rows = (ofv.unsqueeze(2) * (directions - value.unsqueeze(1)).square()).sum(1) / (
        validation * (validation - 1)
    )
    by_source = (ofm * (columns - means.unsqueeze(2)).square()).sum(2) / (blocks * (blocks - 1))
    return value, (by_rows + by_source @ centring.square().T).sqrt()
