"""Measure how far each method of a grid separates two halves of one source over its seeds (A/A).

    python benchmarks/llm/weights/halves.py runs/weights/denoising german-1 german-2 [--json FILE]

For each method z = log(weight of the first half / weight of the second) of every seed: the mean
with its 95 % t-interval, and the standard deviation of one run. For a method without preference,
the interval contains 0; a method with random weights has a large deviation. Halves have the same
rows in every run, so their luck is part of the mean. The file has a row per mix: method, seed,
weights, z, test losses, and processor seconds of all stages except evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from hgms.results import Interval
from hgms_mix.stages.compare.outcome import processor_seconds

LEAST = 1e-6
"""Smaller weights count as this value, because zero has no logarithm."""


def mixes(folder: Path, first: str, second: str) -> list[dict[str, Any]]:
    """Return the finished mixes as rows of the file.

    A method is its label with the hash of its run; z is None without both halves.
    """
    rows = []
    for path in sorted(folder.glob("**/seed-*/report.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        weights = {row["source"]: row["weight"] for row in report["sources"]}
        if report.get("test"):
            logs = [
                math.log(max(weights[half], LEAST)) for half in (first, second) if half in weights
            ]
            losses = {name: row["token_loss"]["value"] for name, row in report["test"].items()}
            rows.append(
                {
                    "method": path.parent.parent.name,
                    "seed": report["seed"],
                    "weights": weights,
                    "z": logs[0] - logs[1] if len(logs) == 2 else None,
                    "test_losses": losses,
                    "processor_seconds": processor_seconds(report),
                }
            )
    return rows


def line(method: str, values: list[float]) -> str:
    """Return the line of a method.

    >>> line("hg-ms", [0.0, 1.0, 2.0])
    'hg-ms                            +1.00 ± 2.48, of one run 1.00   seeds: 3'
    >>> line("hg-ms", [1.0])
    'hg-ms                            +1.00   seeds: 1'
    """
    interval = Interval.of(values)
    spread = (
        f" ± {interval.half_width:.2f}, of one run {statistics.stdev(values):.2f}"
        if len(values) > 1
        else ""
    )
    return f"{method:32} {interval.mean:+.2f}{spread}   seeds: {len(values)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="that of the grid's runs")
    parser.add_argument("halves", nargs=2, metavar="HALF", help="the names of the two sources")
    parser.add_argument("--json", type=Path, help="write the mixes there, too")
    options = parser.parse_args()
    rows = mixes(options.folder, *options.halves)
    parted = [row for row in rows if row["z"] is not None]
    if not parted:
        raise SystemExit(
            f"no finished mix with the sources {' and '.join(options.halves)} in {options.folder}"
        )
    for method in dict.fromkeys(row["method"] for row in parted):
        print(line(method, [row["z"] for row in parted if row["method"] == method]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
