"""Compare an outer step with jitted JAX at growing sizes: the step of bench_small.py.

    python benchmarks/bench_scaling.py [--json FILE] [--picture FILE] [--repetitions 5] [--seconds
    0.1] [--only n d N K]

From 100 rows, 20 unknowns, N = 4 candidates and K = 20 lower steps, one size grows and the others
are constant. At every size both sides must first agree (:func:`bench_small.agreeing`). Seconds are
processor time on one processor, medians of alternating repetitions. ``--draw`` only draws the
picture from a file of figures.

    python benchmarks/bench_scaling.py --growth [--json FILE] [--picture FILE]

Larger sizes, against the floor: the same gradients and products, as matrix products without
autograd, without the updates, solver, selection and record of a step (:func:`floor`). ``--json``
then adds the figures to the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from bench_small import DECAY, Work, measure, ours, pipeline, problem
from timing import difference, machine, quartiles, ratios, show, take_turns, use_processors
from torch import Tensor
from torch.nn import functional

SWEEPS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "n": ("rows", "rows n", (100, 300, 1000, 3000, 10_000, 30_000)),
    "d": ("unknowns", "unknowns d", (20, 60, 200, 600, 2000)),
    "N": ("candidates", "candidates N", (1, 2, 4, 8, 16, 32, 64)),
    "K": ("lower_steps", "lower steps K", (5, 10, 20, 40, 80, 160)),
}
LARGE: dict[str, tuple[int, ...]] = {
    "N": (1, 4, 16, 64),
    "n": (1000, 10_000, 100_000, 1_000_000),
    "d": (100, 1000, 10_000, 100_000, 1_000_000),
}
AGREEMENT = 1e-4
"""Maximum difference of compiled and eager steps: float32 sums of many rows round differently."""
STEPS = 5
"""Steps over which the products of a solve are averaged: in large problems CG reaches the end of
float32 before its last step."""
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


def floor(work: Work, products: int) -> Callable[[], Tensor]:
    """Return a function that computes the gradients and products of a step and nothing else.

    A step computes K gradients at N candidates, N upper values, an upper and a lower gradient at
    one candidate, ``products`` Hessian products, and a mixed product.
    """
    task = problem(work)
    (a, y), (above, labels) = (
        (data.whole["a"], data.whole["y"])
        for data in (task.lower_data, task.upper_data["differentiate"])
    )
    weights = torch.sigmoid(task.theta0["w"]) / work.rows
    signed = -y * weights
    x = 0.1 * torch.randn(
        work.candidates, work.unknowns, generator=torch.Generator().manual_seed(0)
    )
    v = x[0].clone()

    def gradient(x: Tensor, a: Tensor, y: Tensor, signed: Tensor) -> Tensor:
        slope = torch.sigmoid(-y * (x @ a.T)) * signed
        return slope @ a + 2 * DECAY * x

    @torch.no_grad()
    def step() -> Tensor:
        for _ in range(work.lower_steps):
            last = gradient(x, a, y, signed)
        functional.softplus(-labels * (x @ above.T)).mean(-1)
        gradient(x[:1], above, labels, -labels / len(labels))
        gradient(x[:1], a, y, signed)
        probability = torch.sigmoid(-y * (a @ x[0]))
        curvature = probability * (1 - probability) * weights
        for _ in range(products):
            last = (curvature * (a @ v)) @ a + 2 * DECAY * v
        (a @ v) * probability * signed
        return last

    return step


def against_the_floor(work: Work, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the seconds of a step, eager and compiled, and of the floor, with ratios per round."""
    method, task = pipeline(work), problem(work)
    state = method.init(task, seed=0)
    for _ in range(STEPS):
        state, record = method.step(task, state)
    products = round(record["cost_products"] / STEPS)
    sides: dict[str, Callable[[], Any]] = {
        "eager": ours(work, exact=False),
        "compiled": ours(work, compiled=True, exact=False),
        "floor": floor(work, products),
    }
    error = max(map(difference, sides["compiled"](), sides["eager"]()))
    if not error <= AGREEMENT:
        raise SystemExit(f"compiled steps of {work} differ by {error:.1e}")
    spent = take_turns(sides, rounds, seconds, time.process_time)
    return {
        "products": products,
        "sides": {name: quartiles(values) for name, values in spent.items()},
        "/ floor": {
            name: ratios(values, spent["floor"])
            for name, values in spent.items()
            if name != "floor"
        },
    }


def growth(options: argparse.Namespace) -> None:
    """Measure the sizes of LARGE against the floor; write them after each size."""
    path: Path | None = options.json
    figures: dict[str, Any] = {}
    if path is not None and path.exists():
        figures = json.loads(path.read_text(encoding="utf-8"))
    grown: dict[str, Any] = {**machine(), "sweeps": {}}
    for name in (axis for axis in LARGE if axis in options.only):
        rows = grown["sweeps"][name] = []
        for size in LARGE[name]:
            work = evolve(Work(), **{SWEEPS[name][0]: size})
            rows.append(
                {"size": size, **against_the_floor(work, options.repetitions, options.seconds)}
            )
            print(name, size, json.dumps(rows[-1]), flush=True)
            if path is not None:
                figures["growth"] = grown
                path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if options.picture:
        draw_growth(grown, options.picture)


def draw_growth(grown: dict[str, Any], path: Path) -> None:
    """Draw the milliseconds of a step and of the floor, and their ratio, against each size."""
    from matplotlib.figure import Figure

    colors = {"eager": "C0", "compiled": "C1", "floor": "C2"}
    figure = Figure(figsize=(11, 5), layout="constrained")
    sweeps = grown["sweeps"]
    panels = figure.subplots(2, len(sweeps), sharey="row", sharex="col", squeeze=False)
    for column, (name, rows) in enumerate(sweeps.items()):
        sizes = [row["size"] for row in rows]
        above, below = panels[0][column], panels[1][column]
        for side in rows[0]["sides"]:
            medians = [1e3 * row["sides"][side]["median"] for row in rows]
            above.plot(sizes, medians, "o-", color=colors[side], markersize=3, label=side)
        for side in rows[0]["/ floor"]:
            shares = [row["/ floor"][side]["median"] for row in rows]
            below.plot(sizes, shares, "o-", color=colors[side], markersize=3)
        above.set(xscale="log", yscale="log")
        below.set(xscale="log", yscale="log", xlabel=SWEEPS[name][1])
        for panel in (above, below):
            panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("milliseconds")
    panels[1][0].set_ylabel("time / floor")
    panels[0][0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


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
    parser.add_argument("--growth", action="store_true", help="larger sizes, against the floor")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a block of steps")
    parser.add_argument("--only", choices=list(SWEEPS), nargs="+", default=list(SWEEPS))
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw.read_text(encoding="utf-8")), options.picture or PICTURE)
        return
    use_processors(1)
    if options.growth:
        growth(options)
        return
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
