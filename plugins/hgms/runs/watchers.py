"""Functions that watch a run and may end it: early stopping, or the pruning of a study.

A run calls ``watch(info, record, share)`` after every outer step, outside the clock. ``record`` is
the new row (``step``, ``upper_loss``, ``metric.<name>`` if it was evaluated, ``seconds``, …).
``share`` is the spent share of the budget.

A run that a watcher ends is done, and its result is the result after that step.
``summary["stopped_by"]`` names the watcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hgms.packages import optional_module
from hgms_core import Record, RunInfo
from hgms_core.arguments import check_function

Watcher = Callable[[RunInfo, Record, float], Any]
"""``watch(info, record, share of the budget spent)``, called after every step, outside the clock.

A watcher ends the run if it returns ``True`` or raises :class:`StopRun`. Other results are ignored.
"""


class StopRun(BaseException):
    """Raised by a watcher, an observer or ``evaluate`` to end the run as done.

    The result is the current result of the run. The text gives the reason.

    Like KeyboardInterrupt, this class is not an ``Exception``, so code in between that catches
    exceptions does not stop it.

    Examples
    --------
    >>> from hgms.config import Budget
    >>> from hgms_core import Problem
    >>> from hgms.runs import run
    >>> class Halve:
    ...     name = "halve"
    ...
    ...     def init(self, problem, seed):
    ...         return {"x": dict(problem.x0)}
    ...
    ...     def step(self, problem, state, progress):
    ...         return {"x": {"x": state["x"]["x"] / 2}}, {"upper_loss": state["x"]["x"].sum()}
    ...
    ...     def result(self, state):
    ...         return {}, state["x"]
    >>> import torch
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, b: x["x"].sum(),
    ...     f=lambda t, x, b: x["x"].sum(),
    ... )
    >>> def enough(info, record, share):
    ...     if record.get("upper_loss", 1.0) < 0.3:
    ...         raise StopRun("the loss is below 0.3")
    >>> result = run(Halve(), problem, Budget(outer_steps=100), watch=enough)
    >>> result.summary["outer_steps"], result.summary["stopped_by"]
    (3, 'watch: the loss is below 0.3')
    """


def trial_pruner(trial: Any, metric: str) -> Watcher:
    """Return a watcher that prunes the run of an Optuna trial.

    The watcher reports ``metric`` to the trial at every evaluated step. It raises
    ``optuna.TrialPruned`` if the study's pruner requests it. Example: ``run(method, problem, "60s",
    watch=pruned(trial, "validation_accuracy"))``. The study defines the better direction. The
    folder of the run, if it has one, keeps the computed results.

    Raises
    ------
    MissingExtra
        Without Optuna.
    """
    optuna = optional_module("optuna", "pruning", "optuna")

    def watch(_info: RunInfo, record: Record, _share: float) -> None:
        value = record.get(f"metric.{metric}", record.get(metric))
        if isinstance(value, int | float) and math.isfinite(value):
            trial.report(float(value), int(record["step"]))
            if trial.should_prune():
                raise optuna.TrialPruned(f"pruned at step {record['step']}: {metric} {value:.6g}")

    return watch


def check_watchers(_observers: object, _attribute: object, watch: Sequence[Watcher]) -> None:
    """Raise ConfigError if a function cannot be called with the arguments of a watcher."""
    for item in watch:
        check_function("watch", item, "info", "record", "share")
