"""Tables and the picture of docs/reference/benchmarks-zoo.md from the records of ``zoo_run.py``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from statsmodels.stats.multitest import multipletests
from tune_tables import markdown, signed

from hgms.results.statistics import Interval, mean_and_error, two_sided

Row = dict[str, Any]
Losses = dict[str, dict[str, dict[int, float]]]
"""Test losses by problem, competitor and seed."""

STRUCTURED = (
    "rows-digits",
    "rows-mnist",
    "rows-cancer",
    "rows-star98",
    "classes-digits",
    "classes-mnist",
    "groups-16",
    "groups-classes",
    "sparse",
    "tasks",
    "start",
    "sources",
)
BASELINES = (
    "start",
    "early stopping",
    "validation rows only",
    "shared level",
    "level with the lowest loss",
    "out-of-fold filter",
    "cleanlab",
)
TRIVIAL = BASELINES[:3]
WITHOUT_LEVEL = ("classes-digits", "classes-mnist", "tasks", "start", "sources")
"""Problems without penalties and row weights, so that samplers have no other start."""
L2 = ("RidgeCV", "LogisticRegressionCV-l2")
L1 = ("LassoCV", "LogisticRegressionCV-l1")
SAMPLERS = ("TPE", "CMA-ES", "GP")
TOOLS: dict[str, tuple[str, ...]] = {
    "TPE": ("TPE + level", "TPE"),
    "CMA-ES": ("CMA-ES + level", "CMA-ES"),
    "GP": ("GP + level", "GP"),
    "L2 by cross-validation": L2,
    "L1 by cross-validation": L1,
}
"""The columns of the tools, and the competitors in the records; the first with records counts."""


def losses(rows: Iterable[Row]) -> Losses:
    """Return the test losses; a run without a finite loss is infinite.

    Of networks, the baselines of ``tune`` have a small share of its budget. They are replaced by
    runs with the whole budget, except for the filter.
    """
    found: Losses = {}
    for row in rows:
        own = found.setdefault(row["problem"], {})
        entries = {row["competitor"]: row.get("test_loss")}
        if row["kind"] == "tune":
            is_network = row["engine"] == "online"
            entries |= {
                name: row["table"][name][1]
                for name in row["baselines"]
                if name.startswith("out-of-fold") or not is_network
            }
        elif "estimators" in row:
            entries = {name: pair[0] for name, pair in row["estimators"].items()}
        for name, loss in entries.items():
            is_number = loss is not None and math.isfinite(loss)
            own.setdefault(name, {})[row["seed"]] = loss if is_number else math.inf
    return found


def log_ratio(mine: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the differences of the logarithms over the seeds of both."""
    seeds = [seed for seed in mine if seed in theirs]
    return [math.log(mine[seed] / theirs[seed]) for seed in seeds]


def p_value(values: Sequence[float]) -> float:
    """Return the p-value of a t-test of the mean; 1 without a spread."""
    mean, error = mean_and_error(values) if len(values) > 1 else (0.0, 0.0)
    return two_sided(mean / error, len(values) - 1) if error > 0 else 1.0


def percent(values: Sequence[float]) -> float:
    return 100 * math.expm1(statistics.mean(values))


def interval_of(values: Sequence[float]) -> str:
    """Return the mean ratio of losses and its 95 % interval, in percent above 1."""
    interval = Interval.of(values)
    ends = (interval.mean - interval.reach, interval.mean + interval.reach)
    low, high = (signed(100 * math.expm1(end)) for end in ends)
    return f"{signed(percent(values))} ({low} to {high})"


def best_of(own: Mapping[str, Mapping[int, float]], names: Iterable[str]) -> str | None:
    """Return the competitor with the lowest geometric mean; None if the runs without tuning lack.

    Competitors without a run for a seed of these are skipped.
    """
    untuned = own.get("early stopping", own.get("start"))
    if untuned is None:
        return None
    seeds = set(own["tune"]) & set(untuned)
    present = [name for name in names if name in own and seeds <= set(own[name])]
    return min(
        present, key=lambda name: statistics.mean(math.log(own[name][seed]) for seed in seeds)
    )


def against_best(
    rows: Sequence[Row],
) -> tuple[dict[str, str], dict[str, list[float]], Sequence[float]]:
    """Return the best baseline of each problem, log ratios to it, and p-values by Holm's rule."""
    best, ratios = {}, {}
    for problem, own in losses(rows).items():
        name = best_of(own, BASELINES)
        if name is not None:
            best[problem] = name
            ratios[problem] = log_ratio(own["tune"], own[name])
    corrected = multipletests([p_value(values) for values in ratios.values()], method="holm")[1]
    return best, ratios, corrected


def not_improved(rows: Sequence[Row]) -> str:
    """Return sentences: on which problems tune is better, not better, or worse."""
    _, ratios, corrected = against_best(rows)
    signs = {
        problem: 0 if p >= 0.05 else 1 if statistics.mean(values) > 0 else -1
        for (problem, values), p in zip(ratios.items(), corrected, strict=True)
    }
    names = {
        sign: [f"`{problem}`" for problem in signs if signs[problem] == sign] for sign in (-1, 0, 1)
    }
    widths = sorted(100 * Interval.of(values).reach for values in ratios.values())
    own = [row for row in rows if row["kind"] == "tune" and row["problem"] not in STRUCTURED]
    returned = sum(not row["is_learned"] for row in own)
    return "\n".join(
        [
            f"- Better than the best baseline: {len(names[-1])} of {len(signs)} problems: "
            f"{', '.join(names[-1]) or 'none'}.",
            f"- Worse: {len(names[1])}: {', '.join(names[1]) or 'none'}.",
            f"- No significant difference: {len(names[0])}: {', '.join(names[0]) or 'none'}.",
            f"- Median half-width of the intervals: {statistics.median(widths):.1f} %.",
            f"- Ordinary tables on which `tune` returns a baseline: {returned} of {len(own)} runs.",
        ]
    )


def baselines(rows: Sequence[Row]) -> str:
    """Return tune against the best baseline in hindsight, with Holm's rule over the problems."""
    tuned = [row for row in rows if row["kind"] == "tune"]
    best, ratios, corrected = against_best(rows)
    names = ["problem", "d", "tuned", "test loss", "best baseline", "tune / baseline, %", ""]
    lines = [names]
    for (problem, values), p in zip(ratios.items(), corrected, strict=True):
        own = [row for row in tuned if row["problem"] == problem]
        lines.append(
            [
                f"`{problem}`",
                f"{own[0]['d']:,}",
                f"{sum(row['is_learned'] for row in own)} of {len(own)}",
                f"{statistics.mean(row['test_loss'] for row in own):.3f}",
                best[problem],
                interval_of(values),
                "" if p >= 0.05 else "better" if statistics.mean(values) < 0 else "**worse**",
            ]
        )
    return markdown(lines)


def tools(rows: Sequence[Row], structured: bool) -> str:
    """Return the test loss of tune relative to the tools, in percent, with Holm's rule."""
    found = losses(rows)
    problems = [name for name in found if (name in STRUCTURED) == structured]
    cells: dict[tuple[str, str], list[float]] = {}
    for problem in problems:
        own = found[problem]
        for tool, names in TOOLS.items():
            fits = [name for name in names if problem in WITHOUT_LEVEL or name not in SAMPLERS]
            name = next((name for name in fits if name in own), None)
            cells[problem, tool] = [] if name is None else log_ratio(own["tune"], own[name])
    return star_table(problems, list(TOOLS), cells)


def plain(rows: Sequence[Row]) -> str:
    """Return the test loss of tune relative to samplers that begin at the start, in percent."""
    found = losses(rows)
    samplers = (*SAMPLERS, "random")
    kinds = {row["problem"] for row in rows if row["kind"] == "plain"}
    problems = [name for name in found if name in kinds]
    cells = {
        (problem, sampler): log_ratio(found[problem]["tune"], found[problem].get(sampler, {}))
        for problem in problems
        for sampler in samplers
    }
    return star_table(problems, list(samplers), cells)


def star_table(
    problems: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], Sequence[float]],
) -> str:
    """Return percents; a star marks p < 0.05 of a paired t-test of logarithms, by Holm's rule."""
    filled = {cell: values for cell, values in cells.items() if values}
    if not filled:
        return "No runs."
    corrected = multipletests([p_value(values) for values in filled.values()], method="holm")[1]
    shown = {
        cell: f"{signed(percent(values))}{'*' if p < 0.05 else ''}"
        for (cell, values), p in zip(filled.items(), corrected, strict=True)
    }
    lines = [["problem", "seeds", *columns]]
    for problem in problems:
        own = [values for cell, values in filled.items() if cell[0] == problem]
        counts = sorted({len(values) for values in own})
        seeds = " to ".join(str(count) for count in dict.fromkeys(counts[:1] + counts[-1:]))
        entries = [shown.get((problem, column), "") for column in columns]
        if own:
            lines.append([f"`{problem}`", seeds, *entries])
    return markdown(lines)


SEEDS = 10
"""Seeds that a statement about a method and a problem needs."""


def methods(rows: Sequence[Row]) -> str:
    """Return registered methods against the best trivial baseline of each problem."""
    found = losses(rows)
    own = [row for row in rows if row["kind"] == "methods"]
    names = list(dict.fromkeys(row["competitor"] for row in own))
    lines: list[list[str]] = []
    order: list[float] = []
    for name in names:
        mine = [row for row in own if row["competitor"] == name]
        rejected = [row for row in mine if row.get("error") == "not-supported"]
        if len(rejected) == len(mine):
            continue
        medians, better, worse = [], [], []
        for problem in dict.fromkeys(row["problem"] for row in mine):
            trivial = best_of(found[problem], TRIVIAL)
            if trivial is None:
                continue
            values = log_ratio(found[problem][name], found[problem][trivial])
            medians += values
            interval = Interval.of([min(value, 10.0) for value in values])
            if len(values) >= SEEDS and interval.excludes_zero:
                (worse if interval.mean > 0 else better).append(f"`{problem}`")
        failed = sum(row["test_loss"] is None or not row["is_finite"] for row in mine)
        median = statistics.median(medians)
        order.append(median)
        lines.append(
            [
                f"`{name}`",
                str(len(mine)),
                f"{math.exp(median):.2f}",
                f"{sum(value < 0 for value in medians)}",
                ", ".join(better) or "–",
                ", ".join(worse) or "–",
                str(failed),
            ]
        )
    lines = [line for _, line in sorted(zip(order, lines, strict=True))]
    head = ["method", "runs", "median ratio", "runs ahead", "better", "worse", "failed"]
    return markdown([head, *lines]) if lines else "No runs."


def unfinished(rows: Sequence[Row]) -> str:
    """Return the number of runs by kind."""
    lines = [["kind", "problems", "competitors", "seeds", "runs", "processor time, s"]]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        seeds = sorted({row["seed"] for row in own})
        lines.append(
            [
                kind,
                str(len({row["problem"] for row in own})),
                str(len({row["competitor"] for row in own})),
                _ranges(seeds),
                f"{len(own):,}",
                f"{sum(row['total_seconds'] for row in own):,.0f}",
            ]
        )
    return markdown(lines)


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges.

    >>> _ranges([1, 2, 3, 5])
    '1 to 3, 5'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]} to {part[-1]}" if part[1:] else f"{part[0]}" for part in parts)


PROFILE = {"tune": ("tune",), "best baseline": BASELINES, **TOOLS}


def draw_profile(rows: Sequence[Row], path: Path) -> None:
    """Draw performance profiles (Dolan and Moré 2002) of the zoo.

    A curve is the share of pairs of problem and seed with a test loss of at most the given multiple
    of the lowest test loss of all competitors, for the seeds that all of them have. A problem
    without a competitor counts as unsolved; competitors with fewer than half of the runs are not
    drawn.
    """
    from matplotlib.figure import Figure

    found = losses(rows)
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, structured in zip(panels, (True, False), strict=True):
        pairs: list[dict[str, float]] = []
        for problem, own in found.items():
            baseline = best_of(own, BASELINES)
            if (problem in STRUCTURED) != structured or baseline is None:
                continue
            chosen = {"best baseline": (baseline,), **PROFILE}
            runs_of = {
                label: own.get(next((name for name in names if name in own), ""), {})
                for label, names in chosen.items()
            }
            common = set.intersection(*[set(runs) for runs in runs_of.values() if runs])
            pairs += [
                {label: runs.get(seed, math.inf) for label, runs in runs_of.items()}
                for seed in common
            ]
        for number, label in enumerate(("tune", "best baseline", *TOOLS)):
            runs = sum(math.isfinite(pair[label]) for pair in pairs)
            if not 2 * runs > len(pairs):
                continue
            ratios = sorted(pair[label] / min(pair.values()) for pair in pairs)
            shares = [position / len(ratios) for position in range(1, len(ratios) + 1)]
            line = "-" if label == "tune" else "--" if label == "best baseline" else ":"
            panel.step(ratios, shares, line, where="post", color=f"C{number}", label=label)
        panel.set(
            title="structured problems" if structured else "ordinary tables",
            xlabel="test loss / lowest test loss",
            xlim=(1, 3 if structured else 1.5),
            ylim=(0, 1),
        )
    panels[0].set_ylabel("share of runs")
    known = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    figure.legend(known.values(), known, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "zoo-tune": baselines,
    "zoo-not-improved": not_improved,
    "zoo-structured": partial(tools, structured=True),
    "zoo-ordinary": partial(tools, structured=False),
    "zoo-plain": plain,
    "zoo-methods": methods,
    "zoo-runs": unfinished,
}
"""The tables of the page by name."""
