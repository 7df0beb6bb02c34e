"""What the small files of a run have to hold: valid JSON is not yet a summary, and what will be added up has to be numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hgms_core import CheckpointError, ConfigError
from hgms_results.stored import StoredRun

_NAME = 300  # characters of a label or metric; a folder's name has 255


def shorten(text: str, most: int = 400) -> str:
    """The text, or its beginning and how long it is.

    >>> shorten("a" * 5000, most=10)
    'aaaaaaaaaa… (5,000 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def check_run(run: StoredRun) -> None:
    """CheckpointError where a file of the run does not hold what it should."""
    _check_config(run)
    _check_summary(run.summary)
    _check_scores(run.scores)
    about = run.environment.get("task") or {}
    if not isinstance(about, dict) or not isinstance(about.get("metrics") or {}, dict):
        raise CheckpointError("env.json: 'task' does not hold the task's version and metrics")
    _check_directions("env.json", about.get("metrics") or {})
    _check_number("resources.json", "peak_memory_bytes", run.resources.get("peak_memory_bytes"))


def check_sweep(table: Mapping[str, Any]) -> None:
    """CheckpointError where ``sweep.json`` does not hold trials."""
    trials = table.get("trials") or []
    for trial in trials if isinstance(trials, list) else [trials]:
        if not isinstance(trial, dict) or not isinstance(trial.get("values") or {}, dict):
            raise CheckpointError("sweep.json: 'trials' is no list of tables with 'values'")
        _check_number("sweep.json", "number", trial.get("number"))
        _check_number("sweep.json", "loss", trial.get("loss"), signed=True)


def _check_config(run: StoredRun) -> None:
    try:
        names = (run.task_name, run.task_label, run.method_name, run.label)
        _ = (run.seed, run.budget)
        if not all(isinstance(table, Mapping) for table in (run.task, run.method, run.settings)):
            raise TypeError("'task', 'method' and 'run' are to be tables")
        if longest := next((name for name in names if len(name) > _NAME), None):
            raise ValueError(f"a name has more than {_NAME} characters: {longest[:40]}…")
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else shorten(str(error).splitlines()[0])
        raise CheckpointError(f"config.toml does not describe a run: {what}") from None


def _check_summary(summary: Mapping[str, Any]) -> None:
    for name in ("outer_steps", "oracle_calls"):
        _check_number("summary.json", name, summary.get(name))
        if (summary.get(name) or 0) % 1 != 0:
            raise CheckpointError(f"summary.json: {name!r} is no whole number: {summary[name]}")
    _check_number("summary.json", "upper_loss", summary.get("upper_loss"), signed=True)
    for name in ("metrics", "cost"):
        table = summary.get(name)
        if not isinstance(table, dict | None):
            raise CheckpointError(f"summary.json: {name!r} is no table of numbers: {str(table)[:40]}")
        for key, value in (table or {}).items():
            _check_number("summary.json", f"{name}.{key}", value, signed=name == "metrics")
    if not isinstance(summary.get("error"), str | None):
        raise CheckpointError("summary.json: 'error' is no text")


def _check_scores(scores: Mapping[str, Any]) -> None:
    if not all(isinstance(scores.get(key, {}), dict) for key in ("metrics", "higher_is_better")):
        raise CheckpointError("scores.json does not hold the tables 'metrics' and 'higher_is_better'")
    for name, value in scores.get("metrics", {}).items():
        _check_number("scores.json", f"metrics.{name}", value, signed=True)
    _check_directions("scores.json", scores.get("higher_is_better", {}))


def _check_directions(file: str, table: Mapping[str, Any]) -> None:
    for name, higher in table.items():
        if not isinstance(higher, bool):
            raise CheckpointError(f"{file}: whether {name[:40]!r} is better where it is higher is neither true nor false")


def _check_number(file: str, name: str, value: object, *, signed: bool = False) -> None:
    """It is null, or a number that counts something; ``signed``: any number."""
    if len(name) > _NAME:
        raise CheckpointError(f"{file}: a name has more than {_NAME} characters: {name[:40]}…")
    if not isinstance(value, int | float | None) or isinstance(value, bool):
        raise CheckpointError(f"{file}: {name!r} is no number: {str(value)[:40]}")
    if not signed and value is not None and not 0 <= value < 2**63:
        raise CheckpointError(f"{file}: {name!r} is no number that counts something: {value}")
