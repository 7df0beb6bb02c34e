"""What the commands look like on a terminal of 80 columns, and what a shell offers at the tab
key.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import field, fields, frozen, validators
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from hgms.cli import main
from hgms.config import decay_rate, decay_rates, optional_whole, positive, share
from hgms.runs.describe import range_of
from hgms.runs.docstrings import folded
from hgms_core import choice
from hgms_core.registry import KINDS, Registry

REGISTRY = Registry.load()
NAMES = {kind: [component.name for component in REGISTRY.components(kind)] for kind in KINDS}


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


# --- help
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["", "mix", "new"])
def test_no_summary_of_a_command_is_cut_at_80_columns(group: str) -> None:
    lines = shown(*group.split(), "--help")
    commands = [line for line in lines[lines.index("Commands:") + 1 :] if line.strip()]
    assert commands
    for line in commands:
        assert len(line) <= 80
        assert re.fullmatch(r"  \S+ +\S.*[^.]\.|  \S+ +\S.*\?", line), (
            f"cut, or without an end: {line}"
        )


# --- describe
# --------------------------------------------------------------------------------------------------


def test_no_docstring_keeps_its_markup_or_is_wider_than_the_terminal() -> None:
    for component in REGISTRY.components():
        if not isinstance(component.target, type):
            continue
        doc = component.target.__doc__ or ""
        text = folded(doc, 80)
        assert not re.search(r"``|:\w+:`|::$|^\.\. \w", text, re.MULTILINE), component.name
        for line in text.splitlines():
            assert len(line) <= 80 or line.lstrip().startswith((">>> ", "... ")), (
                component.name,
                line,
            )
        words = lambda source: re.findall(r"[A-Za-zα-ω]{3,}", source)  # noqa: E731
        lost = set(words(doc)) - set(words(text)) - {"class", "meth", "func", "mod", "hgms_core"}
        assert not lost, (component.name, lost)


def test_paragraphs_items_formulas_and_examples() -> None:
    text = folded(
        """First line that is long enough to be folded into two of them.

        Equation::

            y  =  a x        (aligned)

            z  =  y

        Arguments:
            lr: the *rate* of :class:`~hgms_core.Key`, which goes
                on here and ends.
            steps, more: ``n``. See :meth:`with_key`.

        - a point that is long enough to be folded
          into two
        - another

        >>> f(1, [2, 3], "a string", other=4, third="more words")
        ... # doctest: +SKIP
        'f'

        Last.
        """,
        44,
    )
    assert text == inspect.cleandoc(
        """
        First line that is long enough to be folded
        into two of them.

        Equation:

            y  =  a x        (aligned)

            z  =  y

        Arguments:
            lr: the rate of Key, which goes on here
                and ends.
            steps, more: `n`. See with_key.

        - a point that is long enough to be folded
          into two
        - another

        >>> f(1, [2, 3], "a string", other=4,
        ...     third="more words")
        ... # doctest: +SKIP
        'f'

        Last.
        """
    )


def test_ranges_of_validators() -> None:
    @frozen
    class Fields:
        plain: int = 1
        above: float = field(default=1.0, validator=positive)
        between: float = field(default=0.5, validator=share)
        decay: float = field(default=0.5, validator=decay_rate)
        two: tuple[float, float] = field(default=(0.1, 0.2), validator=decay_rates)
        maybe: int | None = field(default=None, validator=optional_whole)
        word: str = field(default="a", validator=choice("a", "b"))
        text: str = field(default="a", validator=validators.min_len(1))
        both: int = field(
            default=1, validator=[validators.instance_of(int), validators.ge(1), validators.le(9)]
        )

    assert {item.name: range_of(item.validator) for item in fields(Fields)} == {
        "plain": "",
        "above": "> 0",
        "between": "in [0, 1]",
        "decay": "in [0, 1)",
        "two": "two numbers in [0, 1)",
        "maybe": "> 0",
        "word": "",
        "text": "at least 1 long",
        "both": "in [1, 9]",
    }


@pytest.mark.parametrize("name", ["cg", "quadratic", "implicit", "hg-ms"])
def test_describe_fits_80_columns(name: str) -> None:
    lines = shown("describe", name)
    assert [
        line for line in lines if len(line) > 80 and not line.startswith((">>> ", "... ", "["))
    ] == []
    if name == "quadratic":
        text = "\n".join(lines)
        assert "Metrics, lower is better: value, upper_loss" in text
        assert "few-upper: few upper variables" in text
        assert "θ at these defaults: 20 numbers (log_penalty [20])" in text
        assert re.search(r"rows +200 +an integer ≥ 1", text)


# --- compat
# --------------------------------------------------------------------------------------------------


def test_compat_fits_80_columns_and_breaks_no_name() -> None:
    lines = shown("compat")
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for number, task in enumerate(NAMES["task"], 1):
        assert f"{number} {task}" in text
    for method in NAMES["method"]:
        assert any(line.split()[:1] == [method] for line in lines), method


def test_compat_of_one_task_or_one_method_says_why_in_its_lines() -> None:
    lines = shown("compat", "--task", "sphere", "--method", "fixed,hg-ms")
    assert lines[0] == "task sphere"
    assert any(re.fullmatch(r" fixed +no .*named data sources .*", line) for line in lines)
    assert any(line.split() == ["hg-ms", "ok"] for line in lines)
    lines = shown("compat", "--method", "tpe", "--task", "quadratic", "--task", "hyper-cleaning")
    assert lines[0] == "method tpe"
    assert any(line.split() == ["quadratic", "ok"] for line in lines)
    two = CliRunner().invoke(
        main, ["compat", "--method", "hg-ms", "--task", "sphere,quadratic", "--json"]
    )
    assert [(row["method"], row["task"]) for row in json.loads(two.stdout)] == [
        ("hg-ms", "sphere"),
        ("hg-ms", "quadratic"),
    ]
    wrong = CliRunner().invoke(main, ["compat", "--task", "sphera"])
    assert wrong.exit_code == 2
    assert all(word in wrong.stderr for word in ("'sphera'", "'sphere'"))


# --- completion
# --------------------------------------------------------------------------------------------------


def test_names_and_kinds_are_completed() -> None:
    assert {"describe", "demo"} <= set(offered("de"))
    assert "run" not in offered("de")
    assert offered("list", "s") == ["selector", "solver"]
    assert {"solver", "soba"} <= set(offered("describe", "so"))
    assert offered("describe", "solvers", "ny") == ["nystrom"]
    assert offered("describe", "task", "ny") == []
    assert offered("check", "ny") == ["nystrom"]
    assert offered("check-gradient", "quad") == ["quadratic"]
    assert offered("compat", "--method", "hg-ms,tp") == ["hg-ms,tpe"]
    assert offered("new", "plugin", "mine", "--kind", "solver,gen") == ["solver,generator"]


def test_labels_of_a_grid_are_completed(tmp_path: Path) -> None:
    assert offered("compare", "--methods", "tp") == ["tpe"]
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'task = ["quadratic"]\nmethod = ["uniform", { name = "hg-ms", label = "mine" }]\n'
    )
    assert offered("compare", str(grid), "--methods", "") == ["uniform", "mine"]
    assert offered("compare", str(grid), "--methods", "mine,") == ["mine,uniform"]
    assert offered("compare", str(grid), "--task", "q") == ["quadratic"]
    assert offered("compare", str(grid), "--seeds", "2", "--reference", "m") == ["mine"]


@pytest.mark.parametrize(
    "line",
    [
        ("nonsense", "x"),
        ("describe", "nonsense", "x"),
        ("compare", "nowhere.toml", "--methods", "x"),
    ],
)
def test_what_is_wrong_with_the_line_offers_nothing_and_raises_nothing(
    line: tuple[str, ...],
) -> None:
    assert offered(*line) == []


def test_a_completer_that_fails_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no plugins today")

    monkeypatch.setattr("hgms.cli.complete.Registry", broken)
    assert offered("check", "ny") == []


def test_a_reader_that_leaves_is_no_fault_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hgms describe cg | head`"""

    def printed(*_: Any, **__: Any) -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904 - so rich leaves

    monkeypatch.setattr("rich.console.Console.print", printed)
    done = CliRunner().invoke(main, ["describe", "cg"])
    assert (done.exit_code, done.stderr) == (1, "")
