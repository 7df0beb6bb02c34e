"""`hgms mix` on ranks: fine-tuning and evaluation with the numbers of one process, resumed on
another number of ranks.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from launched import children_of, free_address, on_ranks
from safetensors.torch import load_file
from support.helpers import rejects
from support.small_mixes import TASK, begin
from tuned_model import llama, table, tune

from hgms_core import ConfigError
from hgms_mix.stages import carry_out, load
from hgms_mix.stages.batches import Dealt
from hgms_mix.stages.evaluate import row_losses
from hgms_mix.stages.finetune import ensure_parts
from hgms_mix.stages.settings import Finetune

pytestmark = [
    pytest.mark.extended,
    # peft's own calls of names that transformers has renamed
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    ),
]

FOLLOWER = "hgms_mix.stages.follower"


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def assert_alike(ours: Path, alone: Path) -> None:
    """The same steps and the same adapter, to rounding of float32."""
    for own, other in zip(logged(ours), logged(alone), strict=True):
        assert own == pytest.approx(other, rel=1e-5)
    own, other = (
        load_file(folder / "adapter/adapter_model.safetensors") for folder in (ours, alone)
    )
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_ranks_train_as_one_process_does_and_go_on_from_one_another(tmp_path: Path) -> None:
    """Rows of all lengths in micro-batches, a last step that is not full, a schedule, clipping,
    gradient checkpointing.
    """
    tune(tmp_path / "one")
    tune(tmp_path / "one-two", stop=3)
    on_ranks("tuned_model.py", 2, tmp_path)
    assert_alike(tmp_path / "two", tmp_path / "one")
    assert_alike(tmp_path / "one-two", tmp_path / "one")
    tune(tmp_path / "two-one")
    assert_alike(tmp_path / "two-one", tmp_path / "one")
    # with as many ranks to the bit, dropout and all
    for name in ("losses.jsonl", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "two-two-dropout" / name).read_bytes() == (
            tmp_path / "two-dropout" / name
        ).read_bytes()
    assert logged(tmp_path / "two-dropout") != logged(tmp_path / "two")

    assert_alike(tmp_path / "parts", tmp_path / "one")

    losses = row_losses(llama(), table(), rows=4).as_dict()
    for rank, name in itertools.product(range(2), ("whole", "parts")):
        assert json.loads((tmp_path / f"losses-{name}-{rank}.json").read_text()) == losses


def test_a_step_is_dealt_out_whole() -> None:
    """Every row of a step to one rank, as many micro-batches to each, none above its size."""
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0)).tolist()
    for micro, accumulation, count in ((2, 4, 2), (4, 3, 2), (4, 3, 3), (1, 6, 3), (8, 1, 4)):
        together = micro * accumulation
        own = -(-accumulation // count)
        ranks = [list(Dealt(order, together, own, rank, count)) for rank in range(count)]
        assert len({len(batches) for batches in ranks}) == 1
        assert max(len(batch) for batches in ranks for batch in batches) <= micro
        for step in range(-(-21 // together)):
            batches = itertools.chain(*(each[step * own : (step + 1) * own] for each in ranks))
            dealt = sorted(row for row in itertools.chain(*batches) if row >= 0)
            assert dealt == sorted(order[step * together : (step + 1) * together])


def test_steps_that_do_not_part_evenly_are_refused_with_what_would() -> None:
    ensure_parts(Finetune(micro_batch=2, accumulation=3), 6)
    with rejects("uneven-split", "finetune", "accumulation", of=ConfigError) as caught:
        ensure_parts(Finetune(micro_batch=2, accumulation=3), 4)
    assert (caught.value.hint or "").endswith("accumulation = 2 or 4, or run.ranks = 3")


MIX = f"""
seed = 1
budget = "2 steps"
[method]
name = "hg-ms"
generator = {{ count = 2, steps = 1, batch_size = 4 }}
[certainty]
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
save_every = 2
epochs = 2
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mix that one process has made, in runs; the same up to its sample, in begun."""
    place = tmp_path_factory.mktemp("mix")
    still = "n_positions = 40, resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0"
    text = MIX.replace('path = "', f'path = "{place}/').replace("n_positions = 40", still)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        begin(text)
    carry_out(load(place / "mix.toml", out=str(place / "begun")), upto="sample")
    shutil.copytree(place / "begun", place / "runs")
    carry_out(load(place / "mix.toml", out=str(place / "runs")))
    return place


def on_two(made: Path, out: Path) -> Any:
    return load(made / "mix.toml", ["run.ranks=2"], out=str(out))


def assert_made_alike(ours: Path, alone: Path) -> None:
    assert_alike(ours / "finetune", alone / "finetune")
    own, other = (
        json.loads((folder / "evaluate/losses-sums.json").read_bytes()) for folder in (ours, alone)
    )
    assert (own["digest"], own["tokens"]) == (other["digest"], other["tokens"])
    assert own["total"] == pytest.approx(other["total"], rel=1e-5)


@pytest.mark.nightly
def test_torchrun_starts_the_ranks_of_all_stages(made: Path, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    port = ("--master-port", free_address()[10:])
    mix = ("-m", "hgms", "mix", made / "mix.toml", "--set", "run.ranks=2")
    done = subprocess.run(
        [sys.executable, *torchrun, *port, *mix, "--out", tmp_path / "runs"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (ours,), (alone,) = (place.glob("runs/*/*/seed-1") for place in (tmp_path, made))
    assert_made_alike(ours, alone)


def test_a_mix_that_goes_on_with_ranks_is_that_of_one_process(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "begun", tmp_path / "runs")
    (alone,) = (made / "runs").glob("*/*/seed-1")
    assert_made_alike(Path(carry_out(on_two(made, tmp_path / "runs"))["folder"]), alone)
    assert not children_of(FOLLOWER)
