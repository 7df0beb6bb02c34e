"""Runs: the clock, the budget, the folder, resuming, and what happens when something breaks."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from hgms_core import CheckpointError, ConfigError, NumericalError, Problem, State
from hgms_core.budget import Budget
from hgms_core.errors import out_of_memory
from hgms_core.folder import DiskError, RunFolder, pack, unpack
from hgms_core.launch import device_called
from hgms_core.resources import cuda_for
from hgms_core.runner import Interrupted, _Clock, run


@frozen(kw_only=True)
class Descent:
    """Gradient descent on f with noise and momentum: a Method whose state has tensors, numbers, lists and None."""

    name = "descent"
    seconds: float = 0.0
    breaks_at: int | None = None
    interrupts_at: int | None = None

    def init(self, problem: Problem, seed: int) -> State:
        return {"seed": seed, "step": 0, "x": dict(problem.x0), "memory": {"m": torch.zeros(2)}, "best": None, "list": [1, 2.5]}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        step = state["step"]
        if self.interrupts_at == step:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(self.seconds)
        noise = torch.randn(2, generator=torch.Generator().manual_seed(1000 * state["seed"] + step))
        memory = 0.9 * state["memory"]["m"] + state["x"]["x"] + 0.1 * noise
        x = {"x": state["x"]["x"] - 0.1 * (1 - 0.5 * progress) * memory}
        new = {**state, "step": step + 1, "x": x, "memory": {"m": memory}, "best": {"loss": memory.norm()}}
        broken = self.breaks_at == step
        record = {
            "step": step + 1, "upper_loss": x["x"].norm(), "oracle_calls": 3 * (step + 1), "gap": float("inf"),
            "finite_candidates": torch.tensor(0 if broken else 4), "scores": torch.tensor([float("nan")] * 2),
        }  # fmt: skip
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


def folder(path: Path) -> RunFolder:
    made = RunFolder(path)
    made.create("seed = 0\n", {"torch": torch.__version__})
    return made


def contents(path: Path) -> dict[str, bytes]:
    """Everything that has to be the same for every run of one seed."""
    kept = [each for each in path.iterdir() if each.name.startswith(("checkpoint", "steps", "summary"))]
    return {each.name: each.read_bytes() for each in kept}


def test_budget_in_steps_calls_and_seconds() -> None:
    assert run(Descent(), problem(), Budget(outer_steps=7)).summary["outer_steps"] == 7
    assert run(Descent(), problem(), Budget(oracle_calls=10)).summary["outer_steps"] == 4
    timed = run(Descent(seconds=0.02), problem(), Budget(seconds=0.1))
    assert 0.1 <= timed.seconds < 0.2
    assert 3 <= timed.summary["outer_steps"] <= 5


def test_clock_excludes_evaluation_and_observers() -> None:
    slow = run(Descent(seconds=0.01), problem(evaluate_seconds=0.05), Budget(outer_steps=5), watch=lambda *_: time.sleep(0.05))
    assert 0.05 <= slow.seconds < 0.15  # 5 · 10 ms of steps; evaluation and watching took 600 ms


def test_first_use_is_not_charged_to_the_budget_in_seconds() -> None:
    class Cold:
        name = "cold"
        calls = 0

        def init(self, problem: Problem, seed: int) -> State:
            return Descent().init(problem, seed)

        def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
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
    made = folder(tmp_path / "run")
    result = run(Descent(), problem(), Budget(outer_steps=6), folder=made, evaluate_every=2)
    assert made.records() == result.records
    assert [row["step"] for row in result.records] == list(range(7))
    assert [row["step"] for row in result.records if "metric.size" in row] == [0, 2, 4, 6]
    assert result.records[1]["gap"] is None  # JSON has no infinity
    assert json.loads((tmp_path / "run/summary.json").read_text())["metrics"]["size"] == result.records[-1]["metric.size"]


def test_evaluations_are_spread_over_the_budget() -> None:
    """However fast a method is, it is evaluated as often, and at the end."""
    for steps, expected in ((12, [0, 3, 6, 9, 12]), (3, [0, 1, 2, 3]), (10, [0, 3, 5, 8, 10])):
        result = run(Descent(), problem(), Budget(outer_steps=steps), evaluations=4)
        assert [row["step"] for row in result.records if "metric.size" in row] == expected


def test_the_cpu_clock_counts_work_and_not_waiting() -> None:
    @frozen
    class Sleeper:
        name = "sleeper"

        def init(self, problem: Problem, seed: int) -> State:
            return {"x": dict(problem.x0)}

        def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
            time.sleep(0.02)
            return state, {}

        def result(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
            return {}, state["x"]

    wall = run(Sleeper(), problem(), Budget(outer_steps=5), clock="wall").seconds
    cpu = run(Sleeper(), problem(), Budget(outer_steps=5), clock="cpu").seconds
    assert wall >= 0.1
    assert 0 < cpu < 0.5 * wall


def test_killed_before_the_first_checkpoint_starts_again(tmp_path: Path) -> None:
    whole, broken = folder(tmp_path / "whole"), folder(tmp_path / "broken")
    run(Descent(), problem(), Budget(outer_steps=9), folder=whole, checkpoint_seconds=0)
    with pytest.raises(Interrupted, match="state after step 4 is saved"):
        run(Descent(interrupts_at=3), problem(), Budget(outer_steps=10), folder=broken)
    (tmp_path / "broken/checkpoint.json").unlink()  # its lines, from a longer schedule, must go too
    run(Descent(), problem(), Budget(outer_steps=9), folder=broken, resume=True)
    assert contents(whole.path) == contents(broken.path)


@pytest.mark.parametrize("stop", [0, 4, 7])
def test_ctrl_c_saves_and_resumes(tmp_path: Path, stop: int) -> None:
    whole, broken = folder(tmp_path / "whole"), folder(tmp_path / "broken")
    run(Descent(), problem(), Budget(outer_steps=9), folder=whole)
    with pytest.raises(Interrupted, match=r"--resume"):
        run(Descent(interrupts_at=stop), problem(), Budget(outer_steps=9), folder=broken)
    assert not broken.summary.exists()
    result = run(Descent(), problem(), Budget(outer_steps=9), folder=broken, resume=True)
    assert result.info.resumed_from == stop + 1
    assert contents(whole.path) == contents(broken.path)


def test_second_ctrl_c_stops_at_once() -> None:
    def twice() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    thread = threading.Thread(target=twice)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(Descent(seconds=5.0), problem(), Budget(outer_steps=9))
    thread.join()
    assert time.monotonic() - began < 3


def test_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    whole, broken = folder(tmp_path / "whole"), folder(tmp_path / "broken")
    run(Descent(), problem(), Budget(outer_steps=9), folder=whole)
    with pytest.raises(Interrupted):
        run(Descent(interrupts_at=5), problem(), Budget(outer_steps=9), folder=broken)
    with broken.steps.open("ab") as stream:
        stream.write(b'{"step": 7, "upper_lo')
    run(Descent(), problem(), Budget(outer_steps=9), folder=broken, resume=True)
    assert contents(whole.path) == contents(broken.path)


@pytest.mark.parametrize("saved", [True, False])
def test_what_a_kill_left_of_a_checkpoint_goes_when_the_run_does_on(tmp_path: Path, saved: bool) -> None:
    """Killed while it wrote tensors, or before it removed the older ones; also where nothing is saved any more."""
    made = folder(tmp_path / "run")
    run(Descent(), problem(), Budget(outer_steps=9), folder=made)
    before = contents(made.path)
    left = ["checkpoint-4.safetensors", "checkpoint-11.safetensors.part"]
    for name in left:
        (made.path / name).write_bytes(b"half")
    if saved:
        made.save(*(made.load() or ({}, -1)))
    else:
        run(Descent(), problem(), Budget(outer_steps=9), folder=made, resume=True)
    assert contents(made.path) == before


def test_all_candidates_broken_keeps_the_last_good_state(tmp_path: Path) -> None:
    made = folder(tmp_path / "run")
    with pytest.raises(NumericalError, match=r"step 4: none of the candidates is finite .*\n.*state after step 3 is kept"):
        run(Descent(breaks_at=3), problem(), Budget(outer_steps=9), folder=made)
    state, step = made.load() or ({}, -1)
    assert step == 3
    assert torch.isfinite(state["x"]["x"]).all()
    summary = made.read_summary()
    assert summary is not None
    assert summary["status"] == "failed"
    assert "step 4" in summary["error"]
    assert len(made.records()) == 4


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "pointer", "key", "line"])
def test_damaged_files_are_named_and_left_alone(tmp_path: Path, damage: str) -> None:
    made = folder(tmp_path / "run")
    run(Descent(), problem(), Budget(outer_steps=4), folder=made)
    tensors = tmp_path / "run/checkpoint-4.safetensors"
    data = tensors.read_bytes()
    if damage == "truncate":
        tensors.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "remove":
        tensors.unlink()
    elif damage == "pointer":
        made.checkpoint.write_text(made.checkpoint.read_text()[:40])
    elif damage == "key":
        made.checkpoint.write_text("{}")
    else:
        lines = made.steps.read_bytes().split(b"\n")
        made.steps.write_bytes(b"\n".join([lines[0], b"{broken", *lines[2:]]))
    named = {"pointer": "checkpoint.json", "key": "checkpoint.json", "line": "steps.jsonl"}.get(damage, tensors.name)
    before = contents(tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"damaged run file .*{named}.*(?s:.*)nothing was changed"):
        run(Descent(), problem(), Budget(outer_steps=8), folder=made, resume=True)
    assert contents(tmp_path / "run") == before


def test_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder(tmp_path / "run")
    made.save({"x": torch.ones(3)}, 1)
    before = contents(tmp_path / "run")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DiskError, match=r"cannot write .*: the disk is full\n.*last complete checkpoint is untouched.*--resume"
    ):
        made.save({"x": torch.zeros(3)}, 2)
    monkeypatch.undo()
    assert contents(tmp_path / "run") == before
    assert not list((tmp_path / "run").glob("*.part"))
    state, step = made.load() or ({}, 0)
    assert (step, state["x"].tolist()) == (1, [1.0, 1.0, 1.0])


def test_state_packs_views_and_shared_tensors(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    state = {"a": base, "same": base, "view": base.t(), "nested": [{"n": None, "b": True, "i": 3, "f": 0.1}], "empty": {}}
    structure, tensors = pack(state)
    again = unpack(json.loads(json.dumps(structure)), tensors)
    assert again["nested"] == state["nested"]
    assert again["empty"] == {}
    assert torch.equal(again["view"], base.t())
    base.zero_()
    assert again["a"].sum() == 15  # a copy: going on with the run does not change what was packed
    with pytest.raises(TypeError, match="state holds a set at 'bad'"):
        pack({"bad": {1, 2}})


def test_global_generator_is_untouched() -> None:
    before = torch.random.get_rng_state()
    run(Descent(), problem(), Budget(outer_steps=3))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_gpu_is_waited_for_by_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first GPU of the machine, which a run on the second does not use."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    with _Clock(0.0, torch.device("cuda:1")):
        assert waited == [torch.device("cuda:1")]
    assert waited == [torch.device("cuda:1")] * 2
    with _Clock(0.0, torch.device("cpu")):
        pass
    assert len(waited) == 2


def test_a_gpu_that_is_not_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_called("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="device 'cuda:2' asked for, but the last that torch sees is 'cuda:1'"):
        device_called("cuda:2")


def test_a_run_on_the_cpu_takes_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cuda_for("cpu") is None
    assert cuda_for("cuda:0") is torch.cuda
    assert cuda_for("cuda:1") is None, "which the run itself tells"


def test_memory_of_a_cuda_library_counts_as_memory() -> None:
    assert out_of_memory(RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"))


def test_a_budget_of_calls_ends_although_the_method_makes_none(tmp_path: Path) -> None:
    class Silent(Descent):
        def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
            following, _ = super().step(problem, state, progress)
            return following, {"upper_loss": following["x"]["x"].norm()}

    place = folder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"no oracle call in the last 1,000 steps.*\n.*steps or seconds"):
        run(Silent(), problem(), Budget(oracle_calls=10), folder=place, evaluate_every=500)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["outer_steps"]) == ("failed", 1000)
    assert place.records()[-1]["step"] == 1000
    run(Silent(), problem(), Budget(outer_steps=1001))  # in steps it is a method like any other
