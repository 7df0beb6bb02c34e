"""A small method for tests of runs, and its run in a folder: whole, or stopped after a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import field, frozen

from hgms.config import Budget
from hgms.plugins import Host
from hgms.runs import Interrupted, RunFolder, RunResult, run
from hgms_core import Problem, State

STEPS = 9


def nothing(step: int) -> Mapping[str, Any]:
    return {}


@frozen(kw_only=True)
class Descent:
    """Gradient descent on f with noise and momentum: a Method whose state has tensors, numbers,
    lists and None. ``before`` is called with the number of steps before each one; ``record`` and
    ``state`` add to the record and the state of a step.
    """

    name = "descent"
    # how a test disturbs it is no part of what it computes, so no part of its configuration
    before: Callable[[int], object] = field(default=nothing, metadata={"toml": False})
    record: Callable[[int], Mapping[str, Any]] = field(default=nothing, metadata={"toml": False})
    state: Callable[[int], Mapping[str, Any]] = field(default=nothing, metadata={"toml": False})

    def init(self, problem: Problem, seed: int) -> State:
        memory = {"m": torch.zeros(2)}
        start = {"seed": seed, "step": 0, "x": dict(problem.x0), "memory": memory}
        return start | {"best": None, "list": [1, 2.5]}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        step = state["step"]
        self.before(step)
        noise = torch.randn(2, generator=torch.Generator().manual_seed(1000 * state["seed"] + step))
        memory = 0.9 * state["memory"]["m"] + state["x"]["x"] + 0.1 * noise
        x = {"x": state["x"]["x"] - 0.1 * (1 - 0.5 * progress) * memory}
        new = {"step": step + 1, "x": x, "memory": {"m": memory}, "best": {"loss": memory.norm()}}
        record = {
            "step": step + 1,
            "upper_loss": x["x"].norm(),
            "oracle_calls": 3 * (step + 1),
            "gap": float("inf"),
            "finite_candidates": torch.tensor(4),
            "scores": torch.tensor([float("nan")] * 2),
        }
        return state | new | self.state(step + 1), record | self.record(step + 1)

    def result(self, state: State) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return state.get("theta", {}), state["x"]


def signals(number: int, *steps: int) -> Descent:
    """The method that sends its own process a signal in these steps."""
    return Descent(before=lambda step: step in steps and os.kill(os.getpid(), number))


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


def descend(method: Any = Descent(), steps: int = STEPS, **options: Any) -> RunResult:
    """A run without plugins, whose loading takes longer than the run."""
    budget = options.pop("budget", Budget(outer_steps=steps))
    watch = options.pop("watch", ())
    several = watch if isinstance(watch, list | tuple) else [watch]
    made = options.pop("problem", problem())
    return run(method, made, budget, watch=[Host(), *several], **options)


def resumed(folder: RunFolder, **options: Any) -> RunResult:
    return descend(folder=folder, resume=True, **options)


def stopped(path: Path, after: int = 6) -> RunFolder:
    """The folder of a run that Ctrl-C stopped."""
    with pytest.raises(Interrupted):
        descend(signals(signal.SIGINT, after - 1), folder=path)
    return RunFolder(path)


def files(path: Path) -> dict[str, bytes]:
    """The contents of the files of a folder, but for what is no file."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def fill(path: Path, contents: Mapping[str, bytes]) -> RunFolder:
    """A folder with these files and no others."""
    path.mkdir(exist_ok=True)
    for file in path.iterdir():
        file.unlink()
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return RunFolder(path)
