"""One finished run on disk: its small files, and its rows on demand.

Rows are read completely, or only in the named fields.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from hgms.config.budget import as_budget
from hgms.config.tables import difference, flatten, group_values
from hgms.runs import Execution, RunFolder
from hgms.store import ROWS, open_file
from hgms_core.errors import CheckpointError


@contextlib.contextmanager
def relative(folder: Path) -> Iterator[None]:
    """Make the place of an error about a file in the folder relative to the folder."""
    try:
        yield
    except CheckpointError as error:
        file, *rest = error.place or ("",)
        place = Path(str(file))
        if not place.is_relative_to(folder):
            raise
        name = place.relative_to(folder).as_posix()
        raise CheckpointError(
            error.code, error.message, place=(name, *rest), hint=error.hint
        ) from None


@frozen(eq=False, kw_only=True)
class StoredRun:
    """One finished (or failed) run on disk.

    ``config`` is the complete configuration, and ``environment`` the content of ``env.json``.
    ``resources`` contains measurements of the run's resources (``{"peak_memory_bytes": …}``; empty
    without measurements). ``scores`` contains later measurements of the result, for example by
    ``hgms mix`` (``{"metrics": {…}, "higher_is_better": {…}}``). ``facts`` are the facts of the
    manifest: the step of the last state, and the ``seconds`` up to it.
    """

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any] = field(factory=dict)
    facts: Mapping[str, Any] = field(factory=dict)
    resources: Mapping[str, Any] = field(factory=dict)
    scores: Mapping[str, Any] = field(factory=dict)

    @property
    def task(self) -> Mapping[str, Any]:
        """The task's table in the configuration."""
        return _table(self.config["task"])

    @property
    def task_name(self) -> str:
        return str(self.task["name"])

    @property
    def task_label(self) -> str:
        """The task's label set by the author of the run, otherwise its name."""
        return self._label("task_label") or self.task_name

    @property
    def task_version(self) -> str | None:
        """The task's version; ``None`` if ``env.json`` does not contain it."""
        version = (self.environment.get("task") or {}).get("version")
        return None if version is None else str(version)

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """The metrics, True if higher values are better.

        They are in the task's order, followed by later scores.

        Empty if ``env.json`` does not contain the metrics.
        """
        own = (self.environment.get("task") or {}).get("metrics") or {}
        return {**own, **self.scores.get("higher_is_better", {})} if own else own

    @property
    def metric_rows(self) -> Mapping[str, str]:
        """The rows on which each metric is computed, by metric (``metric_rows`` of the task)."""
        return (self.environment.get("task") or {}).get("metric_rows") or {}

    @property
    def method(self) -> Mapping[str, Any]:
        """The method's table in the configuration."""
        return _table(self.config["method"])

    @property
    def method_name(self) -> str:
        return str(self.method["name"])

    @property
    def role(self) -> str:
        """The method's role in comparisons: "floor", "ceiling", or an empty string."""
        return str(self.summary.get("role") or "")

    @property
    def label(self) -> str:
        """The method's label set by the author of the run, otherwise its name."""
        return self._label("label") or self.method_name

    @property
    def settings(self) -> Mapping[str, Any]:
        """The ``[run]`` table: the settings of the execution."""
        return self.config.get("run") or {}

    @property
    def execution(self) -> dict[str, str]:
        """The execution settings that differ from torch's defaults.

        Examples
        --------
        ``{"matmul": "fast"}``.
        """
        return {} if self._execution is None else self._execution.choices()

    @property
    def eager(self) -> dict[str, str]:
        """The functions that could not be compiled, with the reason."""
        recorded = self._execution
        return {} if recorded is None or recorded.compile is None else recorded.compile.eager

    @property
    def compile_seconds(self) -> float:
        """The seconds of compilation, which count toward no budget; 0 without compilation."""
        recorded = self._execution
        return 0.0 if recorded is None or recorded.compile is None else recorded.compile.seconds

    @functools.cached_property
    def _execution(self) -> Execution | None:
        """How the steps were executed; ``None`` if ``env.json`` does not contain it."""
        return Execution.from_environment(self.environment)

    def _label(self, key: str) -> str:
        label = self.settings.get(key)
        return "" if label in (None, "none") else str(label)

    @property
    def hash(self) -> str:
        """The configuration's hash in the folder's name; empty if the folder was renamed."""
        match = re.search(r"-([0-9a-f]{8})$", self.path.parent.name)
        return match[1] if match else ""

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def budget(self) -> str:
        return str(as_budget(self.config["budget"]))

    @property
    def status(self) -> str:
        """``done`` or ``failed``."""
        return str(self.summary["status"])

    @property
    def error(self) -> str | None:
        return self.summary.get("error")

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """The last evaluation and later scores; a metric that was not finite is NaN."""
        metrics = {**(self.summary.get("metrics") or {}), **self.scores.get("metrics", {})}
        return {name: _number(value) for name, value in metrics.items()}

    @functools.cached_property
    def seconds(self) -> float:
        """The clock after the last step, without evaluation; NaN if it was not recorded."""
        return _number(self.facts.get("seconds"))

    def records(self) -> list[dict[str, Any]]:
        """Return every row of ``steps.jsonl`` with its ``seconds``."""
        with relative(self.path):
            return RunFolder(self.path).records()

    @functools.cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields of the first rows in order: the run's columns.

        The first rows are the start and two steps.
        """
        names: dict[str, None] = {}
        path = self.path / "steps.jsonl"
        if os.path.lexists(path):
            with open_file(path, ROWS) as stream:
                for line in itertools.islice(stream, 3):
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError):
                        break  # `columns` reports the line
                    names |= dict.fromkeys(row if isinstance(row, dict) else ())
        return tuple(map(sys.intern, names))

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read the named fields of every row as arrays.

        An array is float64 (NaN if a row lacks a finite number), or an object array if any value
        is a string.

        Raises
        ------
        CheckpointError
            a line other than the last is not valid JSON, or the file was changed.
        """
        rows = self.records()
        wanted = dict.fromkeys(("step", *names))
        return {name: _array([row.get(name) for row in rows]) for name in wanted}


def short_names(
    tables: Mapping[str, Mapping[str, Any]], label: Mapping[str, str]
) -> dict[str, str]:
    """Return a name for every table: its label.

    If several tables share a label, the name also contains the differing fields.

    Examples
    --------
    >>> short_names(
    ...     {"a": {"name": "t", "rho": 0.4}, "b": {"name": "t", "rho": 0.6}}, {"a": "t", "b": "t"}
    ... )
    {'a': 't (rho = 0.4)', 'b': 't (rho = 0.6)'}
    """
    alike = group_values((label[key], table) for key, table in tables.items())
    differing = {name: difference(several) for name, several in alike.items()}

    def name_of(key: str) -> str:
        flat = flatten(tables[key])
        values = ", ".join(f"{name} = {flat.get(name, 'none')}" for name in differing[label[key]])
        return f"{label[key]} ({values})" if values else label[key]

    return {key: name_of(key) for key in tables}


def _table(value: Any) -> Mapping[str, Any]:
    return {"name": value} if isinstance(value, str) else value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _array(column: Sequence[Any]) -> np.ndarray:
    if any(isinstance(value, str) for value in column):
        return np.array(
            [value if isinstance(value, str) else None for value in column], dtype=object
        )
    most = sys.float_info.max  # an integer may have hundreds of digits
    numbers = [
        float(value) if isinstance(value, int | float) and -most <= value <= most else math.nan
        for value in column
    ]
    return np.array(numbers)
