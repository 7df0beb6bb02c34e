"""A method with one program, time that goes on where a test says so, and what stands in for the
compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from attrs import evolve
from torch import Tensor
from torch.fx import GraphModule

from hgms.adapters import from_losses
from hgms.compiled import Programs
from hgms_core import Problem, State
from support.helpers import assert_same

MAKING = 100.0
"""Seconds that an interpreted program takes to make."""


class Time:
    """What clocks show."""

    now = 0.0


@attrs.define
class Walker:
    """A method with a program; its steps take the seconds that are ``left``, the last of them
    for good.
    """

    name: ClassVar[str] = "walker"
    left: list[float] = attrs.field(factory=lambda: [1.0], metadata={"toml": False})
    interrupts_at: int | None = attrs.field(default=None, metadata={"toml": False})
    steps: int = attrs.field(default=0, metadata={"toml": False})

    def init(self, problem: Problem, seed: int) -> State:
        return {"x": dict(problem.x0), "step": 0}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        if state["step"] == self.interrupts_at:
            raise KeyboardInterrupt
        self.steps += 1
        Time.now += self.left[0] if len(self.left) == 1 else self.left.pop(0)
        compiler = problem.compiler
        step = halved if compiler is None else compiler(("halve",), halved)
        calls = 100 * (state["step"] + 1)
        record = {"oracle_calls": calls, "compiled": float(compiler is not None)}
        return {"x": step(state["x"]), "step": state["step"] + 1}, record

    def result(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {}, state["x"]


def halved(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf / 2 for name, leaf in x.items()}


def problem(**changes: Any) -> Problem:
    parts: dict[str, Any] = {
        "theta0": {},
        "x0": {"x": torch.ones(2)},
        "g": lambda t, x, b: x["x"].sum(),
        "f": lambda t, x, b: x["x"].sum(),
    }
    return from_losses(**(parts | changes))


def as_traced(graph: GraphModule, leaves: Sequence[Tensor], **settings: Any) -> Callable[..., Any]:
    """In place of torch's compiler, which takes seconds for each program: the traced graph."""
    shapes = [leaf.shape for leaf in leaves]

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        assert [leaf.shape for leaf in inputs] == shapes
        return graph(*inputs)

    return run


def same_run(
    method: Any,
    problem: Problem,
    steps: int = 3,
    settled: int = 1,
    rtol: float = 1e-9,
    atol: float = 1e-11,
) -> Programs:
    """Runs the method with programs and without; after ``settled`` steps no further one is made."""
    compiler = Programs()
    fast, plain = (evolve(problem, compiler=where) for where in (compiler, None))
    state, expected = (method.init(each, 0) for each in (fast, plain))
    kept = 0
    for step in range(steps):
        state, record = method.step(fast, state, step / steps)
        expected, reference = method.step(plain, expected, step / steps)
        assert_same(record, reference, rtol, atol)
        assert_same(state, expected, rtol, atol)
        if step + 1 == settled:
            kept = len(compiler._kept)
    assert kept == len(compiler._kept) > 0
    assert set(compiler.outcomes.values()) == {"compiled"}
    return compiler
