"""What a run records of its surroundings."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hgms.runs.provenance import _git


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
