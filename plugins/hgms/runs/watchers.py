"""Functions that watch a run and may end it: early stopping, or the pruning of a study.

A run calls ``watch(info, record, share)`` after every outer step, outside the clock. ``record`` is
the new row (``step``, ``upper_loss``, ``metric.<name>`` if it was evaluated, ``seconds``, …).
``share`` is the spent share of the budget.

A run that a watcher ends is done, and its result is the result after that step.
``summary["stopped_by"]`` names the watcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from attrs import field, frozen

from hgms.arguments import require
from hgms.packages import optional_module
from hgms.runs.own_problem import higher_is_better
from hgms_core import Record, RunInfo
from hgms_core.arguments import check_function, reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.errors import unknown_name
from hgms_core.validators import not_negative, positive

Watcher = Callable[[RunInfo, Record, float], Any]
"""``watch(info, record, share of the budget spent)``, called after every step, outside the clock.

A watcher ends the run if it returns ``True`` or raises :class:`StopRun`. Other results are ignored.
A watcher may have a method ``recall(records)``. The run calls it with the existing rows when it
starts or resumes, so that a resumed run ends at the same step as an uninterrupted run.
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


@final
@reports_errors
@frozen(kw_only=True, eq=False, field_transformer=read_by_annotation)
class Patience:
    """Ends a run if ``metric`` has not improved for ``steps`` outer steps.

    ``metric`` is a metric of ``evaluate``, or a number in every row (``upper_loss``,
    ``stop_loss``). The name of an accuracy or a loss determines whether higher is better. For other
    names, set ``higher_is_better``. An improvement by ``least`` or less does not count. Steps
    without an evaluation of the metric are skipped.

    The stopping criterion must not be the reported metric: use a metric of validation rows.

    Raises
    ------
    ConfigError
        If the better direction is unknown, or if the first evaluated row lacks the metric.

    Examples
    --------
    >>> patience = Patience(metric="validation_loss", steps=2)
    >>> [
    ...     patience(None, {"step": step, "metric.validation_loss": loss}, 0.0)
    ...     for step, loss in enumerate([3.0, 2.0, 2.5, 2.1])
    ... ]
    [None, None, None, True]
    """

    metric: str
    steps: int = field(validator=positive)
    least: float = field(default=0.0, validator=not_negative)
    higher_is_better: bool | None = None
    _gained: list[tuple[float, int]] = field(factory=list, init=False, repr=False)
    """The best value and its step in the watched run; empty before the first value."""

    def __attrs_post_init__(self) -> None:
        require(
            self._higher is not None,
            "missing-option",
            f"the better direction of metric {self.metric!r} is unknown",
            hint="set higher_is_better=True or False",
            place=("higher_is_better",),
        )

    @property
    def _higher(self) -> bool | None:
        return (
            higher_is_better(self.metric)
            if self.higher_is_better is None
            else self.higher_is_better
        )

    def __call__(
        self, info: RunInfo | None, record: Mapping[str, Any], share: float
    ) -> bool | None:
        if record["step"] == 0:
            self.recall([])
        if metric_of(record, self.metric) is None:
            self._check(record)
            return None
        return True if self._without_gain(record) >= self.steps else None

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Restart with the rows of a resumed run."""
        self._gained.clear()
        for record in records:
            self._without_gain(record)

    def _without_gain(self, record: Mapping[str, Any]) -> int:
        """Return the number of steps since the best value."""
        value = metric_of(record, self.metric)
        step = int(record["step"])
        sign = 1 if self._higher else -1
        if value is not None and (
            not self._gained or sign * (value - self._gained[0][0]) > self.least
        ):
            self._gained[:] = [(value, step)]
        return step - (self._gained[0][1] if self._gained else 0)

    def _check(self, record: Mapping[str, Any]) -> None:
        """Raise ConfigError if the rows do not contain the metric."""
        evaluated = [name.removeprefix("metric.") for name in record if name.startswith("metric.")]
        if not self._gained and record["step"] and (evaluated or record["step"] >= self.steps):
            numbers = [
                name
                for name, value in record.items()
                if isinstance(value, float) and not name.startswith("metric.")
            ]
            raise unknown_name("metric", self.metric, [*evaluated, *numbers], ("watch", "metric"))


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
        value = metric_of(record, metric)
        if value is not None:
            trial.report(value, int(record["step"]))
            if trial.should_prune():
                raise optuna.TrialPruned(f"pruned at step {record['step']}: {metric} {value:.6g}")

    return watch


def metric_of(record: Mapping[str, Any], name: str) -> float | None:
    """Return the finite value of a metric, or of another number, in a row; else ``None``."""
    value = record.get(f"metric.{name}", record.get(name))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def watchers(watch: Watcher | Sequence[Watcher]) -> list[Watcher]:
    """Return one function or several functions as a list.

    Raises
    ------
    ConfigError
        If an item cannot be called with the arguments of a watcher.
    """
    several: list[Any] = list(watch) if isinstance(watch, list | tuple) else [watch]
    for item in several:
        check_function("watch", item, "info", "record", "share")
    return several
