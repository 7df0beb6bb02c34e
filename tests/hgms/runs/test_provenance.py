"""What a run records of its surroundings, and what a stranger's record may hold."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.helpers import rejects

from hgms.comparison.usage import measured
from hgms.runs import data_of
from hgms.runs.provenance import _git
from hgms_core import ConfigError, DataError


@pytest.mark.parametrize("text", ["[]", '{"wall_seconds": "x"}', "[" * 9999, None])
def test_resources_of_any_shape_do_no_harm(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "resources.json"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    with measured(tmp_path, "cpu"):
        pass
    assert json.loads(path.read_bytes())["wall_seconds"] >= 0


def test_asking_for_the_commit_runs_nothing_of_the_repository(tmp_path: Path) -> None:
    """A stranger's .git/config names programs: a monitor of files, filters."""

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", ".")
    git("commit", "-qm", "a")
    hostile = tmp_path / "hostile"
    hostile.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\ncat\n")
    hostile.chmod(0o755)
    (tmp_path / ".gitattributes").write_text("* filter=x\n")
    (tmp_path / "file").write_text("b")  # as long as before, so git would compare the contents
    for key in ("core.fsmonitor", "filter.x.clean", "filter.x.smudge", "core.pager"):
        git("config", key, str(hostile))
    (tmp_path / "executed").unlink(missing_ok=True)
    assert len(_git(tmp_path) or "") == 12
    assert not (tmp_path / "executed").exists()


def test_data_that_cannot_be_read_have_the_reason_for_their_contents() -> None:
    for error in (FileNotFoundError(2, "No such file"), DataError("missing-file", "no such data")):
        task = SimpleNamespace(made_of=Mock(side_effect=error))
        assert data_of(task) == {"made_of": str(error)}
    with rejects("wrong-result", of=ConfigError):
        data_of(SimpleNamespace(made_of=lambda: {"rows": b"digest"}))
