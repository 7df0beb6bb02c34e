"""A component in a file of one's own, edited and compared again and again: results belong to the
code that made them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.helpers import rejects
from support.processes import Ended, Server

from hgms.comparison import compare
from hgms.solvers import CG, MINRES
from hgms_core import CallableSolver
from hgms_core.errors import ConfigError

SOLVER = """
import attrs
from hgms_core import CallableSolver, hookimpl

@attrs.frozen(kw_only=True)
class Mine:
    name = "mine"

    def solve(self, matvec, b, x0=None):
        return CallableSolver(lambda matvec, b: {value}).solve(matvec, b)

@hookimpl
def hgms_register_linear_solvers():
    return [Mine]
"""
GRID = """
budget = "2 steps"
seeds = 1
task = "quadratic"
method = [{ name = "hg-ms", label = "mine", hypergradient = { solver = { name = "mine" } } }]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.toml").write_text(GRID)
    return tmp_path


@pytest.fixture
def compared(folder: Path, server: Server) -> Callable[[str], Ended]:
    """A comparison of the solver with this value, in a process of its own: a module is imported
    once.
    """

    def compared(value: str) -> Ended:
        (folder / "mine.py").write_text(SOLVER.format(value=value))
        command = ("compare", "grid.toml", "--plugin", "./mine.py", "--jobs", "0", "--no-baselines")
        return server.run(folder, *command)

    return compared


def test_an_edited_file_is_run_again_and_the_older_result_is_kept_apart(
    folder: Path, compared: Callable[[str], Ended], server: Server
) -> None:
    first, other, again = (compared(value) for value in ("b", "-b", "-b"))
    done = [(each.returncode, "seed 0: done" in each.stderr) for each in (first, other, again)]
    assert done == [(0, True), (0, True), (0, False)], "of the same code there is a result"
    cells = [each.stdout.split("mine ")[1].split()[0] for each in (first, other)]
    assert cells[0] != cells[1]
    folders = [path.parent.name for path in folder.glob("runs/quadratic/*/seed-0")]
    assert [name.partition("-")[0] for name in folders] == ["mine"] * 2
    report = server.run(folder, "report", "runs", "--out", "report.md")
    assert "the code of a component has changed since" in report.stdout + report.stderr
    assert "1 run, 1 task, 1 method" in report.stdout


def test_a_component_that_raises_is_found_again(
    folder: Path, compared: Callable[[str], Ended]
) -> None:
    done = compared("b.no_such_thing")
    assert done.returncode == 1
    assert "AttributeError" in done.stderr + done.stdout
    assert "(mine.py:10; " in done.stderr + done.stdout
    (kept,) = folder.glob("runs/quadratic/*/seed-0/traceback.txt")
    assert kept.read_text().startswith("Traceback (most recent call last)")
    assert "in solve" in kept.read_text()


def test_a_file_without_its_suffix_is_recognised(folder: Path, server: Server) -> None:
    (folder / "mine.py").write_text(SOLVER.format(value="b"))
    done = server.run(folder, "list", "solver", "--plugin", "mine")
    assert done.returncode == 2
    assert "(mine)" in done.stderr
    assert "'./mine.py'?" in done.stderr


# --- parts as objects


def test_parts_are_objects_and_labels_are_keys(tmp_path: Path) -> None:
    methods = {
        "cg": {"name": "hg-ms", "hypergradient": {"solver": CG(max_steps=3)}},
        "minres": {"name": "hg-ms", "hypergradient": {"solver": MINRES()}},
        "alike": {"name": "hg-ms", "generator": {"whole_batch_noise": 0.0}},
        "spread": {"name": "hg-ms", "generator": {"noise": 1.0}},
        "one": "hg-implicit",
    }
    found = compare("quadratic", methods, "2 steps", 1, tmp_path, jobs=0, baselines=False)
    notes = {row.method: row.notes for row in found.tables[0].rows}
    assert list(notes) == list(methods)
    (path,) = (tmp_path / "quadratic").glob("cg-*/seed-0/config.toml")
    assert "max_steps = 3" in path.read_text()
    # candidates that never differ are noted
    assert [notes[name] for name in ("alike", "spread", "one")] == [("equal candidates",), (), ()]
    assert any("noise" in line for line in found.remarks)


def test_a_part_of_an_unknown_class_is_compared_in_this_process(tmp_path: Path) -> None:
    @attrs.frozen
    class Own:
        name = "own"

        def solve(self, matvec: Any, b: Any, x0: Any = None) -> Any:
            return CallableSolver(lambda matvec, b: b).solve(matvec, b)

    table = {"name": "hg-ms", "hypergradient": {"solver": Own()}}
    assert compare("quadratic", table, "1 steps", 1, tmp_path, baselines=False).complete
    (path,) = tmp_path.glob("quadratic/hg-ms-*/seed-0/config.toml")
    assert '[method.hypergradient.solver]\nname = "own"' in path.read_text()
    with rejects("not-supported", "jobs", of=ConfigError):
        compare("quadratic", table, "1 steps", 1, tmp_path, jobs=2)
