"""Checkpoints: what they hold, when they are on the disk, and what a full disk does to them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.descent import descend, files, fill
from support.helpers import assert_same, rejects

from hgms.runs import RunFolder, pack, unpack
from hgms.runs.recorder import Recorder
from hgms.runs.stepper import Position
from hgms.store import DiskError
from hgms_core.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return fill(tmp_path / "run", {})


def test_what_a_checkpoint_stands_on_is_on_the_disk_before_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, tensors and their name in the folder, then the file that points to them, then its
    name, then the old ones go.
    """
    folder.append({"step": 0}, {"step": 0, "seconds": 0.0})
    folder.save({"x": torch.ones(2)}, 0)
    folder.append({"step": 1}, {"step": 1, "seconds": 0.0})
    calls: list[str] = []

    def noted(what: str, before: Any, name: Callable[..., str]) -> Any:
        def act(*arguments: Any, **options: Any) -> Any:
            calls.append(f"{what} {name(*arguments)}")
            return before(*arguments, **options)

        return act

    sync = noted("sync", os.fsync, lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}")).name)
    replace = noted("name", Path.replace, lambda path, to: to.name)
    unlink = noted("remove", Path.unlink, lambda path: path.name)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(Path, "unlink", unlink)
    folder.save({"x": torch.ones(2)}, 1)
    assert [call for call in calls if "remove" not in call or call == calls[-1]] == [
        "sync checkpoint-1.safetensors.part",
        "name checkpoint-1.safetensors",
        "sync steps.jsonl",
        "sync timings.jsonl",
        "sync run",
        "sync manifest.json.part",
        "name manifest.json",
        "sync run",
        "remove checkpoint-0.safetensors",
    ]


def test_a_full_disk_keeps_the_last_checkpoint(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.save({"x": torch.ones(3)}, 1)
    before = files(folder.path)

    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    path = str(folder.path / "checkpoint-2.safetensors")
    with rejects("cannot-write", path, of=DiskError):
        folder.save({"x": torch.zeros(3)}, 2)
    with rejects("cannot-write", path, of=DiskError):
        Recorder(folder=folder).save(Position(state={"x": torch.zeros(3)}, step=2))
    monkeypatch.undo()
    assert files(folder.path) == before


def test_a_state_is_copied_with_views_shared_tensors_and_plain_values() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    nested = [{"n": None, "b": True, "i": 3, "f": 0.1}]
    state = {"a": base, "same": base, "view": base.t(), "nested": nested, "empty": {}}
    structure, tensors = pack(state)
    again = unpack(json.loads(json.dumps(structure)), tensors)
    assert (again["nested"], again["empty"]) == (nested, {})
    assert torch.equal(again["view"], base.t())
    base.zero_()
    assert again["a"].sum() == 15, "the run continues without changing what was packed"


def test_tensors_are_read_back_aligned_as_torch_aligns_them_and_only_in_their_size(
    folder: RunFolder,
) -> None:
    """Products with them then round as they did before they were written."""
    descend(steps=2, folder=folder)
    odd = {f"x{size}": torch.ones(size) for size in (1, 3, 5, 7)}
    folder.save({"odd": odd}, 2)
    loaded, _ = folder.load(torch.device("cpu")) or ({}, -1)
    assert_same(loaded["odd"], odd)
    assert [leaf.data_ptr() % 64 for leaf in loaded["odd"].values()] == [0] * 4
    tensors = folder.path / "checkpoint-2.safetensors"
    os.truncate(tensors, 1 << 43)  # 8 TiB, sparse
    with rejects("damaged-file", str(tensors), of=CheckpointError):
        folder.load()
