"""Print the results of the grids in this folder as a Markdown table.

    python benchmarks/mls/table.py runs/mls/linear [runs/mls/published …]

Two choices of the step are compared. The choice of HGMS uses no test labels: the step that the
method keeps, by holdout rows with ``keep = "best"``, else the last. MLS-Bench uses the best
evaluated step by *test* accuracy. F1 is the published measure (``cleaning_f1_redrawn``) at that
step. A figure is the mean over seeds with its 95 % interval. The last column compares the best by
test accuracy with the published mean, with both spreads; a published figure of one seed has no
spread.
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import hgms.report as report
from hgms.results.statistics import Interval

FIGURES = Path(__file__).resolve().parents[1] / "published_figures.toml"
ACCURACY = "test_accuracy"
F1 = "cleaning_f1_redrawn"


def published() -> dict[tuple[str, str], Interval]:
    """Return the test accuracy by task label and method, in percent."""
    table = tomllib.loads(FIGURES.read_text(encoding="utf-8"))
    values = {
        (one["protocol"], one["method"]): one.get("seeds") or [one["value"]]
        for one in table["figure"]
    }
    return {
        key: Interval.of(list(map(float, seeds)))
        for key, seeds in values.items()
        if key[0] in ("mls-linear", "mls-mlp")
    }


def best_by_test(accuracy: Sequence[float], f1: Sequence[float]) -> tuple[float, float]:
    """Return accuracy and F1 of the step with the highest test accuracy, then the higher F1.

    >>> best_by_test([0.5, 0.9, 0.9, float("nan")], [0.1, 0.2, 0.3, 0.9])
    (0.9, 0.3)
    """
    return max((a, b) for a, b in zip(accuracy, f1, strict=True) if math.isfinite(a))


def spelled(values: Sequence[float]) -> str:
    interval = Interval.of(values).scale(100)
    return f"{interval.mean:.2f}" + (
        "" if math.isnan(interval.half_width) else f" ± {interval.half_width:.2f}"
    )


def reached(values: Sequence[float], figure: Interval | None) -> str:
    """Compare the result with the published mean.

    >>> (
    ...     reached([0.905, 0.907, 0.906], Interval.of([90.1])),
    ...     reached([0.88, 0.881, 0.882], Interval.of([90.1])),
    ... )
    ('90.10: above', '90.10: below')
    """
    if figure is None:
        return "–"
    ours = Interval.of(values).scale(100)
    half = math.hypot(
        *(0.0 if math.isnan(one.half_width) else one.half_width for one in (ours, figure))
    )
    gap = ours.mean - figure.mean
    return f"{figure.mean:.2f}: " + (
        "within its interval" if abs(gap) <= half else "above" if gap > 0 else "below"
    )


def rows(folders: Sequence[Path]) -> list[str]:
    figures = published()
    lines = []
    for section in report.build(folders).sections:
        for entry in section.entries:
            label = entry.runs[0].task_label
            method = entry.runs[0].label
            kept = {name: [run.metrics[name] for run in entry.runs] for name in (ACCURACY, F1)}
            names = [f"metric.{ACCURACY}", f"metric.{F1}"]
            curves = [run.columns(names) for run in entry.runs]
            best = [best_by_test(*(curve[name].tolist() for name in names)) for curve in curves]
            accuracy, f1 = ([pair[index] for pair in best] for index in (0, 1))
            own = f"{spelled(kept[ACCURACY])} / {spelled(kept[F1])}"
            theirs = f"{spelled(accuracy)} / {spelled(f1)}"
            lines.append(
                f"| {label} | `{method}` | {own} | {theirs} | "
                f"{reached(accuracy, figures.get((label, method)))} |"
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    print(
        "| task | method | at its own stop, accuracy / F1 | best by test accuracy, accuracy / F1 "
        "| published |"
    )
    print("|---|---|---|---|---|")
    print("\n".join(rows(options.folders)), file=sys.stdout)


if __name__ == "__main__":
    main()
