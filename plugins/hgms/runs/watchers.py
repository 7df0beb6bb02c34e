"""Functions that watch a run, and may end it: early stopping, a study's pruning.

``watch(info, record, share)`` is called after every outer step, outside the clock, with the new row
(``step``, ``upper_loss``, ``metric.<name>`` where it was evaluated, ``seconds``, …) and the share
of the budget spent. A run that a watcher ends is done: its result is what it was after that step,
``summary["stopped_by"]`` says who ended it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from attrs import field, frozen

from hgms.runs.own_problem import higher_is_better
from hgms_core import ConfigError, Record, RunInfo
from hgms_core.arguments import check_function
from hgms_core.components import read_by_annotation, reports_errors
from hgms_core.errors import MissingExtra, unknown_name
from hgms_core.validators import not_negative, whole

Watcher = Callable[[RunInfo, Record, float], Any]
"""``watch(info, record, share of the budget spent)``, called after every step, outside the clock.
What is ``True`` or raises :class:`StopRun` ends the run; any other result is ignored. It may have
``recall(records)``, called with the rows that are there when a run begins or goes on: so that a
resumed run ends where an uninterrupted one would have.
"""


class StopRun(BaseException):
    """Raised by a watcher, an observer or ``evaluate``: the run is done, and its result is what it
    is now. The text says why.

    No ``Exception``, like Ctrl-C: what catches those in between does not hold it up.

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
    """Ends a run when ``metric`` has not been better for ``steps`` outer steps.

    ``metric`` is one of ``evaluate``, or a number of every row (``upper_loss``, ``stop_loss``).
    Whether higher is better is known by the name of an accuracy or a loss, else
    ``higher_is_better`` says it; what is better by no more than ``least`` does not count. Steps at
    which the metric was not evaluated are passed over. What decides when to stop must not be what
    is reported: take a metric of validation rows.

    Errors: ConfigError where nothing says which way is better, and where the first evaluated row
        lacks the metric.

    >>> patience = Patience(metric="validation_loss", steps=2)
    >>> [
    ...     patience(None, {"step": step, "metric.validation_loss": loss}, 0.0)
    ...     for step, loss in enumerate([3.0, 2.0, 2.5, 2.1])
    ... ]
    [None, None, None, True]
    """

    metric: str
    steps: int = field(validator=whole)
    least: float = field(default=0.0, validator=not_negative)
    higher_is_better: bool | None = None
    _gained: list[tuple[float, int]] = field(factory=list, init=False, repr=False)
    """The best value and its step, of the run that is watched; empty before one."""

    def __attrs_post_init__(self) -> None:
        if self._higher is None:
            raise ConfigError(
                "missing-option",
                f"the better direction of metric {self.metric!r} is unknown",
                place=("higher_is_better",),
                hint="set higher_is_better=True or False",
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
        """Begins anew, with the rows of a run that goes on."""
        self._gained.clear()
        for record in records:
            self._without_gain(record)

    def _without_gain(self, record: Mapping[str, Any]) -> int:
        """The steps since the best value."""
        value = metric_of(record, self.metric)
        step = int(record["step"])
        if value is not None:
            gain = (
                math.inf
                if not self._gained
                else (value - self._gained[0][0]) * (1 if self._higher else -1)
            )
            if gain > self.least:
                self._gained[:] = [(value, step)]
        return step - (self._gained[0][1] if self._gained else 0)

    def _check(self, record: Mapping[str, Any]) -> None:
        """What is in no row cannot be waited for."""
        evaluated = [name.removeprefix("metric.") for name in record if name.startswith("metric.")]
        if not self._gained and record["step"] and (evaluated or record["step"] >= self.steps):
            numbers = [
                name
                for name, value in record.items()
                if isinstance(value, float) and not name.startswith("metric.")
            ]
            raise unknown_name("metric", self.metric, [*evaluated, *numbers], ("watch", "metric"))


def pruned(trial: Any, metric: str) -> Watcher:
    """A watcher that reports ``metric`` to an Optuna trial at every evaluated step, and raises
    ``optuna.TrialPruned`` where the study's pruner says so: ``run(method, problem, "60s",
    watch=pruned(trial, "validation_accuracy"))``. The study's direction says which way is better.
    The run's folder, if it has one, keeps what was computed.

    Errors: MissingExtra without Optuna.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingExtra(
            "missing-package",
            "pruning requires Optuna, which is not installed",
            install="pip install 'hgms[optuna]'",
        ) from error

    def watch(_info: RunInfo, record: Record, _share: float) -> None:
        value = metric_of(record, metric)
        if value is not None:
            trial.report(value, int(record["step"]))
            if trial.should_prune():
                raise optuna.TrialPruned(f"pruned at step {record['step']}: {metric} {value:.6g}")

    return watch


def metric_of(record: Mapping[str, Any], name: str) -> float | None:
    """The finite value of a metric, or of another number, in a row."""
    value = record.get(f"metric.{name}", record.get(name))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def watchers(watch: Watcher | Sequence[Watcher]) -> list[Watcher]:
    """One function or several, as a list.

    Errors: ConfigError for what cannot be called so."""
    several: list[Any] = list(watch) if isinstance(watch, list | tuple) else [watch]
    for item in several:
        check_function("watch", item, "info", "record", "share")
    return several
