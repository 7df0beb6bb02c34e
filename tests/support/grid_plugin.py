"""A plugin in one file for the tests of comparisons: a small task, and methods that can fail in
every way.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field, frozen, validators

from hgms.adapters import from_losses
from hgms_core import Data, Key, Problem, State, Tree, hookimpl


@final
@frozen(kw_only=True)
class Bowl:
    """f(x) = mean ‖x − t_i‖² over rows around a target; the metrics are distances to the target
    itself.
    """

    name: ClassVar[str] = "bowl"
    version: ClassVar[str] = "1"
    metrics: ClassVar[Mapping[str, bool]] = {"distance": False, "closeness": True}
    traits: ClassVar[frozenset[str]] = frozenset({"stop-rows"})

    rows: int = field(default=5, validator=validators.ge(1))

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        generator = Key(seed).fold("bowl").generator()

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

        target = normal(2)
        x0 = normal(2)
        parts = {
            role: Data.of({"t": target + 0.3 * normal(self.rows, 2)})
            for role in ("differentiate", "select", "stop")
        }

        def loss(theta: Tree, x: Tree, batch: Tree) -> torch.Tensor:
            return (x["x"] - batch["t"]).square().sum(-1).mean() + 0.0 * sum(
                leaf.sum() for leaf in theta.values()
            )

        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            far = float((x["x"] - target).norm())
            return {"distance": far, "closeness": -far}

        return from_losses(
            theta0={"t": normal(1)},
            x0={"x": x0},
            g=loss,
            f=loss,
            lower_data=parts["differentiate"],
            upper_data=parts,
            evaluate=evaluate,
        )


@frozen(kw_only=True)
class Schedule:
    """A part within a part, for dotted fields."""

    lr: float = field(default=0.1, validator=validators.gt(0))


@final
@frozen(kw_only=True)
class Walk:
    """Gradient descent on f with noise. ``breaks`` says how step ``at`` of seed ``seed`` (of every
    ``seed``-th, if ``every``) fails; only the first time, if ``once`` names a folder to remember
    that in.
    """

    name: ClassVar[str] = "walk"

    move: Schedule = Schedule()
    noise: float = 0.05
    pause: float = 0.0
    breaks: Literal["never", "raise", "kill"] = "never"
    at: int = 2
    seed: int = 1
    every: bool = False
    once: str = ""

    def init(self, problem: Problem, seed: int) -> State:
        return {"x": dict(problem.x0), "step": 0, "seed": seed}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        time.sleep(self.pause)
        _hold(Path(f"hold-{state['seed']}-{state['step']}"))
        due = state["seed"] % self.seed == 0 if self.every else state["seed"] == self.seed
        if due and state["step"] == self.at:
            self._break(state["seed"])
        rows = problem.upper_data["differentiate"].whole
        generator = Key(state["seed"]).fold("walk").fold(state["step"]).generator()
        noise = self.noise * torch.randn(2, generator=generator, dtype=torch.float64).to(
            state["x"]["x"].dtype
        )
        slope = 2 * (state["x"]["x"] - rows["t"].mean(0)) + noise
        x = {"x": state["x"]["x"] - self.move.lr * slope}
        step = state["step"] + 1
        return {**state, "x": x, "step": step}, {
            "upper_loss": problem.f({}, x, rows),
            "oracle_calls": 2 * step,
        }

    def _break(self, seed: int) -> None:
        if self.once:
            try:
                Path(self.once, str(seed)).touch(exist_ok=False)
            except FileExistsError:
                return
        if self.breaks == "raise":
            raise RuntimeError("CUDA out of memory, or so")
        if self.breaks == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def result(self, state: State) -> tuple[Tree, Tree]:
        return {}, state["x"]


def _hold(file: Path) -> None:
    """Waits while there is such a file, until Ctrl-C: so a test can be sure that no run ends
    before its blow falls.
    """
    if not file.exists():
        return
    heard, bell = socket.socketpair()
    bell.setblocking(False)
    before = signal.set_wakeup_fd(bell.fileno())
    try:
        while file.exists() and not select.select([heard], [], [], 0.01)[0]:
            pass
    finally:
        signal.set_wakeup_fd(before)
        heard.close()
        bell.close()


@final
@frozen(kw_only=True)
class Needy:
    """Needs what the bowl has not."""

    name: ClassVar[str] = "needy"
    needs: ClassVar[frozenset[str]] = frozenset({"sources"})

    def init(self, problem: Problem, seed: int) -> State:
        return {}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        return {}, {}

    def result(self, state: State) -> tuple[Tree, Tree]:
        return {}, {}


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [Bowl]


@hookimpl
def hgms_register_methods() -> list[type]:
    return [Walk, Needy]
