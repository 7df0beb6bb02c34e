"""Compare outer steps of `hg-ms` on digits cleaning, as registered, with one jitted JAX function.

    python benchmarks/bench_digits.py [--json FILE] [--repetitions 9] [--processors 1]
                                       [--only SIDE ...]

A block is ten outer steps from the first state. The last step ends with a restart of the lower
level, as every tenth step of a run; JAX's does not. Seconds are per outer step. The JAX function
gets the drawn rows and the corrections of the optimisers as arrays: it draws nothing, and computes
no part of a record except losses, scores and a norm. After each of the first three
steps, x, the outer moments of the hypergradient and θ must agree to 1e-5. Sides take turns in one
process on the same processors, in float32; the clock is the processor time of the process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import evolve
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

from hgms.compiled import Programs
from hgms.runs import RunConfig
from hgms_core import Key, State

STEPS = 10
"""Outer steps of a block: the method restarts the lower level after as many."""
COMPARED = 3
"""First steps whose results are compared; later, training amplifies rounding."""
TOLERANCE = 1e-5

Result = dict[str, Any]
"""x, the moments of the hypergradient, and θ after a step, by name."""
Block = Callable[[], list[Result]]
"""Makes the steps of a block and returns their results."""


def configured() -> RunConfig:
    return RunConfig.from_dict({"task": "hyper-cleaning", "method": "hg-ms", "budget": "1 steps"})


def ours(config: RunConfig, compiled: bool = False) -> Block:
    plain = config.task.problem(0, torch.device("cpu"), torch.float32)
    problem = evolve(plain, compiler=Programs() if compiled else None)
    method = config.method
    first = method.init(problem, seed=0)

    def block() -> list[Result]:
        state = first
        results = []
        for _ in range(STEPS):
            state, _record = method.step(problem, state)
            m, theta = state["outer"]["m"]["logits"], state["theta"]["logits"]
            results.append({**state["x"], "m": m, "theta": theta})
        return results

    return block


def states_of(config: RunConfig) -> list[State]:
    """Return the state before each step of a block."""
    problem = config.task.problem(0, torch.device("cpu"), torch.float32)
    states = [config.method.init(problem, seed=0)]
    while len(states) < STEPS:
        states.append(config.method.step(problem, states[-1])[0])
    return states


def in_jax(config: RunConfig) -> Block:
    import jax
    import jax.numpy as jnp
    from jax_programs import cleaning_step

    def arrays(tree: Any) -> Any:
        return {name: jnp.asarray(leaf.numpy()) for name, leaf in tree.items() if name != "index"}

    def lower_state(state: State) -> dict[str, Any]:
        start = state["start"]
        x = {name: jnp.asarray(leaf[0].numpy()) for name, leaf in start["x"].items()}
        m, v = (
            {name: jnp.asarray(start["moments"][f"{kind}.{name}"][0].numpy()) for name in x}
            for kind in ("m", "v")
        )
        return {"x": x, "moments": (m, v)}

    pipeline = config.method.method
    branches, outer = pipeline.generator.generator, pipeline.outer
    solver = pipeline.hypergradient.solver
    problem = config.task.problem(0, torch.device("cpu"), torch.float32)
    lower = problem.lower_data
    states = states_of(config)
    operands = []
    for state in states:
        key = Key(0).fold("step", state["step"]).fold("propose")
        table = branches.operands(problem, state["start"], key, 0.0)["numbers"][:, 2:]
        drawn = [
            lower.draw(key.fold("batches").fold(member), branches.batch_size, branches.steps)
            for member in range(branches.count)
        ]
        rate, scale, correction = outer.numbers(state["outer"], 0.0)
        of_outer = np.array([rate * scale, correction], dtype=np.float32)
        rows = jnp.asarray(torch.stack(drawn).numpy())
        operands.append((rows, (jnp.asarray(table.numpy()), jnp.asarray(of_outer))))
    data = {name: arrays(rows.whole) for name, rows in problem.upper_data.items()}
    data["lower"] = arrays(lower.whole)
    betas = (branches.optimizer.betas, outer.betas)
    program = cleaning_step(config.task.omega, solver.ridge, solver.max_steps, *betas)
    theta = jnp.asarray(problem.theta0["logits"].numpy())
    zeros = {"h": jnp.zeros_like(theta)}
    lower_start = lower_state(states[0])
    best = {"loss": jnp.float32(np.inf), "theta": theta, "x": lower_start["x"]}
    first = {"theta": theta, **lower_start, "outer": (zeros, zeros), "best": best}

    def block() -> list[Result]:
        state = first
        results = []
        for rows, numbers in operands:
            state, _record = jax.block_until_ready(program(state, rows, numbers, data))
            m = state["outer"][0]["h"]
            results.append({**state["x"], "m": m, "theta": state["theta"]})
        return results

    return block


SIDES: dict[str, tuple[Callable[[RunConfig], Block], str | None]] = {
    "ours": (ours, None),
    "ours, compiled": (partial(ours, compiled=True), None),
    JAX: (in_jax, "jax"),
}
"""The sides, and the library that a side requires."""


def agreeing(config: RunConfig) -> tuple[dict[str, Block], dict[str, float]]:
    """Return the installed sides with their largest differences from the eager steps."""
    blocks = {
        name: start(config)
        for name, (start, needs) in SIDES.items()
        if needs is None or importlib.util.find_spec(needs)
    }
    expected = blocks["ours"]()[:COMPARED]
    errors = {}
    for name, block in blocks.items():
        pairs = zip(block(), expected, strict=False)
        errors[name] = max(difference(a[leaf], b[leaf]) for a, b in pairs for leaf in b)
        if not errors[name] <= TOLERANCE:
            raise SystemExit(
                f"{name} computes something else: relative difference {errors[name]:.1e}"
            )
    return blocks, errors


def measure(names: list[str], rounds: int, processors: int) -> dict[str, Any]:
    blocks, errors = agreeing(configured())
    timed = {name: block for name, block in blocks.items() if name in names}
    spent = take_turns(timed, rounds, 0.0, clock_of(processors))
    return against_jax(spent, errors, STEPS)


def main() -> None:
    parser = arguments(__doc__, 9)
    parser.add_argument("--only", choices=list(SIDES), nargs="+", default=list(SIDES))
    options = parser.parse_args()
    use_processors(options.processors)
    sides = measure(options.only, options.repetitions, options.processors)
    report_against_jax("One outer step of hg-ms on digits cleaning", sides, options)


if __name__ == "__main__":
    main()
