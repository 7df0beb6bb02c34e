"""A run folder that was cut off, changed or made by a stranger: a resumed run ends as if nothing
had been, or an error names the file and nothing is changed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.descent import STEPS, descend, files, fill, resumed, stopped
from support.helpers import rejects, run_files

from hgms.runs import RunFolder
from hgms_core.errors import CheckpointError

Contents = dict[str, bytes]
Change = Callable[[RunFolder], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    path = tmp_path_factory.mktemp("whole") / "run"
    descend(folder=path)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    """The files of a run that stopped after 6 of 9 steps."""
    return files(stopped(tmp_path_factory.mktemp("stopped") / "run").path)


@pytest.fixture
def folder(tmp_path: Path, sound: Contents) -> RunFolder:
    return fill(tmp_path / "run", sound)


# --- what is no longer as it was written

TENSORS = "checkpoint-6.safetensors"
JSON = ("manifest.json", "steps.jsonl", "timings.jsonl")
FILES = (*JSON, TENSORS, "config.toml")


def edit(name: str, change: Callable[[bytes], bytes]) -> Change:
    def edited(folder: RunFolder) -> None:
        path = folder.path / name
        path.write_bytes(change(path.read_bytes() if path.exists() else b""))

    return edited


def cut(name: str, length: int) -> Change:
    return edit(name, lambda data: data[:length])


def append(name: str, text: bytes) -> Change:
    return edit(name, lambda data: data + text)


def reads(text: str, name: str) -> Change:
    return edit(name, lambda _: f"{text}\n".encode())


def without(name: str) -> Change:
    return lambda folder: (folder.path / name).unlink()


def pipe(name: str, *others: str) -> Change:
    """The file is a pipe, which has no end; the others are gone."""

    def change(folder: RunFolder) -> None:
        for each in (name, *others):
            (folder.path / each).unlink(missing_ok=True)
        os.mkfifo(folder.path / name)

    return change


BREAKS_A_ROW = edit("steps.jsonl", lambda data: data.replace(b'\n{"step": 1,', b"\n{broken", 1))
DROPS_A_ROW = edit("steps.jsonl", lambda data: data[: data.rfind(b"\n", 0, -1) + 1])
SHAPES = ("[]", "{}", "null", "[" * 100_000, '{"step": ' + "9" * 5000 + "}", '{"checksum": []}')


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        (cut(TENSORS, -8), "damaged-file", TENSORS),
        (append(TENSORS, b"\0"), "damaged-file", TENSORS),
        (without(TENSORS), "unreadable-file", TENSORS),
        (cut("manifest.json", 40), "damaged-file", "manifest.json"),
        (BREAKS_A_ROW, "damaged-file", "steps.jsonl"),
        (DROPS_A_ROW, "damaged-file", "steps.jsonl"),
        (without("steps.jsonl"), "unreadable-file", "steps.jsonl"),
        (without("config.toml"), "missing-file", "config.toml"),
        *((pipe(name), "not-a-file", name) for name in (*FILES, "env.json", "summary.json")),
        # also where there is no checkpoint yet
        *(
            (pipe(name, "manifest.json"), "not-a-file", name)
            for name in ("steps.jsonl", "timings.jsonl", "env.json")
        ),
        *((reads(text, "manifest.json"), "damaged-file", "manifest.json") for text in SHAPES),
        *((reads("[" * 9999, name), "damaged-file", name) for name in JSON[1:]),
        *((reads("{}", name), "damaged-file", name) for name in JSON[1:]),
    ],
)
def test_a_damaged_folder_is_rejected_before_anything_is_changed(
    folder: RunFolder, change: Change, code: str, name: str
) -> None:
    change(folder)
    before = files(folder.path)
    with rejects(code, of=CheckpointError) as caught:
        resumed(folder)
    assert caught.value.place[0] == str(folder.path / name)
    assert files(folder.path) == before


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_rejected_or_harmless(
    folder: RunFolder, sound: Contents, whole: Path, name: str
) -> None:
    chance = random.Random(name)
    seconds = [json.loads(line)["seconds"] for line in sound["timings.jsonl"].splitlines()]
    found = 0
    for _ in range(8):
        data = bytearray(sound[name])
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        damaged = {**sound, name: bytes(data)}
        fill(folder.path, damaged)
        try:
            result = resumed(folder)
        except CheckpointError:
            found += 1
            assert files(folder.path) == damaged
        else:
            assert run_files(folder.path) == run_files(whole)
            assert [row["seconds"] for row in result.records][:7] == seconds
    assert found > 5


@pytest.mark.parametrize("linked", [".part", ""])
def test_nothing_is_written_through_a_symbolic_link(
    folder: RunFolder, tmp_path: Path, sound: Contents, linked: str
) -> None:
    """Of a stranger's run folder: what its files point to stays as it is. Links in place of its
    own files are rejected.
    """
    other = fill(tmp_path / "other", sound).path
    for name in sound:
        (folder.path / f"{name}{linked}").unlink(missing_ok=True)
        (folder.path / f"{name}{linked}").symlink_to(other / name)
    (folder.path / ".lease").symlink_to(other / "steps.jsonl")
    with rejects("not-a-file", of=CheckpointError) if not linked else nullcontext():
        resumed(folder)
    assert folder.summary.exists() == bool(linked)
    assert files(other) == sound


# --- what a kill leaves


def before_the_first_checkpoint(folder: RunFolder) -> None:
    """Rows that no checkpoint speaks for go too."""
    folder.manifest.unlink()
    edit("steps.jsonl", lambda data: data.replace(b"0.", b"1."))(folder)


@pytest.mark.parametrize(
    "change",
    [
        append("steps.jsonl", b'{"step": 7, "upper_lo'),
        append("steps.jsonl", b'{"step": 3}\n'),
        append("timings.jsonl", b'{"step": 7, "seco'),
        append("diagnosis.jsonl", b'{"step": 7}\n'),
        reads("[" * 9999, "summary.json"),
        append("checkpoint-3.safetensors", b"half"),
        append("checkpoint-11.safetensors.part", b"half"),
        before_the_first_checkpoint,
    ],
)
def test_what_a_kill_left_goes_when_the_run_is_resumed(
    folder: RunFolder, whole: Path, change: Change
) -> None:
    change(folder)
    resumed(folder)
    assert run_files(folder.path) == run_files(whole)
    assert [row["step"] for row in folder.records()] == list(range(STEPS + 1))
    seconds = [row["seconds"] for row in folder.records()]
    assert seconds == sorted(seconds), "the clock goes on"
