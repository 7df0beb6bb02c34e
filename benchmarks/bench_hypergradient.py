"""Compare one implicit hypergradient of the cleaning network: HGMS, by hand, TorchOpt, JAX.

    python benchmarks/bench_hypergradient.py [--json FILE] [--repetitions 9] [--processors 1]
    [--only "ours" "jax, …"]

The network is 784-300-10 with 5,000 rows and 30 CG steps. The problem is MNIST hyper-cleaning if
$HGMS_DATA/mnist contains the images (500 upper rows), otherwise random images with learnable
labels, at a network trained for 600 steps. Sides take turns in one process on the same processors,
in float32; the clock is the processor time of the process (on several processors wall time). Every
side must first return HGMS's CG hypergradient, to the rounding of float32; compilation is not
timed. Sides without their library are skipped (``pip install "hgms[peers]"``). "As documented" is
TorchOpt with the default solver of its examples, CG on the normal equations: two products per step,
and another result after 30 steps, which HGMS also returns for that system.

To add a side, write a function of a :class:`Point` that returns a call without arguments, and name
it in SIDES. "matrix products" is the floor: only the products of all Hessian products.
"""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import evolve, frozen
from timing import (
    arguments,
    clock_of,
    difference,
    machine,
    quartiles,
    ratios,
    show,
    take_turns,
    use_processors,
)
from torch import Tensor

from hgms.compiled import Levels, Programs, linearized
from hgms.runs import RunConfig, calibrated, matrix_route
from hgms.solvers import CG
from hgms_core import CallableSolver, Data, Estimate, Linearization, Problem, Tree

STEPS = 30
ROWS = 5000
ROUNDING = STEPS * ROWS**0.5 * torch.finfo(torch.float32).eps
"""Relative differences of float32 between processors.

A product sums ROWS terms, which round to about √ROWS·ε, in each of the STEPS of CG (2.5e-4).
"""
RIDGES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # the first with which CG uses all its steps


@frozen(eq=False)
class Point:
    """The point of the hypergradient, on whole batches."""

    problem: Problem
    x: Tree
    ridge: float
    steps: int
    decay: float

    @property
    def theta(self) -> Tree:
        return self.problem.theta0

    @property
    def train(self) -> Tree:
        return self.problem.lower_data.whole

    @property
    def validation(self) -> Tree:
        return self.problem.upper_data["differentiate"].whole

    def f(self, theta: Tree, x: Tree) -> Tensor:
        return self.problem.f(theta, x, self.validation)

    def g(self, theta: Tree, x: Tree) -> Tensor:
        return self.problem.g(theta, x, self.train)


# 1. The point
# --------------------------------------------------------------------------------------------------


def cleaning(dataset: str, **sizes: int) -> Problem:
    """Return the registered task; all validation images are differentiated."""
    table = {
        "name": "hyper-cleaning",
        "dataset": dataset,
        "corruption": 0.6,
        "validation_split": [1.0, 1.0, 1.0],
        **sizes,
    }
    config = RunConfig.from_dict({"task": table, "method": "scalebio", "budget": "1 steps"})
    problem = config.task.problem(0, torch.device("cpu"), torch.float32)
    return problem if dataset != "digits" or sizes else _of_mnist_s_shape(problem)


def _of_mnist_s_shape(problem: Problem, rows: int = ROWS) -> Problem:
    """Return the losses of a task on random images of MNIST's shape, with labels of a linear
    teacher.
    """
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(784, 10, generator=generator)

    def data(count: int) -> Data:
        pixels = torch.rand(count, 784, generator=generator)
        return Data.of({"pixels": pixels, "label": ((pixels - 0.5) @ teacher).argmax(-1)})

    shapes = {
        "hidden.weight": (300, 784),
        "hidden.bias": (300,),
        "output.weight": (10, 300),
        "output.bias": (10,),
    }
    x0 = {
        name: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    train = data(rows)
    validation = data(rows // 10)
    return evolve(
        problem,
        theta0={"logits": torch.zeros(rows)},
        x0=x0,
        lower_data=train,
        upper_data=dict.fromkeys(problem.upper_data, validation),
    )


def trained(problem: Problem, steps: int, batch_size: int = 250) -> Tree:
    """Return the lower state after some steps of Adam.

    A random state would give CG negative curvature.
    """
    generator = torch.Generator().manual_seed(0)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    optimiser = torch.optim.Adam(leaves.values(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randint(problem.lower_data.size, (batch_size,), generator=generator)
        optimiser.zero_grad()
        problem.g(problem.theta0, leaves, problem.lower_data.batch(rows)).backward()
        optimiser.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def point(
    problem: Problem, training_steps: int = 600, steps: int = STEPS, decay: float = 1e-4
) -> Point:
    x = trained(problem, training_steps)
    for ridge in RIDGES:
        at = Point(problem, x, ridge, steps, decay)
        if int(estimate(at).solution.iterations) == steps:
            return at
    raise SystemExit(f"with no ridge of {RIDGES} does CG make {steps} steps")


# 2. The sides
# --------------------------------------------------------------------------------------------------


def estimate(at: Point) -> Estimate:
    return Linearization.of(at.f, at.g, at.theta, at.x).hypergradient(
        CG(ridge=at.ridge, rtol=1e-12, max_steps=at.steps)
    )


def plain(at: Point) -> Tensor:
    return estimate(at).value["logits"]


def ours(at: Point, route: Literal["exact", "fast"] | None = None) -> Callable[[], Tensor]:
    """Return the side of HGMS, with matrix products on the measured route, or on another."""
    taken = calibrated(at.problem).route if route is None else route

    def call() -> Tensor:
        with matrix_route(taken):
            return plain(at)

    return call


def ours_compiled(at: Point) -> Callable[[], Tensor]:
    """Return the side of HGMS with compiled functions."""
    programs = Programs()
    taken = calibrated(at.problem).route

    def call() -> Tensor:
        with matrix_route(taken):
            here = linearized(
                programs,
                ("bench",),
                Levels(f=lambda theta, x, _: at.f(theta, x), g=lambda theta, x, _: at.g(theta, x)),
                at.theta,
                at.x,
                {},
                {},
            )
            if here is None:
                raise SystemExit(f"no programs: {programs.outcomes}")
            return here.hypergradient(CG(ridge=at.ridge, rtol=1e-12, max_steps=at.steps)).value[
                "logits"
            ]

    return call


def by_hand(at: Point) -> Callable[[], Tensor]:
    """Return the loop by hand: one retained graph of the gradient, one backward pass through it
    per step.
    """
    theta = at.theta["logits"].detach().requires_grad_()
    leaves = [leaf.detach().requires_grad_() for leaf in at.x.values()]
    sizes = [leaf.numel() for leaf in leaves]
    shapes = [leaf.shape for leaf in leaves]
    tree = dict(zip(at.x, leaves, strict=True))

    def flat(parts: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts])

    def split(vector: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]

    def call() -> Tensor:
        b = flat(torch.autograd.grad(at.f({"logits": theta}, tree), leaves))
        gradient = torch.autograd.grad(at.g({"logits": theta}, tree), leaves, create_graph=True)
        v = torch.zeros_like(b)
        r = b.clone()
        p = b.clone()
        rr = r.dot(r)
        for _ in range(at.steps):
            ap = (
                flat(torch.autograd.grad(gradient, leaves, split(p), retain_graph=True))
                + at.ridge * p
            )
            alpha = rr / p.dot(ap)
            v = v + alpha * p
            r = r - alpha * ap
            following = r.dot(r)
            p = r + following / rr * p
            rr = following
        return -torch.autograd.grad(gradient, theta, split(v))[0]

    return call


def with_torchopt(at: Point, solver: str) -> Callable[[], Tensor]:
    """Return TorchOpt's ``custom_root`` of the stationarity condition.

    Its documentation's examples use ``solve_normal_cg``, which squares the operator, so the ridge
    belongs to the condition; ``solve_cg`` is comparable with the others.
    """
    import torchopt

    names = list(at.x)
    own = at.ridge if solver == "solve_cg" else None

    def stationary(leaves: tuple[Tensor, ...], theta: Tensor) -> tuple[Tensor, ...]:
        slopes = torch.func.grad(
            lambda point: at.g({"logits": theta}, dict(zip(names, point, strict=True)))
        )(leaves)
        if own is not None:
            return slopes
        return tuple(
            slope + at.ridge * (leaf - at.x[name])
            for slope, leaf, name in zip(slopes, leaves, names, strict=True)
        )

    solve = getattr(torchopt.linear_solve, solver)(
        rtol=1e-12, atol=0.0, maxiter=at.steps, ridge=own
    )

    @torchopt.diff.implicit.custom_root(stationary, argnums=1, solve=solve)
    def solved(_start: tuple[Tensor, ...], _theta: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.detach().clone() for leaf in at.x.values())

    def call() -> Tensor:
        theta = at.theta["logits"].detach().requires_grad_()
        leaves = solved(tuple(at.x.values()), theta)
        return torch.autograd.grad(
            at.f({"logits": theta}, dict(zip(names, leaves, strict=True))), theta
        )[0]

    return call


def in_jax(at: Point, program: str) -> Callable[[], Any]:
    """Return a function of jax_programs.py, called with existing JAX arrays, and awaited."""
    import jax_programs

    run = getattr(jax_programs, program)(at.decay, at.ridge, at.steps)
    arguments = arrays(at.theta)["logits"], arrays(at.x), arrays(at.train), arrays(at.validation)
    return lambda: run(*arguments).block_until_ready()


def arrays(tree: Tree) -> dict[str, Any]:
    import jax.numpy as jnp

    return {name: jnp.asarray(leaf.numpy()) for name, leaf in tree.items() if name != "index"}


def normal_equations(at: Point) -> Tensor:
    """Return CG on the squared operator: the expected result of a solver of the normal
    equations.
    """

    def solve(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
        def shifted(v: Tensor) -> Tensor:
            return matvec(v) + at.ridge * v

        return (
            CG(rtol=1e-12, max_steps=at.steps)
            .solve(lambda v: shifted(shifted(v)), shifted(b))
            .value
        )

    levels = Linearization.of(at.f, at.g, at.theta, at.x)
    return levels.hypergradient(CallableSolver(solve)).value["logits"]


@frozen
class Side:
    """``start(point)`` returns a call for the hypergradient; ``needs`` names a library;
    ``expected(point)`` is the required result, to a relative ``tolerance``.
    """

    start: Callable[[Point], Callable[[], Any]]
    needs: str | None = None
    expected: Callable[[Point], Tensor] = plain
    tolerance: float = ROUNDING


SIDES = {
    "ours, compiled": Side(ours_compiled),
    "ours": Side(ours),
    "ours, exact products": Side(partial(ours, route="exact")),
    "by hand": Side(by_hand),
    "torchopt, solve_cg": Side(partial(with_torchopt, solver="solve_cg"), "torchopt"),
    # The squared operator has the squared condition number, and float32's rounding shows.
    "torchopt, as documented": Side(
        partial(with_torchopt, solver="solve_normal_cg"),
        "torchopt",
        normal_equations,
        10 * ROUNDING,
    ),
    "jaxopt, jitted": Side(partial(in_jax, program="jaxopt_hypergradient"), "jaxopt"),
    "jax, linearize + scan": Side(partial(in_jax, program="hypergradient"), "jax"),
}
FLOOR = "matrix products"
REFERENCES = (
    "by hand",
    "torchopt, as documented",
    "jaxopt, jitted",
    "jax, linearize + scan",
    FLOOR,
)
"""The denominators of the ratios."""


def matrix_products(at: Point) -> Callable[[], Tensor]:
    """Return the matrix products of all Hessian products, without any other operation.

    They are eight per Hessian product (docs/explanation/programs.md), on the measured route, into
    existing memory. Random matrices take the place of the derivatives of activations.
    """
    a = at.train["pixels"]
    first, second = at.x["hidden.weight"], at.x["output.weight"]
    rows, width, classes = len(a), len(first), len(second)
    generator = torch.Generator().manual_seed(0)
    inner, outer = (torch.rand(rows, size, generator=generator) for size in (width, classes))
    pairs = [
        (a, first.t()),
        (inner, second.t()),
        (inner, second.t()),
        (outer, second),
        (outer, second),
        (inner.t(), a),
        (outer.t(), inner),
        (outer.t(), inner),
    ]
    results = [torch.mm(left, right) for left, right in pairs]
    taken = calibrated(at.problem).route

    def call() -> Tensor:
        with matrix_route(taken):
            for _ in range(at.steps):
                for (left, right), result in zip(pairs, results, strict=True):
                    torch.mm(left, right, out=result)
        return results[0]

    return call


# 3. Agreement, and the clock
#    ---------------------------------------------------------------------------------------------


def agreeing(at: Point, names: list[str]) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Return the installed sides with their differences. Raises SystemExit if one is too large."""
    calls = {}
    errors = {}
    expected = {}
    for name in names:
        side = SIDES[name]
        if side.needs is None or importlib.util.find_spec(side.needs):
            calls[name] = side.start(at)
            if side.expected not in expected:
                expected[side.expected] = side.expected(at)
            errors[name] = difference(calls[name](), expected[side.expected])
            if not errors[name] <= side.tolerance:
                raise SystemExit(
                    f"{name} computes something else: relative difference {errors[name]:.1e}"
                )
    return calls, errors


def measure(at: Point, names: list[str], rounds: int, processors: int) -> dict[str, Any]:
    calls, errors = agreeing(at, names)
    calls[FLOOR] = matrix_products(at)
    spent = take_turns(calls, rounds, 0.0, clock_of(processors))
    return {
        name: {
            "seconds": quartiles(seconds),
            "difference": errors.get(name, 0.0),
            **{
                f"/ {other}": ratios(seconds, spent[other])
                for other in REFERENCES
                if other in spent and other != name
            },
        }
        for name, seconds in spent.items()
    }


def main() -> None:
    parser = arguments(__doc__, 9)
    parser.add_argument("--only", choices=list(SIDES), nargs="+", default=list(SIDES))
    options = parser.parse_args()
    use_processors(options.processors)
    warnings.filterwarnings("ignore", message="We've integrated functorch", category=FutureWarning)
    warnings.filterwarnings("ignore", message="JAXopt is no longer", category=DeprecationWarning)
    root = os.environ.get("HGMS_DATA")
    dataset = "mnist" if root and (Path(root) / "mnist").exists() else "digits"
    at = point(cleaning(dataset))
    figures: dict[str, Any] = {
        **machine(),
        "processors": options.processors,
        "images": dataset if dataset == "mnist" else "random",
        "ridge": at.ridge,
    }
    figures["sides"] = measure(at, options.only, options.repetitions, options.processors)
    show(
        f"One CG hypergradient, 784-300-10, {at.problem.lower_data.size} rows of "
        f"{figures['images']}, {at.steps} steps, ridge "
        f"{at.ridge}, {options.processors} processor(s)",
        ("side", "seconds", "q25", "q75", *(f"/ {name}" for name in REFERENCES), "difference"),
        [
            (
                name,
                *side["seconds"].values(),
                *(side.get(f"/ {other}", {}).get("median", "") for other in REFERENCES),
                f"{side['difference']:.1e}",
            )
            for name, side in figures["sides"].items()
        ],
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
