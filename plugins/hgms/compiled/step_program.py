"""One compiled program per outer step of a pipeline with parts that can be joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hgms.compiled.trace import KNOWN, apart, flatten, lift_constants, unflatten
from hgms.compiled.verify import compare, effect_of_rounding, perturb
from hgms_core import (
    Candidates,
    Cost,
    Estimate,
    Key,
    Pipeline,
    Problem,
    Record,
    Selection,
    State,
    Tree,
)
from hgms_core.capabilities import JoinsStep, find
from hgms_core.components import evolve

aten = torch.ops.aten
Value = TypeVar("Value")
Runner = Callable[[Sequence[Tensor]], Sequence[Tensor]]
NAME = "step"
PARTS = ("generator", "selector", "hypergradient", "outer")
MOST = 50_000
"""Maximum multiply-adds of a matrix product that becomes a loop. Below this size, the call of the
linear algebra library takes longer than the product.
"""
SHAPES = 8
"""Maximum number of programs; steps with further shapes run part by part."""
WORK = 4_000_000
"""Maximum unknowns times rows of a step that is one program. The steps of larger problems take much
longer than the Python code around the programs, and torch stores separate programs on disk.
"""
SMALL_STEP = {"realize_opcount_threshold": 8, "realize_reads_threshold": 2}
"""Settings of inductor for steps without large products. With its defaults, inductor recomputes a
derivative for each entry of a sum that reads it.
"""


class Compiler(Protocol):
    """The methods of :class:`hgms.compiled.Programs` that compile a program."""

    outcomes: dict[str, str]

    def attempt(self, name: str, what: str, make: Callable[[], Value]) -> Value | None: ...

    def refuse(self, name: str, why: str) -> None: ...

    def refuses(self, name: str) -> bool: ...

    def build(self, graph: GraphModule, leaves: Sequence[Tensor], **settings: Any) -> Runner: ...


# 1. Small matrix products as loops


def _mm(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    if m * k * n > MOST:
        return NotImplemented
    if n < min(m, 16):  # the branches: the long axis is last, along which inductor vectorises
        return (b.t().unsqueeze(1) * a.unsqueeze(0)).sum(2).t()
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if a.numel() * b.shape[2] > MOST:
        return NotImplemented
    return (a.unsqueeze(3) * b.unsqueeze(1)).sum(2)


def _mv(a: Tensor, b: Tensor) -> Tensor:
    return NotImplemented if a.numel() > MOST else (a * b).sum(1)


def _addmm(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    if a.numel() * b.shape[1] > MOST:
        return NotImplemented
    return beta * c + alpha * (a @ b)


def _view(a: Tensor, shape: Sequence[int]) -> Tensor:
    """View a product with another memory layout."""
    return NotImplemented if a.is_contiguous() else aten.view.default(a.contiguous(), shape)


LOOPS: dict[Any, Callable[..., Any]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.mv.default: _mv,
    aten.dot.default: lambda a, b: (a * b).sum(),
    aten.addmm.default: _addmm,
}
LARGE = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default)


# 2. The parts and the numbers of a step as functions of tensors


@frozen
class PartWithOperands:
    """A part of a pipeline that uses operands instead of keys and schedules; it fits any role."""

    name: ClassVar[str] = "part-with-operands"

    part: Any
    operands: Any

    def init(self, *context: Any) -> State:
        state: State = self.part.init(*context)
        return state

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float
    ) -> Candidates:
        candidates: Candidates = self.part.compute(problem, theta, self.operands)
        return candidates

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        following: State = self.part.carry(start, candidates, index, key, problem)
        return following

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        selection: Selection = self.part.compute(problem, theta, candidates, self.operands)
        return selection

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        found: tuple[Estimate, State] = self.part.compute(
            problem, theta, candidates, selection, state, self.operands
        )
        return found

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        moved: tuple[Tree, State] = self.part.compute(theta, gradient, state, self.operands)
        return moved


def as_tensors(value: Any) -> Any:
    """Return the value with 0-dimensional tensors in place of whole numbers."""
    if isinstance(value, Tensor) or value is None:
        return value
    if isinstance(value, dict):
        return {name: as_tensors(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_tensors(item) for item in value]
    if type(value) is not int:
        raise TypeError(f"a state with a {type(value).__name__} cannot be computed by a program")
    # an operation of the graph while a step is traced, where torch.tensor would be a constant
    return torch.full((), value, dtype=torch.int64)


def as_numbers(value: Any) -> Any:
    """Return the value with numbers in place of 0-dimensional tensors of integers."""
    if isinstance(value, dict):
        return {name: as_numbers(item) for name, item in value.items()}
    if isinstance(value, Tensor) and not value.dim() and value.dtype == torch.int64:
        return int(value)
    return value


# 3. The program


@frozen(eq=False)
class Program:
    """A compiled step for values of one structure and of one list of shapes and types."""

    given: Any
    kinds: list[tuple[torch.Size, torch.dtype]]
    run: Runner
    constants: tuple[Tensor, ...]
    structure: Any

    def suits(self, structure: Any, kinds: list[tuple[torch.Size, torch.dtype]]) -> bool:
        return bool(self.kinds == kinds and self.given == structure)


@define(eq=False)
class JoinedStep:
    """The steps of a pipeline as one program, for a problem without a compiler.

    ``excluded`` is whether a part cannot be joined with its settings, or the problem is large (None
    before the first step). It is a function of the settings, so a resumed run joins the same steps.
    """

    compiler: Compiler
    pipeline: Pipeline
    problem: Problem
    programs: list[Program] = field(factory=list, init=False)
    excluded: bool | None = field(default=None, init=False)

    @classmethod
    def of(cls, compiler: Compiler, pipeline: Pipeline, problem: Problem) -> JoinedStep | None:
        """Return the joined step, or None if a part does not declare that it can be joined."""
        parts = [getattr(pipeline, name) for name in PARTS]
        leaves = [*problem.theta0.values(), *problem.x0.values()]
        if any(find(part, JoinsStep) is None for part in parts):
            return None
        if any(leaf.device.type != "cpu" for leaf in leaves):
            return None
        return cls(compiler, pipeline, evolve(problem, compiler=None, guard=None))

    def __call__(self, state: State, progress: float) -> tuple[State, Record] | None:
        """Return the next state and the record; None if the step cannot be one program."""
        if self.excluded or self.compiler.refuses(NAME):
            return None
        operands = self._operands(state, progress)
        if self.excluded is None:
            self.excluded = operands is None or self._work(operands["hypergradient"]) > WORK
        if operands is None or self.excluded:
            return None
        if any(operand is NotImplemented for operand in operands.values()):
            return self.pipeline.step(self.problem, state, progress)
        kept = {name: state[name] for name in ("theta", "start", "hypergradient", "outer")}
        leaves: list[Tensor] = []
        structure = flatten(as_tensors({**kept, "operands": operands}), leaves)
        kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
        program = next((known for known in self.programs if known.suits(structure, kinds)), None)
        if program is None:
            if len(self.programs) >= SHAPES:
                return None
            program = self._make(structure, leaves, state, progress)
            if program is None:
                return None
            self.programs.insert(0, program)
        outputs = program.run([*leaves, *program.constants])
        return self._result(state, unflatten(program.structure, outputs))

    def _operands(self, state: State, progress: float) -> dict[str, Any] | None:
        """Return the operands of the parts; None if a part cannot be joined with its settings."""
        key = Key(state["seed"]).fold("step", state["step"])
        contexts: dict[str, Any] = {
            "hypergradient": (key.fold("differentiate"), state["hypergradient"]),
            "outer": (state["outer"], progress),
            "selector": (key.fold("select"),),
            "generator": (state["start"], key.fold("propose"), progress),
        }
        operands = {}
        for name, context in contexts.items():
            part = getattr(self.pipeline, name)
            operands[name] = part.operands(self.problem, *context)
            if operands[name] is None:
                return None
        return operands

    def _work(self, batches: Any) -> int:
        """Return the unknowns times the rows of the batches of a hypergradient."""
        leaves: list[Tensor] = []
        flatten(batches, leaves)
        rows = max((len(leaf) for leaf in leaves if leaf.dim()), default=1)
        return rows * sum(leaf.numel() for leaf in self.problem.x0.values())

    def compute(self, values: dict[str, Any]) -> dict[str, Any]:
        """Compute a step of the pipeline as a function of tensors; counts start at zero."""
        operands = values["operands"]
        parts: dict[str, Any] = {
            name: PartWithOperands(getattr(self.pipeline, name), operands[name]) for name in PARTS
        }
        kept = {name: item for name, item in values.items() if name != "operands"}
        start = {**kept, "seed": 0, "step": 0, "cost": Cost().numbers()}
        state, record = evolve(self.pipeline, **parts).step(self.problem, start)
        return {"state": as_tensors(state), "record": as_tensors(record)}

    def _result(self, state: State, computed: dict[str, Any]) -> tuple[State, Record]:
        """Add the counts of the computed step to the counts before it."""
        after, record = computed["state"], computed["record"]
        cost = Cost(**state["cost"]) + Cost(**as_numbers(after["cost"]))
        counts = cost.numbers()
        step = state["step"] + 1
        following = {
            **state,
            **after,
            "start": as_numbers(after["start"]),
            "outer": as_numbers(after["outer"]),
            "seed": state["seed"],
            "step": step,
            "cost": counts,
        }
        costs = {f"cost_{name}": count for name, count in counts.items()}
        return following, {**record, "step": step, **costs, "oracle_calls": cost.calls}

    def _make(
        self, structure: Any, leaves: list[Tensor], state: State, progress: float
    ) -> Program | None:
        compiler = self.compiler
        made = compiler.attempt(NAME, "traced", lambda: self._trace(structure, leaves))
        if made is None:
            return None
        graph, constants, result = made
        inputs = [*leaves, *constants]
        large = any(
            node.target in LARGE
            for module in graph.modules()
            if isinstance(module, GraphModule)
            for node in module.graph.nodes
        )
        settings = {} if large else SMALL_STEP
        run = compiler.attempt(NAME, "compiled", lambda: compiler.build(graph, inputs, **settings))
        if run is None:
            return None
        kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
        program = Program(structure, kinds, run, constants, result)
        check = lambda: self._difference(program, structure, leaves, state, progress)  # noqa: E731
        difference = compiler.attempt(NAME, "checked", check)
        if difference is None:
            return None
        if difference:
            compiler.refuse(NAME, f"differs when it is compiled: {difference}")
            return None
        compiler.outcomes.setdefault(NAME, "compiled")
        return program

    def _trace(
        self, structure: Any, leaves: list[Tensor]
    ) -> tuple[GraphModule, tuple[Tensor, ...], Any]:
        result: Any = None

        def flat(*inputs: Tensor) -> list[Tensor]:
            nonlocal result
            outputs: list[Tensor] = []
            result = flatten(self.compute(unflatten(structure, inputs)), outputs)
            return [output.detach() for output in outputs]

        table = {**KNOWN, **LOOPS}
        traced = make_fx(flat, table, tracing_mode="fake", _allow_non_fake_inputs=True)
        graph, constants = lift_constants(traced(*apart(leaves)))
        graph.graph.eliminate_dead_code()
        return graph, constants, result

    def _difference(
        self, program: Program, structure: Any, leaves: list[Tensor], state: State, progress: float
    ) -> str:
        """Return how the program differs from the eager step; empty if both agree.

        The program is compared at these values with the pipeline, and at other values with the
        function that was traced, in case the graph contains the values of the trace.
        """

        def function(inputs: Sequence[Tensor]) -> list[Tensor]:
            return _leaves(self.compute(unflatten(structure, inputs)))

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            outputs = program.run([*inputs, *program.constants])
            return _leaves(unflatten(program.structure, outputs))

        elsewhere = perturb(leaves, 0.01)
        expected = function(elsewhere)
        rounding = effect_of_rounding(function, elsewhere, expected)
        difference = compare(run(elsewhere), expected, rounding)
        if difference:
            return difference
        computed = self.compute(unflatten(structure, leaves))
        rounding = effect_of_rounding(function, leaves, _leaves(computed))
        outputs = unflatten(program.structure, program.run([*leaves, *program.constants]))
        steps = (self._result(state, outputs), self.pipeline.step(self.problem, state, progress))
        found, expected = (
            _leaves(
                {
                    "state": {name: as_tensors(after[name]) for name in computed["state"]},
                    "record": {name: as_tensors(record[name]) for name in computed["record"]},
                }
            )
            for after, record in steps
        )
        return compare(found, expected, rounding)


def _leaves(value: dict[str, Any]) -> list[Tensor]:
    """Return all tensors of a step, without the gap.

    The gap is a difference of scores that are nearly equal. A residual is relative to the size of
    b, and so is its rounding error.
    """
    record = {name: item for name, item in value["record"].items() if name != "gap"}
    if record["residual"] is not None:
        record["residual"] = 1 + record["residual"]
    leaves: list[Tensor] = []
    flatten({**value, "record": record}, leaves)
    return leaves
