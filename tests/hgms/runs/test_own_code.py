"""A component in a file of one's own, edited and compared again and again: results belong to the
code that made them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from support.helpers import rejects
from support.processes import Ended, Server

from hgms.comparison import compare
from hgms.runs import RunConfig
from hgms.runs.provenance import digests
from hgms.solvers import CG, MINRES
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
def hgms(folder: Path, server: Server) -> Callable[..., Ended]:
    """Each in a process of its own: a module is imported once."""
    return functools.partial(server.run, folder)


def test_an_edited_file_is_run_again_and_the_older_result_is_kept_apart(
    folder: Path, hgms: Callable[..., Ended]
) -> None:
    written = folder / "mine.py"
    tables = []
    for value in ("b", "-b", "-b"):
        written.write_text(SOLVER.format(value=value))
        done = hgms(
            "compare", "grid.toml", "--plugin", "./mine.py", "--jobs", "0", "--no-baselines"
        )
        assert done.returncode == 0, done.stderr
        tables.append((done.stdout, "seed 0: done" in done.stderr))
    assert [ran for _, ran in tables] == [True, True, False]  # the same code: its result is there
    assert tables[0][0].split("mine ")[1].split()[0] != tables[1][0].split("mine ")[1].split()[0]
    folders = sorted(path.parent.name for path in folder.glob("runs/quadratic/*/seed-0"))
    assert len(folders) == 2
    assert all(name.startswith("mine-") for name in folders)
    report = hgms("report", "runs", "--out", "report.md")
    assert report.returncode == 0, report.stderr
    assert "the code of a component has changed since" in report.stdout + report.stderr
    assert "1 run, 1 task, 1 method" in report.stdout


def test_our_own_components_are_known_by_their_version() -> None:
    config = RunConfig.from_dict({"task": "quadratic", "method": "hg-ms", "budget": "2 steps"})
    assert digests([config.task, config.method]) == {}


def test_a_component_that_raises_is_found_again(folder: Path, hgms: Callable[..., Ended]) -> None:
    (folder / "mine.py").write_text(SOLVER.format(value="b.no_such_thing"))
    done = hgms("compare", "grid.toml", "--plugin", "./mine.py", "--jobs", "0", "--no-baselines")
    assert done.returncode == 1
    assert (
        "AttributeError: 'Tensor' object has no attribute 'no_such_thing' (mine.py:10; all of it "
        "is in traceback.txt)"
    ) in (done.stdout + done.stderr)
    (kept,) = folder.glob("runs/quadratic/*/seed-0/traceback.txt")
    assert kept.read_text().startswith("Traceback (most recent call last)")
    assert "in solve" in kept.read_text()


def test_a_file_without_its_suffix_is_recognised(folder: Path, hgms: Callable[..., Ended]) -> None:
    (folder / "mine.py").write_text(SOLVER.format(value="b"))
    done = hgms("list", "solver", "--plugin", "mine")
    assert done.returncode == 2
    assert "(mine)" in done.stderr
    assert "did you mean './mine.py'?" in done.stderr
    assert "Traceback" not in done.stderr


class TestObjects:
    def test_parts_as_objects_and_labels_as_keys(self, tmp_path: Path) -> None:
        methods = {
            "cg": {"name": "hg-ms", "hypergradient": {"solver": CG(max_steps=3)}},
            "minres": {"name": "hg-ms", "hypergradient": {"solver": MINRES()}},
            "floor": "uniform",
        }
        found = compare(
            "quadratic", methods, "1 steps", seeds=1, out=tmp_path, jobs=0, baselines=False
        )
        assert [row.method for row in found.tables[0].rows] == ["cg", "minres", "floor"]
        (path,) = (tmp_path / "quadratic").glob("cg-*/seed-0/config.toml")
        assert "max_steps = 3" in path.read_text()

    def test_a_part_of_an_unknown_class_is_compared_in_this_process(self, tmp_path: Path) -> None:
        import attrs

        from hgms_core import CallableSolver

        @attrs.frozen
        class Own:
            name = "own"

            def solve(self, matvec, b, x0=None):  # type: ignore[no-untyped-def]
                return CallableSolver(lambda matvec, b: b).solve(matvec, b)

        table = {"name": "hg-ms", "hypergradient": {"solver": Own()}}
        found = compare("quadratic", table, "1 steps", 1, tmp_path, baselines=False)
        assert found.complete
        (path,) = tmp_path.glob("quadratic/hg-ms-*/seed-0/config.toml")
        assert '[method.hypergradient.solver]\nname = "own"' in path.read_text()
        with rejects("not-supported", "jobs", of=ConfigError):
            compare("quadratic", table, "1 steps", 1, tmp_path, jobs=2)

    def test_candidates_that_never_differ_are_noted(self, tmp_path: Path) -> None:
        methods = {
            "alike": {"name": "hg-ms", "generator": {"whole_batch_noise": 0.0}},
            "spread": {"name": "hg-ms", "generator": {"noise": 1.0}},
            "one": "hg-implicit",
        }
        found = compare(
            "quadratic", methods, "2 steps", seeds=1, out=tmp_path, jobs=0, baselines=False
        )
        notes = {row.method: row.notes for row in found.tables[0].rows}
        assert any("the generator's noise tells them apart" in line for line in found.remarks)
        assert notes == {"alike": ("equal candidates",), "spread": (), "one": ()}
