"""Runs on the device: killed and resumed, measured, timed, and out of memory."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from click.testing import CliRunner
from support.helpers import rejects, run_files
from support.processes import rows_written

from hgms.cli import main
from hgms.runs import RunConfig, RunSettings, run, run_config
from hgms_core import Budget, Problem, State
from hgms_core.errors import OutOfMemory

pytestmark = pytest.mark.nightly

CONFIG = """
seed = 3

[task]
name = "hyper-cleaning"
dataset = "digits"
corruption = 0.5
train_size = 100
hidden = 8

[method]
name = "hg-ms"
generator = {{ count = 3, steps = 5, noise = 0.05, batch_size = 20 }}

[budget]
outer_steps = {steps}

[run]
device = "{device}"
threads = 1
evaluate_every = 5
checkpoint_seconds = 0.0
"""
STEPS = 40
# As docs/how-to/run-on-gpus.md says it.
DETERMINISTIC = """
import sys, torch
torch.use_deterministic_algorithms(True)
from hgms.cli import main
main(sys.argv[1:])
"""


def _prepared(folder: Path, device: torch.device, steps: int = STEPS) -> RunConfig:
    folder.mkdir()
    (folder / "run.toml").write_text(CONFIG.format(steps=steps, device=device.type))
    text = (folder / "run.toml").read_text().replace("[run]", f'[run]\nout = "{folder / "runs"}"')
    return RunConfig.from_toml(text)


def _folder(place: Path) -> Path:
    [found] = place.glob("runs/*/*/seed-*")
    return found


@pytest.mark.usefixtures("deterministic", "real")
def test_killed_and_resumed_equals_left_alone(tmp_path: Path, device: torch.device) -> None:
    """With noise and minibatches, under deterministic algorithms: bit for bit, also from one
    process to another.
    """
    run_config(_prepared(tmp_path / "whole", device))

    place = tmp_path / "killed"
    config = _prepared(place, device)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            DETERMINISTIC,
            "run",
            "run.toml",
            "--set",
            f"run.out={place / 'runs'}",
        ],
        cwd=place,
        env=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    until = time.monotonic() + 90
    while process.poll() is None and rows_written(place) < STEPS // 6 and time.monotonic() < until:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, f"it ended by itself: {said.decode()}"
    done = rows_written(place)
    assert 0 < done < STEPS, f"killed after {done} of {STEPS} steps: {said.decode()}"

    result = run_config(config, resume=True)
    assert result.info.resumed_from is not None
    assert result.theta["logits"].device.type == device.type
    one, other = (run_files(_folder(each)) for each in (tmp_path / "whole", place))
    assert len(one) == 4, sorted(one)
    assert one == other


@pytest.mark.usefixtures("deterministic", "real")
def test_a_comparison_writes_the_device_and_the_peak_of_its_memory(
    tmp_path: Path, device: torch.device
) -> None:
    grid = f"""
    seeds = [0]
    baselines = false
    budget = "2 steps"
    task = [{{ name = "hyper-cleaning", train_size = 100, hidden = 8 }}]
    method = [{{ name = "uniform", generator.steps = 2 }}]
    run = {{ device = "{device.type}", threads = 1, out = "{tmp_path / "runs"}" }}
    """
    (tmp_path / "grid.toml").write_text(grid)
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "grid.toml"), "--jobs", "0"])
    assert done.exit_code == 0, done.output
    files = [_folder(tmp_path) / name for name in ("env.json", "resources.json")]
    told, used = (json.loads(file.read_bytes()) for file in files)
    on_gpu = device.type == "cuda"
    assert told["device"] == (torch.cuda.get_device_name() if on_gpu else "cpu")
    assert told["deterministic"] is True
    peak = used["peak_gpu_memory_bytes"]
    # the training images alone are 100·64 numbers
    most = torch.cuda.get_device_properties(0).total_memory if on_gpu else 0
    assert 4 * 100 * 64 < peak <= most if on_gpu else peak is None


@frozen(kw_only=True)
class Queued:
    """A step that hands work to the device and asks for nothing back: only a clock that waits
    sees how long it takes.
    """

    name = "queued"
    products: int

    def init(self, problem: Problem, seed: int) -> State:
        return {"x": dict(problem.x0)}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        x = state["x"]["x"]
        for _ in range(self.products):
            x = (x @ x).clamp(-1, 1)
        return {"x": {"x": x}}, {"note": "nothing on the device"}

    def result(self, state: State) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return {}, state["x"]


def test_a_budget_of_seconds_waits_for_the_device(device: torch.device) -> None:
    size, products = (6144, 8) if device.type == "cuda" else (384, 8)
    problem = Problem(
        theta0={},
        x0={"x": torch.full((size, size), 1e-3, device=device)},
        g=lambda theta, x, batch: x["x"][0, 0],
        f=lambda theta, x, batch: x["x"][0, 0],
    )
    method = Queued(products=products)
    state = method.init(problem, 0)
    for _ in range(3):  # the last one is warm
        began = _now(device)
        state, _ = method.step(problem, state, 0.0)
        launched = time.perf_counter() - began
        one = _now(device) - began
    if device.type == "cuda":
        assert launched < 0.5 * one, (
            f"launching took {launched:.4f} s of {one:.4f} s: this device works at once"
        )
    budget = 10 * one
    result = run(method, problem, Budget(seconds=budget), settings=RunSettings(evaluate_every=1000))
    steps = result.summary["outer_steps"]
    assert result.seconds >= budget
    assert result.seconds <= budget + 5 * one, (
        f"{result.seconds:.4f} s under a budget of {budget:.4f} s"
    )
    assert 4 <= steps <= 20, f"{steps} steps of {one:.4f} s under a budget of {budget:.4f} s"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- out of memory
# --------------------------------------------------------------------------------------------------

LARGE = {"train_size": 600, "hidden": 4096}
COUNT = 64
"""64 candidates of 64·4096 weights and 256 rows of activations each: about 0.3 GB of activations
in one pass.
"""


@pytest.fixture
def memory(cuda: torch.device) -> Iterator[Memory]:
    made = Memory()
    yield made
    made.free()


class Memory:
    """Lets this process have little or all of the GPU's memory."""

    def limit(self, spare: int) -> None:
        """``spare`` bytes beside what is held now."""
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + spare) / total, 0
        )

    def free(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        gc.collect()
        torch.cuda.empty_cache()


def _large(place: Path, steps: int) -> RunConfig:
    table = {
        "task": {"name": "hyper-cleaning", **LARGE},
        "method": {"name": "hg-ms", "generator": {"count": COUNT, "steps": 2}},
        "budget": f"{steps} steps",
        "run": {
            "device": "cuda",
            "threads": 1,
            "out": str(place / "runs"),
            "checkpoint_seconds": 1e6,
        },
    }
    return RunConfig.from_dict(table)


def test_out_of_memory_in_the_midst_keeps_the_state(tmp_path: Path, memory: Memory) -> None:
    def watch(_info: object, record: dict[str, Any], _share: float) -> None:
        if record["step"] == 2:
            memory.limit(50_000_000)  # another program took the rest

    with rejects("out-of-memory", of=OutOfMemory) as caught:
        run_config(_large(tmp_path, 4), watch=watch)
    assert caught.value.message.startswith("step 3: out of memory: ")
    assert (caught.value.hint or "").startswith("method.generator: ")
    told = json.loads((_folder(tmp_path) / "summary.json").read_bytes())
    assert (told["status"], told["outer_steps"]) == ("failed", 2)

    memory.free()
    result = run_config(_large(tmp_path, 4), resume=True)
    assert result.info.resumed_from == 2
    assert result.summary["outer_steps"] == 4
