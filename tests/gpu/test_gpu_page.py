"""What docs/how-to/run-on-gpus.md says of every device, held against this one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.helpers import counted, rejects, run_files

from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.outer import Adam
from hgms.runs import device_called, run
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.tasks.cleaning import HyperCleaning
from hgms.testing.kit import difference, snapshot
from hgms_core import Budget, Key, Pipeline, Problem

pytestmark = pytest.mark.nightly

KEY = Key(2)
F64 = torch.float64


def _cleaning(device: torch.device, hidden: int = 8, dtype: torch.dtype = F64) -> Problem:
    task = HyperCleaning(train_size=100, validation_size=40, test_size=50, hidden=hidden)
    return task.problem(0, device, dtype)


def _method() -> Pipeline:
    generator = Branches(count=3, steps=4, noise=0.05, batch_size=20)
    return Pipeline(
        generator=generator, selector=BestOfN(), hypergradient=Implicit(solver=CG()), outer=Adam()
    )


def test_auto_stacks_on_a_gpu(device: torch.device) -> None:
    """Candidates too large to be stacked on a CPU: how often g is called tells a stack from a
    loop.
    """
    problem, calls = counted(_cleaning(device, hidden=1024, dtype=torch.float32))
    generator = Branches(count=3, steps=4)
    generator.propose(problem, problem.theta0, generator.init(problem, KEY), KEY)
    assert calls["g"] == (4 if device.type == "cuda" else 12)


def test_the_device_sees_the_cpus_batches_and_has_a_generator_of_its_own(
    device: torch.device,
) -> None:
    one, other = (KEY.indices(100, 16, 9, place) for place in ("cpu", device))
    assert other.device.type == device.type
    assert torch.equal(one, other.cpu())
    draws = [torch.randn(50, generator=KEY.generator(device), device=device) for _ in range(2)]
    assert torch.equal(*draws)
    same = torch.equal(draws[0].cpu(), torch.randn(50, generator=KEY.generator()))
    assert same == (device.type != "cuda")


@pytest.mark.usefixtures("deterministic")
def test_one_seed_gives_the_same_bits_twice(device: torch.device, tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        problem = _cleaning(device, dtype=torch.float32)
        run(_method(), problem, Budget(outer_steps=6), seed=5, folder=tmp_path / name)
        files.append(run_files(tmp_path / name))
    assert len(files[0]) == 4
    assert files[0] == files[1]


def test_chunk_bounds_memory_and_changes_nothing_else(device: torch.device) -> None:
    problem = _cleaning(device, hidden=512)
    found = []
    peaks = []
    for chunk in (None, 1):
        generator = Branches(count=16, steps=3, mode="stacked", chunk=chunk)
        start = generator.init(problem, KEY)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        found.append(snapshot(generator.propose(problem, problem.theta0, start, KEY).x))
        peaks.append(torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0)
    differs = difference(*found, rtol=1e-9)
    assert not differs, f"with chunk = 1, {differs}"
    if device.type == "cuda":
        assert peaks[1] < 0.75 * peaks[0], (
            f"the peak is {peaks[0]:,} bytes with all in one pass, {peaks[1]:,} with chunk = 1"
        )


def test_a_device_that_is_not_there_is_one_error(cuda: torch.device) -> None:
    number = torch.cuda.device_count()
    with rejects("device-not-available", "run", "device") as caught:
        device_called(f"cuda:{number}")
    assert f"cuda:{number}" in caught.value.message
    assert device_called("cuda:0").index == 0
