"""TOML that is read without trust, and values of a command line."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.helpers import rejects

from hgms.config.tables import merge_setting, parse_toml
from hgms.runs import RunConfig
from hgms_core.errors import CheckpointError, ConfigError

MANY = 40_000


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (".".join([r'"a\"b"'] * MANY) + " = 1", "too-deep"),
        ("x = {" + ".".join(["'a\"'"] * MANY) + " = 1}", "too-deep"),
        ('x = """"' + r'\"""y"' * MANY + "." * 100, "wrong-format"),
        ('"' + r"\"" * MANY + "." * 100, "wrong-format"),
    ],
)
def test_a_deep_key_is_rejected_in_linear_time(text: str, code: str) -> None:
    began = time.process_time()
    with rejects(code, "config.toml", of=CheckpointError):
        parse_toml(text, "config.toml")
    assert time.process_time() - began < 1.0


def test_values_of_a_command_line() -> None:
    wanted: dict[str, Any] = {
        ".5": 0.5,
        "5.": 5.0,
        "-.5e1": -5.0,
        "1e3": 1000.0,
        "7": 7,
        "2026-11-26": "2026-11-26",
        "12:30:00": "12:30:00",
        "true": True,
        "[1]": [1],
        ".": ".",
        "x." + "a." * 100 + " = 1": "x." + "a." * 100 + " = 1",
    }
    table: dict[str, Any] = {}
    for number, text in enumerate(wanted):
        merge_setting(table, f"key{number}={text}")
    assert list(map(repr, table.values())) == list(map(repr, wanted.values()))


def test_a_field_of_text_takes_dates_and_quoted_numbers() -> None:
    table = {"task": "quadratic", "method": "hg-implicit", "budget": "1 step"}
    for assignment in ("run.out='1e3'", "run.label=2026-11-26", "method.outer.lr=.5"):
        merge_setting(table, assignment)  # type: ignore[arg-type]
    config = RunConfig.from_dict(table)
    assert (config.run.out, config.run.label) == ("1e3", "2026-11-26")
    assert config.as_dict()["method"]["outer"]["lr"] == 0.5
    merge_setting(table, "run.threads=.5")  # type: ignore[arg-type]
    with rejects("wrong-type", "run", "threads", of=ConfigError):
        RunConfig.from_dict(table)


def test_the_folder_of_runs_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    table = {"task": "quadratic", "method": "hg-ms", "budget": "1 step"}
    for out, expanded in (("~", "/h"), ("$HOME/x", "/h/x"), ("runs", "runs")):
        config = RunConfig.from_dict({**table, "run": {"out": out}})
        assert (config.run.out, config.path.is_relative_to(expanded)) == (expanded, True)
