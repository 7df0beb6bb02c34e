"""The null test: do sources differ more than random halves of a source?

    python benchmarks/llm/halves.py FOLDER sums small-talk

FOLDER contains the runs of one mix file with several seeds. Each source NAME has two halves in that
file, ``NAME-1`` and ``NAME-2``. With --json, the script prints all figures. :func:`halves_test`
tests other weights of the shape (runs, sources, 2).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import frozen

from hgms.results import Interval, t_quantile, two_sided
from hgms.store import finite
from hgms.uncertainty.seeds import ROUNDING
from hgms.uncertainty.simplex import LEAST, Array
from hgms.uncertainty.verdict import LEVEL, chance, join_names, over_sources


@frozen(kw_only=True)
class Parted:
    """Differences of ``source`` in log-odds: between its halves, and to the other sources.

    ``halves`` is the mean of |log ω₁/ω₂| over runs, with its interval ``low`` to ``high``.
    ``apart`` is the mean log weight of the source minus the mean log weight of the other sources.
    Its interval ``apart_low`` to ``apart_high`` includes the chance variation that the halves show.
    ``ratio`` compares ``apart`` with ``halves`` (:func:`halves_test`). ``p`` is the p-value that
    ``apart`` is such chance variation, after Holm's rule over the sources.
    """

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
        """1: more of the source than chance explains; −1: less; 0: no evidence.

        The halves measure chance.
        """
        return 0 if not self.p <= 1 - LEVEL else 1 if self.apart > 0 else -1

    @property
    def verdict(self) -> str:
        return {
            1: "more than the others",
            -1: "less than the others",
            0: "parts no further than halves do",
        }[self.sign]


@frozen(kw_only=True)
class HalvesTest:
    """The sources, the overall ratio of signal to null, and the overall p-value.

    The ratio is NaN if no weight changed.
    """

    sources: tuple[Parted, ...]
    ratio: float
    p: float
    runs: int

    @property
    def evidence(self) -> bool:
        return self.p <= 1 - LEVEL

    @property
    def has_moved(self) -> bool:
        return not math.isnan(self.ratio)

    @property
    def verdict(self) -> str:
        """The result of the test in one sentence."""
        if not self.has_moved:
            return (
                "no weight moved, neither between halves nor between sources: no evidence "
                "against the prior"
            )
        how = (
            f"{self.ratio:.1f} times as far as"
            if self.ratio < 100
            else "far more than 100 times as far as"
        )
        if not self.evidence:
            return (
                "the halves of a source part as far as different sources do (signal to null "
                f"{self.ratio:.2f}, {chance(self.p)}, {self.runs} runs): the weights say nothing"
            )
        named = {
            sign: [part.source for part in self.sources if part.sign == sign] for sign in (1, -1, 0)
        }
        parts = [
            f"{word} of {join_names(named[sign])}"
            for sign, word in ((1, "more"), (-1, "less"))
            if named[sign]
        ]
        evidence = (
            f"different sources part {how} the halves of one ({chance(self.p)}, {self.runs} runs)"
        )
        evidence += (
            f": evidence for {', '.join(parts)}"
            if parts
            else ", but of no single source can be said which way"
        )
        return evidence + (
            f"; {join_names(named[0])} cannot be told from halves of one source"
            if parts and named[0]
            else ""
        )

    def as_dict(self) -> dict[str, Any]:
        sources = [
            {**attrs.asdict(part), "evidence": part.sign, "verdict": part.verdict}
            for part in self.sources
        ]
        table = {
            "runs": self.runs,
            "ratio": self.ratio,
            "p": self.p,
            "evidence": self.evidence,
            "verdict": self.verdict,
        }
        return dict(finite({**table, "sources": sources}))


def halves_test(weights: Array, names: Sequence[str]) -> HalvesTest:
    """Compare differences between sources with differences between halves.

    ``weights`` has shape ``[runs, S, 2]``; every run draws new halves::

        null_s = log ω_{s,1} − log ω_{s,2},  signal_s = log ω_{s,i} − log ω_{r,j}
            for all r ≠ s and i, j
        ratio = root mean square of signals / root mean square of nulls

    If the names of the sources carry no information, the 2S halves of a run differ only by chance:
    by their rows and by the run. Then the ratio is about 1. The chance effect of the run is
    independent between runs. The chance effect of the rows is not: both halves of a source together
    contain the same rows in every run. More runs only show this effect more clearly. The halves
    show its size: rows that contribute σ² to the difference of two halves contribute σ²/4 to the
    mean log weight ℓ_s of both. So with σ² the mean of null², and n runs::

        F = 4 Σ_s (ℓ̄_s − ℓ̄)² / ((S − 1) σ²) ~ F(S − 1, n S),
            t_s = 2 (ℓ̄_s − mean of the others) / (σ √(S/(S − 1))) ~ t(n S)

    with ℓ̄_s the mean over runs. Chance effects of the runs reduce both F and t_s. Weights below
    10⁻⁴ count as 10⁻⁴.

    Use when you want to test whether a method gives credible results on these data. More runs make
    the estimate of σ² more precise; they do not make a small difference between sources
    significant.

    Notes
    -----
    Source: Fisher (1925), *Statistical methods for research workers*, for the analysis of variance;
    the halves follow A/A tests.

    Examples
    --------
    >>> alike = np.array(
    ...     [[[0.7, 0.1], [0.1, 0.1]], [[0.1, 0.1], [0.1, 0.7]], [[0.1, 0.1], [0.7, 0.1]]]
    ... )
    >>> halves_test(alike, ["a", "b"]).evidence
    False
    >>> apart = np.array(
    ...     [[[0.45, 0.4], [0.05, 0.1]], [[0.5, 0.4], [0.05, 0.05]], [[0.35, 0.5], [0.1, 0.05]]]
    ... )
    >>> halves_test(apart, ["a", "b"]).verdict.partition(":")[0]
    'different sources part 4.5 times as far as the halves of one (p < 0.001, 3 runs)'
    """
    from scipy import special

    logs = np.log(np.maximum(np.asarray(weights, dtype=float), LEAST))
    runs, count, _ = logs.shape
    nulls = logs[..., 0] - logs[..., 1]
    crossed = _cross_differences(logs)
    null = _root_mean_square(nulls)
    signal = _root_mean_square(crossed)
    still = max(null, signal) <= ROUNDING
    freedom = runs * count
    off = logs.mean((0, 2)) - logs.mean()
    luck = max(null, ROUNDING) / 2  # the standard deviation of a source's mean log weight
    whole = float(special.fdtrc(count - 1, freedom, np.square(off / luck).sum() / (count - 1)))
    aparts = off * count / (count - 1)
    error = luck * math.sqrt(count / (count - 1))
    adjusted = (
        [1.0] * count
        if still
        else over_sources([two_sided(apart / error, freedom) for apart in aparts])
    )
    half = t_quantile(freedom, 1 - LEVEL) * error
    parts = []
    for s, name in enumerate(names):
        halves = Interval.of(np.abs(nulls[:, s]).tolist())
        own = _root_mean_square(nulls[:, s])
        apart = float(aparts[s])
        ratio = (
            math.nan
            if still
            else _root_mean_square(crossed[:, s]) / own
            if own > ROUNDING
            else math.inf
        )
        parts.append(
            Parted(
                source=name,
                halves=halves.mean,
                low=max(halves.mean - halves.half_width, 0.0),
                high=halves.mean + halves.half_width,
                apart=apart,
                apart_low=apart - half,
                apart_high=apart + half,
                ratio=ratio,
                p=adjusted[s],
            )
        )
    ratio = math.nan if still else signal / null if null > ROUNDING else math.inf
    return HalvesTest(sources=tuple(parts), ratio=ratio, p=1.0 if still else whole, runs=runs)


def _cross_differences(logs: Array) -> Array:
    """Compute differences between halves of different sources, ``[runs, S, (S − 1) · 4]``."""
    runs, count, _ = logs.shape
    differences = logs[:, :, None, :, None] - logs[:, None, :, None, :]  # of s, r and i, j
    return differences[:, ~np.eye(count, dtype=bool)].reshape(runs, count, -1)


def _root_mean_square(values: Array) -> float:
    return float(np.sqrt(np.square(values).mean()))


def read_weights(folder: Path, names: Sequence[str]) -> Array:
    """Read the weights of the halves from the reports below a folder, ``[runs, S, 2]``."""
    reports = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("**/seed-*/report.json"))
    ]
    if not reports:
        raise SystemExit(f"no seed-*/report.json in {folder}")
    runs = []
    for report in reports:
        weights = {row["source"]: row["weight"] for row in report["sources"]}
        missing = {f"{name}-{half}" for name in names for half in (1, 2)} - weights.keys()
        if missing:
            raise SystemExit(f"no weight of {', '.join(sorted(missing))} in {folder}")
        runs.append([[weights[f"{name}-1"], weights[f"{name}-2"]] for name in names])
    return np.array(runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if len(options.sources) < 2:
        parser.error("two sources or more are required")
    test = halves_test(read_weights(options.folder, options.sources), options.sources)
    print(json.dumps(test.as_dict(), indent=1) if options.json else test.verdict)


if __name__ == "__main__":
    main()
