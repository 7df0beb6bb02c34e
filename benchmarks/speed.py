"""Measure speed in one table: required, targeted and measured values (``tox -e bench``).

    python benchmarks/speed.py [--json FILE] [--against a87e5bd] [--budget 60] [--only hypergradient
    small …] [--quick]

Every part is a script of this folder, executed with --json; its figures become one row per piece of
work in docs/reference/benchmarks-speed.md. Within a part the sides take turns. Ratios are medians
with quartiles. Parts that cannot be measured (no JAX, no git) are empty. ``--against`` is the
commit or the checkout for "before".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import frozen
from tables import SPEED, speed_row
from timing import machine, show

HERE = Path(__file__).resolve().parent
BEFORE = "a87e5bd"  # the last commit with eager steps
SHIPPED = "ours, compiled"
"""The side of bench_hypergradient.py that represents HGMS."""

Figures = dict[str, Any]


@frozen
class Row:
    """A piece of work: its ``part``, and its value in the part's figures.

    The value is a ratio or seconds with quartiles, and a note on their origin. It must be at most
    (``greater``: at least) ``required``.
    """

    work: str
    part: str
    value: Callable[[Figures], tuple[dict[str, float], str]]
    required: float
    aim: float
    greater: bool = False

    def meets(self, median: float, limit: float) -> bool:
        return median >= limit if self.greater else median <= limit


def _side(side: str, other: str) -> Callable[[Figures], tuple[dict[str, float], str]]:
    return lambda figures: (figures["sides"][side][f"/ {other}"], side)


def _method(name: str) -> Callable[[Figures], tuple[dict[str, float], str]]:
    return lambda figures: (figures["methods"][name]["ratio"], name)


def _worst(figures: Figures) -> tuple[dict[str, float], str]:
    """Return the slowest of the methods."""
    name = max(figures["methods"], key=lambda name: figures["methods"][name]["ratio"]["median"])
    return figures["methods"][name]["ratio"], f"{name}, the slowest"


def _fewest(figures: Figures) -> tuple[dict[str, float], str]:
    """Return the solver with the fewest products, on its worst trajectory and ridge."""
    best: dict[tuple[str, float], dict[str, Any]] = {}
    for row in figures["products"]:
        where = row["trajectory"], row["ridge"]
        if where not in best or row["ratio"] < best[where]["ratio"]:
            best[where] = row
    row = max(best.values(), key=lambda row: row["ratio"])
    return dict.fromkeys(
        ("median", "q25", "q75"), row["ratio"]
    ), f"{row['what']}, {row['trajectory']}, ridge {row['ridge']:g}"


def _first(kind: str) -> Callable[[Figures], tuple[dict[str, float], str]]:
    def value(figures: Figures) -> tuple[dict[str, float], str]:
        seconds = figures["methods"]["hg-ms"][kind]
        return dict.fromkeys(("median", "q25", "q75"), seconds), "seconds"

    return value


ROWS = (
    Row(
        "CG hypergradient, cleaning network, / jitted jaxopt",
        "hypergradient",
        _side(SHIPPED, "jaxopt, jitted"),
        1.0,
        0.75,
    ),
    Row(
        "the same / TorchOpt as documented",
        "hypergradient",
        _side(SHIPPED, "torchopt, as documented"),
        0.35,
        0.25,
    ),
    Row("small outer step / jitted JAX", "small", _side(SHIPPED, "jax, one program"), 10, 3),
    Row("`hg-ms` on digits, seconds a step / before", "digits", _method("hg-ms"), 0.33, 0.2),
    Row(
        "`hg-ms` on MNIST, outer steps in a budget / before",
        "budget",
        _method("hg-ms"),
        2.0,
        3.0,
        True,
    ),
    Row("`hg-ms-tilted` on MNIST, the same", "budget", _method("hg-ms-tilted"), 2.0, 3.0, True),
    Row("every other method on digits, seconds a step / before", "others", _worst, 1.0, 0.5),
    Row("products to 1e-6 along a trajectory / plain CG", "products", _fewest, 0.4, 0.15),
    Row(
        "language-model step, N = 4, / before",
        "language",
        _method("hg-ms on a language model"),
        0.8,
        0.6,
    ),
    Row("first step of `hg-ms` on MNIST, cold (s)", "first", _first("cold"), 60, 25),
    Row("the same, warm cache (s)", "first", _first("warm"), 10, 4),
)


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return each part's script with its arguments."""
    against = ["bench_versions.py", "--against", options.against]
    fewer = ["--pairs", "5", "--seconds", "0.1"] if options.quick else []
    few = ["--repetitions", "5"] if options.quick else []
    settings = ["--set", *options.set] if options.set else []
    budget = str(min(options.budget, 5) if options.quick else options.budget)
    others = [
        "hg-baseline",
        "v-pbgd",
        "g-pbgd",
        "scalebio",
        "bome",
        "soba",
        "iaptt-gm",
        "amigo",
        "stocbio",
        "darts",
        "fixed-point",
    ]
    return {
        "hypergradient": ["bench_hypergradient.py", *few],
        "small": ["bench_small.py", *few],
        "digits": [*against, "--only", "hg-ms", *fewer, *settings],
        "others": [*against, "--only", *others, *fewer, *settings],
        "budget": [
            *against,
            "--budget",
            budget,
            "--dataset",
            "mnist",
            "--only",
            "hg-ms",
            "hg-ms-tilted",
            *settings,
        ],
        "products": ["bench_products.py"],
        "language": [*against, "--language"],
        "first": [
            "bench_versions.py",
            "--first",
            "--dataset",
            "mnist",
            "--only",
            "hg-ms",
            "--set",
            "compile=true",
            *settings,
        ],
    }


def run(command: list[str]) -> Figures | None:
    """Return the figures of a part, or None with its output after a failure."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        script, *arguments = command
        done = subprocess.run(
            [sys.executable, HERE / script, *arguments, "--json", path], check=False
        )
        if done.returncode or not path.exists():
            print(f"\n{script} {' '.join(arguments)} failed", file=sys.stderr)
            return None
        return json.loads(path.read_text(encoding="utf-8"))


def measured(parts: dict[str, Figures]) -> Iterator[dict[str, Any]]:
    for row in ROWS:
        entry: dict[str, Any] = {
            "work": row.work,
            "required": row.required,
            "aim": row.aim,
            "greater": row.greater,
        }
        try:
            value, whose = row.value(parts[row.part])
            met = {
                "required met": row.meets(value["median"], row.required),
                "aim met": row.meets(value["median"], row.aim),
            }
            yield {**entry, **value, **met, "of": whose}
        except KeyError:  # the part failed, or the library is not installed
            yield entry


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="also write the figures to this file; parts that are not run keep theirs",
    )
    parser.add_argument(
        "--against", default=BEFORE, help="a commit or a folder: what 'before' means"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=60,
        help="seconds of processor time that outer steps are counted in",
    )
    parts_of_table = list(dict.fromkeys(row.part for row in ROWS))
    parser.add_argument("--only", choices=parts_of_table, nargs="+", default=parts_of_table)
    parser.add_argument(
        "--quick", action="store_true", help="fewer repetitions, and a budget of 5 s"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help=(
            "settings of [run] for the runs of this checkout (compile=true: also where the "
            "budget is too short for auto)"
        ),
    )
    options = parser.parse_args()
    parts: dict[str, Figures] = {}
    if options.json and options.json.exists():
        parts = json.loads(options.json.read_text(encoding="utf-8"))["parts"]
    for name, command in commands(options).items():
        if name in options.only:
            print(f"\n--- {name}", flush=True)
            figures = run(command)
            if figures is not None:
                parts[name] = figures
            if options.json:  # after every part: a later one may be interrupted
                table = {**machine(), "rows": list(measured(parts)), "parts": parts}
                options.json.write_text(
                    json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
                )
    show("How fast", SPEED, [tuple(speed_row(row)) for row in measured(parts)])


if __name__ == "__main__":
    main()
