"""Fine-tuning that was broken off: it ends as one that was not, bit for bit, or says what is
damaged.
"""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.finetuning import PowerCut, assert_ended_alike, cut_at, gpt, lora, random_rows
from support.helpers import rejects

from hgms.store import DiskError
from hgms_core.errors import CheckpointError
from hgms_mix.stages.checkpoints import SEAL, newest_checkpoint
from hgms_mix.stages.settings import Finetune
from hgms_mix.stages.training import train

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

# peft's own calls of names that transformers has renamed
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
)
SETTINGS = Finetune(lr=1e-2, accumulation=1, save_every=3)


def test_a_resumed_run_ends_with_the_very_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = Finetune(
        lr=1e-2, accumulation=2, save_every=3, schedule="cosine", warmup=2, clip=1.0, epochs=2
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def go(folder: Path, last: int) -> None:
        folder.mkdir(exist_ok=True)
        own: dict[str, Any] = {"adapter": lora(dropout=0.2), "watch": cut_at(last)}
        train(settings, gpt(dropout=0.1), random_rows(9), folder, seed=5, **own)

    go(whole, 99)
    with pytest.raises(PowerCut):
        go(broken, 5)
    (broken / "checkpoints" / "checkpoint-5").mkdir()  # killed while it was being written
    assert newest_checkpoint(broken / "checkpoints") == broken / "checkpoints" / "checkpoint-3"
    go(broken, 99)
    assert_ended_alike(whole, broken)


def go_on(folder: Path, last: int = 99) -> None:
    train(SETTINGS, gpt(), random_rows(6), folder, seed=5, watch=cut_at(last))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of full fine-tuning."""
    folder = tmp_path_factory.mktemp("whole")
    go_on(folder)
    return folder


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, ended after its fourth step, with a checkpoint of the third."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.raises(PowerCut):
        go_on(folder, 4)
    return folder


@pytest.fixture
def broken(cut: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(cut, tmp_path / "broken"))


def test_a_kill_while_a_checkpoint_is_sealed_or_removed_costs_no_result(
    whole: Path, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, real: Any = shutil.rmtree, **named: Any) -> None:
        held = [file for file in Path(path).rglob("*") if file.is_file() and file.name != SEAL]
        if "checkpoints" not in path.parts or not (broken / "model").exists() or not held:
            return real(path, **named)
        held[0].unlink()
        raise PowerCut

    seal = broken / "checkpoints" / "checkpoint-3" / "sha256.json"
    seal.rename(seal.with_name("sha256.json.part"))
    assert newest_checkpoint(broken / "checkpoints") is None
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(PowerCut):
            go_on(broken)
    go_on(broken)
    assert_ended_alike(whole, broken)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "sha256.json"])
def test_a_flipped_bit_in_a_checkpoint_is_named(file: str, broken: Path) -> None:
    path = broken / "checkpoints" / "checkpoint-3" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with rejects("damaged-file", str(path.parent), of=CheckpointError):
        go_on(broken)


@pytest.mark.parametrize("part", ["weights", "optimiser"])
def test_a_disk_that_is_full_keeps_what_was_saved(
    part: str, whole: Path, broken: Path, request: pytest.FixtureRequest
) -> None:
    """A limit on the size of files, which the libraries meet as they meet a full disk: safetensors
    in the first file of a checkpoint, torch in the optimiser's, which is twice as large."""
    newest = broken / "checkpoints" / "checkpoint-3"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    weights = (newest / "model.safetensors").stat().st_size
    most = weights // 2 if part == "weights" else weights + 5_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    with rejects("cannot-write", str(broken), of=DiskError):
        go_on(broken)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert newest_checkpoint(broken / "checkpoints") == newest
    go_on(broken)
    assert_ended_alike(whole, broken)
