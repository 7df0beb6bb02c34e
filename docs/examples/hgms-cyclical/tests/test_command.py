"""`hgms cycles` counts what the files say, and says what is wrong with what it is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hgms.cli import main


def output(*arguments: object, exit_code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == exit_code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), "a traceback"
    return done.output


def record(
    folder: Path,
    won: list[int],
    gaps: list[float | None],
    *,
    cycles: int = 3,
    method: str = "hg-ms",
    seed: int = 0,
):
    folder.mkdir(parents=True)
    head = {"cycles": cycles, "task": "sphere", "method": method, "seed": seed}
    rows = [
        {"step": i, "cycle": cycle, "gap": gap}
        for i, (cycle, gap) in enumerate(zip(won, gaps, strict=True), start=1)
    ]
    (folder / "cycles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    record(tmp_path / "runs/a/seed-0", [1, 3, 3, 2], [0.1, 0.2, None, 0.3])
    record(tmp_path / "runs/a/seed-1", [3, 3, 3, 3], [0.4, 0.4, 0.4, 0.4], seed=1)
    record(tmp_path / "runs/b/seed-0", [2, 2], [None, None], cycles=2, method="two")
    return tmp_path / "runs"


def table(text: str) -> list[list[str]]:
    """The cells of a printed table, without its rules; cells are two blanks apart."""
    lines = [line for line in text.splitlines() if line.strip(" ─")]
    return [[cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines]


def test_the_table(runs):
    assert table(output("cycles", runs)) == [
        ["task", "method", "runs", "steps", "cycle 1", "cycle 2", "cycle 3", "mean gap"],
        ["sphere", "hg-ms", "2", "8", "12%", "12%", "75%", "0.314"],
        ["sphere", "two", "1", "2", "0%", "100%"],
    ]


def test_json_has_every_number(runs):
    first, second = json.loads(output("cycles", runs / "a", runs / "b", "--json"))
    assert first["shares"] == [1 / 8, 1 / 8, 6 / 8]
    assert first["mean_gap"] == pytest.approx((0.1 + 0.2 + 0.3 + 4 * 0.4) / 7)
    assert first["runs"] == [str(runs / "a/seed-0"), str(runs / "a/seed-1")]
    assert (second["shares"], second["mean_gap"], second["outer_steps"]) == ([0.0, 1.0], None, 2)


def test_a_run_that_has_only_begun_has_no_shares(tmp_path):
    record(tmp_path / "new", [], [])
    assert table(output("cycles", tmp_path))[1] == ["sphere", "hg-ms", "1", "0"]


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_picture_is_drawn(runs, tmp_path, kind):
    path = tmp_path / "made" / f"cycles.{kind}"
    assert output("cycles", runs, "--plot", path).splitlines()[-1] == f"  {path}"
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    assert path.read_bytes().startswith(start)


def test_the_bars_are_as_high_as_the_shares(runs):
    from hgms_cyclical.command import groups
    from hgms_cyclical.picture import bars

    axis = bars(groups([runs])).axes[0]
    heights = [[bar.get_height() for bar in container] for container in axis.containers]
    assert heights == [[12.5, 12.5, 75.0], [0.0, 100.0]]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        "hg-ms on sphere (2 runs)",
        "two on sphere (1 run)",
    ]


def test_without_matplotlib_it_says_what_to_install(runs, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    message = output("cycles", runs, "--plot", tmp_path / "x.png", exit_code=2)
    assert "pip install 'hgms-cyclical[plot]'" in message
    assert "75%" in output("cycles", runs), "the table needs no matplotlib"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("nowhere", "({})"),
        ("empty", "({})"),
        ("others", "({})"),
        ("damaged", "({}/seed-0/cycles.jsonl:2)"),
        ("nothing", "({}/seed-0/cycles.jsonl:1)"),
    ],
)
def test_bad_input_is_named(tmp_path, name, place):
    (tmp_path / "empty").mkdir()
    for seed in range(2):
        other = tmp_path / "others" / f"seed-{seed}"
        other.mkdir(parents=True)
        (other / "steps.jsonl").write_text('{"step": 0}\n')
    record(tmp_path / "damaged/seed-0", [1], [0.5])
    path = tmp_path / "damaged/seed-0/cycles.jsonl"
    path.write_text(path.read_text().replace('"cycle"', '"circle"'))
    record(tmp_path / "nothing/seed-0", [], [])
    (tmp_path / "nothing/seed-0/cycles.jsonl").write_text("")
    answer = output("cycles", tmp_path / name, exit_code=2)
    assert place.format(tmp_path / name) in answer.splitlines()[0]
    assert "\n  " in answer, "a remedy"


def test_a_line_that_is_being_written_is_left_out(runs):
    with (runs / "b/seed-0/cycles.jsonl").open("a") as stream:
        stream.write('{"step": 3, "cy')
    assert table(output("cycles", runs / "b"))[1] == ["sphere", "two", "1", "2", "0%", "100%"]


def test_a_file_type_that_cannot_be_drawn(runs, tmp_path):
    message = output("cycles", runs, "--plot", tmp_path / "x.doc", exit_code=2)
    assert ".png, .svg, .pdf (--plot)" in message
