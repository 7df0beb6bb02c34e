"""Fine-tuning that was broken off: it ends as one that was not, bit for bit, or says what is
damaged.
"""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.finetuning import PowerCut, assert_ended_alike, cut_at, gpt, lora, random_rows
from support.helpers import rejects

from hgms.store import DiskError, Folder
from hgms_core.errors import CheckpointError
from hgms_mix.stages.graph import Runner, Stage
from hgms_mix.stages.settings import Finetune
from hgms_mix.stages.training import resume_point, train

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

# peft's own calls of names that transformers has renamed
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
)
SETTINGS = Finetune(lr=1e-2, accumulation=1, save_every=3, seed=5)


def test_a_resumed_run_ends_with_the_very_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = Finetune(
        lr=1e-2,
        accumulation=2,
        save_every=3,
        schedule="cosine",
        warmup=2,
        clip=1.0,
        epochs=2,
        seed=5,
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def go(folder: Path, last: int) -> None:
        folder.mkdir(exist_ok=True)
        own: dict[str, Any] = {"adapter": lora(dropout=0.2), "watch": cut_at(last)}
        train(settings, gpt(dropout=0.1), random_rows(9), Folder(folder, ""), **own)

    go(whole, 99)
    with pytest.raises(PowerCut):
        go(broken, 5)
    (broken / "checkpoints" / "checkpoint-5").mkdir()  # killed while it was being written
    assert resume_point(Folder(broken, "")) == broken / "checkpoints" / "checkpoint-3"
    go(broken, 99)
    assert_ended_alike(whole, broken)


def go_on(folder: Path, last: int = 99) -> None:
    train(SETTINGS, gpt(), random_rows(6), Folder(folder, ""), watch=cut_at(last))


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


def test_a_kill_while_a_checkpoint_is_recorded_or_removed_costs_no_result(
    whole: Path, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: Folder, *names: Any, real: Any = Folder.commit, **named: Any) -> None:
        if named["facts"].get("checkpoint") == "checkpoint-6":
            raise PowerCut
        real(self, *names, **named)

    def half(path: Path, real: Any = shutil.rmtree, **named: Any) -> None:
        held = [file for file in Path(path).rglob("*") if file.is_file()]
        if "checkpoints" not in path.parts or not held:
            return real(path, **named)
        held[0].unlink()
        raise PowerCut

    for place, name, change in ((Folder, "commit", cut), (shutil, "rmtree", half)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, change)
            with pytest.raises(PowerCut):
                go_on(broken)
    go_on(broken)
    assert_ended_alike(whole, broken)


def test_a_kill_between_the_end_of_a_stage_and_the_removal_of_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(work: Folder) -> dict[str, Any]:
        (work.path / "checkpoints").mkdir()
        work.write("checkpoints/state", b"1")
        work.write("result", b"2")
        return {}

    stage = Stage(
        name="tune", version="1", function=write, writes=("result",), scratch=("checkpoints",)
    )
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock(side_effect=PowerCut))
        with pytest.raises(PowerCut):
            Runner(root=tmp_path, values={}).run(stage)
    done = Runner(root=tmp_path, values={}).run(stage)
    assert sorted(path.name for path in done.path.iterdir()) == ["manifest.json", "result"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "../../manifest.json"])
def test_a_flipped_bit_in_a_checkpoint_is_named(file: str, broken: Path) -> None:
    path = (broken / "checkpoints" / "checkpoint-3" / file).resolve()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with rejects("damaged-file", str(path), of=CheckpointError):
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
    assert resume_point(Folder(broken, "")) == newest
    go_on(broken)
    assert_ended_alike(whole, broken)
