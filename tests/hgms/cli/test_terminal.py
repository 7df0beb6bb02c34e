"""What the commands look like on a terminal of 80 columns, and what a shell offers at the tab
key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from attrs import field, fields, make_class, validators
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from support.fakes import call, json_of

from hgms.cli import main
from hgms.runs.describe import range_of
from hgms_core.validators import decay_rate, optional_positive, positive, share

pytestmark = pytest.mark.usefixtures("one_registry")


def shown(*arguments: str) -> list[str]:
    done = CliRunner().invoke(main, list(arguments), env={"COLUMNS": "80"}, terminal_width=80)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def offered(*line: str) -> list[str]:
    """What is offered for the last word."""
    words = ShellComplete(main, {}, "hgms", "_HGMS_COMPLETE").get_completions(
        list(line[:-1]), line[-1]
    )
    return [word.value for word in words]


# --- help and describe
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("validator", "shown"),
    [
        (None, ""),
        (positive, "> 0"),
        (share, "in [0, 1]"),
        (decay_rate, "in [0, 1)"),
        (optional_positive, "> 0"),
        (validators.min_len(1), "at least 1 long"),
        ([validators.instance_of(int), validators.ge(1), validators.le(9)], "in [1, 9]"),
    ],
)
def test_the_range_of_a_validator(validator: Any, shown: str) -> None:
    [item] = fields(make_class("Part", {"a": field(validator=validator)}))
    assert range_of(item.validator) == shown


# --- compat
# --------------------------------------------------------------------------------------------------


def test_compat_of_one_task_or_one_method_says_why_in_its_lines() -> None:
    lines = shown("compat", "--task", "sphere", "--method", "fixed,hg-ms")
    assert any(re.fullmatch(r" fixed +no .*named data sources .*", line) for line in lines)
    assert ["hg-ms", "ok"] in [line.split() for line in lines]
    rows = json_of("compat", "--method", "hg-ms", "--task", "sphere,quadratic")
    assert [(row["method"], row["task"]) for row in rows] == [
        ("hg-ms", "sphere"),
        ("hg-ms", "quadratic"),
    ]
    wrong = call("compat", "--task", "sphera")
    assert (wrong.exit_code, "'sphere'" in wrong.stderr) == (2, True)


# --- completion
# --------------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("list s", ["selector", "solver"]),
        ("describe solvers ny", ["nystrom"]),
        ("describe task ny", []),
        ("check ny", ["nystrom"]),
        ("check-gradient quad", ["quadratic"]),
        ("compat --method hg-ms,tp", ["hg-ms,tpe"]),
        ("new plugin mine --kind gen", ["generator"]),
        ("compare --methods tp", ["tpe"]),
        ("compare grid.toml --methods ", ["uniform", "mine"]),
        ("compare grid.toml --methods mine,", ["mine,uniform"]),
        ("compare grid.toml --task q", ["quadratic"]),
        ("compare grid.toml --seeds 2 --reference m", ["mine"]),
        ("compare nowhere.toml --methods x", []),
        ("describe nonsense x", []),
        ("nonsense x", []),
    ],
)
def test_the_last_word_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    methods = 'method = ["uniform", { name = "hg-ms", label = "mine" }]\n'
    Path("grid.toml").write_text('task = ["quadratic"]\n' + methods)
    assert offered(*line.split(" ")) == expected
    assert {"describe", "demo"} <= set(offered("de"))
