"""`hgms mix` on ranks: all ranks learn the mixture, and one process runs the later stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from launches import children_of, free_address
from support.small_mixes import TASK, begin

from hgms_mix.stages import load, run_mix

pytestmark = [
    pytest.mark.extended,
    # peft's own calls of names that transformers has renamed
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    ),
]

MIX = f"""
seed = 1
budget = "2 steps"
[method]
name = "hg-ms"
generator = {{ count = 2, steps = 1, batch_size = 4 }}
[uncertainty]
validation_blocks = 4
source_blocks = 4
rows = 1
[run]
threads = 1
{TASK}
[sample]
size = 29
[finetune]
lr = 1e-2
micro_batch = 3
accumulation = 2
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mix that one process has made."""
    place = tmp_path_factory.mktemp("mix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        begin(MIX.replace('path = "', f'path = "{place}/'))
    run_mix(load(place / "mix.toml", out=str(place / "runs")))
    return place


def assert_alike(ours: Path, alone: Path) -> None:
    own, other = (json.loads((folder / "report.json").read_bytes()) for folder in (ours, alone))
    assert own["sample"]["counts"] == other["sample"]["counts"]
    for key in ("token_loss", "example_loss"):
        losses = [report["test"]["sums"][key]["value"] for report in (own, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.nightly
def test_torchrun_starts_the_ranks_of_a_mix_and_of_a_finished_one(
    made: Path, tmp_path: Path
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    mix = ("-m", "hgms", "mix", made / "mix.toml", "--set", "run.ranks=2", "--out", "runs")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, *torchrun, "--master-port", free_address()[10:], *mix],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "reweight: done before" in done.stderr
    (ours,), (alone,) = (place.glob("runs/*/*/seed-1") for place in (tmp_path, made))
    assert_alike(ours, alone)


def test_a_mix_on_ranks_is_that_of_one_process(made: Path, tmp_path: Path) -> None:
    (alone,) = (made / "runs").glob("*/*/seed-1")
    config = load(made / "mix.toml", ["run.ranks=2"], out=str(tmp_path / "runs"))
    assert_alike(Path(run_mix(config)["folder"]), alone)
    assert not children_of("hgms.runs.follower")
