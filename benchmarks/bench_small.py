"""Compare a very small outer step through Pipeline.step with one jitted JAX function.

    python benchmarks/bench_small.py [--json FILE] [--repetitions 15] [--seconds 0.2] [--processors
    1]

20 unknowns, 100 weighted rows: N = 4 branches of 20 gradient steps on all rows, the best on
validation, the implicit hypergradient by 10 steps of CG, a step of SGD on the weights. The branches
differ by their rates instead of noise, so both sides have the same numbers; three steps of both
must first agree to 1e-5. Every step is awaited. Sides take turns in one process on the same
processors, in float32; the clock is the processor time of the process.

To add a side, write a function of a :class:`Work` that returns a stepper, and name it in SIDES.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from timing import (
    JAX,
    against_jax,
    arguments,
    clock_of,
    difference,
    report_against_jax,
    take_turns,
    use_processors,
)
from torch import Tensor
from torch.nn import functional

from hgms.adapters import from_losses
from hgms.compiled import Programs
from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import Implicit
from hgms.optim import SGD
from hgms.outer import Sgd
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import Data, Pipeline, Problem, Tree

DECAY = 1e-3
RATE = 0.5
SPREAD = (0.5, 2.0)
RIDGE = 2e-3
TOLERANCE = 1e-5
START_AGAIN = 20
"""Outer steps after which a side restarts at its first θ, because sides make unequal numbers of
steps.
"""


@frozen
class Work:
    """The sizes of one outer step."""

    rows: int = 100
    unknowns: int = 20
    candidates: int = 4
    lower_steps: int = 20
    products: int = 10

    @property
    def outer_lr(self) -> float:
        return 10.0 * self.rows  # a weight's hypergradient is of the order 1/rows

    @property
    def factors(self) -> list[float]:
        """Return the factors of the branches' rates, evenly spaced in the logarithm."""
        low, high = SPREAD
        count = self.candidates
        return (
            [1.0] if count == 1 else [low * (high / low) ** (i / (count - 1)) for i in range(count)]
        )


Stepper = Callable[[], tuple[Any, Any]]
"""Makes one outer step per call and returns (θ, x)."""


def losses(x: Tree, batch: Tree) -> Tensor:
    return functional.softplus(-batch["y"] * (batch["a"] @ x["x"]))


def lower(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return (torch.sigmoid(theta["w"]) * losses(x, batch)).mean() + DECAY * (x["x"] * x["x"]).sum()


def upper(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return losses(x, batch).mean()


def problem(work: Work) -> Problem:
    """Return two classes that a linear teacher separates.

    Validation has another teacher, so ∇f is not a small difference of large sums. Columns have
    scales from 1 to 1/10, for a nontrivial CG, and rows a length of about 1.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -1, work.unknowns)
    scales = scales / scales.norm()

    def data(count: int) -> Tree:
        teacher = torch.randn(work.unknowns, generator=generator)
        a = torch.randn(count, work.unknowns, generator=generator) * scales
        return {"a": a, "y": torch.sign(a @ teacher)}

    train = data(work.rows)
    validation = data(max(work.rows // 4, 20))
    roles = dict.fromkeys(("differentiate", "select", "stop"), Data.of(validation))
    return from_losses(
        theta0={"w": torch.zeros(work.rows)},
        x0={"x": torch.zeros(work.unknowns)},
        g=lower,
        f=upper,
        lower_data=Data.of(train),
        upper_data=roles,
    )


def pipeline(work: Work) -> Pipeline:
    return Pipeline(
        generator=Branches(
            count=work.candidates,
            steps=work.lower_steps,
            optimizer=SGD(lr=RATE),
            diversity=Diversity(lr_spread=SPREAD),
        ),
        selector=BestOfN(),
        # A tolerance that no solve reaches: every solve makes all its steps.
        hypergradient=Implicit(solver=CG(ridge=RIDGE, rtol=1e-12, max_steps=work.products)),
        outer=Sgd(lr=work.outer_lr),
    )


def ours(work: Work, compiled: bool = False, exact: bool = True, joins: bool = True) -> Stepper:
    """Return our side; ``exact`` requires every solve to make all its steps.

    With ``joins``, a compiled step is one program.
    """
    method = pipeline(work)
    of_size = evolve(problem(work), compiler=Programs(joins=joins) if compiled else None)
    state = first = method.init(of_size, seed=0)
    count = 0

    def step() -> tuple[Tensor, Tensor]:
        nonlocal state, count
        state = first if count % START_AGAIN == 0 else state
        count = count + 1
        state, record = method.step(of_size, state)
        # At 2,000 unknowns the residual is at float32's end (5e-8) one step before the last.
        if exact and record["iterations"] < work.products - 1:
            raise SystemExit(
                f"CG made {int(record['iterations'])} steps and not {work.products}: the sides "
                "do not do the same"
            )
        return state["theta"]["w"], state["x"]["x"]

    return step


def in_jax(work: Work) -> Stepper:
    import jax
    import jax.numpy as jnp
    from jax_programs import outer_step

    with_data = problem(work)
    train, validation = (
        {name: jnp.asarray(data.whole[name].numpy()) for name in ("a", "y")}
        for data in (with_data.lower_data, with_data.upper_data["differentiate"])
    )
    factors = jnp.asarray(np.array(work.factors, dtype=np.float32))
    program = outer_step(
        DECAY, factors, RATE, work.lower_steps, RIDGE, work.products, work.outer_lr
    )
    theta, x = first = jnp.zeros(work.rows), {"x": jnp.zeros(work.unknowns)}
    count = 0

    def step() -> tuple[Any, Any]:
        nonlocal theta, x, count
        (theta, x), count = (first if count % START_AGAIN == 0 else (theta, x)), count + 1
        theta, x, _record = jax.block_until_ready(program(theta, x, train, validation))
        return theta, x["x"]

    return step


SIDES: dict[
    str, tuple[Callable[[Work], Stepper], str | None]
] = {  # and the library that a side requires
    "ours": (ours, None),
    "ours, compiled": (partial(ours, compiled=True), None),
    "ours, separate programs": (partial(ours, compiled=True, joins=False), None),
    JAX: (in_jax, "jax"),
}


def agreeing(work: Work) -> tuple[dict[str, Stepper], dict[str, float]]:
    """Return the installed sides after three steps, with their differences in the movement of θ
    and x.
    """
    steppers = {
        name: start(work)
        for name, (start, needs) in SIDES.items()
        if needs is None or importlib.util.find_spec(needs)
    }
    ends = {}
    for name, step in steppers.items():
        for _ in range(3):
            theta, x = step()
        ends[name] = (theta, x)
    errors = {name: max(map(difference, end, ends["ours"])) for name, end in ends.items()}
    for name, error in errors.items():
        if not error <= TOLERANCE:
            raise SystemExit(
                f"{name} computes something else: relative difference {error:.1e} after three "
                f"steps of {work}"
            )
    return steppers, errors


def measure(work: Work, rounds: int, seconds: float, processors: int) -> dict[str, Any]:
    steppers, errors = agreeing(work)
    spent = take_turns(steppers, rounds, seconds, clock_of(processors))
    return against_jax(spent, errors)


def main() -> None:
    parser = arguments(__doc__, 15)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a block of steps")
    options = parser.parse_args()
    use_processors(options.processors)
    sides = measure(Work(), options.repetitions, options.seconds, options.processors)
    report_against_jax(
        "One outer step: 20 unknowns, 100 rows, N = 4, 20 lower steps, 10 CG steps", sides, options
    )


if __name__ == "__main__":
    main()
