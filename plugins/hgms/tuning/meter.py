"""The spent share of a budget, and stages that a resumed call does not repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

from hgms.config import Budget

Stage = dict[str, Any]
"""The result of a stage: tensors and numbers by name."""


class NotConvex(Exception):
    """The training loss has negative curvature; the online engine handles it."""


class Paused(Exception):
    """A stage is missing, and no further stage may run in this step."""


class Meter:
    """Count seconds and lower steps against a budget.

    A budget in seconds limits the time since the start; time of earlier, interrupted calls counts.
    A budget in steps limits the lower steps, where one step moves all replicas. A budget in calls
    limits the gradients of all replicas. A GPU may be a few steps behind the clock: the engines
    wait for it when they judge the replicas.

    Examples
    --------
    >>> meter = Meter(Budget("10 steps"), models=4)
    >>> meter.count(5)
    >>> meter.share
    0.5
    """

    def __init__(self, budget: Budget, models: int, kind: Literal["wall", "cpu"] = "wall") -> None:
        self.budget = budget
        self.models = models
        self.steps = 0
        self.calls = 0
        self.earlier = 0.0
        self._time = time.perf_counter if kind == "wall" else time.process_time
        self._started = self._time()

    @property
    def seconds(self) -> float:
        return self.earlier + self._time() - self._started

    def count(self, steps: int = 1) -> None:
        """Add lower steps."""
        self.steps += steps

    def call(self, calls: int) -> None:
        """Add evaluations of losses, with or without a gradient, and Hessian products."""
        self.calls += calls

    @property
    def share(self) -> float:
        """The spent share of the budget; it may exceed 1."""
        if self.budget.seconds is not None:
            return self.seconds / self.budget.seconds
        if self.budget.outer_steps is not None:
            return self.steps / self.budget.outer_steps
        return self.steps * self.models / (self.budget.oracle_calls or 1)

    def spent(self) -> dict[str, float]:
        return {"seconds": self.seconds, "steps": self.steps, "calls": self.calls}

    def restore(self, spent: Mapping[str, float]) -> None:
        """Continue from the counts at the end of a stage."""
        self.steps = int(spent["steps"])
        self.calls = int(spent["calls"])
        self.earlier = float(spent["seconds"])
        self._started = self._time()


class Stages:
    """Run the stages of an engine in order; each call runs at most ``count`` new stages.

    ``finished`` contains the results of earlier calls by name. They are returned again, with the
    meter at the end of the stage, so decisions that depend on the spent share are repeated. A stage
    is a pure function of the problem and of earlier stages, so a resumed search computes the same
    numbers if the budget is in steps. ``spent`` contains the counts at the end of the last call.

    Raises
    ------
    Paused
        If a further stage is necessary.
    NotConvex
        If the stage raised it.
    """

    def __init__(
        self, meter: Meter, finished: Mapping[str, Stage], spent: Mapping[str, float], count: int
    ) -> None:
        self.meter = meter
        self.finished = dict(finished)
        self.spent = spent
        self.left = count
        self.last = ""
        self.prefix = ""

    def run(self, name: str, function: Callable[[], Stage]) -> Stage:
        name = self.prefix + name
        if name in self.finished:
            stage = self.finished[name]
            self.meter.restore(stage["spent"])
        else:
            stage = self._compute(name, function)
        if stage.get("not_convex"):
            raise NotConvex
        return stage

    def _compute(self, name: str, function: Callable[[], Stage]) -> Stage:
        if not self.left:
            raise Paused
        if not self.last:
            self.meter.restore(self.spent)
        self.left -= 1
        try:
            result = function()
        except NotConvex:
            result = {"not_convex": True}
        stage = {key: _detach(value) for key, value in result.items()}
        stage["spent"] = self.meter.spent()
        self.finished[name] = stage
        self.last = name
        return stage


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
