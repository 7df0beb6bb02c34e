"""What a run records of its surroundings, and what a stranger's record may hold."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from support.descent import resumed, stopped

from hgms.comparison.usage import measured
from hgms.runs import RunConfig, RunFolder
from hgms.runs.provenance import _git, digests


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return stopped(tmp_path / "run", after=2)


def environment(folder: RunFolder) -> dict[str, object]:
    table: dict[str, object] = json.loads((folder.path / "env.json").read_bytes())
    return table


def test_a_run_that_is_resumed_elsewhere_says_so(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    table = environment(folder)
    older = {**table, "versions": {**table["versions"], "torch": "1.0"}}  # type: ignore[dict-item]
    (folder.path / "env.json").write_text(json.dumps(older))
    resumed(folder)
    assert f"torch 1.0 → {torch.__version__}" in caplog.text
    assert environment(folder) == {**table, "before": [older]}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"versions": null}',
        '{"versions": "x", "before": 3}',
        '{"python": "\\u001b[31m"}',
        "[" * 9999,
    ],
)
def test_an_environment_of_any_shape_does_no_harm(folder: RunFolder, text: str) -> None:
    (folder.path / "env.json").write_text(text)
    assert resumed(folder).summary["status"] == "done"
    assert environment(folder)["versions"]["torch"] == torch.__version__  # type: ignore[index]


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


def test_our_own_components_are_known_by_their_version() -> None:
    config = RunConfig.from_dict({"task": "quadratic", "method": "hg-ms", "budget": "2 steps"})
    assert digests([config.task, config.method]) == {}
