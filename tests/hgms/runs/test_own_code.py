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
from hgms.solvers import CG
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


@pytest.mark.extended
def test_an_edited_file_is_run_again_and_the_older_result_is_kept_apart(
    compared: Callable[[str], Result], tmp_path: Path
) -> None:
    first, other, again = (compared(value) for value in ("b", "-b", "-b"))
    done = [(each.exit_code, "seed 0: done" in each.stderr) for each in (first, other, again)]
    assert done == [(0, True), (0, True), (0, False)], "of the same code there is a result"
    assert len({each.stdout.split("mine ")[1].split()[0] for each in (first, other)}) == 2
    folders = [path.parent.name for path in tmp_path.glob("runs/quadratic/*/seed-0")]
    assert [name.partition("-")[0] for name in folders] == ["mine"] * 2
    report = call("report", "runs", "--out", "report.tex").output
    assert "the code of a component has changed since" in report
    assert "1 run, 1 task, 1 method" in report


# --- parts as objects


def test_parts_are_objects_of_any_class_and_labels_are_keys(tmp_path: Path) -> None:
    @attrs.frozen
    class Own:
        name = "own"

        def solve(self, matvec: Any, b: Any, x0: Any = None) -> Any:
            return CallableSolver(lambda matvec, b: b).solve(matvec, b)

    methods = {
        label: {"name": "hg-ms", "hypergradient": {"solver": solver}}
        for label, solver in {"cg": CG(max_steps=3), "mine": Own()}.items()
    }
    found = compare("quadratic", methods, "1 steps", 1, tmp_path, baselines=False)
    assert [row.method for row in found.tables[0].rows] == ["cg", "mine"]
    with rejects("not-supported", "jobs", of=ConfigError):
        compare("quadratic", methods, "1 steps", 1, tmp_path, jobs=2)
