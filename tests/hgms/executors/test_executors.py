"""Who carries out which run: several coordinators on one grid, machines that are gone, executors of
plugins.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from click.testing import CliRunner, Result
from support.executor_grids import GRID, PLUGIN, begun_twice, contents, on_another_machine
from support.processes import reaches, started

from hgms.cli import main
from hgms.executors import BUSY, Ending, Here, Piece, run_together, shared_work, unless_busy
from hgms.store import hold_lease, lease
from hgms_core import ConfigError, HgmsError

COMPARE = ("compare", "grid.toml", "--plugin", str(PLUGIN), "--json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.toml").write_text(GRID)
    return tmp_path


def compare(*arguments: str) -> Result:
    done = CliRunner().invoke(main, [*COMPARE, *arguments])
    assert "Traceback" not in done.stderr
    return done


def table(text: str) -> Any:
    """What a comparison printed, without what depends on the machine's speed."""
    printed = json.loads(text)
    for task in printed["tasks"]:
        for method in task["methods"]:
            del method["seconds"], method["peak_memory_bytes"]
    return printed


Alone = tuple[dict[str, bytes], Any, Path]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one process writes and prints that has the grid to itself."""
    place = tmp_path_factory.mktemp("alone")
    (place / "grid.toml").write_text(GRID)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        done = compare("--jobs", "0")
    assert done.exit_code == 0, done.stderr
    return contents(place / "runs"), table(done.stdout), place / "runs"


# --- several coordinators


@pytest.mark.extended
@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_two_coordinators_share_a_grid_and_print_the_same_table(
    folder: Path, alone: Alone, dies: bool
) -> None:
    """Also if one of them dies, whose run the other takes up."""
    (folder / "hold-0-6").touch()  # nobody is done before both are at work
    both = []
    for jobs, rows in (("1" if dies else "0", 7), ("1", 7 + 8)):  # the first run is held
        both.append(started(folder, *COMPARE, "--jobs", jobs))
        reaches(folder, rows, *both)
    if dies:
        both[0].kill()
        both.pop(0).communicate()
    (folder / "hold-0-6").unlink()
    ends = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0] * len(both), ends
    assert [table(out) for out, _ in ends] == [alone[1]] * len(both)
    assert contents(folder / "runs") == alone[0]
    assert begun_twice(folder) == ["seed-0"] * dies, "each other run was begun once"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of three fifths of a second, at which everybody looks often."""
    for module, name, value in (
        (lease, "SECONDS", 0.6),
        (lease, "GRACE", 0.3),
        (lease, "LOOK", 0.05),
        (shared_work, "POLL", 0.05),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.extended
@pytest.mark.usefixtures("short")
def test_a_run_of_another_machine_that_is_gone_is_taken_up_from_its_checkpoint(
    folder: Path, alone: Alone
) -> None:
    """Nobody but who looks after it can tell that it gives no sign of life any more."""
    shutil.copytree(alone[2], folder / "runs")
    [path] = folder.glob("runs/bowl/*/seed-3")
    (path / "summary.json").unlink()  # it had come to its last step
    before = (path / "manifest.json").read_bytes()
    on_another_machine(path, lease.SECONDS)
    done = CliRunner().invoke(main, [*COMPARE[:-1], "--jobs", "0"])
    assert done.exit_code == 0, done.output
    waits, again, ends = done.stderr.splitlines()
    assert waits.startswith("waiting for 1 run")
    assert "seed 3" in again
    assert ends.startswith("[1/1] bowl, walk, seed 3: done")
    assert contents(folder / "runs") == alone[0]
    assert (path / "manifest.json").read_bytes() == before, "none of its steps is done twice"


def piece_of(folder: Path, number: int, **arguments: Any) -> Piece:
    """A piece that leaves its number in a file."""
    path = folder / str(number)

    def finished() -> int | None:
        return int((path / "number").read_text()) if (path / "number").exists() else None

    return Piece(
        title=f"piece {number}",
        path=path,
        function="test_executors:leave",
        arguments={"path": str(path), "number": number, **arguments},
        finished=finished,
        result=lambda outcome: outcome["number"],
    )


@unless_busy
def leave(arguments: Mapping[str, Any], tell: Any) -> Mapping[str, Any]:
    path = Path(arguments["path"])
    with hold_lease(path, patience=0.0):
        if arguments.get("fails"):
            raise ConfigError("missing-file", "no such data", place=("train.jsonl",))
        with (path / "times").open("a") as stream:
            stream.write("once\n")
        (path / "number").write_text(str(arguments["number"]))
    return {"number": arguments["number"]}


@pytest.mark.usefixtures("short")
def test_pieces_are_done_once_whoever_does_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is done, 1 and 2 are to do, 3 fails, 4 is made by a process that ends with it, 5 by a
    machine that is gone.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pieces = [piece_of(tmp_path, number, fails=number == 3) for number in range(6)]
    leave(pieces[0].job().arguments, None)
    on_another_machine(tmp_path / "5", lease.SECONDS)
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        if line.startswith("waiting for 2"):
            (tmp_path / "4" / "number").write_text("4")
            held.close()

    with contextlib.ExitStack() as held:
        held.enter_context(hold_lease(tmp_path / "4"))
        results, failures = run_together(pieces, Here(), say=hear)
    assert {str(piece): result for piece, result in results.items()} == {
        f"piece {n}": n for n in (0, 1, 2, 4, 5)
    }
    errors = {str(piece): (error.code, error.place) for piece, error in failures.items()}
    assert errors == {"piece 3": ("missing-file", ("train.jsonl",))}
    assert said[0] == "1 of 6 runs done before"
    once = [path for path in sorted(tmp_path.rglob("times")) if path.read_text() == "once\n"]
    assert [path.parent.name for path in once] == ["0", "1", "2", "5"]
    assert not list(tmp_path.rglob(".lease"))


class Losing:
    """An executor that loses every worker."""

    name = "losing"

    def carry_out(self, jobs: Any, report: Any) -> Iterator[Ending]:
        for job in jobs:
            yield Ending(job=job, lost="killed")

    def close(self) -> None:
        pass


@frozen(kw_only=True, eq=False)
class Taken(Piece):
    """A piece that another process finishes after this process has lost its workers."""

    def fail(self, error: HgmsError) -> Any:
        self.path.mkdir()
        (self.path / "number").write_text("9")
        return BUSY


@pytest.mark.usefixtures("short")
def test_a_lost_piece_that_another_process_has_is_waited_for(tmp_path: Path) -> None:
    plain = piece_of(tmp_path, 1)
    taken = Taken(title="taken", path=tmp_path / "9", finished=piece_of(tmp_path, 9).finished)
    results, failures = run_together([plain, taken], Losing(), say=lambda line: None)
    assert results == {taken: 9}
    assert [(piece, error.code) for piece, error in failures.items()] == [(plain, "worker-lost")]


# --- executors of plugins

MINE = '''
import sys
from typing import ClassVar
from attrs import define
from hgms_core import hookimpl
from hgms.executors import Ending, function_of, pack_job, run_message

@define(kw_only=True)
class Mine:
    """The shortest one: job by job, here."""
    name: ClassVar[str] = "mine"
    jobs: int | None = None
    word: str = "hello"

    def carry_out(self, jobs, report):
        for job in jobs:
            print(self.word, job.title, job.needs.cpus, file=sys.stderr)
            tell = lambda _job=job, **event: report(_job, event)
            yield Ending(job=job, outcome=function_of(job.function)(job.arguments, tell))

    def close(self):
        print("closed", file=sys.stderr)

class Elsewhere:
    """A machine with another version of the core."""
    name = "elsewhere"
    jobs = None

    def carry_out(self, jobs, report):
        for job in jobs:
            message = pack_job(job)
            message["installation"]["hgms"] = "0.1"
            yield Ending.of(job, run_message(message))

    def close(self):
        pass

@hookimpl
def hgms_register_executors():
    return [Mine, Elsewhere]
'''


@pytest.fixture
def mine(folder: Path) -> Path:
    path = folder / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.extended
def test_an_executor_of_a_plugin_carries_out_a_grid(mine: Path, alone: Alone) -> None:
    done = compare("--plugin", str(mine), "--executor", "mine", "--set", "executor.word=now")
    assert done.exit_code == 0, done.stderr
    jobs = [f"now bowl, walk, seed {seed} 1" for seed in range(4)]
    assert done.stderr.splitlines() == [*jobs, "closed"]
    assert table(done.stdout) == alone[1]
    assert contents(mine.parent / "runs") == alone[0]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--executor", "local", "--set", "executor.frehs=true"], "(executor.frehs)"),
        (["--executor", "local", "--address", "auto"], "(executor.address)"),
        (["--executor", "local", "--jobs", "0"], "(executor.jobs)"),
        (["--address", "auto"], "(--address auto)"),
        (["--set", "executor.word=now"], "(--set executor.word=now)"),
        (["--executor", "lcal"], "'local'"),
        (["--executor", "ray"], "pip install 'hgms[ray]'"),
        (["--plugin", "mine.py", "--executor", "mine", "--set", "executor.lanes=3"], "executor"),
        (["--executor", "slurm"], "pip install 'hgms[slurm]'"),
        (["--plugin", "mine.py", "--executor", "elsewhere"], "there, 0.1 here"),
    ],
)
def test_what_is_wrong_with_an_executor_is_said(
    mine: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], shown: str
) -> None:
    for module in ("ray", "submitit"):
        monkeypatch.setitem(sys.modules, module, None)
    done = compare(*arguments)
    assert (done.exit_code, shown in done.stderr) == (2, True), done.stderr
    assert not list(mine.parent.rglob("steps.jsonl"))
