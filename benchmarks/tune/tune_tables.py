"""Tables of docs/reference/benchmarks-tune.md from the records of the scripts in this folder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scipy import stats
from statsmodels.stats.multitest import multipletests

Row = dict[str, Any]

LABELS = {
    "sparse-regression": ("sparse regression, 10 of 210 features relevant", "210 penalties"),
    "sparse-classes": ("sparse classes, 10 of 210 relevant", "210 penalties"),
    "all-relevant": ("all of 100 features relevant", "100 penalties"),
    "none-relevant": ("none of 100 features relevant", "100 penalties"),
    "grouped-16": ("16 groups of 13 features, two relevant", "16 penalties"),
    "diabetes-2": ("diabetes, degree 2", "65 penalties"),
    "breast-cancer": ("breast cancer", "30 penalties"),
    "wine-2": ("wine, degree 2", "104 penalties"),
    "boston-2": ("Boston, degree 2", "104 penalties"),
    "hitters-2": ("Hitters, degree 2", "209 penalties"),
    "ames": ("Ames", "274 penalties"),
    "college-2": ("College, degree 2", "170 penalties"),
    "proteins": ("Alzheimer proteins", "134 penalties"),
    "cells": ("cells", "56 penalties"),
    "hepatic": ("hepatic injury", "370 penalties"),
    "attrition": ("attrition", "57 penalties"),
    "digits-noise": ("digits, 40 % wrong labels, MLP", "600 row weights"),
    "mnist-noise": ("MNIST, 60 % wrong labels, MLP", "1,000 row weights"),
    "digits-smoothing": ("digits, MLP", "2,260 penalties, smoothing"),
    "digits-rare": ("digits, rare classes, MLP", "20 class weights and shifts"),
    "digits-conv": ("digits, CNN with batch normalisation", "6 penalties"),
    "digits-linear-noise": ("digits, 40 % wrong labels, linear", "400 row weights, 2 penalties"),
    "cells-inputs": ("cells with 100 features of noise, MLP", "156 penalties, smoothing"),
    "leaves": ("leaves, MLP", "2,688 penalties, smoothing"),
    "cells-noise": ("cells, 40 % redrawn classes, linear", "400 row weights, 2 penalties"),
    "mnist-conv-noise": ("MNIST at 14 × 14, 40 % wrong labels, CNN", "1,000 row weights"),
}
"""The problem and its hyperparameters, by the name of a problem of ``run.py``."""

TOOL_LABELS = {
    "groups-1": "sparse regression, one penalty",
    "groups-4": "the same, groups of neighbours",
    "groups-16": "the same",
    "groups-64": "the same",
    "groups-208": "the same, one penalty per feature",
    "sparse-1000": "sparse regression, 300 rows",
    "sparse-classes": "sparse classes",
    "diabetes-2": "diabetes, degree 2",
    "breast-cancer-2": "breast cancer, degree 2",
    "wine-2": "wine, degree 2",
    "digits-3-8": "digits 3 and 8",
    "star98": "schools (star98)",
}
"""The problems of ``tools.py``."""

RIVALS: dict[str, tuple[str, ...]] = {
    "start": ("start",),
    "shared level": ("shared level",),
    "TPE": ("TPE",),
    "TPE + level": ("TPE + level",),
    "CMA-ES": ("CMA-ES",),
    "CMA-ES + level": ("CMA-ES + level",),
    "GP": ("GP",),
    "GP + level": ("GP + level",),
    "L2 by cross-validation": ("RidgeCV", "LogisticRegressionCV-l2"),
    "L1 by cross-validation": ("LassoCV", "LogisticRegressionCV-l1"),
}
"""The columns of the comparison with tools, and the names of the rivals in the records."""


def baselines(rows: Sequence[Row]) -> str:
    """Return test losses relative to the baselines (``run.py``)."""
    names = ("problem", "hyperparameters", "learned selected")
    lines = [[*names, "/ selected baseline", "/ best baseline", "accuracy"]]
    for name, labels in LABELS.items():
        own = [row for row in rows if row["problem"] == name]
        if not own:
            continue
        accuracy = [row["accuracy"] for row in own if "accuracy" in row]
        lines.append(
            [
                *labels,
                f"{sum(row['is_learned'] for row in own)} of {len(own)}",
                f"{mean_ratio(own, 'baseline_test_loss'):.3f}",
                f"{mean_ratio(own, 'best_baseline_in_hindsight'):.3f}",
                f"{statistics.mean(accuracy):.3f}" if accuracy else "",
            ]
        )
    return markdown(lines)


def mean_ratio(rows: Iterable[Row], other: str) -> float:
    """Return the geometric mean of the test loss over another loss."""
    logs = [math.log(row["test_loss"] / row[other]) for row in rows]
    return math.exp(statistics.mean(logs)) if logs else math.nan


def tools(rows: Sequence[Row]) -> str:
    """Return the test loss of tune relative to each rival, in percent (``tools.py``).

    A star marks p < 0.05 of a paired t-test of the logarithms, by Holm's rule over all cells.
    """
    cells: dict[tuple[str, str], tuple[float, float]] = {}
    d = {row["problem"]: row["d"] for row in rows}
    problems = [problem for problem in TOOL_LABELS if problem in d]
    for problem in problems:
        own = [row["losses"] for row in rows if row["problem"] == problem]
        for rival, names in RIVALS.items():
            logs = [
                math.log(losses["tune"][0] / losses[name][0])
                for losses in own
                for name in names
                if name in losses
            ]
            equal = len(set(logs)) < 2
            p = 1.0 if equal else float(stats.ttest_1samp(logs, 0.0).pvalue)
            cells[problem, rival] = (100 * (math.exp(statistics.mean(logs)) - 1), p)
    corrected = multipletests([p for _, p in cells.values()], method="holm")[1]
    shown = {
        key: f"{signed(change)}{'*' if p < 0.05 else ''}"
        for (key, (change, _)), p in zip(cells.items(), corrected, strict=True)
    }
    lines = [["problem", "d", *RIVALS]]
    for problem in problems:
        values = [shown[problem, rival] for rival in RIVALS]
        lines.append([TOOL_LABELS[problem], f"{d[problem]:,}", *values])
    return markdown(lines)


def batches(rows: Sequence[Row]) -> str:
    """Return losses and accuracies by layer and batch size (``batches.py``)."""
    names = ["layer", "rows per lower step", "lower steps", "test loss", "test loss, learned"]
    lines = [[*names, "accuracy"]]
    for layer, size in dict.fromkeys((row["layer"], row["batch_size"]) for row in rows):
        own = [row for row in rows if (row["layer"], row["batch_size"]) == (layer, size)]
        steps = statistics.mean(row["steps"] for row in own)
        columns = ("test_loss", "learned_test_loss", "accuracy")
        values = [_mean_and_error([row[name] for row in own]) for name in columns]
        shown = "all 750" if size is None else str(size)
        lines.append(["–" if layer == "plain" else layer, shown, f"{steps:,.0f}", *values])
    return markdown(lines)


def states(rows: Sequence[Row]) -> str:
    """Return how minimisers from three initial states differ (``initial_states.py``)."""
    names = ["problem", "spread of the held-out loss", "runs above two standard errors"]
    lines = [[*names, "test loss, best of three / first"]]
    for name in dict.fromkeys(row["problem"] for row in rows):
        own = [row for row in rows if row["problem"] == name]
        spreads = [max(row["held_out"]) / min(row["held_out"]) - 1 for row in own]
        gains = []
        above = 0
        for row in own:
            lowest = min(row["held_out"])
            best = row["held_out"].index(lowest)
            gains.append(row["test"][best] / row["test"][0])
            pairs = zip(row["held_out"], row["errors"], strict=True)
            above += any(loss - lowest > 2 * error for loss, error in pairs)
        share = f"{above} of {len(own)}"
        gain = statistics.geometric_mean(gains)
        spread = f"{100 * statistics.mean(spreads):.1f} %"
        lines.append([LABELS[name][0], spread, share, f"{gain:.3f}"])
    return markdown(lines)


RULES = (
    "start",
    "lowest loss",
    "at most 2 % of the loss",
    "at most 5 % (`tune`)",
    "at most 10 %",
    "standard error",
)
"""The columns of ``losses`` in the records of ``levels.py``: the start, then the doubts."""


def levels(rows: Sequence[Row]) -> str:
    """Return rules for the shared level (``levels.py``) against the level with the lowest loss.

    A cell is a table and a number of training rows. The reference of the last two columns is the
    better of the start and the lowest loss in this cell, by the geometric mean over the seeds.
    """
    cells: dict[tuple[str, bool, int], list[list[float]]] = {}
    for row in rows:
        if row["losses"] is not None:
            logs = [math.log(loss) for loss in row["losses"]]
            cells.setdefault((row["table"], row["classes"], row["rows"]), []).append(logs)
    few = [cell for cell in cells if cell[2] <= 60]
    many = [cell for cell in cells if cell[2] > 60]
    lines = [["gain minus", "20 or 60 rows, %", "180 rows, %", "worse", "by more than 5 %"]]
    for rule, name in enumerate(RULES):
        shown = []
        for part in (few, many):
            changes = [log[rule] - log[1] for cell in part for log in cells[cell]]
            shown.append(signed(100 * math.expm1(statistics.mean(changes))))
        against = [_to_better(cells[cell], rule) for cell in cells]
        worse = sum(_is_worse(logs) for logs in against)
        large = sum(statistics.mean(logs) > math.log(1.05) for logs in against)
        lines.append([name, *shown, str(worse), str(large)])
    return f"{len(few)} cells with 20 or 60 rows, {len(many)} with 180.\n\n{markdown(lines)}"


def _to_better(logs: Sequence[Sequence[float]], rule: int) -> list[float]:
    """Return the differences of a rule to the better of the first two rules, over the seeds."""
    better = min((0, 1), key=lambda column: statistics.mean(log[column] for log in logs))
    return [log[rule] - log[better] for log in logs]


def _is_worse(logs: Sequence[float]) -> bool:
    if len(set(logs)) < 2 or statistics.mean(logs) <= 0:
        return False
    return bool(stats.ttest_1samp(logs, 0.0).pvalue < 0.05)


def signed(number: float) -> str:
    """Return a number with its sign and one digit.

    >>> signed(-0.04), signed(1.26)
    ('0.0', '+1.3')
    """
    text = f"{number:+.1f}"
    return text if float(text) else "0.0"


def _mean_and_error(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table; the first line is its head."""
    head, *rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rows])


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "tune-baselines": ("tune.jsonl", baselines),
    "tune-tools": ("tune-tools.jsonl", tools),
    "tune-batches": ("tune-batches.jsonl", batches),
    "tune-states": ("tune-states.jsonl", states),
    "tune-levels": ("tune-levels.jsonl", levels),
}
"""The name of a table on the page: its file of records and its function."""
