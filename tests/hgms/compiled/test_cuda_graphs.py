"""Recorded computations give the numbers of the ones they stand for. Here a recording runs its
function again, so that what is tested is all but the device: addresses, copies, counts, what is
kept and for how long. tests/gpu asks a device the same.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import F64, network_problem, normal, rejects, spd
from torch import Tensor
from waiting import NoWaiting, Waits

from hgms.compiled import cuda_graphs as graphs
from hgms.compiled.cuda_graphs import RecordedProduct, Recording, recorded
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.methods import Tilted
from hgms.outer import Adam
from hgms.selectors import BestOfN
from hgms.solvers import CG, NystromCG
from hgms.solvers.pcg import iteration
from hgms.tasks.circle import CircleDegenerate, CircleKink
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.quadratic import Quadratic
from hgms.tasks.regression import LogisticCv, RidgeCv
from hgms_core import (
    Linearization,
    LinearSystem,
    Pipeline,
    Problem,
    Strategy,
    Task,
    gradient,
    groups,
    repeat,
)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records on a CPU too."""
    monkeypatch.setattr(graphs, "RECORDING", ("cuda", "cpu"))


def test_a_recording_sees_new_arguments_and_changes_nothing_else() -> None:
    given = {"x": torch.tensor([1.0, 2.0])}
    double_and_shift = Recording(
        lambda tree, shift: tree["x"] * 2 + shift, given, torch.tensor(1.0)
    )
    assert double_and_shift({"x": torch.tensor([5.0, 6.0])}, torch.tensor(0.5)).tolist() == [
        10.5,
        12.5,
    ]
    assert given["x"].tolist() == [1.0, 2.0]


def test_a_recording_may_change_its_arguments_in_place() -> None:
    def double(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    recording = Recording(double, torch.ones(2))
    assert float(recording(torch.ones(2))) == 4.0  # what the recording itself did is undone
    assert float(recording.run()) == 8.0


def test_nothing_is_recorded_on_a_cpu_nor_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network_problem()
    cpu = torch.device("cpu")

    def asked() -> int | None:
        return recorded(problem, "key", cpu, lambda: 3)

    assert [asked(), asked(), asked()] == [None, None, None]
    monkeypatch.setattr(graphs, "RECORDING", ("cpu",))
    assert [asked(), asked(), asked()] == [None, 3, 3]


def run(
    problem: Problem,
    *,
    cuda_graphs: bool,
    hypergradient: dict[str, Any] | None = None,
    **branches: Any,
) -> Pipeline:
    return Pipeline(
        generator=Branches(
            **{"count": 3, "steps": 4, "lr": 0.05, "batch_size": 8, **branches},
            cuda_graphs=cuda_graphs,
        ),
        selector=BestOfN(),
        hypergradient=Implicit(
            **{"solver": CG(ridge=0.5, rtol=1e-8, max_steps=40), **(hypergradient or {})},
            cuda_graphs=cuda_graphs,
        ),
        outer=Adam(lr=0.1),
    )


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(
    ("branches", "hypergradient"),
    [
        ({}, {}),
        ({"mode": "stacked"}, {}),
        ({"mode": "stacked", "chunk": 2}, {}),
        ({"mode": "loop"}, {"batch_size": 6, "upper_batch_size": 3}),
        ({"batches": "shared"}, {"warm_start": True}),
        ({"batch_size": None}, {"strategy": "jvp"}),
        ({"optimizer": "adamw", "weight_decay": 0.1}, {"strategy": "difference"}),
        (
            {"momentum": 0.9, "noise": 0.1, "clip": 0.2, "schedule": "cosine"},
            {"solver": CG(ridge=0.5, max_steps=3)},
        ),
        (
            {"carry_rule": "per-branch", "lr_spread": (0.5, 2.0)},
            {"solver": NystromCG(ridge=0.5, rank=4)},
        ),
        ({"carry_rule": "restart"}, {"solver": lambda matvec, b: b - 0.1 * matvec(b)}),
    ],
)
def test_a_recorded_pipeline_is_the_same(
    branches: dict[str, Any], hypergradient: dict[str, Any]
) -> None:
    found = []
    for cuda_graphs in (False, True):
        problem = network_problem()
        pipeline = run(problem, cuda_graphs=cuda_graphs, hypergradient=hypergradient, **branches)
        state = pipeline.init(problem, 0)
        records = []
        for _ in range(5):
            state, record = pipeline.step(problem, state)
            records.append(record)
        found.append((state, records))
    (plain, its_records), (replayed, records) = found
    for expected, record in zip(its_records, records, strict=True):
        assert record.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(
                    record[name], value, rtol=1e-12, atol=0, equal_nan=True, msg=name
                )
            else:
                assert record[name] == value, name
    for tree in ("theta", "x"):
        for name, leaf in plain[tree].items():
            torch.testing.assert_close(replayed[tree][name], leaf, rtol=1e-12, atol=0)


@pytest.mark.usefixtures("recording")
def test_records_of_earlier_steps_stay_what_they_were() -> None:
    """A recording writes into the same memory again and again; nothing that is handed out may
    lie there.
    """
    problem = network_problem()
    pipeline = run(problem, cuda_graphs=True, hypergradient={"warm_start": True})
    state = pipeline.init(problem, 0)
    handed: list[tuple[Tensor, Tensor]] = []
    for _ in range(5):
        state, record = pipeline.step(problem, state)
        tensors = [value for value in record.values() if isinstance(value, Tensor)]
        tensors += [leaf for tree in ("theta", "x") for leaf in state[tree].values()]
        tensors += [*state["start"]["x"].values(), state["hypergradient"]["v"]]
        handed += [(each, each.clone()) for each in tensors]
    for each, copy in handed:
        torch.testing.assert_close(each, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("recording")
def test_recordings_are_freed_with_their_problem() -> None:
    problem = network_problem()
    pipeline = run(problem, cuda_graphs=True)
    state = pipeline.init(problem, 0)
    for _ in range(3):
        state, _ = pipeline.step(problem, state)
    assert len(problem.kept) == 2
    gone = weakref.ref(problem)
    del problem, state
    gc.collect()
    assert gone() is None


SYSTEMS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "positive definite": lambda: (spd(12), normal(12, seed=3)),
    "zero right-hand side": lambda: (spd(12), torch.zeros(12, dtype=F64)),
    "indefinite": lambda: (torch.diag(torch.linspace(-1, 3, 12, dtype=F64)), normal(12, seed=3)),
    "singular, outside the range": lambda: (
        torch.diag(torch.linspace(0, 3, 12, dtype=F64)),
        torch.ones(12, dtype=F64),
    ),
    "not finite": lambda: (torch.full((12, 12), torch.nan, dtype=F64), torch.ones(12, dtype=F64)),
    "ill-conditioned": lambda: (
        torch.diag(torch.logspace(0, 10, 12, dtype=F64)),
        torch.ones(12, dtype=F64),
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("max_steps", [2, 100])
@pytest.mark.parametrize("warm", [False, True])
def test_cg_on_a_recorded_operator_ends_the_same_way(
    system: str, max_steps: int, warm: bool
) -> None:
    matrix, b = SYSTEMS[system]()
    solver = CG(rtol=1e-9, max_steps=max_steps)
    x0 = 0.1 * torch.ones(12, dtype=F64) if warm else None
    product = RecordedProduct(lambda v: matrix @ v, b)
    plain = solver.solve(lambda v: matrix @ v, b, x0)
    for _ in range(2):  # the second time the iteration is already recorded
        found = solver.solve(product, b, x0)
        assert found.outcome is plain.outcome
        assert found.products == plain.products
        for name in ("value", "residual", "iterations", "curvature"):
            torch.testing.assert_close(
                getattr(found, name), getattr(plain, name), rtol=1e-12, atol=0, equal_nan=True
            )


def test_solves_with_other_settings_are_recorded_anew() -> None:
    matrix = spd(8)
    b = normal(8, seed=1)
    product = RecordedProduct(lambda v: matrix @ v, b)
    for ridge in (0.1, 2.0):
        for max_steps in (1, 50):
            solver = CG(ridge=ridge, max_steps=max_steps, rtol=1e-10)
            torch.testing.assert_close(
                solver.solve(product, b).value, solver.solve(lambda v: matrix @ v, b).value
            )


def test_fresh_batches_cannot_be_recorded() -> None:
    with rejects("conflicting-options", "cuda_graphs"):
        Implicit(solver=CG(), batches="fresh", cuda_graphs=True)


@pytest.mark.usefixtures("recording")
def test_the_tilted_problem_is_recorded_once() -> None:
    problem = network_problem()
    pipeline = Tilted(method=run(problem, cuda_graphs=True), tilt=0.5)
    state = pipeline.init(problem, 0)
    for _ in range(3):
        state, _ = pipeline.step(problem, state)
    ((_, tilted),) = problem.kept.items()
    assert list(map(bool, tilted.kept.values())) == [True] * len(tilted.kept) != []


def test_what_cannot_be_recorded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(recording: Recording, function: Callable[..., Any]) -> None:
        raise RuntimeError(
            "CUDA error: operation not permitted when stream is capturing\nmore lines"
        )

    recording = object.__new__(Recording)
    recording.arguments = []
    recording._places = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: refuse(recording, lambda: None))
    with rejects("not-supported", "cuda_graphs") as caught:
        recording._record(lambda: None)
    assert caught.value.message.endswith("operation not permitted when stream is capturing")


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
def test_nothing_that_is_recorded_waits_for_the_device(task: str) -> None:
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
