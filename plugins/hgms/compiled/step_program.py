"""One compiled program per outer step of a pipeline with parts that can be joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hgms.compiled.library import plain
from hgms.compiled.loops import replacements
from hgms.compiled.small_products import LARGE
from hgms.compiled.trace import (
    MODE,
    Structure,
    apart,
    flatten,
    leaves_of,
    lift_constants,
    mutates,
    without_changes_of_new_tensors,
    without_repetitions,
)
from hgms.compiled.verify import Function, difference_nearby, difference_of
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
from hgms_core.capabilities import Fixed, JoinsStep, Restarting, find
from hgms_core.components import evolve

Runner = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Kinds = list[tuple[torch.Size, torch.dtype]]
NAME = "step"
CARRIED = ("theta", "start", "hypergradient", "outer", "cost")
"""The entries of a state that the next step reads, except its seed and step."""
PARTS = ("hypergradient", "outer", "selector", "generator")
ROUNDED = ("gap", "curvature")
"""Entries of a record that are not compared."""
SHAPES = 8
"""Maximum number of programs; steps with further shapes run part by part."""
WORK = 4_000_000
"""Maximum multiply-adds of a loss in a step that is one program. Steps of larger problems take much
longer than the Python code around the programs, and torch stores separate programs on disk.
"""
SMALL_STEP = {"realize_opcount_threshold": 8, "realize_reads_threshold": 2}
"""Settings of inductor for steps without large products. With its defaults, inductor recomputes a
derivative for each entry of a sum that reads it.
"""


# 1. The parts and the numbers of a step as functions of tensors


@frozen
class PartWithOperands:
    """A part of a pipeline that uses operands instead of keys and schedules; it fits any role."""

    name: ClassVar[str] = "part-with-operands"

    part: Any
    operands: Any

    def init(self, *context: Any) -> State:
        return self.part.init(*context)

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float
    ) -> Candidates:
        return self.part.compute(problem, theta, start, self.operands)

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        return self.part.carry(start, candidates, index, key, problem)

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        return self.part.compute(problem, theta, candidates, self.operands)

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        return self.part.compute(problem, theta, candidates, selection, state, self.operands)

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        return self.part.compute(theta, gradient, state, self.operands)


def spread(
    value: Any, leaves: list[Tensor], counts: list[Any], like: Structure = None
) -> Structure:
    """Append tensors to ``leaves`` and whole numbers to ``counts``; return the structure.

    In the structure, ``...`` is a tensor and ``int`` a whole number. A tensor is also a whole
    number if the structure ``like`` has one at its place.
    """
    if like is int or type(value) is int:
        counts.append(value)
        return int
    if isinstance(value, Tensor):
        leaves.append(value)
        return ...
    if isinstance(value, dict):
        inner = like if isinstance(like, dict) else {}
        return {name: spread(item, leaves, counts, inner.get(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [spread(item, leaves, counts) for item in value]
    if value is not None:
        raise TypeError(f"a state with a {type(value).__name__} cannot be computed by a program")
    return None


def gather(structure: Structure, leaves: Iterator[Tensor], counts: Iterator[Any]) -> Any:
    """Return the value with this structure, these tensors and these whole numbers."""
    if structure is ...:
        return next(leaves)
    if structure is int:
        return next(counts)
    if isinstance(structure, dict):
        return {
            name: next(leaves) if item is ... else gather(item, leaves, counts)
            for name, item in structure.items()
        }
    return structure and [gather(item, leaves, counts) for item in structure]


def as_tensor(counts: Sequence[Any]) -> Tensor:
    """Return whole numbers, some of which are tensors of a trace, as one tensor."""
    if not any(isinstance(count, Tensor) for count in counts):
        return torch.tensor(counts, dtype=torch.int64)
    # torch.tensor would be a constant of the graph
    return torch.stack([torch.full((), 0, dtype=torch.int64) + count for count in counts])


def kinds_of(leaves: Sequence[Tensor]) -> Kinds:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]


# 2. The program


@frozen
class Form:
    """The structure of a value, and the shapes and types of its tensors."""

    structure: Structure
    kinds: Kinds


@frozen(eq=False)
class Leaves:
    """The tensors of a value, and its form: its structure, and the shapes and types of tensors.

    ``leaves`` of a carried part of a state are one tensor of its whole numbers, and its tensors.
    ``source`` is what a part returned.
    """

    value: Any
    leaves: list[Tensor]
    form: Form
    source: Any = None

    @classmethod
    def of(cls, operands: Any) -> Leaves:
        """Return the tensors of the operands of a part."""
        value = operands.value if isinstance(operands, Fixed | Restarting) else operands
        leaves: list[Tensor] = []
        structure = flatten(value, leaves)
        leaves = plain(leaves)
        return cls(value, leaves, Form(structure, kinds_of(leaves)), operands)

    @classmethod
    def carried(cls, state: State, like: Structure = None) -> Leaves:
        """Return the part of a state that the next step reads."""
        leaves: list[Tensor] = []
        counts: list[Any] = []
        structure = spread({name: state[name] for name in CARRIED}, leaves, counts, like)
        leaves = [as_tensor(counts), *leaves]
        return cls(state, leaves, Form(structure, kinds_of(leaves)))


@frozen(eq=False)
class Result:
    """The form of the carried state, and the structure of (x, record).

    The first output of a program contains the whole numbers of the state.
    """

    carried: Form
    rest: Structure


@frozen(eq=False)
class Program:
    """A compiled step for a carried state and operands of these forms."""

    carried: Form
    operands: list[Form]
    run: Runner
    constants: tuple[Tensor, ...]
    result: Result

    def outputs(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.run([*leaves, *self.constants])


Traced = tuple[GraphModule, tuple[Tensor, ...], Result]
"""The graph of a step, the tensors that it reads in addition, and its result."""


@define(eq=False)
class JoinedStep:
    """The steps of a pipeline as one program, for a problem without a compiler.

    ``compiler`` is a :class:`hgms.compiled.Programs`.
    ``excluded`` is whether a part cannot be joined with its settings, or the problem is large (None
    before the first step). It is a function of the settings, so a resumed run joins the same steps.
    ``last`` is the last state, and its carried part. ``operands`` are the last operands of each
    part.
    """

    compiler: Any
    pipeline: Pipeline
    problem: Problem
    programs: list[Program] = field(factory=list, init=False)
    excluded: bool | None = field(default=None, init=False)
    last: Leaves | None = field(default=None, init=False)
    operands: dict[str, Leaves] = field(factory=dict, init=False)

    @classmethod
    def of(cls, compiler: Any, pipeline: Pipeline, problem: Problem) -> JoinedStep | None:
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
            self.excluded = operands is None or self._work() > WORK
        if operands is None or self.excluded:
            return None
        last = self.last
        carried = last if last is not None and last.value is state else Leaves.carried(state)
        leaves = carried.leaves + [leaf for part in operands for leaf in part.leaves]
        forms = [part.form for part in operands]
        for program in self.programs:
            if program.carried == carried.form and program.operands == forms:
                return self._run(program, leaves, state)
        made = self._find(carried.form, forms, leaves, state, progress)
        return None if made is None else self._run(made, leaves, state)

    def _run(self, program: Program, leaves: list[Tensor], state: State) -> tuple[State, Record]:
        outputs = program.outputs(leaves)
        result = program.result
        rest = iter(outputs)
        counts = iter(next(rest).tolist())
        kept = gather(result.carried.structure, rest, counts)
        x, record = gather(result.rest, rest, counts)
        step = state["step"] + 1
        generator = self.operands["generator"].source
        if isinstance(generator, Restarting):
            key = Key(state["seed"]).fold("step", state["step"])
            kept["start"] = generator.restart(key.fold("carry"))
        following = {**state, **kept, "x": x, "step": step}
        if not isinstance(generator, Restarting):
            carried = list(outputs[: len(result.carried.kinds)])
            self.last = Leaves(following, carried, result.carried)
        cost = kept["cost"]
        costs = {f"cost_{name}": count for name, count in cost.items()}
        return following, {"step": step, **record, **costs, "oracle_calls": Cost(**cost).calls}

    def _operands(self, state: State, progress: float) -> list[Leaves] | None:
        """Return the operands of the parts; None if a part cannot be joined."""
        key = None
        found = []
        for name in PARTS:
            known = self.operands.get(name)
            if known is None or not isinstance(known.source, Fixed):
                key = key or Key(state["seed"]).fold("step", state["step"])
                part = getattr(self.pipeline, name)
                value = part.operands(self.problem, *_context(name, state, key, progress))
                if value is None:
                    return None
                known = self.operands[name] = Leaves.of(value)
            found.append(known)
        return found

    def _work(self) -> int:
        """Return about the multiply-adds of the lower loss on the batch of the hypergradient.

        Leaves with more than two axes count as weights of convolutions, each of which multiplies
        about every number of a row.
        """
        leaves = self.operands["hypergradient"].leaves
        rows = max((len(leaf) for leaf in leaves if leaf.dim()), default=1)
        data = self.problem.lower_data
        first = data.batch(torch.zeros(min(1, data.size), dtype=torch.int64, device=data.device))
        width = max((leaf.numel() for leaf in first.values()), default=1)
        unknowns = [
            leaf.numel() * (width if leaf.dim() > 2 else 1) for leaf in self.problem.x0.values()
        ]
        return rows * sum(unknowns)

    def compute(
        self, carried: Form, operands: list[Form], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], Result]:
        """Compute a step of the pipeline as a function of tensors."""
        leaves = iter(inputs)
        kept = gather(carried.structure, leaves, iter(next(leaves).unbind()))
        parts: dict[str, Any] = {}
        for name, form in zip(PARTS, operands, strict=True):
            given = gather(form.structure, leaves, iter(()))
            parts[name] = PartWithOperands(getattr(self.pipeline, name), given)
        start = {**kept, "seed": 0, "step": 0}
        state, record = evolve(self.pipeline, **parts).step(self.problem, start)
        after = Leaves.carried(state, carried.structure)
        outputs = list(after.leaves)
        structure = flatten((state["x"], without_costs(record)), outputs)
        return outputs, Result(carried if after.form == carried else after.form, structure)

    def _find(
        self,
        carried: Form,
        operands: list[Form],
        leaves: list[Tensor],
        state: State,
        progress: float,
    ) -> Program | None:
        """Return the program, and remember it."""
        if len(self.programs) >= SHAPES:
            return None

        def compute(inputs: Sequence[Tensor]) -> tuple[list[Tensor], Result]:
            return self.compute(carried, operands, inputs)

        def sides(run: Runner, result: Result) -> tuple[Function, Function]:
            return (
                lambda inputs: comparable(result, compute(inputs)[0]),
                lambda inputs: comparable(result, run(inputs)),
            )

        def check(run: Runner, result: Result) -> str:
            after, record = self.pipeline.step(self.problem, state, progress)
            if isinstance(self.operands["generator"].source, Restarting):
                # The program computes the state that the restart replaces.
                counts, *outputs = compute(leaves)[0]
                kept = gather(result.carried.structure, iter(outputs), iter(counts.tolist()))
                after["start"] = kept["start"]
            others = leaves_of((after["x"], without_costs(record)))
            expected = [*Leaves.carried(after).leaves, *others]
            both = sides(run, result)
            nearby = difference_nearby(*both, leaves)
            return nearby or difference_of(*both, leaves, comparable(result, expected))

        def make() -> Program | None:
            traced = self.compiler.attempt(NAME, "traced", lambda: trace_step(compute, leaves))
            if traced is None:
                return None
            run = self._compile(traced, leaves, check)
            return run and Program(carried, operands, run, *traced[1:])

        program = self.compiler.recall(
            [NAME],
            (NAME, self.pipeline, self.problem, carried, operands),
            leaves,
            make,
            lambda found: difference_nearby(*sides(found.outputs, found.result), leaves),
        )
        if program is not None:
            self.programs.insert(0, program)
        return program

    def _compile(
        self, traced: Traced, leaves: Sequence[Tensor], check: Callable[[Runner, Result], str]
    ) -> Runner | None:
        graph, constants, result = traced
        large = any(
            node.target in LARGE
            for module in graph.modules()
            if isinstance(module, GraphModule)
            for node in module.graph.nodes
        )

        def agrees(run: Runner) -> str:
            return check(lambda inputs: run([*inputs, *constants]), result)

        settings = {} if large else SMALL_STEP
        return self.compiler.build(NAME, graph, [*leaves, *constants], agrees, **settings)


def _context(name: str, state: State, key: Key, progress: float) -> tuple[Any, ...]:
    """Return the arguments of ``operands`` of a part, after the problem."""
    if name == "generator":
        return state["start"], key.fold("propose"), progress
    if name == "selector":
        return (key.fold("select"),)
    if name == "hypergradient":
        return key.fold("differentiate"), state["hypergradient"]
    return state["outer"], progress


def without_costs(record: Record) -> Record:
    """Return a record without the counts that a step adds to the counts before it."""
    return {
        name: value
        for name, value in record.items()
        if name not in ("step", "oracle_calls") and not name.startswith("cost_")
    }


def trace_step(
    compute: Callable[[Sequence[Tensor]], tuple[list[Tensor], Result]], leaves: list[Tensor]
) -> Traced:
    """Return the graph of a step, the tensors that it reads in addition, and its result."""
    results: list[Result] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        outputs, result = compute(inputs)
        results.append(result)
        return [output.detach() for output in outputs]

    traced = make_fx(flat, replacements(), tracing_mode="fake", _allow_non_fake_inputs=True)
    pure = without_changes_of_new_tensors(traced(*apart(leaves)))
    graph, constants = lift_constants(pure)
    if not mutates(graph):
        graph = without_repetitions(graph)
    graph.meta[MODE] = next(iter(graph.graph.nodes)).meta["val"].fake_mode
    return graph, constants, results[0]


def comparable(result: Result, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return all tensors of a step, without values that rounding determines.

    The gap is a difference of scores that are nearly equal. The curvature is the quotient of a late
    direction of a solver, which is nearly lost in rounding. A residual is relative to the size of
    b, and so is its rounding error.
    """
    leaves = iter(outputs)
    counts = next(leaves)
    carried = gather(result.carried.structure, leaves, iter(counts.unbind()))
    x, record = gather(result.rest, leaves, iter(()))
    record = {name: item for name, item in record.items() if name not in ROUNDED}
    if record["residual"] is not None:
        record["residual"] = 1 + record["residual"]
    return leaves_of((carried, x, record))
