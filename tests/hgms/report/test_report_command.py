"""`hgms report` and `hgms plot`: what they say, wrong input, missing extras."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.run_folders import write_mixtures, write_run

from hgms.cli import main


def call(*arguments: str | Path, code: int = 0) -> Any:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done


def test_the_command_says_what_it_wrote_and_left_out(comparison: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.tex"
    words = ["report", comparison, "--out", out, "--reference", "baseline", "--json"]
    printed = json.loads(call(*words).stdout)
    assert printed["written"] == [str(out)]
    assert (printed["runs"], len(printed["failed"]), len(printed["skipped"])) == (24, 1, 3)
    task = printed["tasks"][0]
    assert (task["winner"], "a claim needs" in task["verdict"]) == (None, True)
    assert task["methods"][0]["metrics"]["value"]["mean"] == pytest.approx(0.1)


@pytest.mark.extended
def test_pictures_of_curves_and_mixtures(comparison: Path, tmp_path: Path) -> None:
    folder = write_mixtures(tmp_path / "runs", budgets=[3600.0])
    out = tmp_path / "m.svg"
    for words, parts in (
        ([comparison], ["hg-ms", "oracle calls", "ring (rho = 0.4)", "uniform"]),
        ([folder, "--mixture"], ["hg-ms", "scalebio", "source-4", "weight"]),
    ):
        call("plot", *words, "--out", out)
        assert [part for part in parts if part not in out.read_text()] == []


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (["runs", "--metric", "val"], "(metrics)\n  did you mean 'value'?"),
        (["runs", "--out", "report.docx"], "(report.docx)"),
        (["damaged"], "(summary.json)"),
        (["empty"], "skipped folders: 0 ("),
        (["nowhere"], "(nowhere)"),
    ],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    write_run(Path("runs"))
    write_run(Path("damaged"), files={"summary.json": "{"})
    assert place in call("report", *flags, code=2).stderr
    assert not list(tmp_path.glob("report*"))


@pytest.mark.parametrize(
    ("command", "out", "module", "extra"),
    [("report", "r.html", "jinja2", "report"), ("plot", "r.svg", "matplotlib", "plot")],
)
def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, out: str, module: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    done = call(command, write_run(tmp_path), "--out", tmp_path / out, code=2)
    assert f"pip install 'hgms[{extra}]'" in done.stderr
