"""Who carries out which run: leases on folders, several coordinators on one grid, lost workers,
executors of plugins.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from support.helpers import rejects
from support.processes import Server, rows_written

from hgms.cli import main
from hgms.comparison import coordinator
from hgms.executors import (
    Here,
    Job,
    Local,
    Needs,
    Piece,
    as_error,
    called,
    carried_out_together,
    code_of,
    ensure_same,
    executor_of,
    installation,
    pack_error,
    unless_busy,
    unpack_error,
)
from hgms.executors import shared_work as together
from hgms.runs import FolderInUse, HeldFolders, RunFolder, lease, leased
from hgms_core import CheckpointError, ConfigError, ErrorGroup, MissingExtra, PluginError
from hgms_core.host import Host

PLUGIN = Path(__file__).parents[2] / "support" / "grid_plugin.py"

HOLD = """
import pathlib, sys, time
from hgms.runs import leased
with leased(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


# --- leases


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_is_held_by_one_process_and_free_once_that_is_gone(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    held_there = rejects("folder-in-use", str(tmp_path / "run"), of=FolderInUse)
    with held_there as caught, leased(tmp_path / "run"):
        pass
    assert f"process {holder.pid}" in str(caught.value)
    holder.kill()
    holder.wait()
    with leased(tmp_path / "run") as held:  # at once: it is seen to be gone
        held.ensure()
    assert list((tmp_path / "run").iterdir()) == []


def elsewhere(path: Path) -> None:
    """Makes a lease of this machine one of another."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join("host=another-machine\n" if line.startswith("host=") else line for line in lines)
    )


def test_the_lease_of_another_machine_expires_by_our_own_clock(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as old as the epoch, and still lasts as long as we have seen it unchanged: whose
    clock jumps loses nothing.
    """
    marker = tmp_path / "run" / ".lease"
    os.kill(holder.pid, signal.SIGSTOP)  # it gives no sign of life
    elsewhere(marker)
    marker.write_text(marker.read_text().replace(f"duration={lease.SECONDS}", "duration=0.6"))
    os.utime(marker, (0, 0))
    monkeypatch.setattr(lease, "SECONDS", 0.6)
    with pytest.raises(FolderInUse), leased(tmp_path / "run", patience=0.1):
        pass
    with leased(tmp_path / "run", patience=30.0) as held:
        held.ensure()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    """A lease of three fifths of a second, here and in the marker of the other machine."""
    monkeypatch.setattr(lease, "SECONDS", 0.6)
    monkeypatch.setattr(lease, "GRACE", 0.3)
    monkeypatch.setattr(lease, "LOOK", 0.05)
    return 0.6


def on_another_machine(folder: Path, pid: int, duration: float) -> Path:
    """The marker of a process of another machine that is not there any more."""
    folder.mkdir(exist_ok=True)
    marker = folder / ".lease"
    marker.write_text(
        f"filelock/2\npid={pid}\nhost=another-machine\nmode=lease\ntoken={'0' * 32}\n"
        f"duration={duration}\n"
    )
    return marker


JUMPS = [-6 * 3600.0, 6 * 3600.0]
"""Seconds by which the clock of the other machine, or of the disk, is wrong."""


@pytest.mark.parametrize("jump", JUMPS, ids=["into the past", "into the future"])
def test_a_clock_that_jumps_steals_no_run_whose_holder_lives(
    tmp_path: Path, short: float, jump: float
) -> None:
    """It gives signs of life by a clock that is wrong by hours, and by another wrong one each
    time.
    """
    marker = on_another_machine(tmp_path / "run", 1, short)
    stop = threading.Event()

    def live() -> None:
        turn = 0
        while not stop.wait(short / 3):
            turn += 1
            os.utime(marker, times=(now := time.time() + turn * jump, now))

    thread = threading.Thread(target=live)
    watch = HeldFolders()
    thread.start()
    try:
        held_there = rejects("folder-in-use", str(tmp_path / "run"), of=FolderInUse)
        with held_there as caught, leased(tmp_path / "run"):
            pass
        assert "process 1 on another-machine" in " ".join(caught.value.lines())
        until = time.monotonic() + 3 * short
        while time.monotonic() < until:  # as a coordinator looks after it
            assert not watch.free(tmp_path / "run")
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("jump", JUMPS, ids=["into the past", "into the future"])
@pytest.mark.parametrize("swaps", [True, False], ids=["", "NFS swaps no names"])
def test_a_clock_that_jumps_keeps_no_run_whose_holder_is_gone(
    tmp_path: Path, short: float, jump: float, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither who waits for it loses it, nor who looks after it now and then."""
    if not swaps:
        monkeypatch.setattr("filelock._soft.exchange_names", lambda source, target: False)
    for number in range(2):
        marker = on_another_machine(tmp_path / f"run-{number}", 1, short)
        os.utime(marker, times=(time.time() + jump, time.time() + jump))
    began = time.monotonic()
    with leased(tmp_path / "run-0") as held:
        assert time.monotonic() - began >= short
        held.ensure()
    watch = HeldFolders()
    looks = 0
    while not watch.free(tmp_path / "run-1"):
        looks += 1
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    assert looks > 5
    with leased(tmp_path / "run-1", patience=0.0) as held:
        held.ensure()


def test_who_has_lost_its_lease_writes_nothing_more(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.claimed("seed = 0"):
        folder.create("seed = 0", {})
        folder.append({"step": 0}, {"step": 0, "seconds": 0.0})
        taken = folder.path / ".taken"
        taken.write_text("filelock/2\n")
        taken.replace(folder.path / ".lease")  # as another machine does, after a minute of silence
        before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
        for write in (
            lambda: folder.append({"step": 1}, {"step": 1, "seconds": 0.0}),
            lambda: folder.save({}, 0),
            lambda: folder.write_summary({}),
            lambda: folder.note("a", 1),
            lambda: folder.append_diagnosis({}),
            lambda: folder.create("seed = 1", {}),
            folder.reopen,
        ):
            with rejects("folder-in-use", str(folder.path), of=FolderInUse):
                write()  # type: ignore[no-untyped-call]
        assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    assert (folder.path / ".lease").exists(), "it is the other's"


def test_a_folder_that_is_gone_is_no_longer_held(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.claimed("seed = 0"):
        (folder.path / ".lease").unlink()
        with rejects("folder-in-use", str(folder.path), of=CheckpointError):
            folder.ensure_held()


# --- grids

GRID = """
budget = "12 steps"
seeds = 6
baselines = false
task = ["bowl"]

[run]
out = "runs"
checkpoint_seconds = 0.0
threads = 1

[[method]]
name = "walk"
pause = 0.01
"""

COMPARE = ("compare", "grid.toml", "--plugin", str(PLUGIN), "--json")


def prepared(folder: Path, text: str = GRID) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "grid.toml").write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    kept = ("checkpoint", "steps", "summary")
    files = sorted(path for path in (folder / "runs").rglob("*") if path.name.startswith(kept))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def table(text: str) -> Any:
    """What a comparison printed, without what depends on the machine's speed."""
    printed = json.loads(text)
    for task in printed["tasks"]:
        for method in task["methods"]:
            del method["seconds"], method["peak_memory_bytes"]
    return printed


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, server: Server) -> tuple[dict[str, bytes], Any]:
    """What one process writes and prints that has the grid to itself."""
    folder = prepared(tmp_path_factory.mktemp("alone"))
    done = server.run(folder, *COMPARE, "--jobs", "0")
    assert done.returncode == 0, done.stderr
    return contents(folder), table(done.stdout)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "hgms.cli", *COMPARE, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.extended
def test_two_coordinators_share_a_grid_and_print_the_same_table(
    tmp_path: Path, alone: tuple[dict[str, bytes], Any]
) -> None:
    folder = prepared(tmp_path)
    (folder / "hold-0-6").touch()  # nobody is done before both are at work
    both = [start(folder, "--jobs", "0"), start(folder, "--jobs", "1")]
    while rows_written(folder) < 7 + 8:  # the first run is held, another runs
        assert all(process.poll() is None for process in both)
    (folder / "hold-0-6").unlink()
    ends = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert [table(out) for out, _ in ends] == [alone[1]] * 2
    assert contents(folder) == alone[0]
    resources = [json.loads(path.read_text()) for path in folder.rglob("resources.json")]
    assert len(resources) == 6
    assert all(row["processor_seconds"] is not None for row in resources), "each was begun once"


@pytest.mark.nightly
def test_runs_of_a_coordinator_that_dies_are_taken_up_by_the_other(
    tmp_path: Path, alone: tuple[dict[str, bytes], Any]
) -> None:
    folder = prepared(tmp_path)
    (folder / "hold-0-6").touch()
    first = start(folder, "--jobs", "1")
    while rows_written(folder) < 7:
        assert first.poll() is None
    second = start(folder, "--jobs", "1")
    while rows_written(folder) < 7 + 8:
        assert second.poll() is None
    first.kill()
    first.communicate()
    (folder / "hold-0-6").unlink()
    out, err = second.communicate()
    assert second.returncode == 0, err
    assert table(out) == alone[1]
    assert contents(folder) == alone[0]


@pytest.mark.usefixtures("short")
def test_a_run_of_another_machine_that_is_gone_is_taken_up_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: tuple[dict[str, bytes], Any]
) -> None:
    """Nobody but who looks after it can tell that it gives no sign of life any more."""
    monkeypatch.setattr(coordinator, "POLL", 0.05)
    monkeypatch.chdir(prepared(tmp_path))
    assert CliRunner().invoke(main, [*COMPARE, "--jobs", "0"]).exit_code == 0
    [folder] = tmp_path.glob("runs/bowl/*/seed-3")
    (folder / "summary.json").unlink()  # it had come to its last step
    before = (folder / "checkpoint.json").read_bytes()
    on_another_machine(folder, 1, lease.SECONDS)
    done = CliRunner().invoke(main, [*COMPARE[:-1], "--jobs", "0"])
    assert done.exit_code == 0, done.output
    said = done.stderr.splitlines()
    assert said[0] == "waiting for 1 run that another process carries out"
    assert said[1] == "bowl, walk, seed 3: nobody carries it out any more; it is taken up again"
    assert [line.partition(" after")[0] for line in said[2:]] == ["[1/1] bowl, walk, seed 3: done"]
    assert contents(tmp_path) == alone[0]
    assert (folder / "checkpoint.json").read_bytes() == before, "none of its steps is done twice"


def piece_of(folder: Path, number: int, **arguments: Any) -> Piece:
    """A piece that leaves its number in a file."""
    path = folder / str(number)
    values = {"path": str(path), "number": number, **arguments}

    def finished() -> int | None:
        return int((path / "number").read_text()) if (path / "number").exists() else None

    return Piece(
        title=f"piece {number}",
        path=path,
        function="test_executors:leave",
        arguments=values,
        finished=finished,
        notice=lambda: "once more" if number == 2 else "",
        result=lambda outcome: outcome["number"],
    )


@unless_busy
def leave(arguments: Mapping[str, Any], tell: Any) -> Mapping[str, Any]:
    path = Path(arguments["path"])
    with leased(path, patience=0.0):
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
    monkeypatch.setattr(together, "POLL", 0.05)
    pieces = [piece_of(tmp_path, number, fails=number == 3) for number in range(6)]
    leave(pieces[0].job().arguments, None)
    on_another_machine(tmp_path / "5", 1, lease.SECONDS)
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        if line.startswith("waiting for 2"):
            (tmp_path / "4" / "number").write_text("4")
            held.close()

    with contextlib.ExitStack() as held:
        held.enter_context(leased(tmp_path / "4"))
        results, failures = carried_out_together(pieces, Here(), say=hear)
    assert {str(piece): result for piece, result in results.items()} == {
        f"piece {n}": n for n in (0, 1, 2, 4, 5)
    }
    assert {
        str(piece): (error.code, error.message, error.place) for piece, error in failures.items()
    } == {"piece 3": ("missing-file", "no such data", ("train.jsonl",))}
    assert said[0] == "1 of 6 runs done before"
    assert [line for line in said if "once more" in line] == ["piece 2: once more"]
    assert [
        path.parent.name for path in sorted(tmp_path.rglob("times")) if path.read_text() == "once\n"
    ] == ["0", "1", "2", "5"]
    assert not list(tmp_path.rglob(".lease"))


def test_a_run_whose_worker_is_killed_is_taken_up_again(
    tmp_path: Path, server: Server, alone: tuple[dict[str, bytes], Any]
) -> None:
    (tmp_path / "marks").mkdir()
    kills = f'breaks = "kill"\nat = 5\nseed = 2\nevery = true\nonce = "{tmp_path / "marks"}"\n'
    folder = prepared(tmp_path, GRID + kills)
    done = server.run(folder, "compare", "grid.toml", "--plugin", str(PLUGIN), "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "marks").iterdir()) == ["0", "2", "4"]
    assert (
        done.stderr.count(
            "its process was killed by SIGKILL (out of memory, most often); it is taken up again"
        )
        == 3
    )
    steps = {
        name.rpartition("seed-")[2]: data
        for name, data in contents(folder).items()
        if "steps" in name
    }
    assert steps == {
        name.rpartition("seed-")[2]: data for name, data in alone[0].items() if "steps" in name
    }


# --- executors of plugins

MINE = '''
import sys
from typing import ClassVar
from attrs import define
from hgms_core import hookimpl
from hgms.executors import Ending, called

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
            yield Ending(job=job, outcome=called(job.function)(job.arguments, tell))

    def close(self):
        print("closed", file=sys.stderr)

class Lame:
    name = "lame"

@hookimpl
def hgms_register_executors():
    return [Mine, Lame]
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_an_executor_of_a_plugin_carries_out_a_grid(
    tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, alone: tuple[dict[str, bytes], Any]
) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    mine.write_text(MINE.replace("[Mine, Lame]", "[Mine]"))
    words = [*COMPARE, "--plugin", str(mine), "--executor", "mine", "--set", "executor.word=now"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.splitlines() == [
        *(f"now bowl, walk, seed {seed} 1" for seed in range(6)),
        "closed",
    ]
    assert table(done.stdout) == alone[1]
    assert contents(tmp_path) == alone[0]


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--executor", "locl"], "--executor"),
        (["--executor", "mine"], "--executor"),
        (["--executor", "local", "--set", "executor.frehs=true"], "executor.frehs"),
        (["--executor", "local", "--address", "auto"], "executor.address"),
        (["--executor", "local", "--jobs", "0"], "executor.jobs"),
        (["--address", "auto"], "--address auto"),
        (["--set", "executor.word=now"], "--set executor.word=now"),
    ],
)
def test_what_is_wrong_with_an_executor_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], place: str
) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    done = CliRunner().invoke(main, [*COMPARE, *arguments])
    assert done.exit_code == 2, done.stderr
    assert f"({place})" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("steps.jsonl"))


@pytest.mark.parametrize(("name", "module"), [("ray", "ray"), ("slurm", "submitit")])
def test_without_its_extra_an_executor_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(prepared(tmp_path))
    done = CliRunner().invoke(main, [*COMPARE, "--executor", name])
    assert done.exit_code == 2, done.output
    assert f"pip install 'hgms[{name}]'" in done.stderr
    assert module in done.stderr
    assert not list(tmp_path.rglob("steps.jsonl"))


ELSEWHERE = '''
from hgms_core import hookimpl
from hgms.executors import carried_out, ending_of, packed

class Elsewhere:
    """A machine with another version of the core."""
    name = "elsewhere"
    jobs = None

    def carry_out(self, jobs, report):
        for job in jobs:
            message = packed(job)
            message["installation"]["hgms_core"] = "0123456789ab"
            yield ending_of(job, carried_out(message), report)

    def close(self):
        pass

@hookimpl
def hgms_register_executors():
    return [Elsewhere]
'''


def test_a_worker_of_another_version_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    Path("elsewhere.py").write_text(ELSEWHERE)
    done = CliRunner().invoke(
        main, [*COMPARE, "--plugin", "elsewhere.py", "--executor", "elsewhere"]
    )
    assert done.exit_code == 2, done.output
    first, second, _ = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert re.fullmatch(r"  hgms_core: \w{12} there, 0123456789ab here", second)
    assert not list(tmp_path.rglob("steps.jsonl"))


def test_a_class_that_is_no_executor_is_named(mine: Path) -> None:
    with rejects("wrong-plugin", of=PluginError) as caught:
        executor_of("mine", {}, Host.load([mine]))
    assert "carry_out, close" in str(caught.value)
    mine.write_text(MINE.replace("[Mine, Lame]", "[Mine]"))
    with rejects("wrong-value", "executor", of=ConfigError) as caught:
        executor_of("mine", {"volume": 1}, Host.load([mine]))
    assert "'volume'" in caught.value.message


def test_objects_of_this_process_go_to_no_executor(tmp_path: Path) -> None:
    from hgms.comparison.grid_file import load
    from hgms.comparison.run_grid import run_grid

    grid = load(
        {
            "budget": "2 steps",
            "task": "quadratic",
            "method": "uniform",
            "run": {"out": str(tmp_path)},
        }
    )
    import attrs

    with rejects("not-supported", "executor", of=ConfigError):
        run_grid(attrs.evolve(grid, own=True), executor=Local())


# --- jobs


def failing(arguments: Mapping[str, Any], tell: Any) -> Mapping[str, Any]:
    """A job that does what its arguments say."""
    if arguments.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if arguments.get("raise"):
        raise ConfigError("missing-file", "no such data", place=("train.jsonl", 3))
    if "hang" in arguments:
        Path(arguments["hang"]).write_text(f"{os.getpid()} {os.getppid()}")
        time.sleep(600)
    tell(event="step", share=0.5)
    return {
        "number": arguments["number"],
        "threads": os.environ["OMP_NUM_THREADS"],
        "process": os.getpid(),
        "loaded": os.getppid(),
    }


def job(number: int, **arguments: Any) -> Job:
    return Job(
        title=f"job {number}",
        function="test_executors:failing",
        arguments={"number": number, **arguments},
    )


def test_jobs_come_back_each_with_its_outcome_and_a_lost_one_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told: list[tuple[str, Any]] = []
    executor = Local(jobs=2)
    jobs = [job(0), job(1, kill=True), job(2), job(3, **{"raise": True}), job(4)]
    try:
        endings = {
            ending.job.arguments["number"]: ending
            for ending in executor.carry_out(
                jobs_of(jobs), lambda job, event: told.append((job.title, event["event"]))
            )
        }
    finally:
        executor.close()
    outcomes = {number: ending.outcome for number, ending in endings.items() if ending.outcome}
    assert {number: outcome["threads"] for number, outcome in outcomes.items()} == {
        0: "1",
        2: "1",
        4: "1",
    }
    assert endings[1].lost == "its process was killed by SIGKILL (out of memory, most often)"
    error = endings[3].error
    assert isinstance(error, ConfigError)
    assert (error.code, error.place) == ("missing-file", ("train.jsonl", 3))
    assert str(error) == "no such data (train.jsonl:3)"
    assert sorted(told) == [(f"job {number}", "step") for number in (0, 2, 4)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker is one process")
def test_a_killed_job_costs_a_fork_and_no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    executor = Local(jobs=1)
    # longer than an argument of a command may be
    jobs = [job(0, long="a" * 200_000), job(1, kill=True), job(2)]
    with contextlib.closing(executor):
        before, lost, after = (
            ending for ending in executor.carry_out(jobs_of(jobs), lambda job, event: None)
        )
        assert lost.lost.startswith("its process was killed by SIGKILL")
        assert before.outcome
        assert after.outcome
        assert before.outcome["process"] != after.outcome["process"]
        assert before.outcome["loaded"] == after.outcome["loaded"] != os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker is one process")
@pytest.mark.parametrize(
    "whole", [True, False], ids=["its loaded process is killed", "its parent is done"]
)
def test_a_fork_ends_with_the_process_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    mark = tmp_path / "at-work"
    executor = Local(jobs=1)
    endings = executor.carry_out(jobs_of([job(0, hang=str(mark))]), lambda job, event: None)
    with contextlib.closing(executor):
        with ThreadPoolExecutor(1) as waiting:
            ending = waiting.submit(next, endings)
            fork, loaded = map(int, appears(mark).split())
            os.kill(loaded if whole else fork, signal.SIGKILL)
            assert "killed by SIGKILL" in ending.result(60).lost
        if not whole:
            assert psutil.pid_exists(loaded), "it is there for the next job"
    psutil.wait_procs(
        [psutil.Process(pid) for pid in (fork, loaded) if psutil.pid_exists(pid)], timeout=60
    )
    assert not [pid for pid in (fork, loaded) if psutil.pid_exists(pid)]


def appears(path: Path) -> str:
    """What a file holds, once there is something in it."""
    until = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return path.read_text()


def jobs_of(jobs: list[Job]) -> Iterable[Job]:
    """As a coordinator gives them: iterated again, those that are left."""

    class Jobs:
        def __iter__(self) -> Iterator[Job]:
            while jobs:
                yield jobs.pop(0)

    return Jobs()


def test_needs_are_checked() -> None:
    for wrong in ({"cpus": 0}, {"gpus": -1}, {"memory": 0}, {"hours": 0.0}):
        with rejects("out-of-range", *wrong, of=ConfigError):
            Needs(**wrong)  # type: ignore[arg-type]


def test_another_installation_is_refused_by_name(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("a = 1\n")
    own = installation(code_of(["hgms_core", str(plugin)]))
    assert {"python", "torch", "hgms_core", "hgms", str(plugin)} <= own.keys()
    ensure_same(own, "node-1")
    with rejects("other-installation", of=ConfigError) as caught:
        ensure_same(
            {**own, "torch": "2.4.0", "hgms_core": "0123456789ab", "hgms_gone": "0123456789ab"},
            "node-1",
        )
    first, *lines = caught.value.message.splitlines()
    assert "node-1" in first
    assert [line.split(":")[0] for line in lines] == ["torch", "hgms_core", "hgms_gone"]
    assert lines[-1] == "hgms_gone: no such module there, 0123456789ab here"


def test_a_function_that_is_not_there_is_named() -> None:
    for name in ("hgms.executors.jobs:cale", "hgms_nowhere:work"):
        with rejects("other-installation", name, of=ConfigError):
            called(name)


def test_an_unknown_executor_is_named_with_the_nearest() -> None:
    with rejects("unknown-executor", "--executor", of=ConfigError) as caught:
        executor_of("locl", {}, Host.load())
    assert caught.value.did_you_mean == ("local",)


def test_errors_come_back_from_workers_as_they_were_raised() -> None:
    wrong = MissingExtra(
        "missing-package",
        "the sampler needs it",
        place=("sweep", 0),
        hint="or set another",
        install="pip install it",
        did_you_mean=("a", "b"),
    )
    several = ErrorGroup([wrong, LostHere("worker-lost", "it is gone")])
    for error in (wrong, several):
        back = unpack_error(json.loads(json.dumps(pack_error(error))))
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert [member.as_dict() for member in back.errors] == [
            member.as_dict() for member in error.errors
        ]
    other = as_error(KeyError("a"))
    assert (other.code, other.message) == ("unexpected-error", "KeyError: 'a'")


class LostHere(CheckpointError):
    """An error of a class that the other machine may lack."""
