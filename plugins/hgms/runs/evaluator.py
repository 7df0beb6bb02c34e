"""Evaluation of the metrics of a problem during a run, and its schedule.

Evaluation is outside the clock. It does not affect the decisions of a method.
"""

from __future__ import annotations

from attrs import frozen

from hgms.adapters import evaluate_metrics
from hgms.runs.config import RunSettings
from hgms_core import Problem, Record, Tree


@frozen
class Evaluator:
    """Evaluates every ``evaluate_every`` steps.

    With ``evaluations``, it evaluates this number of times at equal shares of the budget instead.
    The last step is always evaluated.
    """

    settings: RunSettings

    def is_due(self, step: int, before: float, after: float) -> bool:
        """Return whether a step is evaluated that spent the budget from ``before`` to ``after``.

        Examples
        --------
        >>> Evaluator(RunSettings(evaluations=2)).is_due(7, before=0.4, after=0.5)
        True
        """
        times = self.settings.evaluations
        if times is None:
            return step % self.settings.evaluate_every == 0
        return int(after * times) > int(before * times)

    def metrics(self, problem: Problem, theta: Tree, x: Tree) -> Record:
        """Return the metrics of the problem as ``metric.<name>``."""
        return {
            f"metric.{name}": value for name, value in evaluate_metrics(problem, theta, x).items()
        }
