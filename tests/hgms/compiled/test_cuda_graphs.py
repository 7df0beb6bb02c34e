"""A recorded program gives the numbers of the program. On a CPU a recording runs its program again,
so everything is tested except the device: addresses, copies, results that stay. tests/gpu tests the
device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.helpers import F64
from support.waiting import NoWaiting, Waits
from torch import Tensor

from hgms.compiled.cuda_graphs import Recording
from hgms.solvers.pcg import iteration
from hgms.tasks.circle import CircleDegenerate, CircleKink
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.quadratic import Quadratic
from hgms.tasks.regression import LogisticCv, RidgeCv
from hgms_core import Linearization, LinearSystem, Strategy, Task, gradient, groups, repeat
from hgms_core.registry import Registry


def test_a_recording_reads_new_inputs_and_changes_none() -> None:
    given = [torch.tensor([1.0, 2.0]), torch.tensor(1.0)]
    recording = Recording(lambda inputs: [inputs[0] * 2 + inputs[1]], given)
    (first,) = recording([torch.tensor([5.0, 6.0]), torch.tensor(0.5)])
    assert first.tolist() == [10.5, 12.5]
    assert [each.tolist() for each in given] == [[1.0, 2.0], 1.0]
    (second,) = recording(given)
    assert second.tolist() == [3.0, 5.0]
    assert first.tolist() == [10.5, 12.5], "results are copies"


def test_no_component_has_an_option_for_recordings() -> None:
    targets = [component.target for component in Registry.load().components()]
    assert targets
    assert not [each for each in targets if "cuda_graphs" in getattr(each, "__annotations__", {})]


STRATEGIES: tuple[Strategy, ...] = ("vjp", "jvp", "difference")
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        HyperCleaning(dataset="digits", train_size=64, validation_size=32),
        RidgeCv(),
        LogisticCv(),
        Quadratic(),
        CircleKink(),
        CircleDegenerate(),
    )
}


@pytest.mark.parametrize("task", TASKS)
def test_nothing_that_is_compiled_waits_for_the_device(task: str) -> None:
    problem = TASKS[task].problem(0, torch.device("meta"), F64)
    numbers = (
        torch.zeros(3, 8, dtype=torch.int64, device="meta") if problem.lower_data.size else None
    )
    (group,) = groups(
        problem.g, repeat(problem.x0, 3), own_batch=numbers is not None, mode="stacked"
    )
    own = None if numbers is None else numbers[0]
    with NoWaiting():
        gradient(group.loss, problem.theta0, group.x, problem.lower_data.batch(numbers))
        gradient(problem.g, problem.theta0, problem.x0, problem.lower_data.batch(own))
        below = problem.lower_data.batch(own)
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
    vector = torch.zeros(5, device="meta")
    number = torch.zeros((), device="meta")
    system = LinearSystem.of(lambda v: 2 * v, torch.zeros(5, device="meta"), ridge=0.1)
    state = dict.fromkeys(
        ("rz", "size", "smallest", "curvature", "largest", "floor", "ceiling"), number
    )
    state |= dict.fromkeys(("x", "r", "p", "best"), vector)
    state |= {
        name: torch.zeros((), dtype=torch.int64, device="meta") for name in ("codes", "steps")
    }
    state["active"] = torch.zeros((), dtype=torch.bool, device="meta")
    with NoWaiting():
        after = iteration(system, state, max_steps=3)
    assert after.keys() == state.keys()


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
