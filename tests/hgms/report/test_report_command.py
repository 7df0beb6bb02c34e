"""`hgms report` and `hgms plot`: what they say, wrong input, missing extras, a full disk."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.made_runs import write_mixtures, write_run

import hgms.report as report
from hgms.cli import main


def call(*arguments: str | Path, code: int = 0) -> Any:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done


def test_the_command_says_what_it_wrote_and_left_out(comparison: Path, tmp_path: Path) -> None:
    printed = json.loads(call("report", comparison, "--out", tmp_path / "r.md", "--json").stdout)
    assert printed["written"] == [str(tmp_path / "r.md")]
    assert (printed["runs"], len(printed["failed"]), len(printed["left_out"])) == (24, 1, 3)
    task = printed["tasks"][0]
    assert (task["winner"], "few seeds" in task["verdict"]) == (None, True)
    assert task["methods"][0]["metrics"]["value"]["mean"] == pytest.approx(0.1)
    plain = call("report", comparison, "--out", tmp_path / "r.tex", "--reference", "baseline")
    assert plain.stderr.count("left out: ") == 3
    assert "baseline" in (tmp_path / "r.tex").read_text()


@pytest.mark.extended
def test_pictures_of_curves_mixtures_and_ranks(comparison: Path, tmp_path: Path) -> None:
    folder = write_mixtures(tmp_path / "runs", budgets=[3600.0])
    out = tmp_path / "m.svg"
    for words, parts in (
        ([comparison], ["hg-ms", "oracle calls", "ring (rho = 0.4)", "uniform"]),
        ([folder, "--mixture"], ["hg-ms", "scalebio", "source-4", "weight"]),
        ([comparison, "--ranks"], ["hg-ms", "baseline", "uniform", "lost"]),
    ):
        call("plot", *words, "--out", out)
        shown = out.read_text()
        assert [part for part in parts if part not in shown] == []
    one = write_run(tmp_path / "one")
    for flag in ("--mixture", "--ranks"):
        call("plot", one, flag, "--out", tmp_path / "no.svg", code=2)


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (["runs", "--metric", "val"], "(metrics)\n  did you mean 'value'?"),
        (["runs", "--reference", "halv"], "(reference)\n  did you mean 'halve'?"),
        (["runs", "--out", "report.docx"], "(report.docx)"),
        (["runs", "--out", "report"], "(report)"),
        (["runs", "--out", "report.md", "--steps"], "(--steps)"),
        (["runs", "--watch", "--out", "report.html"], "(--out)"),
        (["runs", "--watch", "--json"], "(--json)"),
        (["damaged"], "(summary.json)"),
        (["empty"], "0 folders skipped ("),
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
    [
        ("report", "r.html", "plotly", "report"),
        ("report", "r.html", "jinja2", "report"),
        ("report", "r.parquet", "pyarrow", "report"),
        ("plot", "r.svg", "matplotlib", "plot"),
    ],
)
def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, out: str, module: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    done = call(command, write_run(tmp_path), "--out", tmp_path / out, code=2)
    assert f"pip install 'hgms[{extra}]'" in done.stderr


@pytest.mark.parametrize("suffix", [*report.SUFFIXES, ".svg"])
def test_a_full_disk_leaves_the_old_report(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "runs")
    out = tmp_path / "out" / f"r{suffix}"
    out.parent.mkdir()
    out.write_text("old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    done = call("plot" if suffix == ".svg" else "report", run, "--out", out, code=1)
    assert f"({out})" in done.stderr
    assert (out.read_text(), list(out.parent.iterdir())) == ("old", [out])
