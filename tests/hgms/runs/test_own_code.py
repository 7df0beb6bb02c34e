"""A component in a file of one's own, edited and compared again and again: results belong to the
code that made them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import Result
from support.fakes import call
from support.helpers import rejects

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
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """A comparison of the solver with this value, imported anew as in a process of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.toml").write_text(GRID)

    def compared(value: str) -> Result:
        (tmp_path / "mine.py").write_text(SOLVER.format(value=value))
        monkeypatch.delitem(sys.modules, "hgms_file_mine", raising=False)
        words = ("--plugin", "./mine.py", "--jobs", "0", "--no-baselines")
        return call("compare", "grid.toml", *words)

    return compared


def test_an_edited_file_is_run_again_and_the_older_result_is_kept_apart(
    compared: Callable[[str], Result], tmp_path: Path
) -> None:
    first, other, again = (compared(value) for value in ("b", "-b", "-b"))
    done = [(each.exit_code, "seed 0: done" in each.stderr) for each in (first, other, again)]
    assert done == [(0, True), (0, True), (0, False)], "of the same code there is a result"
    assert len({each.stdout.split("mine ")[1].split()[0] for each in (first, other)}) == 2
    folders = [path.parent.name for path in tmp_path.glob("runs/quadratic/*/seed-0")]
    assert [name.partition("-")[0] for name in folders] == ["mine"] * 2
    report = call("report", "runs", "--out", "report.md").output
    assert "the code of a component has changed since" in report
    assert "1 run, 1 task, 1 method" in report


def test_a_component_that_raises_is_found_again(
    compared: Callable[[str], Result], tmp_path: Path
) -> None:
    done = compared("b.no_such_thing")
    assert done.exit_code == 1
    assert all(part in done.output for part in ("AttributeError", "(mine.py:10; "))
    (kept,) = tmp_path.glob("runs/quadratic/*/seed-0/traceback.txt")
    assert "in solve" in kept.read_text()
    listed = call("list", "solver", "--plugin", "mine")  # without its suffix
    assert (listed.exit_code, "'./mine.py'?" in listed.stderr) == (2, True)


# --- parts as objects


def test_parts_are_objects_and_labels_are_keys(tmp_path: Path) -> None:
    methods = {
        "cg": {"name": "hg-ms", "hypergradient": {"solver": CG(max_steps=3)}},
        "minres": {"name": "hg-ms", "hypergradient": {"solver": MINRES()}},
        "alike": {"name": "hg-ms", "generator": {"whole_batch_noise": 0.0}},
        "one": "hg-implicit",
    }
    found = compare("quadratic", methods, "2 steps", 1, tmp_path, jobs=0, baselines=False)
    notes = {row.method: row.notes for row in found.tables[0].rows}
    assert list(notes) == list(methods)
    (path,) = (tmp_path / "quadratic").glob("cg-*/seed-0/config.toml")
    assert "max_steps = 3" in path.read_text()
    # candidates that never differ are noted
    assert (notes["alike"], notes["one"]) == (("equal candidates",), ())
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
