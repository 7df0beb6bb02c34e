"""The null test: do different sources part further than two random halves of one source do?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen

from hgms_core import Key
from hgms_uncertainty.seeds import ROUNDING, _quantile
from hgms_uncertainty.simplex import LEAST, Array
from hgms_uncertainty.verdict import LEVEL, _chance, _finite, listed, over_sources

PERMUTATIONS = 9999


@frozen(kw_only=True)
class Parted:
    """How far the halves of ``source`` part, and how far it parts from the others, in log-odds.

    ``halves`` is the mean of |log ω₁/ω₂| over runs with its interval ``low`` to ``high``; ``apart`` the mean of its log weight
    minus that of the other sources, with ``apart_low`` to ``apart_high``; ``ratio`` compares the two (:func:`halves_test`);
    ``p`` is that of "its halves are as other sources' are", after Holm's rule over the sources."""

    source: str
    halves: float
    low: float
    high: float
    apart: float
    apart_low: float
    apart_high: float
    ratio: float
    p: float

    @property
    def sign(self) -> int:
        """1: more of it than halves part by chance; −1: less; 0: that cannot be told."""
        return 0 if not self.p <= 1 - LEVEL else 1 if self.apart > 0 else -1

    @property
    def verdict(self) -> str:
        return {1: "more than the others", -1: "less than the others", 0: "parts no further than halves do"}[self.sign]


@frozen(kw_only=True)
class HalvesTest:
    """The sources, the ratio of signal to null over all of them (NaN where no weight moved), and p of the permutation test."""

    sources: tuple[Parted, ...]
    ratio: float
    p: float
    runs: int

    @property
    def evidence(self) -> bool:
        return self.p <= 1 - LEVEL

    @property
    def moved(self) -> bool:
        return not math.isnan(self.ratio)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.moved:
            return "no weight moved, neither between halves nor between sources: no evidence against the prior"
        how = f"{self.ratio:.1f} times as far as" if self.ratio < 100 else "far more than 100 times as far as"
        if not self.evidence:
            return (
                f"the halves of a source part as far as different sources do (signal to null {self.ratio:.2f}, "
                f"{_chance(self.p)}, {self.runs} runs): the weights say nothing"
            )
        named = {sign: [part.source for part in self.sources if part.sign == sign] for sign in (1, -1, 0)}
        parts = [f"{word} of {listed(named[sign])}" for sign, word in ((1, "more"), (-1, "less")) if named[sign]]
        told = f"different sources part {how} the halves of one ({_chance(self.p)}, {self.runs} runs)"
        told += f": evidence for {', '.join(parts)}" if parts else ", but of no single source can be said which way"
        return told + (f"; {listed(named[0])} cannot be told from halves of one source" if parts and named[0] else "")

    def as_dict(self) -> dict[str, Any]:
        sources = [{**attrs.asdict(part), "evidence": part.sign, "verdict": part.verdict} for part in self.sources]
        table = {"runs": self.runs, "ratio": self.ratio, "p": self.p, "evidence": self.evidence, "verdict": self.verdict}
        return _finite({**table, "sources": sources})


def halves_test(weights: Array, names: Sequence[str], key: Key, permutations: int = PERMUTATIONS) -> HalvesTest:
    """Compares how far different sources part with how far halves of one source do, ``weights`` ``[runs, S, 2]``::

        null_s = log ω_{s,1} − log ω_{s,2},      signal_s = log ω_{s,i} − log ω_{r,j}   for all r ≠ s and i, j
        ratio = root mean square of signals / root mean square of nulls

    Where names say nothing, the 2S halves of a run are alike, whichever way its weights wander, and the ratio is about 1. So
    labels are permuted among the halves of each run: p is the share of permutations (10,000 of them) in which the mean log
    weights of sources over runs, ℓ̄_s, are spread as widely as they are, Σ_s (ℓ̄_s − ℓ̄)², and for a single source, in which
    |ℓ̄_s − mean of the others| is as large. That is exact for any distribution of the weights; runs that end in corners by
    chance end in different ones. Weights below 10⁻⁴ count as that.

    Use when asking whether a method can be believed on these data at all. Needs runs: with two sources
    three give p ≥ 0.009, a single one p ≥ 0.33.

    >>> alike = np.array([[[0.7, 0.1], [0.1, 0.1]], [[0.1, 0.1], [0.1, 0.7]], [[0.1, 0.1], [0.7, 0.1]]])
    >>> halves_test(alike, ["a", "b"], Key(0)).evidence
    False
    >>> told = np.array([[[0.45, 0.4], [0.05, 0.1]], [[0.5, 0.4], [0.05, 0.05]], [[0.35, 0.5], [0.1, 0.05]]])
    >>> halves_test(told, ["a", "b"], Key(0)).verdict.partition(" (")[0]
    'different sources part 4.5 times as far as the halves of one'

    Source: Fisher (1935) for permutation tests; the halves are those of A/A tests.
    """
    logs = np.log(np.maximum(np.asarray(weights, dtype=float), LEAST))
    runs, count, _ = logs.shape
    nulls, crossed = logs[..., 0] - logs[..., 1], _crossed(logs)
    null, signal = _root_mean_square(nulls), _root_mean_square(crossed)
    still = max(null, signal) <= ROUNDING
    levels = logs.mean(2)
    aparts = (levels - levels.mean(1, keepdims=True)) * count / (count - 1)
    observed, shuffled = _spread(levels.mean(0)[None]), _spread(_permuted(logs, key, permutations))
    totals, singles = ((1 + (theirs >= own - 1e-9 * np.abs(own)).sum(0)) / (1 + permutations)
                       for theirs, own in zip(shuffled, observed, strict=True))  # fmt: skip
    adjusted = [1.0] * count if still else over_sources(singles.tolist())
    parts = []
    for s, name in enumerate(names):
        halves, low, high = _interval(np.abs(nulls[:, s]))
        apart, apart_low, apart_high = _interval(aparts[:, s])
        own = _root_mean_square(nulls[:, s])
        ratio = math.nan if still else _root_mean_square(crossed[:, s]) / own if own > ROUNDING else math.inf
        parts.append(
            Parted(source=name, halves=halves, low=max(low, 0.0), high=high, apart=apart, apart_low=apart_low,
                   apart_high=apart_high, ratio=ratio, p=adjusted[s])
        )  # fmt: skip
    ratio = math.nan if still else signal / null if null > ROUNDING else math.inf
    return HalvesTest(sources=tuple(parts), ratio=ratio, p=1.0 if still else float(totals[0]), runs=runs)


def _crossed(logs: Array) -> Array:
    """Differences between the halves of different sources, ``[runs, S, (S − 1) · 4]``."""
    count = logs.shape[1]
    pairs = [
        [logs[:, s, i] - logs[:, r, j] for r in range(count) if r != s for i in (0, 1) for j in (0, 1)] for s in range(count)
    ]
    return np.array(pairs).transpose(2, 0, 1)


def _permuted(logs: Array, key: Key, permutations: int) -> Array:
    """Mean log weights of sources over runs with the halves of each run dealt anew, ``[permutations, S]``."""
    runs, count, _ = logs.shape
    draws = torch.rand(permutations, runs, 2 * count, generator=key.fold("halves").generator(), dtype=torch.float64)
    order = draws.argsort(-1).numpy()
    dealt = np.take_along_axis(np.broadcast_to(logs.reshape(1, runs, 2 * count), order.shape), order, -1)
    return np.asarray(dealt.reshape(permutations, runs, count, 2).mean((1, 3)))


def _spread(levels: Array) -> tuple[Array, Array]:
    """Σ_s (ℓ̄_s − ℓ̄)², ``[B, 1]``, and |ℓ̄_s − mean of the others|, ``[B, S]``."""
    off = levels - levels.mean(-1, keepdims=True)
    return np.square(off).sum(-1, keepdims=True), np.abs(off) * levels.shape[-1] / (levels.shape[-1] - 1)


def _root_mean_square(values: Array) -> float:
    return float(np.sqrt(np.square(values).mean()))


def _interval(values: Array) -> tuple[float, float, float]:
    """The mean and its t-interval; NaN ends for a single value."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = _quantile(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half
