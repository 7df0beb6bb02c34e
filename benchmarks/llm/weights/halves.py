"""A/A: how far each method of a grid parts two halves of one source, over its seeds.

    python benchmarks/llm/weights/halves.py runs/weights/denoising german-1 german-2 [--json FILE]

For every method z = log(weight of the first half / weight of the second) of each seed, their mean with its 95 % t-interval, and
the standard deviation of one run: a method that prefers neither half has an interval that holds 0; one that lets luck decide
has a large deviation. Halves have the same rows in every run, so their luck is part of the mean.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

LEAST = 1e-6
"""A weight below it counts as this much: of zero there is no logarithm."""


def parted(folder: Path, first: str, second: str) -> dict[str, dict[str, Any]]:
    """By ``label-hash`` of the folder's runs: z of each seed, mean, half width, deviation.

    Runs that do not have both sources, and those that are not done, are left out.
    """
    logs: dict[str, dict[int, float]] = defaultdict(dict)
    for path in sorted(folder.glob("**/seed-*/report.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        weights = {row["source"]: max(row["weight"], LEAST) for row in report["sources"]}
        if first in weights and second in weights:
            logs[path.parent.parent.name][report["seed"]] = math.log(weights[first] / weights[second])
    return {label: {"seeds": seeds, **summary(list(seeds.values()))} for label, seeds in sorted(logs.items())}


def summary(values: list[float]) -> dict[str, float | None]:
    """Mean, half width of its 95 % t-interval, and standard deviation; None where one value has none.

    >>> summary([1.0])
    {'mean': 1.0, 'half_width': None, 'deviation': None}
    >>> {name: round(value, 3) for name, value in summary([0.0, 1.0, 2.0]).items()}
    {'mean': 1.0, 'half_width': 2.484, 'deviation': 1.0}
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"mean": mean, "half_width": None, "deviation": None}
    deviation = float(np.std(values, ddof=1))
    half_width = float(stats.t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))
    return {"mean": mean, "half_width": half_width, "deviation": deviation}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="that of the grid's runs")
    parser.add_argument("halves", nargs=2, metavar="HALF", help="the names of the two sources")
    parser.add_argument("--json", type=Path, help="write it there, too")
    options = parser.parse_args()
    rows = parted(options.folder, *options.halves)
    if not rows:
        raise SystemExit(f"no finished mix with the sources {' and '.join(options.halves)} in {options.folder}")
    for label, row in rows.items():
        interval = "" if row["half_width"] is None else f" ± {row['half_width']:.2f}, of one run {row['deviation']:.2f}"
        print(f"{label:32} {row['mean']:+.2f}{interval}   seeds: {len(row['seeds'])}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
