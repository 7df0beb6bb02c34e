"""Compiled programs on the device: the numbers of the run as it is written, recorded as CUDA
graphs, and nothing waited for.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from attrs import evolve
from placed import never_waiting
from support.helpers import assert_same, moved, network_problem
from torch import Tensor

from hgms.compiled import Programs
from hgms.compiled import cuda_graphs as graphs
from hgms.compiled.cuda_graphs import Recording
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.outer import Adam
from hgms.selectors import BestOfN
from hgms.solvers import CG, MINRES
from hgms_core import Key, Pipeline, Problem

pytestmark = pytest.mark.nightly


@pytest.fixture
def recordings(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """What was recorded for programs; on a CPU too."""
    from hgms.compiled import programs

    kept: list[Recording] = []

    def record(*arguments: Any) -> Recording:
        kept.append(Recording(*arguments))
        return kept[-1]

    monkeypatch.setattr(graphs, "RECORDING", ("cuda", device.type))
    monkeypatch.setattr(programs, "Recording", record)
    return kept


def compiled_problem(device: torch.device) -> Problem:
    return evolve(moved(network_problem(rows=64), device), compiler=Programs())


def method(branches: dict[str, Any], hypergradient: dict[str, Any]) -> Pipeline:
    return Pipeline(
        generator=Branches(**{"count": 3, "steps": 4, "lr": 0.05, "batch_size": 8, **branches}),
        selector=BestOfN(),
        hypergradient=Implicit(
            **{"solver": CG(ridge=0.5, rtol=1e-8, max_steps=8), **hypergradient}
        ),
        outer=Adam(lr=0.1),
    )


@pytest.mark.parametrize(
    ("branches", "hypergradient"),
    [
        ({}, {}),
        (
            {"mode": "loop", "momentum": 0.9},
            {"warm_start": True, "batch_size": 16, "upper_batch_size": 3},
        ),
        (
            {"optimizer": "adamw", "schedule": "cosine", "lr_spread": (0.5, 2.0)},
            {"strategy": "jvp"},
        ),
        (
            {"batch_size": None, "clip": 0.2, "noise": 0.1},
            {"solver": MINRES(ridge=0.5), "strategy": "difference"},
        ),
    ],
)
@pytest.mark.usefixtures("real")
def test_a_compiled_run_is_the_same_and_all_its_programs_are_recorded(
    device: torch.device,
    recordings: list[Recording],
    branches: dict[str, Any],
    hypergradient: dict[str, Any],
) -> None:
    pipeline = method(branches, hypergradient)
    problem = compiled_problem(device)
    tolerances = {"rtol": 1e-7, "atol": 1e-9}
    if hypergradient.get("strategy") == "difference":  # which blows rounding up
        tolerances = {"rtol": 1e-4, "atol": 1e-6}
    runs = []
    for chosen in (problem, evolve(problem, compiler=None)):
        state = pipeline.init(chosen, 0)
        for _ in range(4):
            state, _ = pipeline.step(chosen, state)
        runs.append((state["theta"], state["x"]))
    assert_same(*runs, **tolerances)
    outcomes = problem.compiler.outcomes
    assert set(outcomes.values()) == {"compiled"}, outcomes
    if not branches:
        # a block of lower steps, the selection, the linearisation, the mixed product, the solve
        assert len(recordings) == 5
    assert recordings


def test_compiled_lower_steps_and_selections_do_not_wait(device: torch.device) -> None:
    problem = compiled_problem(device)
    key = Key(0)
    generator = Branches(count=3, steps=4, batch_size=8)
    selector = BestOfN()
    start = generator.init(problem, key)

    def call() -> None:
        candidates = generator.propose(problem, problem.theta0, start, key)
        candidates.at(selector.select(problem, problem.theta0, candidates, key).index)

    call()  # makes the programs
    call()
    with never_waiting(device):
        call()


def through_the_cpu(x: Tensor, number: Tensor) -> Tensor:
    return x * (x.sum() * 0 + number).cpu().to(x.device)


@pytest.mark.parametrize(
    ("function", "where"), [(lambda x, number: x * number, "cpu"), (through_the_cpu, "cuda")]
)
def test_what_cannot_be_recorded_is_compiled_all_the_same(
    function: Any, where: str, cuda: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """A number of the CPU is read at every call."""
    program = Programs()(("scaled",), function)
    x = torch.arange(3.0, device=cuda)
    stream = torch.cuda.current_stream()
    with caplog.at_level(logging.WARNING, "hgms.programs"):
        found = [program(x, torch.tensor(number, device=where)).tolist() for number in (2.0, 5.0)]
    assert found == [[0.0, 2.0, 4.0], [0.0, 5.0, 10.0]]
    assert torch.cuda.current_stream() == stream
    assert "is launched kernel by kernel" in caplog.text


def test_a_refused_recording_leaves_the_stream_as_it_was(cuda: torch.device) -> None:
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        Recording(lambda inputs: [inputs[0] * float(inputs[0].sum())], [torch.ones(3, device=cuda)])
    assert torch.cuda.current_stream() == stream
    assert float(torch.ones(3, device=cuda).sum()) == 3.0
