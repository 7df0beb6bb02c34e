"""What a GPU would be asked to do by the programs of a step, read off their graphs: no device has
to be there for that.

Tensors of the meta device hold no numbers and are not on the CPU, so a function can be traced with
them as it would be with those of a GPU, and what would wait for one, or bring numbers to it, shows
in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from attrs import evolve
from support.device_waits import NoWaiting, Waits
from support.helpers import F64
from support.step_graphs import Tracing, branches, multiplications, on_meta, step_graphs, waiting
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from hgms.compiled.cuda_graphs import Recording
from hgms.compiled.programs import _devices
from hgms.solvers.pcg import begin, iteration
from hgms.tasks.circle import CircleKink
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.regression import LogisticCv
from hgms_core import Key, Linearization, LinearSystem, Problem, Strategy, gradient, groups, repeat

MULTIPLICATIONS = {
    # two layers forward; backward one for each matrix and one for what is between them
    "lower step": 5,
    "scores": 2,
    # 5 for each gradient of a level; the zero direction of the data has no product
    "linearisation": 10,
    # a·V₁; h·V₂ and ḣ·W₂; δ·V₂ᵀ and δ̇·W₂ᵀ; ḣᵀδ and hᵀδ̇; aᵀδ̇₁ (docs/explanation/programs.md)
    "Hessian product": 8,
    "mixed product": 3,
    "iteration of CG": 8,
    "small solve, 4 iterations": 5 * 8,  # and one product that checks the residual
}
STRATEGIES: tuple[Strategy, ...] = ("vjp", "jvp", "difference")


@cache
def digits() -> Problem:
    return HyperCleaning(dataset="digits").problem(0, torch.device("cpu"), torch.float32)


def devices(graph: GraphModule, leaves: Any) -> set[str]:
    return {device.type for device in _devices(graph, leaves)}


@pytest.mark.extended
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_waits_for_the_device_nor_comes_from_the_cpu(strategy: Strategy) -> None:
    graphs = step_graphs(digits(), "meta", strategy)
    for part, (graph, leaves) in graphs.items():
        assert waiting(graph) == [], part
        # a number of the CPU among the inputs keeps it from being recorded
        assert {leaf.device.type for leaf in leaves} == devices(graph, leaves) == {"meta"}, part
    counts = {part: multiplications(graph) for part, (graph, _) in graphs.items()}
    if strategy == "vjp":
        assert counts == MULTIPLICATIONS
    if strategy == "jvp":
        assert counts["Hessian product"] <= 9


@pytest.mark.extended
def test_several_small_lower_steps_are_one_program() -> None:
    held = digits()  # FakeTensorMode cannot read the images
    with FakeTensorMode():
        programs = Tracing()
        problem = evolve(on_meta(held), compiler=programs)
        generator = branches(steps=10)
        generator.propose(problem, problem.theta0, generator.init(problem, Key(0)), Key(1))
    graph, _ = programs.graphs["branches"]
    assert multiplications(graph) == 5 * 5
    assert waiting(graph) == []


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(
            HyperCleaning(dataset="digits", train_size=64, validation_size=32),
            marks=pytest.mark.extended,
        ),
        pytest.param(LogisticCv(), marks=pytest.mark.extended),
        CircleKink(),
    ],
    ids=lambda task: task.name,
)
def test_losses_and_their_derivatives_do_not_wait_for_the_device(task: Any) -> None:
    problem = task.problem(0, torch.device("meta"), F64)
    numbers = torch.zeros(3, 8, dtype=torch.int64, device="meta")
    batch = numbers if problem.lower_data.size else None
    own = None if batch is None else batch[0]
    (group,) = groups(problem.g, repeat(problem.x0, 3), own_batch=batch is not None, mode="stacked")
    with NoWaiting():
        gradient(group.loss, problem.theta0, group.x, problem.lower_data.batch(batch))
        below = problem.lower_data.batch(own)
        gradient(problem.g, problem.theta0, problem.x0, below)
        above = problem.upper_data["differentiate"].batch(None)
        for strategy in STRATEGIES:
            at = Linearization.of(
                lambda t, x: problem.f(t, x, above),
                lambda t, x: problem.g(t, x, below),
                problem.theta0,
                problem.x0,
                strategy,
            )
            at.mixed(at.matvec(at.rhs))


def test_an_iteration_of_cg_does_not_wait_for_the_device() -> None:
    system = LinearSystem.of(lambda v: 2 * v, torch.zeros(5, device="meta"), ridge=0.1)
    with NoWaiting():
        state = begin(system, None, 3, None, None)
        assert iteration(system, state, max_steps=3).keys() == state.keys()


# --- that what waits would be seen


@pytest.mark.parametrize(
    "computation",
    [
        lambda x: float(x.sum()),
        lambda x: x * (2 if bool(x.sum() > 0) else 1),
        lambda x: x + torch.ones(3).to(x.device),
        lambda x: x[torch.tensor([0, 1])],
    ],
)
def test_what_waits_is_seen(computation: Callable[[Tensor], object]) -> None:
    with pytest.raises(Waits), NoWaiting():
        computation(torch.zeros(3, device="meta"))


def test_a_recording_reads_new_inputs_and_changes_none() -> None:
    """On a CPU a recording runs its program again."""
    given = [torch.tensor([1.0, 2.0]), torch.tensor(1.0)]
    recording = Recording(lambda inputs: [inputs[0] * 2 + inputs[1]], given)
    (first,) = recording([torch.tensor([5.0, 6.0]), torch.tensor(0.5)])
    assert [each.tolist() for each in given] == [[1.0, 2.0], 1.0]
    (second,) = recording(given)
    assert (first.tolist(), second.tolist()) == ([10.5, 12.5], [3.0, 5.0])
