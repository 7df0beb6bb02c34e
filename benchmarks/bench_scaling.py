"""Compare an outer step with jitted JAX at growing sizes: the step of bench_small.py.

    python benchmarks/bench_scaling.py [--json FILE] [--picture FILE] [--repetitions 5] [--seconds
    0.1] [--only n d N K]

From 100 rows, 20 unknowns, N = 4 candidates and K = 20 lower steps, one size grows and the others
are constant. At every size both sides must first agree (:func:`bench_small.agreeing`). Seconds are
processor time on one processor, medians of alternating repetitions. ``--draw`` only draws the
picture from a file of figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attrs import evolve
from bench_small import Work, measure
from turns import machine, show, use_processors

SWEEPS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "n": ("rows", "rows n", (100, 300, 1000, 3000, 10_000, 30_000)),
    "d": ("unknowns", "unknowns d", (20, 60, 200, 600, 2000)),
    "N": ("candidates", "candidates N", (1, 2, 4, 8, 16, 32, 64)),
    "K": ("lower_steps", "lower steps K", (5, 10, 20, 40, 80, 160)),
}
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"


def sweep(name: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    field, _, sizes = SWEEPS[name]
    rows = []
    for size in sizes:
        sides = measure(evolve(Work(), **{field: size}), rounds, seconds, 1)
        rows.append(
            {"size": size, "sides": {side: figures["seconds"] for side, figures in sides.items()}}
        )
    return rows


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw four curves of milliseconds against a size, with the quartiles as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.4), layout="constrained")
    panels = figure.subplots(1, len(figures["sweeps"]), sharey=True, squeeze=False)[0]
    for panel, (name, rows) in zip(panels, figures["sweeps"].items(), strict=True):
        sizes = [row["size"] for row in rows]
        for number, side in enumerate(rows[0]["sides"]):
            median, low, high = (
                [1e3 * row["sides"][side][key] for row in rows] for key in ("median", "q25", "q75")
            )
            panel.plot(
                sizes, median, "o-", color=f"C{number}", markersize=3, linewidth=1.6, label=side
            )
            panel.fill_between(sizes, low, high, color=f"C{number}", alpha=0.25, linewidth=0)
        panel.set(xscale="log", yscale="log", xlabel=SWEEPS[name][1])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds an outer step")
    panels[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--picture", type=Path, help=f"draw the curves into this file ({PICTURE.name} of the pages)"
    )
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="measure nothing, draw these figures"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a block of steps")
    parser.add_argument("--only", choices=list(SWEEPS), nargs="+", default=list(SWEEPS))
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw.read_text(encoding="utf-8")), options.picture or PICTURE)
        return
    use_processors(1)
    figures: dict[str, Any] = {**machine(), "sweeps": {}}
    for name in options.only:
        rows = figures["sweeps"][name] = sweep(name, options.repetitions, options.seconds)
        sides = list(rows[0]["sides"])
        show(
            f"Milliseconds an outer step, by {SWEEPS[name][1]}",
            (name, *sides, "ratio"),
            [
                (
                    row["size"],
                    *(1e3 * row["sides"][side]["median"] for side in sides),
                    row["sides"][sides[0]]["median"] / row["sides"][sides[-1]]["median"],
                )
                for row in rows
            ],
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if options.picture:
        draw(figures, options.picture)


if __name__ == "__main__":
    main()
