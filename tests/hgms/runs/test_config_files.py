"""Configurations in files that nobody vouches for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.config_parts import REGISTRY, TEXT, error_of
from support.helpers import rejects

from hgms.runs import load
from hgms_core.errors import ConfigError


def write(folder: Path, text: str = TEXT) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (str(tmp_path / "absent.toml"), str(tmp_path / "pipe.toml"), "/dev/zero"):
        with rejects("unreadable-file", path, of=ConfigError):
            load(path, registry=REGISTRY)
    with rejects("wrong-format", "run.toml", of=ConfigError) as caught:
        load(write(tmp_path, "seed = \n"), registry=REGISTRY)
    assert "(at line 1, column 8)" in caught.value.message


@pytest.mark.parametrize(
    "line",
    [
        "a = " + "[" * 5000 + "]" * 5000,
        "a" + ".a" * 5000 + " = 1",
        '[run."' + "b" * 100_000 + '"]',
        "seed = " + "9" * 5000,
        "seed = " + "9" * 400,
        "seed = 1979-05-27",
        "run.label = [1979-05-27T07:32:00Z, 07:32:00]",
        "run.threads = 100000000000000000000000000",
        "run.threads = 1000000000",
        "run.checkpoint_seconds = " + "9" * 400,
        "run = 3",
        "task = [[[[1]]]]",
        'task = "' + "w" * 500_000 + '"',
        "x" * 2_000_000 + " = 1",
        "\n".join(f"key{number} = 1" for number in range(3000)),
        "budget = {outer_steps = 3, seconds = 1979-05-27}",
        'method.name = "\\u001b[31m"',
    ],
    ids=lambda line: line[:30],
)
def test_a_hostile_file_is_one_message(tmp_path: Path, line: str) -> None:
    key = line.partition(" ")[0].partition(".")[0]
    text = "\n".join(
        one for one in TEXT.splitlines() if not one.startswith(f"{key} ") and f"[{key}" not in one
    )
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, f"{line}\n{text}"), registry=REGISTRY)
    assert len(str(caught.value)) < 600_000 / 20
    if "\n" not in line and len(line) < 6000:
        with pytest.raises(ConfigError):
            load(write(tmp_path), [line.replace(" = ", "=")], registry=REGISTRY)


def test_an_integer_that_no_float_holds_is_rejected() -> None:
    error = error_of(run={"checkpoint_seconds": 10**400})
    assert (error.code, error.place) == ("wrong-type", ("run.toml", "run", "checkpoint_seconds"))
