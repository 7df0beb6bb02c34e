"""The graphs of what a run compiles, traced without computing anything: on the meta device,
whose tensors hold no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node

from hgms.compiled import CompiledProduct, Levels, Programs, linearized
from hgms.compiled.trace import Trace, trace
from hgms.generators.branches import Branches
from hgms.optim import AdamW, Cosine
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.solvers.pcg import begin, iteration, whole
from hgms_core import Data, Key, LinearSystem, Problem, Tree

RIDGE = 0.02
SOLVED = 4
MULTIPLY = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv")
READS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
)
"""Operations for which a device has to be waited for."""


@define(eq=False)
class Tracing(Programs):  # type: ignore[misc]  # which is final, but for what looks at it
    """Keeps the graph of every program, with its inputs, and runs it as it is. Nothing is
    checked or compiled.
    """

    graphs: dict[str, tuple[GraphModule, Sequence[Tensor]]] = field(factory=dict)

    def traced(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        turned: bool = False,
    ) -> Trace | None:
        return trace(function, arguments, turned)

    def compiled(
        self, name: str, graph: GraphModule, leaves: Sequence[Tensor], once: bool = False
    ) -> Any:
        self.graphs[name] = (graph, list(leaves))
        return lambda inputs: graph(*inputs)


def on_meta(problem: Problem) -> Problem:
    """The problem with tensors that hold no numbers, on a device that is not the CPU; used in
    :func:`nothing_computed`.
    """

    def empty(leaves: Tree) -> Tree:
        return {
            name: torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            for name, leaf in leaves.items()
        }

    def data(rows: Data) -> Data:
        return Data.of({name: leaf for name, leaf in empty(rows.whole).items() if name != "index"})

    return evolve(
        problem,
        theta0=empty(problem.theta0),
        x0=empty(problem.x0),
        lower_data=data(problem.lower_data),
        upper_data={role: data(rows) for role, rows in problem.upper_data.items()},
        fresh=None,
        references={},
    )


def nothing_computed(device: str) -> AbstractContextManager[Any]:
    return FakeTensorMode() if device == "meta" else nullcontext()


def branches(count: int = 2, steps: int = 1) -> Branches:
    """Those of ``hg-ms``, but for the number of steps."""
    return Branches(
        count=count,
        steps=steps,
        optimizer=AdamW(lr=2e-2, schedule=Cosine()),
        batch_size=256,
        mode="stacked",
    )


def step_graphs(
    problem: Problem, device: str, strategy: Any = "vjp"
) -> dict[str, tuple[GraphModule, Sequence[Tensor]]]:
    """The graph of each function that ``hg-ms`` compiles for a problem, with its inputs: a lower
    step of two branches, the selection, what a linearisation computes once, a Hessian product, the
    mixed product, and an iteration of CG.
    """
    with nothing_computed(device):
        placed = on_meta(problem) if device == "meta" else problem
        programs = Tracing()
        placed = evolve(placed, compiler=programs)
        generator = branches()
        candidates = generator.propose(
            placed, placed.theta0, generator.init(placed, Key(0)), Key(1)
        )
        BestOfN(mode="stacked").select(placed, placed.theta0, candidates, Key(0))
        below = placed.lower_data.batch(None)
        above = placed.upper_data["differentiate"].batch(None)
        levels = Levels(f=placed.f, g=placed.g, strategy=strategy)
        here = linearized(programs, ("step",), levels, placed.theta0, placed.x0, below, above)
        assert here is not None
        here.matvec(here.rhs)
        here.mixed(here.rhs)
        assert isinstance(here.matvec, CompiledProduct)
        advance = here.matvec.loop("iteration", (), RIDGE, partial(iteration, max_steps=1), 1)
        advance(begin(LinearSystem.of(here.matvec, here.rhs, ridge=RIDGE), None, 1, None, None))
        # The program of a small system, whatever the size of this one. Whether it has finished is a
        # number, so not asked here.
        residuals = list(here.matvec.residuals)
        code = here.matvec.code

        def solved(residuals: list[Tensor], b: Tensor) -> Any:
            return whole(
                lambda v: code(*residuals, v)[0],
                b,
                None,
                None,
                CG(ridge=RIDGE, rtol=1e-3, max_steps=SOLVED),
                SOLVED,
            )

        programs(("solve",), solved)(residuals, here.rhs)
    names = {
        "branches": "lower step",
        "scores": "scores",
        "linearization": "linearisation",
        "product": "Hessian product",
        "mixed product": "mixed product",
        "iteration": "iteration of CG",
        "solve": f"small solve, {SOLVED} iterations",
    }
    assert programs.graphs.keys() == names.keys()
    return {called: programs.graphs[name] for name, called in names.items()}


def operations(graph: GraphModule) -> list[Node]:
    """Those that compute something: no views, no parts of a tuple."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [
        node
        for node in calls
        if isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view
    ]


def name_of(node: Node) -> str:
    return str(node.target.overloadpacket.__name__)  # type: ignore[union-attr]


def multiplications(graph: GraphModule) -> int:
    """Products of matrices, or of stacks of matrices."""
    return sum(name_of(node) in MULTIPLY for node in operations(graph))


def waiting(graph: GraphModule) -> list[str]:
    """Operations that read a number off the device or bring one there, and what is computed
    elsewhere from the inputs.
    """
    varies: set[Node] = set()
    bad = []
    for node in graph.graph.nodes:
        if node.op == "placeholder" or any(parent in varies for parent in node.all_input_nodes):
            varies.add(node)
        value = node.meta.get("val")
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload) and name_of(node) in READS:
            bad.append(f"{node.target} reads a number")
        on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
        if node in varies and on_cpu:
            bad.append(f"{node.target} computes on the CPU")
        from_cpu = any(_on_cpu(parent) and _size(parent) > 1 for parent in node.all_input_nodes)
        if not on_cpu and from_cpu:
            bad.append(f"{node.target} brings a tensor of the CPU")
    return bad


def _on_cpu(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _size(node: Node) -> int:
    return int(node.meta["val"].numel())
