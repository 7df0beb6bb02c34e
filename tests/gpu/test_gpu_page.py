"""What docs/how-to/run-on-gpus.md says of equal bits, held against this device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.helpers import run_files

from hgms.config import Budget
from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import Implicit
from hgms.outer import Adam
from hgms.runs import run
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.tasks.cleaning import HyperCleaning
from hgms_core import Pipeline, Problem

pytestmark = pytest.mark.nightly

F64 = torch.float64


def _cleaning(device: torch.device, hidden: int = 8, dtype: torch.dtype = F64) -> Problem:
    task = HyperCleaning(train_size=100, validation_size=40, test_size=50, hidden=hidden)
    return task.problem(0, device, dtype)


def _method() -> Pipeline:
    generator = Branches(count=3, steps=4, diversity=Diversity(noise=0.05), batch_size=20)
    return Pipeline(
        generator=generator, selector=BestOfN(), hypergradient=Implicit(solver=CG()), outer=Adam()
    )


@pytest.mark.usefixtures("deterministic")
def test_one_seed_gives_the_same_bits_twice(device: torch.device, tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        problem = _cleaning(device, dtype=torch.float32)
        run(_method(), problem, Budget(outer_steps=6), seed=5, folder=tmp_path / name)
        files.append(run_files(tmp_path / name))
    assert len(files[0]) == 3
    assert files[0] == files[1]
