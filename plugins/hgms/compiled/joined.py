"""One compiled program per outer step of a pipeline whose parts can be joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hgms.compiled.trace import KNOWN, apart, lift_constants
from hgms.compiled.verify import compare, effect_of_rounding, perturb
from hgms_core import Cost, Key, Pipeline, Problem, Record, State
from hgms_core.capabilities import JoinsStep, find

aten = torch.ops.aten
Value = TypeVar("Value")
Runner = Callable[[Sequence[Tensor]], Sequence[Tensor]]
NAME = "step"
PARTS = ("generator", "selector", "hypergradient", "outer")
MOST = 50_000
"""Multiply-adds of a matrix product up to which a call of the linear algebra library takes longer
than the product itself.
"""
SHAPES = 8
"""Maximum number of programs; steps with further shapes run part by part."""
WORK = 4_000_000
"""Unknowns times rows up to which a step is one program. The steps of larger problems take much
longer than Python around them, and their separate programs are stored on disk.
"""
SMALL_STEP = {"realize_opcount_threshold": 8, "realize_reads_threshold": 2}
"""Settings of inductor for steps without large products. With its defaults, inductor recomputes a
derivative for each entry of a sum that reads it.
"""


class Compiler(Protocol):
    """The functions of :class:`hgms.compiled.Programs` that make a program."""

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
    """View a product that is laid out in another order."""
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


# 2. Values of a step: tensors, and numbers that count


@frozen
class Number:
    """The place of a whole number in a structure; ``value`` if it is the same in each step."""

    value: int | None = None


COUNTER = Number()


def flatten(value: Any, leaves: list[Tensor], constant: bool = False) -> Any:
    """Append the tensors and numbers in ``value`` to ``leaves`` and return the structure.

    Numbers become tensors, or stay in the structure if they are ``constant``.
    """
    if isinstance(value, Tensor):
        leaves.append(value)
        return ...
    if isinstance(value, dict):
        return {name: flatten(item, leaves, constant) for name, item in value.items()}
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [flatten(item, leaves, constant) for item in value]
    if type(value) is not int:
        raise TypeError(f"a state with a {type(value).__name__} cannot be computed by a program")
    if constant:
        return Number(value)
    leaves.append(torch.tensor(value))
    return COUNTER


def unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    rest = iter(leaves)

    def build(part: Any) -> Any:
        if part is ...:
            return next(rest)
        if isinstance(part, dict):
            return {name: build(item) for name, item in part.items()}
        if isinstance(part, list):
            return [build(item) for item in part]
        if part is None:
            return None
        return next(rest) if part.value is None else part.value

    return build(structure)


def counted(value: Any) -> Any:
    """Return the value with numbers in place of 0-dimensional tensors of integers."""
    if isinstance(value, dict):
        return {name: counted(item) for name, item in value.items()}
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

    ``excluded`` is whether a part cannot be joined with its settings, or the problem is large.
    """

    compiler: Compiler
    pipeline: Pipeline
    problem: Problem
    programs: list[Program] = field(factory=list, init=False)
    excluded: bool = field(default=False, init=False)

    @classmethod
    def of(cls, compiler: Compiler, pipeline: Pipeline, problem: Problem) -> JoinedStep | None:
        """Return the joined step, or None if a part does not declare that it can be joined."""
        parts = [getattr(pipeline, name) for name in PARTS]
        leaves = [*problem.theta0.values(), *problem.x0.values()]
        if any(find(part, JoinsStep) is None for part in parts):
            return None
        if any(leaf.device.type != "cpu" for leaf in leaves):
            return None
        return cls(compiler, pipeline, evolve(problem, compiler=None))

    def __call__(self, state: State, progress: float) -> tuple[State, Record] | None:
        """Return the next state and the record; None if the step cannot be one program."""
        if self.excluded or self.compiler.refuses(NAME):
            return None
        values = self._values(state, progress)
        if values is None and self.programs:
            # One step without operands, such as a restart: no compilation of its parts.
            return self.pipeline.step_by_parts(self.problem, state, progress)
        if values is None:
            self.excluded = True
            return None
        leaves: list[Tensor] = []
        structure = flatten(values, leaves)
        kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
        program = next((known for known in self.programs if known.suits(structure, kinds)), None)
        if program is None:
            self.excluded = self._work(values["operands"]["hypergradient"]) > WORK
            if self.excluded or len(self.programs) >= SHAPES:
                return None
            program = self._make(structure, leaves, state, progress)
            if program is None:
                return None
            self.programs.insert(0, program)
        outputs = program.run([*leaves, *program.constants])
        return self._result(state, unflatten(program.structure, outputs))

    def _values(self, state: State, progress: float) -> dict[str, Any] | None:
        """Return what the program reads; None if a part cannot be joined with these settings."""
        key = Key(state["seed"]).fold("step", state["step"])
        problem, pipeline = self.problem, self.pipeline
        contexts: dict[str, Any] = {
            "hypergradient": (key.fold("differentiate"), state["hypergradient"]),
            "outer": (state["outer"], progress),
            "selector": (key.fold("select"),),
            "generator": (state["start"], key.fold("propose"), progress),
        }
        operands = {}
        for name, context in contexts.items():
            operands[name] = getattr(pipeline, name).operands(problem, *context)
            if operands[name] is None:
                return None
        kept = {name: state[name] for name in ("theta", "start", "hypergradient", "outer")}
        return {**kept, "operands": operands}

    def _work(self, batches: Any) -> int:
        """Return the unknowns times the rows of the batches of a hypergradient."""
        leaves: list[Tensor] = []
        flatten(batches, leaves)
        rows = max((len(leaf) for leaf in leaves if leaf.dim()), default=1)
        return rows * sum(leaf.numel() for leaf in self.problem.x0.values())

    def compute(self, values: dict[str, Any]) -> dict[str, Any]:
        """Compute a step as a function of tensors."""
        pipeline, problem, given = self.pipeline, self.problem, values["operands"]
        parts: list[Any] = [getattr(pipeline, name) for name in PARTS]
        generator, selector, estimator, outer = parts
        theta = values["theta"]
        candidates = generator.joined(problem, theta, given["generator"])
        selection = selector.joined(problem, theta, candidates, given["selector"])
        estimate, memory = estimator.joined(
            problem, theta, candidates, selection, values["hypergradient"], given["hypergradient"]
        )
        proposed, after = outer.joined(theta, estimate.value, values["outer"], given["outer"])
        state, record, cost = pipeline.conclude(
            problem,
            {"theta": theta, "start": values["start"]},
            (candidates, selection, estimate),
            {"theta": proposed, "outer": after, "hypergradient": memory},
            Key(0),
        )
        return {"state": state, "record": record, "cost": cost.numbers()}

    def _result(self, state: State, computed: dict[str, Any]) -> tuple[State, Record]:
        after = computed["state"]
        for name in ("start", "outer"):
            after[name] = counted(after[name])
        cost = Cost(**counted(computed["cost"]))
        return self.pipeline.advance(state, after, computed["record"], cost)

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
            result = flatten(self.compute(unflatten(structure, inputs)), outputs, constant=True)
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
        after, record = self.pipeline.step_by_parts(self.problem, state, progress)
        computed = self.compute(unflatten(structure, leaves))
        rounding = effect_of_rounding(function, leaves, _leaves(computed))
        by_parts = {
            "state": {name: after[name] for name in computed["state"]},
            "record": {name: record[name] for name in computed["record"]},
        }
        expected = _leaves(by_parts)
        return compare(run(leaves)[: len(expected)], expected, rounding)


def _leaves(value: dict[str, Any]) -> list[Tensor]:
    """Return all tensors and numbers of a step as tensors, without the gap.

    The gap is a difference of scores that are nearly equal. A residual is relative to the size of
    b, and so is its rounding error.
    """
    record = {name: item for name, item in value["record"].items() if name != "gap"}
    if record["residual"] is not None:
        record["residual"] = 1 + record["residual"]
    leaves: list[Tensor] = []
    flatten({**value, "record": record}, leaves)
    return leaves
