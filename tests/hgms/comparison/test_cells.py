"""A run of a comparison: how it can end, and fields of its method that are set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hgms.comparison import cell as module
from hgms.comparison.cell import carry_out
from hgms.comparison.coordinator import PROGRAMS, Executions, distinct_warnings, runs_of
from hgms.comparison.grid import Cell
from hgms.comparison.grid_file import load
from hgms.distributed import RankLost
from hgms.executors import BUSY, Here, run_together
from hgms.plugins import Registry
from hgms.runs import RunFolder
from hgms.store import DiskError, FolderInUse, hold_lease
from hgms_core import HgmsError
from hgms_core.errors import CheckpointError, NumericalError

PLUGIN = Path(__file__).parents[2] / "support" / "grid_plugin.py"


def cells(out: Path, seeds: int = 1) -> list[Cell]:
    run = {"out": str(out), "threads": 1}
    table = {"budget": "4 steps", "seeds": seeds, "task": "bowl", "run": run, "method": "walk"}
    return load(table, registry=Registry.load([PLUGIN])).cells()


def silent(*_: Any) -> None:
    """A report that nobody reads."""


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (FolderInUse("folder-in-use", "held"), "elsewhere", "folder-in-use"),
        (DiskError("cannot-write", "full"), "stopped", "cannot-write"),
        (CheckpointError("damaged-file", "odd"), "rejected", "damaged-file"),
        (RankLost("rank-lost", "gone"), "rejected", "rank-lost"),
        (NumericalError("not-finite", "NaN"), "failed", "not-finite"),
        (MemoryError("much"), "failed", "out-of-memory"),
        (ZeroDivisionError("odd"), "failed", "unexpected-error"),
        (SystemExit(3), "failed", "unexpected-error"),
    ],
)
def test_whatever_ends_a_run_is_an_ending_and_a_failure_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: str, code: str
) -> None:
    [cell] = cells(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        cell.path.mkdir(parents=True)
        raise error

    monkeypatch.setattr(module, "run_config", fails)
    ending = carry_out(cell, silent)
    assert ending.error is not None
    assert (ending.status, ending.error.code) == (status, code)
    folder = RunFolder(cell.path)
    assert folder.summary.exists() == (status == "failed")
    assert folder.traceback.exists() == (code == "unexpected-error")


@pytest.mark.parametrize(
    ("second", "status", "codes"),
    [
        (FolderInUse("folder-in-use", "held"), "elsewhere", ["folder-in-use"]),
        (DiskError("cannot-write", "full"), "stopped", ["not-finite", "not-recorded"]),
        (CheckpointError("damaged-file", "odd"), "rejected", ["not-finite", "not-recorded"]),
        (PermissionError(13, "denied"), "rejected", ["not-finite", "not-recorded"]),
    ],
)
def test_a_failure_that_cannot_be_recorded_is_told_with_its_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    second: Exception,
    status: str,
    codes: list[str],
) -> None:
    def fails(*_: Any) -> None:
        raise second

    monkeypatch.setattr(module, "record_failure", fails)
    [cell] = cells(tmp_path)
    ending = module.fail_cell(cell, NumericalError("not-finite", "NaN"))
    assert ending.error is not None
    assert (ending.status, [each.code for each in ending.error.errors]) == (status, codes)


def test_a_warning_about_compilation_is_logged_once_whatever_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warns(cell: Cell, *_: Any) -> module.Ending:
        PROGRAMS.warning("g of seed %d runs eagerly", cell.config.seed)
        return module.Ending(cell=cell, status="done")

    monkeypatch.setattr(module, "carry_out", warns)
    with distinct_warnings():
        runs = runs_of(cells(tmp_path, seeds=2), Executions(), (str(PLUGIN),), here=False)
        run_together(runs, Here(), say=silent, look=False)
    assert caplog.messages == ["g of seed 0 runs eagerly"]


def test_a_lost_run_that_another_process_has_is_waited_for(tmp_path: Path) -> None:
    [cell] = cells(tmp_path)
    [run] = runs_of([cell], Executions(), (), here=False)
    error = HgmsError("worker-lost", "killed")
    with hold_lease(cell.path):
        assert run.fail(error) == BUSY
    ending = run.fail(error)
    assert (ending.status, ending.error) == ("failed", error)
    assert cell.state()[0] == "failed"
