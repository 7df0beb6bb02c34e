"""Results of runs: the summary at the end, and remarks about the learned weights.

A remark warns, for example, that the weights were learned from an untrained model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import Factory, frozen

from hgms.adapters import Nested, as_text, sizes
from hgms.diagnosis import Diagnosis
from hgms.packages import frame
from hgms.runs.advice import is_broken, still_leaves, still_note
from hgms.runs.execution import Execution
from hgms.runs.notebook import reporter, write_run
from hgms.runs.own_problem import validation_rows
from hgms.store import finite
from hgms_core import NumericalError, Problem, Record, RunInfo, Sources, Tree, norm

if TYPE_CHECKING:
    import pandas

UNMOVED = 0.01
"""Minimum change of the validation loss for a trained x, as a share of the loss at the start.

With a smaller change, x counts as untrained.
"""


@frozen(kw_only=True)
class RunResult:
    """The result of a run.

    ``theta`` and ``x`` have the nested form of the user's problem. ``records`` are the rows of
    ``steps.jsonl`` with ``seconds``. ``summary`` is ``summary.json``. ``execution`` describes how
    the steps were computed (``None``: its ``env.json`` is lost).

    ``diagnosis`` contains the measurements of ``run.diagnose``, with ``rows``, ``warnings`` and
    ``to_frame()``. It is empty if no diagnosis was requested.
    """

    info: RunInfo
    theta: Nested
    x: Nested
    summary: dict[str, Any]
    records: list[Record]
    execution: Execution | None = None
    diagnosis: Diagnosis = Factory(Diagnosis)

    __repr__ = as_text

    def _rows(self) -> Iterator[tuple[str, str]]:
        info = self.info
        metrics = self.summary.get("metrics") or {}
        status = self.summary.get("status") or "unknown"
        yield "run", f"{info.method} on {info.task}, seed {info.seed}, {info.budget}: {status}"
        counts = {name: self.summary.get(name) for name in ("outer_steps", "oracle_calls")}
        spent = [
            f"{count} {name.replace('_', ' ')}"
            for name, count in counts.items()
            if count is not None
        ]
        yield "spent", ", ".join([*spent, f"{self.seconds:.3g} s"])
        losses = [row["upper_loss"] for row in self.records if row.get("upper_loss") is not None]
        if losses:
            yield "upper loss", f"{losses[0]:.4g} at first, {losses[-1]:.4g} at the end"
        if metrics:
            yield (
                "metrics",
                ", ".join(
                    f"{name} {math.nan if v is None else v:.4g}"
                    for name, v in list(metrics.items())[:6]
                ),
            )
        yield from (("note", remark) for remark in self.summary.get("remarks") or [])
        if self.diagnosis.rows:
            yield (
                "diagnosis",
                "; ".join(self.diagnosis.warnings) or f"{len(self.diagnosis)} steps, no warning",
            )
        yield from (
            ("θ", sizes(self.theta)),
            ("x", sizes(self.x)),
            ("folder", str(info.folder or "none, it is in memory")),
        )

    @property
    def seconds(self) -> float:
        return float(self.records[-1]["seconds"]) if self.records else 0.0

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation, which no budget counts; 0 if nothing was compiled."""
        return float(self.records[-1].get("compile_seconds", 0.0)) if self.records else 0.0

    def to_frame(self) -> pandas.DataFrame:
        """Return ``records`` as a pandas data frame, one row per step.

        Raises
        ------
        MissingExtra
            Without pandas.
        """
        return frame(self.records)

    def report(self, path: str | Path) -> Path:
        """Write the report of `hgms report` for this run.

        The suffix of ``path`` selects the format.

        Raises
        ------
        HgmsError
            The errors of `hgms report`.
        """
        with tempfile.TemporaryDirectory() as place:
            folder = self.info.folder or write_run(
                Path(place), self.info, self.summary, self.records, self.diagnosis
            )
            return Path(reporter().report([folder], path))


def summarise(
    info: RunInfo,
    status: str,
    step: int,
    records: Sequence[Mapping[str, Any]],
    error: str,
    role: str,
) -> dict[str, Any]:
    """Return the summary of a run, without a validation loss.

    It does not contain the clock, so it is the same for every run with the same seed.
    """
    last = records[-1] if records else {}
    return {
        "status": status,
        **({"error": error} if error else {}),
        "task": info.task,
        "method": info.method,
        "seed": info.seed,
        "budget": str(info.budget),
        "outer_steps": step,
        "upper_loss": last.get("upper_loss"),
        "metrics": next(filter(None, map(metrics_of, reversed(records))), {}),
        "oracle_calls": last.get("oracle_calls"),
        "cost": {
            key.removeprefix("cost_"): value
            for key, value in last.items()
            if key.startswith("cost_")
        },
        **({"role": role} if role else {}),
        "validation_loss": None,
    }


def metrics_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row by name.

    Examples
    --------
    >>> metrics_of({"step": 3, "metric.loss": 0.5})
    {'loss': 0.5}
    """
    return {
        key.removeprefix("metric."): value
        for key, value in row.items()
        if key.startswith("metric.")
    }


def judge_result(
    summary: dict[str, Any], problem: Problem, theta: Tree, x: Tree, records: Sequence[Record]
) -> dict[str, Any]:
    """Return the summary with the final validation loss and the remarks.

    Raises
    ------
    NumericalError
        If a run is done but its upper loss is not finite.
    """
    loss = validation_loss(problem, theta, x)
    losses = {row["upper_loss"] for row in records if "upper_loss" in row}
    if summary["status"] == "done" and (is_broken(loss) or losses == {None}):
        what = f"of the result is {loss}" if is_broken(loss) else "is not finite in any step"
        raise NumericalError(
            "not-finite",
            f"step {summary['outer_steps']}: the upper loss {what}",
            place=("upper_loss",),
            hint="remove empty rows, and rows with non-finite numbers",
        )
    notes = []
    if "untrained" not in summary:
        notes = remarks(problem, x, loss, learned=weights_changed(records))
    if not summary.get("role"):  # the method learns θ
        since = still_leaves(records, list(problem.theta0))
        notes += [still_note(since)] if since else []
    return {**summary, **({"remarks": notes} if notes else {}), "validation_loss": finite(loss)}


def weights_changed(records: Sequence[Record]) -> bool:
    """Return whether the weights of sources changed in a run.

    The result is True if the records have no weights.

    Examples
    --------
    >>> weights_changed([{"step": 0, "weight.a": 0.5}, {"step": 1, "weight.a": 0.5}])
    False
    """
    weights = [
        [value for key, value in row.items() if key.startswith("weight.")] for row in records
    ]
    known = [row for row in weights if row]
    return not known or any(row != known[0] for row in known)


def validation_loss(problem: Problem, theta: Tree, x: Tree) -> float:
    """Return f on the validation rows of role ``stop``.

    If there are no such rows, the rows of ``differentiate`` are used. This loss uses no test rows,
    so users may choose settings by it.
    """
    with torch.no_grad():
        return float(problem.f(theta, x, validation_rows(problem).batch(None)))


def remarks(problem: Problem, x: Tree, loss: float, *, learned: bool = True) -> list[str]:
    """Return remarks on a run that ended at ``x`` with the validation loss ``loss``.

    A remark states that the validation loss rose. For a run on data sources, a remark may also
    state that the loss hardly changed.

    The weights of sources are learned from gradients at the x of the run. If x stayed at the start,
    or training made it worse, the weights are not reliable. If the weights were not ``learned``,
    the remarks do not mention them. Cost: 1 upper value.

    Examples
    --------
    >>> still = Problem(
    ...     theta0={},
    ...     x0={"x": torch.ones(2)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> remarks(still, still.x0, 2.0)  # no sources: nothing is said
    []
    >>> remarks(still, still.x0, 3.0)
    ['the validation loss rose from 2 at the start to 3: the result is worse than the start']
    """
    start = validation_loss(problem, problem.theta0, problem.x0)
    rose = not math.isfinite(loss) or loss - start > 1e-3 * abs(start)
    if problem.find(Sources) is None:
        end = f"{start:.4g} at the start to {loss:.4g}"
        return [f"the validation loss rose from {end}: the result is worse than the start"] * rose
    away = float(norm({name: leaf - problem.x0[name] for name, leaf in x.items()}))
    length = float(norm(problem.x0))
    moved = f"x moved by {away / length:.2g} of its length" if length else f"x moved by {away:.2g}"
    if rose:
        trust = "do not trust the weights (" if learned else "("
        return [
            f"the validation loss rose from {start:.4g} to {loss:.4g} ({moved}): the lower level "
            f"diverged, or learned what is of no use for validation; {trust}lower the generator's "
            "lr, or look at the heaviest source)"
        ]
    if learned and abs(loss - start) < UNMOVED * abs(start):
        return [
            f"the validation loss hardly changed, from {start:.4g} to {loss:.4g} ({moved}): the "
            "weights were learned at the "
            "gradients of an untrained x; raise the generator's lr, or give more steps"
        ]
    return []
