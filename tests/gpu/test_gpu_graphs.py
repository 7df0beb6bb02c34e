"""What is recorded as CUDA graphs gives what it gives kernel by kernel, and what cannot be
recorded says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from helpers import assert_same, moved, network_problem, rejects
from torch import Tensor

from hgms.compiled import cuda_graphs as graphs
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.outer import Adam
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import Pipeline

pytestmark = pytest.mark.gpu


def method(cuda_graphs: bool, hypergradient: dict[str, Any], **branches: Any) -> Pipeline:
    return Pipeline(
        generator=Branches(
            **{"count": 3, "steps": 4, "lr": 0.05, "batch_size": 8, **branches},
            cuda_graphs=cuda_graphs,
        ),
        selector=BestOfN(),
        hypergradient=Implicit(
            **{"solver": CG(ridge=0.5, rtol=1e-8, max_steps=40), **hypergradient},
            cuda_graphs=cuda_graphs,
        ),
        outer=Adam(lr=0.1),
    )


@pytest.mark.parametrize(
    ("branches", "hypergradient"),
    [
        ({}, {}),
        ({"mode": "stacked", "chunk": 2}, {"batch_size": 16, "upper_batch_size": 3}),
        ({"mode": "loop", "momentum": 0.9}, {"warm_start": True}),
        ({"batch_size": None, "clip": 0.2}, {"strategy": "jvp"}),
        (
            {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine"},
            {"strategy": "difference"},
        ),
        (
            {"carry_rule": "per-branch", "lr_spread": (0.5, 2.0)},
            {"solver": CG(ridge=0.5, max_steps=2)},
        ),
    ],
)
def test_a_recorded_run_is_the_same(
    device: torch.device,
    branches: dict[str, Any],
    hypergradient: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs, "RECORDING", ("cuda", "cpu"))
    found = []
    for cuda_graphs in (False, True):
        problem = moved(network_problem(rows=64), device)
        pipeline = method(cuda_graphs, hypergradient, **branches)
        state = pipeline.init(problem, 0)
        records = []
        for _ in range(5):
            state, record = pipeline.step(problem, state)
            records.append(record)
        kept = {
            key: value
            for key, value in problem.kept.items()
            if isinstance(key, tuple) and key[0] == "recorded"
        }
        assert all(kept.values())
        assert bool(kept) == cuda_graphs
        found.append((state["theta"], state["x"], records))
    plain, replayed = found
    assert_same(replayed, plain, rtol=1e-9, atol=1e-12)


def test_a_loss_that_waits_for_the_device_is_refused(cuda: torch.device) -> None:
    problem = moved(network_problem(rows=64), cuda)
    plain = problem.g

    def waiting(theta: Any, x: Any, batch: Any) -> Tensor:
        loss: Tensor = plain(theta, x, batch)
        return loss * float(theta["scale"] > -10)

    problem = evolve(problem, g=waiting)
    pipeline = method(True, {}, mode="loop")
    state = pipeline.init(problem, 0)
    state, _ = pipeline.step(problem, state)
    with rejects("not-supported", "cuda_graphs"):
        pipeline.step(problem, state)
    # and the device is usable afterwards
    eager = method(False, {}, mode="loop")
    state, record = eager.step(problem, eager.init(problem, 0))
    assert torch.isfinite(record["upper_loss"])


def test_recording_frees_its_memory(cuda: torch.device) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    problem = moved(network_problem(rows=64), cuda)
    pipeline = method(True, {})
    state = pipeline.init(problem, 0)
    for _ in range(3):
        state, record = pipeline.step(problem, state)
    del problem, state, record
    torch.cuda.synchronize()
    import gc

    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**20
