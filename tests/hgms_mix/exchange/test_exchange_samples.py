"""Samples that are handed over: how a row is written, and what is no finished sample."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from support.exports import sample_of
from support.helpers import rejects

from hgms.store import Folder, read_manifest
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError
from hgms_mix.exchange.trl import answers_in

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")


def test_a_row_of_alpaca_is_a_prompt_and_an_answer_with_its_end_mark(here: Path) -> None:
    sample = sample_of("plain")
    task = evolve(sample.config.task, template="alpaca")
    sample = evolve(sample, config=evolve(sample.config, task=task))
    for rows in sample.rows.values():
        for row, pieces in zip(rows, sample.pieces_of(rows), strict=True):
            asked, answer = (turn["content"] for turn in row["messages"])
            ((prompt, ended),) = answers_in(pieces, "")
            assert f"### Instruction:\n{asked}\n\n### Response:\n" in prompt
            assert ended == f"{answer}{sample.tokenizer.eos_token}"


def edited(name: str, old: str, new: str) -> Callable[[Path], object]:
    def edit(to: Path) -> None:
        (path,) = to.glob(name)
        path.write_text(path.read_text().replace(old, new))

    return edit


def unfinished(to: Path) -> None:
    (path,) = to.glob("sample-*")
    work = Folder(path, read_manifest(path).key)
    work.commit([], facts={})


def without_rows(to: Path) -> None:
    (path,) = to.glob(ROWS)
    path.write_bytes(b"")


MANIFEST = "sample-*/manifest.json"
ROWS = "sample-*/rows.jsonl.gz"


@pytest.mark.parametrize(
    ("change", "code", "place", "of"),
    [
        (lambda to: (to / "mix.toml").unlink(), "missing-file", "", ConfigError),
        (lambda to: shutil.rmtree(*to.glob("sample-*")), "missing-file", "", ConfigError),
        (unfinished, "missing-file", "", ConfigError),
        (edited("mix.toml", "size = 30", "size = 20"), "other-settings", "", ConfigError),
        (edited(MANIFEST, "{", ""), "damaged-file", MANIFEST, CheckpointError),
        (without_rows, "damaged-file", ROWS, CheckpointError),
    ],
)
def test_a_folder_without_a_finished_sample_is_refused(
    here: Path, tmp_path: Path, change: Callable[[Path], object], code: str, place: str, of: Any
) -> None:
    folder = tmp_path / "runs" / "task" / "method" / "seed-1"
    shutil.copytree(next((here / "runs").glob("plain/*/seed-1")), folder)
    (where,) = folder.glob(place) if place else (folder,)
    change(folder)
    with rejects(code, str(where), of=of):
        sample_of(folder)
