"""Compiled programs on the device: the numbers of the run as it is written, recorded as CUDA
graphs, and nothing waited for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import assert_same, moved, network_problem

from hgms.compiled import Programs
from hgms.compiled import cuda_graphs as graphs
from hgms.compiled.cuda_graphs import Recording
from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import Implicit
from hgms.optim import SGD, AdamW, Clip, Cosine
from hgms.outer import Adam
from hgms.selectors import BestOfN
from hgms.solvers import CG, MINRES
from hgms_core import Pipeline, Problem

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
        generator=Branches(
            **{"count": 3, "steps": 4, "optimizer": SGD(lr=0.05), "batch_size": 8, **branches}
        ),
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
            {"mode": "loop", "optimizer": SGD(lr=0.05, momentum=0.9)},
            {"warm_start": True, "batch_size": 16, "upper_batch_size": 3},
        ),
        (
            {
                "optimizer": AdamW(lr=0.05, schedule=Cosine()),
                "diversity": Diversity(lr_spread=(0.5, 2.0)),
            },
            {"strategy": "jvp"},
        ),
        (
            {
                "batch_size": None,
                "optimizer": Clip(optimizer=SGD(lr=0.05), clip=0.2),
                "diversity": Diversity(noise=0.1),
            },
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
