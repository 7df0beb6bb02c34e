"""Write the tables and the picture of docs/reference/study-results.md from the raw records.

    python benchmarks/study/tables.py           write the tables into the page, and draw its picture
    python benchmarks/study/tables.py --check   list tables that differ from the records; status 1

The records are in benchmarks/results/study, written by ``python benchmarks/tables.py runs
study/NAME runs/study/NAME`` and ``… figures study/propositions FILE``. Section 3 of
docs/reference/study-plan.md is the rule. Missing runs have no rows.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from attrs import evolve, frozen
from pyarrow import parquet

from hgms.results.statistics import Interval, paired_interval, spell

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "study"
PAGE = ROOT / "docs" / "reference" / "study-results.md"
PICTURE = ROOT / "docs" / "images" / "where-n-pays.png"


def _beside() -> ModuleType:
    """Load benchmarks/tables.py for the format of tables on a page."""
    spec = importlib.util.spec_from_file_location(
        "hgms_benchmark_tables", ROOT / "benchmarks" / "tables.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARKS = _beside()
markdown = BENCHMARKS.markdown
MARKED = BENCHMARKS.MARKED

COUNTS = (2, 4, 8, 16)
FACTORS = ("shared", "diverse")
CANDIDATES = tuple(f"{factor}-{count}" for factor in FACTORS for count in COUNTS)
FIRST = "n-1"
RESTART = "n-1-restart"
LABELS = (FIRST, RESTART, *CANDIDATES)
HIGHER = {"value": False, "upper_gap": False, "test_accuracy": True, "test_balanced_accuracy": True}
METRICS = {
    "circle-kink": "value",
    "circle-degenerate": "value",
    **{f"sphere-{k}": "upper_gap" for k in range(1, 6)},
    **{f"minima-{kind}": "test_accuracy" for kind in ("tied", "free", "control")},
    "cleaning-0.8": "test_accuracy",
    "imbalanced-10": "test_balanced_accuracy",
}
IMAGES = ("cleaning-0.8", "imbalanced-10")

Values = dict[str, dict[int, float]]
"""A metric of each label, by seed."""

# --- from records to values
# --------------------------------------------------------------------------------------------------


@cache
def records(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.parquet"
    return parquet.read_table(path).to_pylist() if path.exists() else []


def file_of(task: str, equal: str) -> str:
    if task in IMAGES:
        return f"{task.split('-')[0]}-{equal}"
    return "minima" if task.startswith("minima") else "closed"


def values(task: str, equal: str) -> Values:
    """Return the metric at equal ``time``, ``updates`` or ``calls``; empty without records."""
    name = file_of(task, equal)
    metric = f"metric.{METRICS[task]}"
    rows = [row for row in records(name) if row["task"] == task]
    found: Values = {}
    if task in IMAGES or equal == "time":
        for row in rows:
            found.setdefault(row["method"], {})[row["seed"]] = (
                row[metric] if row["status"] == "done" else math.nan
            )
    else:
        along = "step" if equal == "updates" else "oracle_calls"
        points = curves(name, task)
        found = {label: {} for label in dict.fromkeys(row["method"] for row in rows)}
        for row in rows:  # failed runs have no value
            found[row["method"]][row["seed"]] = math.nan
        most = limit(task, along) if points else 0
        for (method, seed), own in points.items():
            # step 0 has spent nothing
            within = [point for point in own if point["step"] == 0 or point[along] <= most]
            found[method][seed] = within[-1][metric]
    return _with_failures(found, higher=HIGHER[METRICS[task]])


def curves(name: str, task: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the points of finished runs, by label and seed."""
    done = {
        (row["method"], row["seed"])
        for row in records(name)
        if row["task"] == task and row["status"] == "done"
    }
    points: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in records(f"{name}.curves"):
        if point["task"] == task and (point["method"], point["seed"]) in done:
            points.setdefault((point["method"], point["seed"]), []).append(point)
    return {run: sorted(own, key=lambda point: point["step"]) for run, own in points.items()}


def limit(task: str, along: str) -> float:
    """Return U or C: the value that every finished run has reached."""
    return min(float(own[-1][along]) for own in curves(file_of(task, "time"), task).values())


def _with_failures(found: Values, *, higher: bool) -> Values:
    """A run without a value counts as the worst finished run of its task."""
    finite = [
        value for by_seed in found.values() for value in by_seed.values() if math.isfinite(value)
    ]
    if not finite:
        return {}
    worst = min(finite) if higher else max(finite)
    return {
        label: {seed: value if math.isfinite(value) else worst for seed, value in by_seed.items()}
        for label, by_seed in found.items()
    }


# --- the rule
# --------------------------------------------------------------------------------------------------


@frozen
class Test:
    """One (task, N, factor): differences to both N = 1 labels, positive in favour of N, and the
    result of the rule.
    """

    task: str
    label: str
    first: Interval
    restart: Interval
    same: bool
    verdict: str = "–"

    @property
    def chances(self) -> tuple[float, float]:
        return chance(self.first), chance(self.restart)


def difference(mine: Mapping[int, float], theirs: Mapping[int, float], sign: int = 1) -> Interval:
    """Return sign·(mine − theirs) by seed; below a millionth of the values in every seed, it is
    rounding and zero.
    """
    interval = paired_interval(mine, theirs)
    size = max(max(abs(mine[seed]), abs(theirs[seed])) for seed in mine)
    if all(abs(mine[seed] - theirs[seed]) <= 1e-6 * size for seed in mine):
        return Interval(0.0, 0.0, interval.count)
    return Interval(sign * interval.mean, interval.half_width, interval.count)


def chance(interval: Interval) -> float:
    """Return the two-sided p-value of the paired t-test; 0 for an equal nonzero difference in
    every seed.
    """
    from scipy import special, stats

    if interval.count < 2:
        return 1.0
    if interval.half_width > 0:
        freedom = interval.count - 1
        error = interval.half_width / float(stats.t.ppf(0.975, freedom))
        return 2 * float(special.stdtr(freedom, -abs(interval.mean) / error))
    return 0.0 if interval.mean else 1.0


def tests(equal: str, images: bool) -> list[Test]:
    """Return one family, with Holm's rule over all of it."""
    from statsmodels.stats.multitest import multipletests

    plain = []
    for task, metric in METRICS.items():
        found = values(task, equal) if (task in IMAGES) is images else {}
        sign = 1 if HIGHER[metric] else -1
        for label in CANDIDATES if set(LABELS) <= found.keys() else ():
            first, restart = (
                difference(found[label], found[other], sign) for other in (FIRST, RESTART)
            )
            plain.append(
                Test(task, label, first, restart, same=first.half_width == 0 and first.mean != 0)
            )
    if not plain:
        return []
    chances = [test.chances for test in plain]
    differ = multipletests([pair[0] for pair in chances], alpha=0.05, method="holm")[0]
    both = multipletests([max(pair) for pair in chances], alpha=0.05, method="holm")[0]
    return [
        evolve(test, verdict=_verdict(test, bool(one), bool(two)))
        for test, one, two in zip(plain, differ, both, strict=True)
    ]


def _verdict(test: Test, differs: bool, from_both: bool) -> str:
    if from_both and min(test.first.mean, test.restart.mean) > 0:
        return "**pays**"
    if not differs:
        return "–"
    return "helps" if test.first.mean > 0 else "costs"


@cache
def verdicts(equal: str) -> dict[tuple[str, str], Test]:
    return {
        (test.task, test.label): test for images in (False, True) for test in tests(equal, images)
    }


# --- tables
# --------------------------------------------------------------------------------------------------


def verdict_table(equal: str) -> str:
    found = verdicts(equal)
    rows = [
        [
            f"`{task}`",
            *(
                found[task, label].verdict + (" (same)" if found[task, label].same else "")
                for label in CANDIDATES
            ),
        ]
        for task in METRICS
        if (task, FIRST_CANDIDATE) in found
    ]
    return markdown(["task", *(label.replace("-", " ") for label in CANDIDATES)], rows)


FIRST_CANDIDATE = CANDIDATES[0]


def shown(task: str, interval: Interval, *, signed: bool = False) -> str:
    return spell(interval, share="accuracy" in METRICS[task], signed=signed)


def value_table(equal: str) -> str:
    """Return means with 95 % t-intervals: N = 1, and candidates with separate starts."""
    table = []
    for task, metric in METRICS.items():
        found = values(task, equal)
        if found:
            labels = (FIRST, RESTART, "shared-16", *(f"diverse-{count}" for count in COUNTS))
            cells = [shown(task, Interval.of(list(found[label].values()))) for label in labels]
            table.append([f"`{task}` {'↑' if HIGHER[metric] else '↓'}", *cells])
    return markdown(
        [
            "task",
            "N = 1",
            "N = 1, restarts",
            "shared 16",
            *(f"diverse {count}" for count in COUNTS),
        ],
        table,
    )


def difference_table(equal: str) -> str:
    """Return the differences of N to N = 1, positive if better; bold if N pays."""
    found = verdicts(equal)
    table = []
    for task in METRICS:
        if (task, FIRST_CANDIDATE) in found:
            for other in ("first", "restart"):
                cells = []
                for label in CANDIDATES:
                    test = found[task, label]
                    cell = shown(task, getattr(test, other), signed=True)
                    cells.append(f"**{cell}**" if "pays" in test.verdict else cell)
                table.append([f"`{task}`", FIRST if other == "first" else RESTART, *cells])
    return markdown(
        ["task", "better than", *(label.replace("-", " ") for label in CANDIDATES)], table
    )


def cost_table() -> str:
    """Return updates and oracle calls within equal time, for the median run of a label."""
    table = []
    for task in METRICS:
        rows = [
            row
            for row in records(file_of(task, "time"))
            if row["task"] == task and row["status"] == "done"
        ]
        if rows:
            cells = []
            for label in (FIRST, *(f"diverse-{count}" for count in COUNTS)):
                own = [row for row in rows if row["method"] == label]
                steps, calls = (
                    statistics.median(row[key] for row in own)
                    for key in ("outer_steps", "oracle_calls")
                )
                cells.append(f"{steps:g} ({calls:,.0f})")
            limits = (
                ["–", "–"]
                if task in IMAGES
                else [f"{limit(task, along):,.0f}" for along in ("step", "oracle_calls")]
            )
            table.append([f"`{task}`", *cells, *limits, str(len({row["seed"] for row in rows}))])
    return markdown(
        ["task", "N = 1", *(f"diverse {count}" for count in COUNTS), "U", "C", "seeds"], table
    )


def figures(case: str) -> dict[str, float]:
    return {row["quantity"]: row["value"] for row in records("propositions") if row["case"] == case}


def p_one() -> str:
    table = []
    for k in range(1, 6):
        own = figures(f"sphere-{k}")
        table.append([str(k), f"{own['P1: slope']:.3f}", f"{own['P1: selected of 16 / one']:.2f}"])
    return markdown(
        ["k", "slope of the distance by λ (0.5)", "selected of 16 / one (≤ 2.0)"], table
    )


def p_two() -> str:
    table = []
    for k in range(1, 6):
        own = figures(f"sphere-{k}")
        table.append(
            [
                str(k),
                f"{own['P2: slope']:.2f}",
                f"{-2 / k:.2f}",
                f"{-1 / k:.2f}",
                *(f"{own[f'P2: squared error at {count}']:.1e}" for count in (32, 1024)),
            ]
        )
    return markdown(
        ["k", "slope by N", "−2/k", "bound −1/k", "squared error, N = 32", "N = 1024"], table
    )


def p_three() -> str:
    from math import log10

    table = []
    for k in range(1, 6):
        own = figures(f"sphere-{k}")
        errors = [
            own[f"P3: error at x*, {ridge}"] for ridge in ("0.0001", "0.001", "0.01", "0.1", "1")
        ]
        beside = [
            own[f"P3: error in the tube, {ridge}"]
            for ridge in ("0.0001", "0.001", "0.01", "0.1", "1")
        ]
        whole = statistics.linear_regression(
            [-4, -3, -2, -1, 0], [log10(error) for error in errors]
        ).slope
        table.append(
            [
                str(k),
                f"{own['P3: slope at x*']:.3f}",
                f"{whole:.3f}",
                f"{own['P3: best ridge']:g}",
                f"{beside[0] / min(beside):.3f}",
                f"{own['P3: slope by N']:.2f}",
                f"{own['P2: slope'] / 2:.2f}",
            ]
        )
    head = [
        "k",
        "slope at x\\*, γ ≤ 0.01 (1)",
        "all γ (1)",
        "best γ in the tube",
        "error at γ = 1e-4 / least",
        "slope by N",
    ]
    return markdown([*head, "half of P2's"], table)


def selection() -> str:
    table = []
    for case in ("minima-tied", "minima-control"):
        own = figures(case)
        table += [
            [name, f"`{case}`", f"{own[key]:.4f}"]
            for name, key in (
                ("deviation of f over minima, fresh rows", "deviation of f over minima"),
                (
                    "standard error of f at one minimum, 40 rows",
                    "standard error of f on the rows of selection",
                ),
                ("deviation of g over minima", "deviation of g over minima"),
            )
        ]
    return markdown(["quantity", "task", "mean of 10 seeds"], sorted(table))


def optimism() -> str:
    table = []
    for case in ("minima-tied", "minima-control"):
        own = figures(case)
        for count in COUNTS:
            row = [
                own[key.format(count)] for key in ("gain of {}", "optimism of {}", "bound of {}")
            ]
            share = own[f"gain of {count}, of the best possible"]
            table.append(
                [
                    f"`{case}`",
                    str(count),
                    f"{row[0]:.4f}",
                    f"{100 * share:.0f} %",
                    f"{row[1]:.4f}",
                    f"{row[2]:.4f}",
                ]
            )
    return markdown(
        ["task", "N", "gain in f", "of what N could gain", "optimism", "σ√(2 log N)"], table
    )


TABLES: dict[str, Callable[[], str]] = {
    "pays-at-equal-time": lambda: verdict_table("time"),
    "pays-at-equal-updates": lambda: verdict_table("updates"),
    "pays-at-equal-calls": lambda: verdict_table("calls"),
    "values-at-equal-time": lambda: value_table("time"),
    "values-at-equal-updates": lambda: value_table("updates"),
    "ahead-at-equal-time": lambda: difference_table("time"),
    "ahead-at-equal-updates": lambda: difference_table("updates"),
    "costs": cost_table,
    "tube": p_one,
    "best-of-n": p_two,
    "ridge": p_three,
    "spread": selection,
    "optimism": optimism,
}

# --- the picture and the page
# --------------------------------------------------------------------------------------------------


def draw() -> None:
    """Draw the metric by N, at equal time and at equal updates, for each task with runs."""
    from matplotlib.figure import Figure

    tasks = [task for task in METRICS if values(task, "time")]
    columns = 5
    figure = Figure(
        figsize=(3.1 * columns, 2.7 * math.ceil(len(tasks) / columns)), layout="constrained"
    )
    panels = figure.subplots(math.ceil(len(tasks) / columns), columns, squeeze=False).ravel()
    for panel, task in zip(panels, tasks, strict=False):
        for equal, line in (("time", "-"), ("updates", "--")):
            found = values(task, equal)
            for number, factor in enumerate(FACTORS if found else ()):
                means = [
                    Interval.of(list(found[label].values()))
                    for label in (FIRST, *(f"{factor}-{n}" for n in COUNTS))
                ]
                heights = [one.mean for one in means]
                halves = [one.half_width for one in means]
                panel.errorbar(
                    (1, *COUNTS),
                    heights,
                    halves,
                    fmt=line,
                    color=f"C{number}",
                    capsize=2,
                    label=f"{factor}, equal {equal}",
                )
            if found and equal == "time":
                panel.axhline(
                    statistics.mean(found[RESTART].values()),
                    color="grey",
                    linewidth=1,
                    label="N = 1, restarts, time",
                )
        panel.set_xscale("log", base=2)
        panel.set(
            title=task,
            xticks=(1, *COUNTS),
            xticklabels=(1, *COUNTS),
            ylabel=METRICS[task].replace("_", " "),
        )
    for panel in panels[len(tasks) :]:
        panel.axis("off")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    figure.savefig(PICTURE, dpi=90)


def page(text: str) -> str:
    return MARKED.sub(lambda match: match[1] + match[2] + "\n" + TABLES[match[1]]() + "\n", text)


def stale(text: str, made: Mapping[str, Callable[[], str]] = TABLES) -> list[str]:
    """Return the tables on the page that differ from the records."""
    return [
        match[1] for match in MARKED.finditer(text) if match[3].strip() != made[match[1]]().strip()
    ]


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        print("\n".join(stale(text)))
        return int(bool(stale(text)))
    PAGE.write_text(page(text), encoding="utf-8")
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
