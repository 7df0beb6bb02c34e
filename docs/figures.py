"""Draw the pictures of the circle tasks in docs/explanation from runs of the circle tasks.

``python docs/figures.py [--check]``. Each function with the name of a picture computes its numbers
(float64 on the CPU, fixed seeds) and returns them with a drawing function. Both are stored in
docs/images: the picture as SVG, the numbers as JSON. ``--check`` computes the numbers and prints
those that differ from the stored numbers by more than ``TOLERANCE``. The tests make the same check.
The build of the pages does too, and uses its new pictures.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from hgms.adapters import hypergradient
from hgms.generators.branches import Branches, Diversity
from hgms.generators.ula import Ula
from hgms.optim import SGD
from hgms.runs import RunConfig, run
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.tasks.circle import CircleDegenerate, CircleKink
from hgms_core import Candidates, Key, Problem, Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parent / "images"
TOLERANCE = {"rel_tol": 1e-5, "abs_tol": 1e-7}
"""How far a number may be from the one on file: processors and BLAS libraries round differently."""

CPU = torch.device("cpu")
DOUBLE = torch.float64
KINK = 10 / (2 * math.pi)
"""A zero of a(θ), at 1.5915: the largest θ below 3 with a tie (first example), with a degenerate
minimiser (second).
"""

# Wong's palette, distinguishable with the common colour deficiencies; line styles and
# markers differ as well.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
BLACK = "#222222"

Numbers = dict[str, Any]
Figures = tuple[Numbers, Callable[[Numbers], "Figure"]]


# --- the runs
# --------------------------------------------------------------------------------------------------

STARTS = 2.5
"""Standard deviation of where candidates start around x0, beyond the circle's radius: some start
on every side of it.
"""

CHAINS = Ula(count=32, steps=80, lr=5e-3, temperature=1e-4, spread=STARTS**2 / 1e-4)
DESCENT = Branches(count=1, steps=80, optimizer=SGD(lr=8e-3), batch_size=None)
SOLVER = CG(ridge=0.1, rtol=1e-10, max_steps=10)


def at(theta: float) -> Tree:
    return {"theta": torch.tensor([theta], dtype=DOUBLE)}


def proposed(
    generator: Ula | Branches, problem: Problem, theta: float, seed: int = 0
) -> Candidates:
    """Return the candidates of one outer step from x0."""
    return generator.propose(problem, at(theta), generator.init(problem, Key(seed)), Key(seed))


def chosen(problem: Problem, theta: float, candidates: Candidates) -> tuple[float, Tree]:
    """Return (upper value, state) of the best candidate."""
    selection = BestOfN().select(problem, at(theta), candidates, Key(0))
    return float(selection.scores[selection.index]), candidates.at(selection.index)


def followed(problem: Problem, thetas: list[float]) -> list[float]:
    """Return f at the end of one lower run per θ.

    Each run starts at the end of the previous run.
    """
    start = DESCENT.init(problem, Key(0))
    values = []
    for step, theta in enumerate(thetas):
        candidates = DESCENT.propose(problem, at(theta), start, Key(step))
        values.append(float(problem.f(at(theta), candidates.at(0), {})))
        start = DESCENT.carry(start, candidates, torch.tensor(0), Key(step), problem)
    return values


def slope(problem: Problem, theta: float, x: Tree, solver: CG = SOLVER) -> float:
    """Return the implicit hypergradient at a lower state."""
    estimate = hypergradient(
        lambda t, y: problem.f(t, y, {}),
        lambda t, y: problem.g(t, y, {}),
        at(theta),
        x,
        solver=solver,
    )
    return float(estimate.value["theta"])


def even(low: float, high: float, count: int) -> list[float]:
    return torch.linspace(low, high, count, dtype=DOUBLE).tolist()


# --- the numbers
# --------------------------------------------------------------------------------------------------


def kink_landscape() -> Figures:
    """Show the candidates of `ula` on the lower landscape on both sides of the kink, and the
    selected candidate.
    """
    task = CircleKink()
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    panels = []
    for theta in (1.45, 1.8):
        candidates = proposed(CHAINS, problem, theta)
        trajectory = proposed(DESCENT, problem, theta).at(0)
        panels.append(
            {
                "theta": theta,
                "candidates": candidates.x["x"].tolist(),
                "selected": chosen(problem, theta, candidates)[1]["x"].tolist(),
                "trajectory": trajectory["x"].tolist(),
                "solution": exact.solution(at(theta))["x"].tolist(),
            }
        )
    return {"panels": panels}, _draw_kink_landscape


def kink_value() -> Figures:
    """Compute F(θ) and its slope with selection, along one trajectory, and by differences of the
    selected value.
    """
    task = CircleKink()
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    wide = even(1.0, 3.0, 81)
    down = [theta for theta in reversed(wide) if theta <= task.start]
    up = [theta for theta in wide if theta > task.start]
    single = dict(
        zip([*down, *up], [*followed(problem, down), *followed(problem, up)], strict=True)
    )
    # Points that are `apart` places from each other are `width` apart, so that a difference needs
    # no separate values; and no point is the kink, where the sign of a(θ) is that of a rounding
    # error.
    apart = 3
    width = 0.02
    grid = even(KINK - 31 / 300, KINK + 31 / 300, 32)
    branches = attrs.evolve(DESCENT, count=128, diversity=Diversity(noise=STARTS))
    best = [chosen(problem, theta, proposed(branches, problem, theta)) for theta in grid]
    near = grid[apart:-apart]
    return {
        "theta": wide,
        "F": [float(exact.value(at(theta))) for theta in wide],
        "selected": [
            chosen(problem, theta, proposed(CHAINS, problem, theta))[0] for theta in wide[::4]
        ],
        "trajectory": [single[theta] for theta in wide],
        "near": near,
        "slope": [float(exact.hypergradient(at(theta))["theta"]) for theta in near],
        "hypergradient": [
            slope(problem, theta, x) for theta, (_, x) in zip(near, best[apart:-apart], strict=True)
        ],
        "difference": [
            (after - before) / (2 * width)
            for (before, _), (after, _) in zip(best[: -2 * apart], best[2 * apart :], strict=True)
        ],
        "width": width,
    }, _draw_kink_value


OUTER_STEPS = 20
BRANCH: Mapping[str, Any] = {
    "steps": 60,
    "optimizer": {"name": "sgd", "lr": 8e-3},
    "batch_size": "none",
}
IMPLICIT: Mapping[str, Any] = {
    "name": "implicit",
    "solver": {"name": "cg", "ridge": 0.1, "rtol": 1e-8, "max_steps": 10},
}


def _methods(task: str, lr: float) -> dict[str, Any]:
    """Build methods as in a configuration file, with the same outer optimiser and solver."""
    outer = {"name": "projected-gradient", "lr": lr}
    chains = {
        "name": "ula",
        "count": CHAINS.count,
        "steps": CHAINS.steps,
        "lr": CHAINS.lr,
        "temperature": CHAINS.temperature,
        "spread": CHAINS.spread,
        "carry_rule": CHAINS.carry_rule,
    }
    implicit = {"hypergradient": IMPLICIT, "outer": outer, "keep": "last"}
    methods: dict[str, Any] = {
        "hg-ms-ula": {"name": "hg-ms-ula", "generator": chains, **implicit},
        "hg-ms": {
            "name": "hg-ms",
            "generator": {**BRANCH, "count": 32, "diversity": {"noise": STARTS}},
            **implicit,
        },
        "hg-implicit": {"name": "hg-implicit", "generator": dict(BRANCH), **implicit},
        "hg-baseline": {"name": "hg-baseline", "generator": dict(BRANCH), "outer": outer},
    }
    if (
        task == "circle-kink"
        # on the other task f falls without bound inside the circle: a penalty of this weight leaves
        # it
    ):
        penalty = {"steps": 40, "lr": 2e-3, "inner_lr": 2e-3, "gamma": 5.0}
        methods["v-pbgd"] = {"name": "v-pbgd", "generator": penalty, "outer": outer}
    return methods


def _runs(task: str, lr: float) -> Numbers:
    numbers: Numbers = {"methods": {}}
    for name, method in _methods(task, lr).items():
        config = RunConfig.from_dict(
            {
                "task": task,
                "method": method,
                "budget": f"{OUTER_STEPS} steps",
                "run": {"dtype": "float64"},
            }
        )
        built = config.method
        problem = config.task.problem(0, CPU, DOUBLE)
        thetas: list[float] = []

        def watch(
            theta: Tree, x: Tree, inner: Any = problem.evaluate, seen: list[float] = thetas
        ) -> Mapping[str, float]:
            seen.append(float(theta["theta"]))
            return inner(theta, x)

        result = run(built, attrs.evolve(problem, evaluate=watch), config.budget)
        numbers["methods"][name] = {
            "theta": thetas,
            "F": [row["metric.value"] for row in result.records],
            "calls": result.summary["oracle_calls"],
        }
    exact = (CircleKink() if task == "circle-kink" else CircleDegenerate()).closed_form(
        0, CPU, DOUBLE
    )
    grid = even(0.2, 3.0, 281)
    values = [float(exact.value(at(theta))) for theta in grid]
    best = min(range(len(grid)), key=values.__getitem__)
    return {**numbers, "grid": grid, "F": values, "minimum": [grid[best], values[best]]}


def kink_methods() -> Figures:
    """Compute θ and F(θ) over 20 outer steps on `circle-kink`."""
    return _runs("circle-kink", 0.02), _draw_methods


def degenerate_methods() -> Figures:
    """Compute θ and F(θ) over 20 outer steps on `circle-degenerate`."""
    return _runs("circle-degenerate", 0.2), _draw_methods


def degenerate_flatness() -> Figures:
    """Compute f on the circle around a degenerate minimiser, and the change of F′ there."""
    task = CircleDegenerate()
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    heights = even(-0.8, 0.8, 161)
    curves = []
    for shift in (-0.02, 0.0, 0.02):
        theta = KINK + shift
        radius = math.sqrt(1 + theta**2)
        points = [
            {"x": torch.tensor([math.sqrt(radius**2 - t * t), t], dtype=DOUBLE)} for t in heights
        ]
        best = exact.solution(at(theta))["x"]
        lowest = [float(best[1]), float(exact.value(at(theta)))]
        curves.append(
            {
                "shift": shift,
                "f": [float(problem.f(at(theta), x, {})) for x in points],
                # at θ₂ itself a(θ) is 1e-16 instead of 0 after rounding, and even that would move
                # the minimiser to 0.17
                "solution": lowest if shift else [0.0, 0.0],
            }
        )
    distances = [10.0**-power for power in even(1.5, 12, 43)]
    solver = CG(ridge=1e-6, rtol=1e-12, max_steps=10)
    changes = []
    computed = []
    for distance in distances:
        theta = KINK + distance
        changes.append(abs(float(exact.hypergradient(at(theta))["theta"])))
        computed.append(abs(slope(problem, theta, exact.solution(at(theta)), solver)))
    return {
        "height": heights,
        "curves": curves,
        "distance": distances,
        "change": changes,
        "hypergradient": computed,
    }, _draw_degenerate_flatness


def degenerate_selection() -> Figures:
    """Compute the height of the selected candidate and the hypergradient for a flat f."""
    task = CircleDegenerate()
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    fine = even(KINK - 0.15, KINK + 0.15, 120)
    coarse = even(KINK - 0.15, KINK + 0.15, 20)
    numbers: Numbers = {"fine": fine, "coarse": coarse, "selected": {}, "hypergradient": {}}
    numbers["height"] = [float(exact.solution(at(theta))["x"][1]) for theta in fine]
    numbers["slope"] = [float(exact.hypergradient(at(theta))["theta"]) for theta in fine]
    for count in (16, 256):
        generator = attrs.evolve(DESCENT, count=count, diversity=Diversity(noise=STARTS))
        heights = []
        slopes = []
        for step, theta in enumerate(coarse):
            _, x = chosen(problem, theta, proposed(generator, problem, theta, seed=step))
            heights.append(float(x["x"][1]))
            slopes.append(slope(problem, theta, x))
        numbers["selected"][str(count)], numbers["hypergradient"][str(count)] = heights, slopes
    return numbers, _draw_degenerate_selection


def ridge() -> Figures:
    """Compute the error of the implicit hypergradient at noisy candidates near x*(θ), by ridge and
    temperature.
    """
    task = CircleKink()
    theta = 1.8
    angle = 0.15
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    best = exact.solution(at(theta))["x"]
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=DOUBLE
    )
    # With the pseudoinverse x moves across the circle only, so its direction u = x/r stays: the
    # slope of f(θ, r(θ) u).
    u = turn @ best / best.norm()
    t = torch.tensor(theta, dtype=DOUBLE, requires_grad=True)
    along = problem.f({"theta": t[None]}, {"x": (1 + t.square()).sqrt() * u}, {})
    (wanted,) = torch.autograd.grad(along, t)
    ridges = [10.0**power for power in even(-4, 2, 13)]
    numbers: Numbers = {"ridge": ridges, "error": {}}
    for temperature in (1e-6, 1e-4, 1e-2):
        chains = Ula(count=16, steps=80, lr=8e-3, temperature=temperature, spread=0.0)
        points = chains.propose(
            problem, at(theta), {"x": {"x": (best.norm() * u)[None]}}, Key(0)
        ).x["x"]
        errors = []
        for gamma in ridges:
            solver = CG(ridge=gamma, rtol=1e-10, max_steps=10)
            off = [
                abs(slope(problem, theta, {"x": x}, solver) - float(wanted)) / abs(float(wanted))
                for x in points
            ]
            errors.append(sorted(off))
        numbers["error"][f"{temperature:.0e}"] = errors
    return numbers, _draw_ridge


FIGURES: dict[str, Callable[[], Figures]] = {
    maker.__name__.replace("_", "-"): maker
    for maker in (
        kink_landscape,
        kink_value,
        kink_methods,
        degenerate_flatness,
        degenerate_selection,
        degenerate_methods,
        ridge,
    )
}


# --- the drawings
# --------------------------------------------------------------------------------------------------


def _panels(count: int, height: float = 3.4, *, square: bool = False) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6 if square else height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(square)
        if not square:
            axis.grid(alpha=0.25, linewidth=0.6)
    return figure, list(axes)


def _below(panel: Axes) -> None:
    """Place the legend under a panel."""
    panel.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.17))


def _draw_kink_landscape(numbers: Numbers) -> Figure:
    figure, axes = _panels(2, square=True)
    line = torch.linspace(-3, 3, 91, dtype=DOUBLE)
    angle = torch.linspace(0, 2 * math.pi, 361, dtype=DOUBLE)
    for panel, data in zip(axes, numbers["panels"], strict=True):
        theta = data["theta"]
        radius = math.sqrt(1 + theta**2)
        height = (line[None, :] ** 2 + line[:, None] ** 2 - radius**2) ** 2
        filled = panel.contourf(
            line,
            line,
            (height + 1e-3).log10(),
            levels=[-3, -2, -1, 0, 0.5, 1, 1.5, 2, 2.5],
            cmap="Greys",
            alpha=0.75,
        )
        panel.plot(
            radius * angle.cos(),
            radius * angle.sin(),
            color=BLACK,
            linewidth=1.2,
            label="$S(\\theta)$: minimisers of g",
        )
        x = torch.tensor(data["candidates"])
        panel.scatter(
            x[:, 0],
            x[:, 1],
            s=26,
            color=BLUE,
            edgecolor="white",
            linewidth=0.5,
            zorder=3,
            label="candidates of ula",
        )
        panel.plot(
            *data["trajectory"],
            "s",
            markersize=16,
            markerfacecolor="none",
            markeredgecolor=ORANGE,
            markeredgewidth=2.5,
            linestyle="none",
            zorder=4,
            label="end of one run from $x_0$",
        )
        panel.scatter(
            *data["selected"],
            s=90,
            marker="D",
            color=GREEN,
            edgecolor=BLACK,
            zorder=5,
            label="selected, best of 32",
        )
        panel.scatter(
            *data["solution"],
            s=190,
            marker="*",
            color=RED,
            edgecolor=BLACK,
            zorder=6,
            label="$x^*(\\theta)$, exact",
        )
        side = "a(\\theta) > 0" if theta < KINK else "a(\\theta) < 0"
        panel.set(
            title=f"$\\theta = {theta}$, ${side}$", xlabel="$x_1$", ylabel="$x_2$", aspect="equal"
        )
    figure.colorbar(filled, ax=axes, label="$\\log_{10}(g + 10^{-3})$", shrink=0.8)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_kink_value(numbers: Numbers) -> Figure:
    figure, (left, right) = _panels(2, 4.6)
    left.plot(numbers["theta"], numbers["F"], color=BLACK, linewidth=2, label="$F(\\theta)$, exact")
    left.plot(
        numbers["theta"][::4],
        numbers["selected"],
        "o",
        color=BLUE,
        markersize=4.5,
        label="best of 32 candidates of ula",
    )
    left.plot(
        numbers["theta"],
        numbers["trajectory"],
        "--",
        color=ORANGE,
        linewidth=2,
        label="one run, carried along",
    )
    left.axvline(KINK, color=BLACK, linewidth=0.8, linestyle=":")
    left.annotate("kink", (KINK, 0.05), (1.25, 1.0), arrowprops={"arrowstyle": "->"}, fontsize=10)
    left.set(
        xlabel="$\\theta$", ylabel="upper value $f$", title="The value, with and without selection"
    )
    _below(left)
    for side, label in ((-1, "$F'(\\theta)$, exact"), (1, None)):
        part = [i for i, theta in enumerate(numbers["near"]) if side * (theta - KINK) > 0]
        near = [numbers["near"][i] for i in part]
        exact = [numbers["slope"][i] for i in part]
        right.plot(near, exact, color=BLACK, linewidth=2, label=label)
    right.plot(
        numbers["near"],
        numbers["hypergradient"],
        "o",
        color=BLUE,
        markersize=4.5,
        label="hypergradient at the best of 128 branches",
    )
    width = numbers["width"]
    right.plot(
        numbers["near"],
        numbers["difference"],
        "^",
        color=RED,
        markersize=5,
        label=f"difference of their upper values, ±{width} apart",
    )
    right.axvspan(KINK - width, KINK + width, color=RED, alpha=0.1, linewidth=0)
    right.set(xlabel="$\\theta$", ylabel="slope", title="The slope near the kink")
    _below(right)
    return figure


_STYLES = {
    "hg-ms-ula": (BLUE, "-", "o"),
    "hg-ms": (GREEN, "-", "s"),
    "hg-implicit": (ORANGE, "-", "^"),
    "hg-baseline": (RED, "--", "x"),
    "v-pbgd": (PURPLE, "-.", "v"),
}


def _draw_methods(numbers: Numbers) -> Figure:
    figure, (left, right) = _panels(2, 4.0)
    left.plot(
        numbers["grid"], numbers["F"], color="#888888", linewidth=1.5, label="$F(\\theta)$, exact"
    )
    for name, curves in numbers["methods"].items():
        colour, line, marker = _STYLES[name]
        left.plot(curves["theta"], curves["F"], marker, color=colour, markersize=4, alpha=0.8)
        left.plot(curves["theta"][-1], curves["F"][-1], marker, color=colour, markersize=9)
        right.plot(
            range(len(curves["F"])),
            curves["F"],
            line,
            marker=marker,
            markersize=4,
            color=colour,
            label=name,
        )
    start = next(iter(numbers["methods"].values()))
    left.plot(
        start["theta"][0], start["F"][0], "o", markersize=10, markerfacecolor="none", color=BLACK
    )
    left.annotate(
        "start",
        (start["theta"][0], start["F"][0]),
        xytext=(8, 6),
        textcoords="offset points",
        fontsize=9,
    )
    left.set(
        xlabel="$\\theta$",
        ylabel="$F(\\theta)$",
        title="Where the iterates go (large: where they end)",
    )
    right.axhline(
        numbers["minimum"][1], color=BLACK, linewidth=0.8, linestyle=":", label="$\\min F$"
    )
    right.set(xlabel="outer step", ylabel="$F(\\theta)$", title="The value at the iterates")
    figure.legend(
        *right.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_degenerate_flatness(numbers: Numbers) -> Figure:
    figure, (left, right) = _panels(2, 4.9)
    for curve, colour, line in zip(
        numbers["curves"], (BLUE, BLACK, RED), ("--", "-", "-."), strict=True
    ):
        shift = f"{curve['shift']:+.2f}" if curve["shift"] else ""
        left.plot(
            numbers["height"],
            curve["f"],
            line,
            color=colour,
            linewidth=2,
            label=f"$\\theta = \\theta_2{shift}$",
        )
        left.plot(
            *curve["solution"], "*", color=colour, markersize=14, markeredgecolor="white", zorder=5
        )
    left.set(
        xlabel="$x_2$ on the circle ($x_1 > 0$)",
        ylabel="$f(\\theta, x)$",
        title="f along the minimisers (star: its minimum)",
    )
    _below(left)
    distance = torch.tensor(numbers["distance"], dtype=DOUBLE)
    right.loglog(
        distance,
        numbers["change"],
        color=BLACK,
        linewidth=2,
        label="$|F'(\\theta) - F'(\\theta_2)|$, exact",
    )
    right.loglog(
        distance[::3],
        numbers["hypergradient"][::3],
        "o",
        color=BLUE,
        markersize=5,
        label="hypergradient at $x^*(\\theta)$",
    )
    for alpha, line, colour in ((1.0, ":", RED), (0.5, "--", ORANGE), (0.1, "-.", GREEN)):
        power = numbers["change"][0] * (distance / distance[0]) ** alpha
        shown = power > 1e-3
        right.loglog(
            distance[shown],
            power[shown],
            line,
            color=colour,
            linewidth=1.5,
            label=f"Hölder, exponent {alpha:g}",
        )
    right.set(
        xlabel="$|\\theta - \\theta_2|$",
        ylabel="change of the slope",
        title="No power of the distance bounds F′",
    )
    _below(right)
    return figure


def _draw_degenerate_selection(numbers: Numbers) -> Figure:
    figure, (left, right) = _panels(2, 4.0)
    marks = {"16": (ORANGE, "^"), "256": (BLUE, "o")}
    left.plot(numbers["fine"], numbers["height"], color=BLACK, linewidth=2, label="exact")
    right.plot(numbers["fine"], numbers["slope"], color=BLACK, linewidth=2)
    for count, (colour, marker) in marks.items():
        left.plot(
            numbers["coarse"],
            numbers["selected"][count],
            marker,
            color=colour,
            markersize=5,
            label=f"best of {count}",
        )
        right.plot(
            numbers["coarse"], numbers["hypergradient"][count], marker, color=colour, markersize=5
        )
    left.set(
        xlabel="$\\theta$",
        ylabel="$x_2$ of the selected state",
        title="Which point of the circle is selected",
    )
    right.set(xlabel="$\\theta$", ylabel="hypergradient", title="The hypergradient there")
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_ridge(numbers: Numbers) -> Figure:
    figure, (panel,) = _panels(1, 3.6)
    figure.set_size_inches(7, 4.0)
    for (temperature, errors), (colour, line, marker) in zip(
        numbers["error"].items(),
        ((GREEN, "-", "s"), (BLUE, "--", "o"), (ORANGE, "-.", "^")),
        strict=True,
    ):
        middle = [row[len(row) // 2] for row in errors]
        largest = [row[-1] for row in errors]
        label = f"$\\lambda = 10^{{{round(math.log10(float(temperature)))}}}$"
        panel.fill_between(numbers["ridge"], middle, largest, color=colour, alpha=0.15, linewidth=0)
        panel.loglog(numbers["ridge"], largest, line, color=colour, linewidth=1)
        panel.loglog(
            numbers["ridge"], middle, line, marker=marker, markersize=5, color=colour, label=label
        )
    panel.set(
        xlabel="ridge $\\gamma$",
        ylabel="relative error",
        title="The hypergradient at 16 noisy candidates of ula",
    )
    panel.legend(
        frameon=False,
        fontsize=9,
        title="temperature\n(marks: median,\nthin line: largest)",
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    return figure


# --- files
# --------------------------------------------------------------------------------------------------


def rounded(value: Any) -> Any:
    """Round to ten digits: enough for the tolerance, and short to read."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None  # JSON has no NaN
    return value


def save(figure: Figure, path: Path) -> None:
    """Save the picture without a date and with fixed identifiers, so equal numbers give equal
    files.
    """
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": path.stem, "font.size": 10}):
        figure.savefig(
            path,
            metadata={"Date": None} if path.suffix == ".svg" else None,
            dpi=110,
            facecolor="white",
        )


def differences(name: str, numbers: Numbers) -> list[str]:
    """Return the numbers that differ from the stored numbers."""
    path = IMAGES / f"{name}.json"
    if not path.exists():
        return [f"{path.name} is missing"]
    return _unequal(json.loads(path.read_text(encoding="utf-8")), rounded(numbers), name)


def _unequal(a: Any, b: Any, place: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in _unequal(a[key], b[key], f"{place}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            line
            for i, pair in enumerate(zip(a, b, strict=True))
            for line in _unequal(*pair, f"{place}[{i}]")
        ]
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return (
        []
        if (math.isclose(a, b, **TOLERANCE) if numbers else a == b)
        else [f"{place}: {a} on file, {b} now"]
    )


def write(folder: Path, suffix: str = ".svg") -> list[str]:
    """Write all pictures and numbers, and return the differences from the stored numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, maker in FIGURES.items():
        numbers, draw = maker()
        paths += differences(name, numbers)
        numbers = rounded(numbers)
        save(draw(numbers), folder / f"{name}{suffix}")
        (folder / f"{name}.json").write_text(json.dumps(numbers) + "\n", encoding="utf-8")
    return paths


def main() -> int:
    torch.set_num_threads(1)
    if "--check" not in sys.argv:
        write(IMAGES)
        return 0
    lines = [line for name, maker in FIGURES.items() for line in differences(name, maker()[0])]
    print("\n".join(lines[:20]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
