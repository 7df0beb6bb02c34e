"""Runs: the clock, the budget, the folder, resuming, and what happens when something breaks."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from attrs import field, frozen
from support.helpers import rejects, run_files

from hgms.comparison.usage import cuda_for, measured
from hgms.results import read_run, scan
from hgms.runs import (
    DiskError,
    Interrupted,
    RunFolder,
    RunSettings,
    device_called,
    pack,
    run,
    unpack,
)
from hgms.runs.loop import Clock
from hgms.runs.provenance import _git
from hgms.runs.signals import counted_suspensions
from hgms_core import CheckpointError, NumericalError, Problem, RunInfo, State
from hgms_core.budget import Budget
from hgms_core.host import Host
from hgms_core.torch_errors import out_of_memory


@frozen(kw_only=True)
class Descent:
    """Gradient descent on f with noise and momentum: a Method whose state has tensors, numbers,
    lists and None.
    """

    name = "descent"
    # how a test disturbs it is no part of what it computes, so no part of its configuration
    seconds: float = field(default=0.0, metadata={"toml": False})
    breaks_at: int | None = field(default=None, metadata={"toml": False})
    interrupts_at: int | None = field(default=None, metadata={"toml": False})

    def init(self, problem: Problem, seed: int) -> State:
        return {
            "seed": seed,
            "step": 0,
            "x": dict(problem.x0),
            "memory": {"m": torch.zeros(2)},
            "best": None,
            "list": [1, 2.5],
        }

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        step = state["step"]
        if self.interrupts_at == step:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(self.seconds)
        noise = torch.randn(2, generator=torch.Generator().manual_seed(1000 * state["seed"] + step))
        memory = 0.9 * state["memory"]["m"] + state["x"]["x"] + 0.1 * noise
        x = {"x": state["x"]["x"] - 0.1 * (1 - 0.5 * progress) * memory}
        new = {
            **state,
            "step": step + 1,
            "x": x,
            "memory": {"m": memory},
            "best": {"loss": memory.norm()},
        }
        broken = self.breaks_at == step
        record = {
            "step": step + 1,
            "upper_loss": x["x"].norm(),
            "oracle_calls": 3 * (step + 1),
            "gap": float("inf"),
            "finite_candidates": torch.tensor(0 if broken else 4),
            "scores": torch.tensor([float("nan")] * 2),
        }
        return new, record

    def result(self, state: State) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return {}, state["x"]


def problem(evaluate_seconds: float = 0.0) -> Problem:
    def evaluate(theta: Any, x: Any) -> dict[str, float]:
        time.sleep(evaluate_seconds)
        return {"size": float(x["x"].norm())}

    return Problem(
        theta0={},
        x0={"x": torch.tensor([1.0, -2.0])},
        g=lambda t, x, b: x["x"].sum(),
        f=lambda t, x, b: x["x"].sum(),
        evaluate=evaluate,
    )


def test_budget_in_steps_calls_and_seconds() -> None:
    assert run(Descent(), problem(), Budget(outer_steps=7)).summary["outer_steps"] == 7
    assert run(Descent(), problem(), Budget(oracle_calls=10)).summary["outer_steps"] == 4
    timed = run(Descent(seconds=0.02), problem(), Budget(seconds=0.1))
    assert 0.1 <= timed.seconds < 0.2
    assert 3 <= timed.summary["outer_steps"] <= 5


def test_clock_excludes_evaluation_and_observers() -> None:
    slow = run(
        Descent(seconds=0.01),
        problem(evaluate_seconds=0.05),
        Budget(outer_steps=5),
        watch=lambda *_: time.sleep(0.05),
    )
    assert 0.05 <= slow.seconds < 0.15  # 5 · 10 ms of steps; evaluation and watching took 600 ms


def test_first_use_is_not_charged_to_the_budget_in_seconds() -> None:
    class Cold:
        name = "cold"
        calls = 0

        def init(self, problem: Problem, seed: int) -> State:
            return Descent().init(problem, seed)

        def step(
            self, problem: Problem, state: State, progress: float
        ) -> tuple[State, dict[str, Any]]:
            self.calls += 1
            time.sleep(0.3 if self.calls == 1 else 0.01)
            return Descent().step(problem, state, progress)

        def result(self, state: State) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            return {}, state["x"]

    method = Cold()
    timed = run(method, problem(), Budget(seconds=0.1))
    assert timed.summary["outer_steps"] == method.calls - 1 > 2
    method = Cold()
    run(method, problem(), Budget(outer_steps=3))
    assert method.calls == 3


def test_rows_on_disk_and_in_memory_agree(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    result = run(
        Descent(),
        problem(),
        Budget(outer_steps=6),
        folder=folder,
        settings=RunSettings(evaluate_every=2),
    )
    assert folder.records() == result.records
    assert [row["step"] for row in result.records] == list(range(7))
    assert [row["step"] for row in result.records if "metric.size" in row] == [0, 2, 4, 6]
    assert result.records[1]["gap"] is None  # JSON has no infinity
    assert (
        json.loads((tmp_path / "run/summary.json").read_text())["metrics"]["size"]
        == result.records[-1]["metric.size"]
    )


def test_evaluations_are_spread_over_the_budget() -> None:
    """However fast a method is, it is evaluated as often, and at the end."""
    for steps, expected in ((12, [0, 3, 6, 9, 12]), (3, [0, 1, 2, 3]), (10, [0, 3, 5, 8, 10])):
        result = run(
            Descent(), problem(), Budget(outer_steps=steps), settings=RunSettings(evaluations=4)
        )
        assert [row["step"] for row in result.records if "metric.size" in row] == expected


@pytest.mark.skipif(not hasattr(signal, "SIGCONT"), reason="this system does not stop processes")
@pytest.mark.parametrize("suspended", [False, True])
def test_the_clock_does_not_count_suspended_time(
    suspended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(0.0, torch.device("cpu"))
    times = iter((0.0, 1000.0))
    clock._time = lambda: next(times)
    with counted_suspensions() as count:
        clock.suspensions = count
        with clock:
            if suspended:
                os.kill(os.getpid(), signal.SIGCONT)
    assert (clock.seconds < 10) == suspended
    assert ("suspended" in caplog.text) == suspended
    assert signal.getsignal(signal.SIGCONT) is signal.SIG_DFL


def test_ctrl_c_before_the_first_step_says_that_nothing_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hgms.runs.launch.Registry.load", interrupted)
    with pytest.raises(Interrupted) as caught:
        run("uniform", problem(), "1 steps")
    assert "nothing is saved" in caught.value.message
    monkeypatch.setattr(Descent, "init", interrupted)
    with pytest.raises(Interrupted) as caught:
        run(Descent(), problem(), Budget(outer_steps=1))
    assert "nothing is saved" in caught.value.message


def test_the_cpu_clock_counts_work_and_not_waiting() -> None:
    @frozen
    class Sleeper:
        name = "sleeper"

        def init(self, problem: Problem, seed: int) -> State:
            return {"x": dict(problem.x0)}

        def step(
            self, problem: Problem, state: State, progress: float
        ) -> tuple[State, dict[str, Any]]:
            time.sleep(0.02)
            return state, {}

        def result(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
            return {}, state["x"]

    wall = run(
        Sleeper(), problem(), Budget(outer_steps=5), settings=RunSettings(clock="wall")
    ).seconds
    cpu = run(
        Sleeper(), problem(), Budget(outer_steps=5), settings=RunSettings(clock="cpu")
    ).seconds
    assert wall >= 0.1
    assert 0 < cpu < 0.5 * wall


def test_killed_before_the_first_checkpoint_starts_again(tmp_path: Path) -> None:
    whole = RunFolder(tmp_path / "whole")
    broken = RunFolder(tmp_path / "broken")
    run(
        Descent(),
        problem(),
        Budget(outer_steps=9),
        folder=whole,
        settings=RunSettings(checkpoint_seconds=0),
    )
    with pytest.raises(Interrupted):
        run(Descent(interrupts_at=3), problem(), Budget(outer_steps=9), folder=broken)
    assert (broken.load() or ({}, -1))[1] == 4, "the state of step 4 is saved"
    (tmp_path / "broken/checkpoint.json").unlink()
    # lines that no checkpoint speaks for go too
    broken.steps.write_bytes(broken.steps.read_bytes().replace(b"0.", b"1."))
    run(Descent(), problem(), Budget(outer_steps=9), folder=broken, resume=True)
    assert run_files(whole.path) == run_files(broken.path)


def test_a_state_that_is_read_back_lies_where_torch_puts_tensors(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    run(Descent(), problem(), Budget(outer_steps=2), folder=folder)
    odd = {f"x{size}": torch.ones(size) for size in (1, 3, 5, 7)}
    folder.save({"odd": odd}, 2)
    loaded = folder.load(torch.device("cpu"))
    assert loaded is not None
    for name, leaf in loaded[0]["odd"].items():
        assert torch.equal(leaf, odd[name])
        assert leaf.data_ptr() % 64 == 0, "products with it round as they did before it was written"


@pytest.mark.parametrize("stop", [0, 4, 7])
def test_ctrl_c_saves_and_resumes(tmp_path: Path, stop: int) -> None:
    whole = RunFolder(tmp_path / "whole")
    broken = RunFolder(tmp_path / "broken")
    run(Descent(), problem(), Budget(outer_steps=9), folder=whole)
    with pytest.raises(Interrupted, match=r"resume=True"):
        run(Descent(interrupts_at=stop), problem(), Budget(outer_steps=9), folder=broken)
    assert not broken.summary.exists()
    result = run(Descent(), problem(), Budget(outer_steps=9), folder=broken, resume=True)
    assert result.info.resumed_from == stop + 1
    assert run_files(whole.path) == run_files(broken.path)


def test_second_ctrl_c_stops_at_once() -> None:
    under_way = threading.Event()

    class Slow(Descent):
        def step(
            self, problem: Problem, state: State, progress: float
        ) -> tuple[State, dict[str, Any]]:
            under_way.set()
            for _ in range(6000):  # a signal may reach the other thread, and wake no sleep
                time.sleep(0.01)
            return super().step(problem, state, progress)

    def twice() -> None:
        assert under_way.wait(60.0)
        for number in (signal.SIGINT, signal.SIGTERM):  # two of one kind may be heard as one
            os.kill(os.getpid(), number)

    began = time.monotonic()
    thread = threading.Thread(target=twice)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(Slow(), problem(), Budget(outer_steps=9))
    thread.join()
    assert time.monotonic() - began < 50


def test_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    whole = RunFolder(tmp_path / "whole")
    broken = RunFolder(tmp_path / "broken")
    run(Descent(), problem(), Budget(outer_steps=9), folder=whole)
    with pytest.raises(Interrupted):
        run(Descent(interrupts_at=5), problem(), Budget(outer_steps=9), folder=broken)
    with broken.steps.open("ab") as stream:
        stream.write(b'{"step": 7, "upper_lo')
    run(Descent(), problem(), Budget(outer_steps=9), folder=broken, resume=True)
    assert run_files(whole.path) == run_files(broken.path)


@pytest.mark.parametrize("saved", [True, False])
def test_what_a_kill_left_of_a_checkpoint_goes_when_the_run_does_on(
    tmp_path: Path, saved: bool
) -> None:
    """Killed while it wrote tensors, or before it removed the older ones; also where nothing is
    saved any more.
    """
    folder = RunFolder(tmp_path / "run")
    run(Descent(), problem(), Budget(outer_steps=9), folder=folder)
    folder.summary.unlink()
    before = run_files(folder.path)
    left = ["checkpoint-4.safetensors", "checkpoint-11.safetensors.part"]
    for name in left:
        (folder.path / name).write_bytes(b"half")
    if saved:
        folder.save(*(folder.load() or ({}, -1)))
    else:
        run(Descent(), problem(), Budget(outer_steps=9), folder=folder, resume=True)
        folder.summary.unlink()
    assert run_files(folder.path) == before


def test_all_candidates_broken_keeps_the_last_good_state(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with rejects("no-finite-candidate", "method", "generator", of=NumericalError):
        run(Descent(breaks_at=3), problem(), Budget(outer_steps=9), folder=folder)
    state, step = folder.load() or ({}, -1)
    assert step == 3
    assert torch.isfinite(state["x"]["x"]).all()
    summary = folder.read_summary()
    assert summary is not None
    assert summary["status"] == "failed"
    assert "step 4" in summary["error"]
    assert len(folder.records()) == 4


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "pointer", "key", "line"])
def test_damaged_files_are_named_and_left_alone(tmp_path: Path, damage: str) -> None:
    folder = RunFolder(tmp_path / "run")
    run(Descent(), problem(), Budget(outer_steps=4), folder=folder)
    tensors = tmp_path / "run/checkpoint-4.safetensors"
    data = tensors.read_bytes()
    if damage == "truncate":
        tensors.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "remove":
        tensors.unlink()
    elif damage == "pointer":
        folder.checkpoint.write_text(folder.checkpoint.read_text()[:40])
    elif damage == "key":
        folder.checkpoint.write_text("{}")
    else:
        lines = folder.steps.read_bytes().split(b"\n")
        folder.steps.write_bytes(b"\n".join([lines[0], b"{broken", *lines[2:]]))
    named = {"pointer": "checkpoint.json", "key": "checkpoint.json", "line": "steps.jsonl"}.get(
        damage, tensors.name
    )
    before = run_files(tmp_path / "run")
    code = "unreadable-file" if damage == "remove" else "damaged-file"
    with rejects(code, str(folder.path / named), of=CheckpointError):
        run(Descent(), problem(), Budget(outer_steps=4), folder=folder, resume=True)
    assert run_files(tmp_path / "run") == before


@pytest.mark.parametrize(
    "name",
    ["checkpoint.json", "checkpoint-6.safetensors", "steps.jsonl", "timings.jsonl", "config.toml"],
)
def test_a_flipped_bit_is_refused_or_harmless(tmp_path: Path, name: str) -> None:
    """A run that stopped after 6 of 9 steps: either it ends as if nothing had been, or nothing
    in its folder is touched.
    """
    whole = RunFolder(tmp_path / "whole")
    broken = RunFolder(tmp_path / "broken")
    run(Descent(), problem(), Budget(outer_steps=9), folder=whole)
    with pytest.raises(Interrupted):
        run(Descent(interrupts_at=5), problem(), Budget(outer_steps=9), folder=broken)
    sound = {path.name: path.read_bytes() for path in broken.path.iterdir()}
    chance = random.Random(name)
    refused = 0
    for _ in range(60):
        for path in broken.path.iterdir():
            path.unlink()
        data = bytearray(sound[name])
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        damaged = {**sound, name: bytes(data)}
        for key, content in damaged.items():
            (broken.path / key).write_bytes(content)
        try:
            result = run(
                Descent(),
                problem(),
                Budget(outer_steps=9),
                folder=RunFolder(broken.path),
                resume=True,
            )
        except CheckpointError:
            refused += 1
            assert {path.name: path.read_bytes() for path in broken.path.iterdir()} == damaged
        else:
            assert run_files(broken.path) == run_files(whole.path)
            assert [row["seconds"] for row in result.records][:7] == sound_seconds(sound)
    assert refused > 50


def sound_seconds(files: dict[str, bytes]) -> list[float]:
    return [json.loads(line)["seconds"] for line in files["timings.jsonl"].split(b"\n")[:-1]]


@pytest.mark.parametrize(
    "damage", ["missing", "short", "longer than it was", "other rows after it"]
)
def test_rows_are_looked_at_before_anything_is_changed(tmp_path: Path, damage: str) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Interrupted):
        run(Descent(interrupts_at=5), problem(), Budget(outer_steps=9), folder=folder)
    (tmp_path / "run/checkpoint-3.safetensors").write_bytes(b"old")
    data = folder.steps.read_bytes()
    if damage == "missing":
        folder.steps.unlink()
    elif damage == "short":
        folder.steps.write_bytes(data[: data.rfind(b"\n", 0, -1) + 1])
    else:
        folder.steps.write_bytes(
            data + (b'{"step": 3}\n' if damage == "other rows after it" else b'{"step": 7}\n{"st')
        )
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    if damage in ("missing", "short"):
        code = "unreadable-file" if damage == "missing" else "damaged-file"
        with rejects(code, str(folder.steps), of=CheckpointError):
            run(Descent(), problem(), Budget(outer_steps=9), folder=folder, resume=True)
        assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    else:
        run(Descent(), problem(), Budget(outer_steps=9), folder=folder, resume=True)
        assert [row["step"] for row in folder.records()] == list(range(10))
        assert folder.steps.read_bytes().startswith(data)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "null",
        "3",
        '"x"',
        "[" * 100_000,
        '{"step": ' + "9" * 5000 + "}",
        '{"checksum": []}',
    ],
)
@pytest.mark.parametrize(
    "name", ["checkpoint.json", "summary.json", "steps.jsonl", "timings.jsonl"]
)
def test_json_of_the_wrong_shape_is_refused(tmp_path: Path, name: str, text: str) -> None:
    folder = RunFolder(tmp_path / "run")
    run(Descent(), problem(), Budget(outer_steps=2), folder=folder)
    (tmp_path / "run" / name).write_text(text + "\n")
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    if name == "summary.json" and text == "{}":
        return  # no status: the run goes on from its checkpoint
    with rejects("damaged-file", of=CheckpointError) as caught:
        run(Descent(), problem(), Budget(outer_steps=2), folder=folder, resume=True)
    assert caught.value.place[0] == str(folder.path / name)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_a_sealed_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Not damage but another program: the checksum is right."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    for state in ({}, {"x": 3}, {"x": {"x": torch.ones(7)}}, {"x": {"y": torch.ones(2)}}):
        folder.create("", {})
        folder.save(state, 0)
        folder.config.unlink()
        info = RunInfo(
            task="problem",
            method="descent",
            seed=0,
            budget=Budget(outer_steps=2),
            config={"seed": 0},
        )
        folder.config.write_text("seed = 0\n")
        with rejects("other-settings", str(folder.checkpoint), of=CheckpointError):
            run(Descent(), problem(), Budget(outer_steps=2), folder=folder, resume=True, info=info)


def test_what_a_checkpoint_stands_on_is_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, tensors and their name in the folder, then the file that points to them, then its
    name, then the old ones go.
    """
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.append({"step": 0}, {"step": 0, "seconds": 0.0})
    folder.save({"x": torch.ones(2)}, 0)
    folder.append({"step": 1}, {"step": 1, "seconds": 0.0})
    calls: list[str] = []
    synced = os.fsync
    renamed = Path.replace
    removed = Path.unlink
    names = lambda handle: Path(os.readlink(f"/proc/self/fd/{handle}")).name  # noqa: E731
    monkeypatch.setattr(
        os, "fsync", lambda handle: (calls.append(f"sync {names(handle)}"), synced(handle))
    )
    monkeypatch.setattr(
        Path, "replace", lambda path, to: (calls.append(f"name {to.name}"), renamed(path, to))
    )
    monkeypatch.setattr(
        Path,
        "unlink",
        lambda path, **_: (
            calls.append(f"remove {path.name}") if path.exists() else None,
            removed(path, **_),
        ),
    )
    folder.save({"x": torch.ones(2)}, 1)
    assert calls == [
        "sync steps.jsonl",
        "sync timings.jsonl",
        "sync checkpoint-1.safetensors.part",
        "name checkpoint-1.safetensors",
        "sync run",
        "sync checkpoint.json.part",
        "name checkpoint.json",
        "sync run",
        "remove checkpoint-0.safetensors",
    ]


def test_rows_are_not_read_again_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    read = []
    original = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: (read.append(path.name), original(path))[1]
    )
    run(
        Descent(),
        problem(),
        Budget(outer_steps=6),
        folder=folder,
        settings=RunSettings(checkpoint_seconds=0),
    )
    assert read.count("steps.jsonl") == 0


@pytest.mark.parametrize("linked", [".part", ""])
def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path, linked: str) -> None:
    """Of a stranger's run folder: what its files point to stays as it is. Links in place of its
    own files are refused.
    """
    folder = RunFolder(tmp_path / "run")
    other = tmp_path / "other"
    with pytest.raises(Interrupted):
        run(Descent(interrupts_at=3), problem(), Budget(outer_steps=9), folder=folder)
    other.mkdir()
    for name in [path.name for path in folder.path.iterdir()]:
        (other / name).write_bytes((folder.path / name).read_bytes())
        if not linked:
            (folder.path / name).unlink()
        (folder.path / f"{name}{linked}").symlink_to(other / name)
    (folder.path / ".lease").symlink_to(other / "steps.jsonl")
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    if linked:
        run(Descent(), problem(), Budget(outer_steps=9), folder=folder, resume=True)
        assert (folder.read_summary() or {})["status"] == "done"
    else:
        with rejects("not-a-file", of=CheckpointError):
            run(Descent(), problem(), Budget(outer_steps=9), folder=folder, resume=True)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before


def test_asking_for_the_commit_runs_nothing_of_the_repository(tmp_path: Path) -> None:
    """A stranger's .git/config names programs: a monitor of files, filters."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "file").write_text("a")
    subprocess.run([*git, "-C", str(tmp_path), "add", "."], check=True)
    subprocess.run([*git, "-C", str(tmp_path), "commit", "-qm", "a"], check=True)
    (tmp_path / "hostile").write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\ncat\n")
    (tmp_path / "hostile").chmod(0o755)
    (tmp_path / ".gitattributes").write_text("* filter=x\n")
    (tmp_path / "file").write_text("b")
    for key in (
        "core.fsmonitor",
        "filter.x.clean",
        "filter.x.smudge",
        "core.sshCommand",
        "core.pager",
    ):
        subprocess.run(
            ["git", "-C", str(tmp_path), "config", key, str(tmp_path / "hostile")], check=True
        )
    (tmp_path / "executed").unlink(missing_ok=True)
    commit = _git(tmp_path)
    assert commit is not None
    assert len(commit) == 12
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("name", ["steps.jsonl", "timings.jsonl", "env.json"])
def test_a_pipe_is_refused_before_anything_is_changed(
    tmp_path: Path, name: str, begun: bool
) -> None:
    """Also in a folder that has no checkpoint yet."""
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Interrupted):
        run(Descent(interrupts_at=3), problem(), Budget(outer_steps=9), folder=folder)
    if begun:
        folder.checkpoint.unlink()
    (folder.path / name).unlink()
    os.mkfifo(folder.path / name)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    with rejects("not-a-file", str(folder.path / name), of=CheckpointError):
        run(Descent(), problem(), Budget(outer_steps=9), folder=folder, resume=True)
    assert {
        path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()
    } == before


def test_rows_behind_the_end_of_a_finished_run_go(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    done = run(Descent(), problem(), Budget(outer_steps=3), folder=folder)
    whole = run_files(folder.path)
    for path in (folder.steps, folder.timings):
        path.write_bytes(path.read_bytes() + path.read_bytes().split(b"\n")[-2] + b"\n")
    assert (
        run(Descent(), problem(), Budget(outer_steps=3), folder=folder, resume=True).records
        == done.records
    )
    assert run_files(folder.path) == whole


@pytest.mark.parametrize("name", ["config.toml", "checkpoint.json", "steps.jsonl", "summary.json"])
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path / "run")
    run(Descent(), problem(), Budget(outer_steps=2), folder=folder)
    (folder.path / name).unlink()
    os.mkfifo(folder.path / name)
    with rejects("not-a-file", str(folder.path / name), of=CheckpointError):
        run(Descent(), problem(), Budget(outer_steps=2), folder=folder, resume=True)


def test_a_folder_without_its_configuration_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    run(Descent(), problem(), Budget(outer_steps=2), folder=folder)
    folder.config.unlink()
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    for resume in (False, True):
        with rejects("missing-file", str(folder.config), of=CheckpointError):
            run(Descent(), problem(), Budget(outer_steps=2), folder=folder, resume=resume)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


# --- a folder from Python
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path, RunFolder])
def test_a_run_from_python_is_kept_like_any_other(tmp_path: Path, kind: Any) -> None:
    place = tmp_path / "new" / "mine"
    seen: list[Path | None] = []

    class Observers(Host):
        def notify(self, hook: str, **arguments: Any) -> None:
            seen.append(arguments["run"].folder)

    result = run(Descent(), problem(), Budget(outer_steps=3), folder=kind(place), host=Observers())
    assert result.info.folder == place
    assert set(seen) == {place}, "observers see it"
    stored = read_run(place)
    assert (stored.task_name, stored.label, stored.seed, stored.status) == (
        "problem",
        "descent",
        0,
        "done",
    )
    assert stored.environment["versions"]["torch"] == torch.__version__
    assert (
        scan(place)[0][0].metrics == stored.metrics == {"size": result.records[-1]["metric.size"]}
    )

    before = {path.name: path.read_bytes() for path in place.iterdir()}
    with rejects("run-exists", str(place), of=CheckpointError) as caught:
        run(Descent(), problem(), Budget(outer_steps=3), folder=kind(place))
    assert "resume=True" in (caught.value.hint or "")
    with rejects("other-settings", str(place), of=CheckpointError):
        run(Descent(), problem(), Budget(outer_steps=4), folder=kind(place), resume=True)
    again = run(Descent(), problem(), Budget(outer_steps=3), folder=kind(place), resume=True)
    assert (again.summary, again.records) == (result.summary, result.records)
    assert before == {path.name: path.read_bytes() for path in place.iterdir()}


def test_a_run_that_goes_on_elsewhere_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Interrupted):
        run(Descent(interrupts_at=1), problem(), Budget(outer_steps=4), folder=folder)
    table = json.loads((folder.path / "env.json").read_bytes())
    older = {**table, "versions": {**table["versions"], "torch": "1.0"}}
    (folder.path / "env.json").write_text(json.dumps(older))
    run(Descent(), problem(), Budget(outer_steps=4), folder=folder, resume=True)
    assert f"torch 1.0 → {torch.__version__}" in caplog.text
    assert json.loads((folder.path / "env.json").read_bytes()) == {**table, "before": [older]}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        '{"versions": null}',
        '{"versions": "x", "before": 3}',
        '{"python": "\\u001b[31m"}',
        "[" * 9999,
    ],
)
def test_an_environment_of_any_shape_does_no_harm(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Interrupted):
        run(Descent(interrupts_at=1), problem(), Budget(outer_steps=4), folder=folder)
    (folder.path / "env.json").write_text(text)
    assert (
        run(Descent(), problem(), Budget(outer_steps=4), folder=folder, resume=True).summary[
            "status"
        ]
        == "done"
    )
    assert (
        json.loads((folder.path / "env.json").read_bytes())["versions"]["torch"]
        == torch.__version__
    )


@pytest.mark.parametrize("text", ["[]", "3", '{"wall_seconds": "x"}', "[" * 9999, None])
def test_resources_of_any_shape_do_no_harm(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "resources.json"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    with measured(tmp_path, "cpu"):
        pass
    assert json.loads(path.read_bytes())["wall_seconds"] >= 0


# --- signals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_batch_systems_signal_saves_like_ctrl_c(tmp_path: Path, number: signal.Signals) -> None:
    class Ended(Descent):
        def step(
            self, problem: Problem, state: State, progress: float
        ) -> tuple[State, dict[str, Any]]:
            if state["step"] == 2:
                os.kill(os.getpid(), number)
            return super().step(problem, state, progress)

    folder = RunFolder(tmp_path / "run")
    before = signal.getsignal(number)
    with pytest.raises(
        Interrupted, match=r"state after step 3 is saved.*\n.*resume=True"
    ) as caught:
        run(Ended(), problem(), Budget(outer_steps=9), folder=folder)
    assert caught.value.number == number
    assert (folder.load() or ({}, -1))[1] == 3
    assert folder.read_summary() is None
    assert signal.getsignal(number) == before


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(
            Descent(),
            problem(),
            Budget(outer_steps=1),
            watch=lambda *_: os.kill(os.getpid(), signal.SIGHUP),
        )
    finally:
        signal.signal(signal.SIGHUP, before)


# --- numbers that break down
# --------------------------------------------------------------------------------------------------


def turned(changes: dict[str, Any], at: int = 3) -> Any:
    """Descent whose record, or whose θ or x, has other values from step ``at`` on."""

    class Turned(Descent):
        def step(
            self, problem: Problem, state: State, progress: float
        ) -> tuple[State, dict[str, Any]]:
            following, record = super().step(problem, state, progress)
            if following["step"] < at:
                return following, record
            return {**following, **changes.get("state", {})}, {
                **record,
                **changes.get("record", {}),
            }

        def result(self, state: State) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            return state.get("theta", {}), state["x"]

    return Turned()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("what", "code", "place", "named"),
    [
        ({"record": {"upper_loss": 0.0}}, "not-finite", ("upper_loss",), "upper loss"),
        (
            {"record": {"hypergradient_norm": 0.0}},
            "not-finite",
            ("method", "hypergradient"),
            "hypergradient",
        ),
        ({"record": {"update_norm": 0.0}}, "diverged", ("method", "outer"), "theta"),
        (
            {"state": {"theta": {"t": torch.zeros(2, dtype=torch.float16)}}},
            "diverged",
            ("method", "outer"),
            "t",
        ),
        ({"state": {"x": {"x": torch.zeros(2)}}}, "diverged", ("method", "outer"), "x"),
    ],
    ids=["upper_loss", "hypergradient_norm", "update_norm", "theta", "x"],
)
def test_a_number_that_is_not_finite_ends_the_run(
    tmp_path: Path,
    what: dict[str, Any],
    code: str,
    place: tuple[str, ...],
    named: str,
    value: float,
) -> None:
    folder = RunFolder(tmp_path / "run")
    spoilt = {
        part: {
            key: torch.tensor(value)
            if part == "record"
            else {
                name: leaf.index_fill(0, torch.tensor([1]), value) for name, leaf in entry.items()
            }
            for key, entry in table.items()
        }
        for part, table in what.items()
    }
    with rejects(code, *place, of=NumericalError) as caught:
        run(turned(spoilt), problem(), Budget(outer_steps=6), folder=folder)
    assert f" {named} " in caught.value.message
    state, step = folder.load() or ({}, -1)
    assert step == 2
    assert torch.isfinite(state["x"]["x"]).all()
    assert [row["step"] for row in folder.records()] == [0, 1, 2]
    assert (folder.read_summary() or {})["status"] == "failed"


def test_an_upper_loss_that_is_not_finite_at_the_end_is_no_result(tmp_path: Path) -> None:
    """Whatever the method recorded: a mean over no rows is NaN."""
    start = problem().x0["x"]
    empty = attrs.evolve(
        problem(), f=lambda t, x, b: x["x"][: len(start) * torch.equal(x["x"], start)].mean()
    )
    folder = RunFolder(tmp_path / "run")
    with rejects("not-finite", "upper_loss", of=NumericalError):
        run(Descent(), empty, Budget(outer_steps=3), folder=folder)
    assert (folder.read_summary() or {})["status"] == "failed"
    never = turned({"record": {"upper_loss": None}}, at=0)
    with rejects("not-finite", "upper_loss", of=NumericalError):
        run(never, problem(), Budget(outer_steps=2))


def test_full_disk_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.save({"x": torch.ones(3)}, 1)
    before = run_files(tmp_path / "run")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    part = str(tmp_path / "run/checkpoint-2.safetensors")
    with rejects("cannot-write", part, of=DiskError):
        folder.save({"x": torch.zeros(3)}, 2)
    monkeypatch.undo()
    assert run_files(tmp_path / "run") == before
    assert not list((tmp_path / "run").glob("*.part"))
    state, step = folder.load() or ({}, 0)
    assert (step, state["x"].tolist()) == (1, [1.0, 1.0, 1.0])


def test_state_packs_views_and_shared_tensors(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    state = {
        "a": base,
        "same": base,
        "view": base.t(),
        "nested": [{"n": None, "b": True, "i": 3, "f": 0.1}],
        "empty": {},
    }
    structure, tensors = pack(state)
    again = unpack(json.loads(json.dumps(structure)), tensors)
    assert again["nested"] == state["nested"]
    assert again["empty"] == {}
    assert torch.equal(again["view"], base.t())
    base.zero_()
    assert again["a"].sum() == 15  # a copy: going on with the run does not change what was packed
    with rejects("wrong-type", "state", "bad"):
        pack({"bad": {1, 2}})


def test_a_state_that_no_file_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Held(Descent):
        def init(self, problem: Problem, seed: int) -> State:
            return {**super().init(problem, seed), "optimizer": object()}

    with rejects("wrong-type", "method", "state", "optimizer"):
        run(Held(), problem(), Budget(outer_steps=3), folder=RunFolder(tmp_path / "run"))
    assert run(Held(), problem(), Budget(outer_steps=3)).summary["status"] == "done", (
        "in memory nothing is written"
    )


def test_global_generator_is_untouched() -> None:
    before = torch.random.get_rng_state()
    run(Descent(), problem(), Budget(outer_steps=3))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_gpu_is_waited_for_by_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first GPU of the machine, which a run on the second does not use."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    with Clock(0.0, torch.device("cuda:1")):
        assert waited == [torch.device("cuda:1")]
    assert waited == [torch.device("cuda:1")] * 2
    with Clock(0.0, torch.device("cpu")):
        pass
    assert len(waited) == 2


def test_a_gpu_that_is_not_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_called("cuda:1") == torch.device("cuda:1")
    with rejects("device-not-available", "run", "device"):
        device_called("cuda:2")


def test_a_run_on_the_cpu_takes_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cuda_for("cpu") is None
    assert cuda_for("cuda:0") is torch.cuda
    assert cuda_for("cuda:1") is None, "which the run itself tells"


def test_memory_of_a_cuda_library_counts_as_memory() -> None:
    assert out_of_memory(
        RuntimeError(
            "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"
        )
    )


def test_a_budget_of_calls_ends_although_the_method_makes_none(tmp_path: Path) -> None:
    class Silent(Descent):
        def step(
            self, problem: Problem, state: State, progress: float
        ) -> tuple[State, dict[str, Any]]:
            following, _ = super().step(problem, state, progress)
            return following, {"upper_loss": following["x"]["x"].norm(), "oracle_calls": 0}

    place = RunFolder(tmp_path / "run")
    with rejects("budget-cannot-end", "budget"):
        run(
            Silent(),
            problem(),
            Budget(oracle_calls=10),
            folder=place,
            settings=RunSettings(evaluate_every=500),
        )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["outer_steps"]) == ("failed", 1000)
    assert place.records()[-1]["step"] == 1000
    run(Silent(), problem(), Budget(outer_steps=1001))  # in steps it is a method like any other
