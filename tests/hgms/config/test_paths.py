"""Paths as users write them, and the digests of the files of a problem."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from support.helpers import rejects

from hgms.config import data_fingerprint, expand
from hgms.config.fingerprinting import fingerprint
from hgms.store import file_digest
from hgms_core.errors import ConfigError


def test_homes_and_variables_are_expanded_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("DATA", "/d")
    monkeypatch.setenv("BELOW_HOME", "~/d")
    paths = {"~/x": "/h/x", "$DATA/${DATA}/y": "/d//d/y", "$BELOW_HOME/z": "/h/d/z"}
    assert {path: str(expand(path)) for path in paths} == {
        path: str(Path(expanded)) for path, expanded in paths.items()
    }
    for path, code in (
        ("~nobody-has-this-name/x", "missing-file"),
        ("$NO_SUCH_VARIABLE/x", "missing-variable"),
        ("a\0b", "wrong-value"),
    ):
        with rejects(code, "task", "path", of=ConfigError):
            expand(path, ("task", "path"))


def test_a_fingerprint_lists_the_digest_of_each_file_and_a_pipe_has_none(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in "ab"]
    assert data_fingerprint([tmp_path / "a", tmp_path / "b"]) == {"files": digests}
    assert data_fingerprint([]) == {}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        file_digest(tmp_path / "pipe")


def test_the_fingerprint_of_a_set_has_no_order() -> None:
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other), "their hashes collide"
    assert fingerprint(one) == fingerprint(other)
