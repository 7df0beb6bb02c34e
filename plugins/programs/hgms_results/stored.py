"""Finished runs, read back: every folder under a directory is either a run or named with the reason why it is not one.

:func:`scan` reads what is small (configuration, summary, environment); the rows of a run are read when they are asked for:
:meth:`StoredRun.records` gives them whole, :meth:`StoredRun.columns` only the named fields, which is what a table of a million
rows needs. Folders below a ``sweeps`` directory are trials of a pilot sweep, not results: :func:`sweeps` reads those.

A folder may be a stranger's: nothing outside it is read, and whatever its files hold, it is a run or gets a reason.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from hgms_core import Budget, CheckpointError, ConfigError, HgmsError
from hgms_results.columns import last_seconds, read_columns
from hgms_run import ROWS, RunFolder, difference, flatten, opened, parse_json, parse_toml, read_file

SWEEPS = "sweeps"
REWEIGHT = "reweight"
_FILES = frozenset({"config.toml", "env.json", "steps.jsonl", "timings.jsonl", "summary.json", "checkpoint.json"})
_SEED = re.compile(r"^seed = ([0-9]{1,18})\n", re.MULTILINE)
_CONFIG = 512 * 2**10  # bytes; tomllib needs seconds for more
_NAME = 300  # characters of a label or metric; a folder's name has 255


def shorten(text: str, most: int = 400) -> str:
    """The text, or its beginning and how long it is.

    >>> shorten("a" * 5000, most=10)
    'aaaaaaaaaa… (5,000 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


@frozen
class Skipped:
    """A folder that looks like a run and cannot be read as one."""

    path: Path
    reason: str = field(converter=shorten)


@frozen(eq=False, kw_only=True)
class StoredRun:
    """One finished (or failed) run on disk.

    ``config`` is its whole configuration, ``environment`` its ``env.json``, ``resources`` what was measured beside it
    (``{"peak_memory_bytes": …}``; empty where nothing was), ``scores`` what was measured of its result later, such as by
    ``hgms mix`` (``{"metrics": {…}, "higher_is_better": {…}}``).
    """

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any] = field(factory=dict)
    resources: Mapping[str, Any] = field(factory=dict)
    scores: Mapping[str, Any] = field(factory=dict)

    @property
    def task(self) -> Mapping[str, Any]:
        """The task's table of the configuration."""
        return _table(self.config["task"])

    @property
    def task_name(self) -> str:
        return str(self.task["name"])

    @property
    def task_label(self) -> str:
        """What the run's author called the task, else its name (:func:`names` tells equal ones apart)."""
        return _said(self.settings.get("task_label")) or self.task_name

    @property
    def task_version(self) -> str | None:
        """None for runs older than the record of it."""
        version = (self.environment.get("task") or {}).get("version")
        return None if version is None else str(version)

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """The task's metrics in its own order, then later scores, True where higher is better; empty for runs older than the
        record of it."""
        own = (self.environment.get("task") or {}).get("metrics") or {}
        return {**own, **self.scores.get("higher_is_better", {})} if own else own

    @property
    def method(self) -> Mapping[str, Any]:
        """The method's table of the configuration."""
        return _table(self.config["method"])

    @property
    def method_name(self) -> str:
        return str(self.method["name"])

    @property
    def label(self) -> str:
        """What the run's author called the method, else its name."""
        return _said(self.settings.get("label")) or self.method_name

    @property
    def settings(self) -> Mapping[str, Any]:
        """The ``[run]`` table: how it was carried out."""
        return self.config.get("run") or {}

    @property
    def hash(self) -> str:
        """The configuration's hash, as the folder's name holds it; empty where the folder was renamed."""
        names = (self.path.parent.name, self.path.parent.parent.name)  # a mix has its run in a folder of its own
        found = next((match for name in names if (match := re.search(r"-([0-9a-f]{8})$", name))), None)
        return found[1] if found else ""

    @property
    def seed(self) -> int:
        seed = self.config["seed"]
        if type(seed) is not int:
            raise TypeError(f"'seed' is no whole number: {str(seed)[:40]}")
        return seed

    @property
    def budget(self) -> str:
        table = self.config["budget"]
        return str(Budget.parse(table) if isinstance(table, str) else Budget(**table))

    @property
    def status(self) -> str:
        """``done`` or ``failed``."""
        return str(self.summary["status"])

    @property
    def error(self) -> str | None:
        return self.summary.get("error")

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation, and later scores; a metric that was not finite is NaN."""
        found = {**(self.summary.get("metrics") or {}), **self.scores.get("metrics", {})}
        return {name: _number(value) for name, value in found.items()}

    @functools.cached_property
    def seconds(self) -> float:
        """The clock after the last step, without evaluation; NaN if it was not written."""
        return last_seconds(self.path / "timings.jsonl")

    def records(self) -> list[dict[str, Any]]:
        """Every row of ``steps.jsonl`` with its ``seconds``."""
        return RunFolder(self.path).records()

    def fields(self) -> list[str]:
        """The fields of the first rows (the start and two steps), in their order: what the run has columns of."""
        found: dict[str, None] = {}
        path = self.path / "steps.jsonl"
        if os.path.lexists(path):
            with opened(path, ROWS) as stream:
                for line in itertools.islice(stream, 3):
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError):
                        break  # `columns` says which line
                    found |= dict.fromkeys(row if isinstance(row, dict) else ())
        return list(found)

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The named fields of every row as arrays: float64 (NaN where a row lacks it), or objects where any is a string.

        A list of numbers (a batch of linear solves) counts by its largest.

        Raises:
            CheckpointError: a line other than the last is not valid JSON; the steps do not follow each other (two runs in one
                folder, say), or their clock or calls run backwards.
        """
        wanted = tuple(dict.fromkeys(name for name in ("step", *names) if name != "seconds"))
        found = read_columns(self.path / "steps.jsonl", wanted)
        if "seconds" in names:
            steps, seconds = read_columns(self.path / "timings.jsonl", ("step", "seconds")).values()
            if np.array_equal(steps, found["step"]):
                found["seconds"] = seconds
            else:
                at = dict(zip(steps.tolist(), seconds.tolist(), strict=True))
                found["seconds"] = np.array([at.get(step, np.nan) for step in found["step"].tolist()], dtype=seconds.dtype)
        _check_rows(found)
        return {name: found[name] for name in dict.fromkeys(("step", *names))}


@frozen(kw_only=True)
class StoredSweep:
    """A pilot sweep's record: ``sweep.json`` as it was written."""

    path: Path
    table: Mapping[str, Any]


def _check_rows(columns: Mapping[str, np.ndarray]) -> None:
    steps = columns["step"]
    numbers = steps.dtype != object
    wrong = np.flatnonzero(~(steps >= 0) | (steps % 1 != 0)) if numbers else np.arange(1)
    if wrong.size:
        raise CheckpointError(f"line {wrong[0] + 1} of steps.jsonl has no number of a step")
    if (back := np.flatnonzero(np.diff(steps) <= 0)).size:
        here, step, last = back[0] + 2, *(int(steps[back[0] + after]) for after in (1, 0))
        raise CheckpointError(f"line {here} of steps.jsonl: step {step} follows step {last}, as if two runs were written there")
    for name, file in (("seconds", "timings.jsonl"), ("oracle_calls", "steps.jsonl")):
        values = columns.get(name, np.empty(0))
        if values.dtype == object:
            raise CheckpointError(f"{file} holds words where {name} belong")
        known = values[~np.isnan(values)]
        if (known[:1] < 0).any() or (np.diff(known) < 0).any():
            raise CheckpointError(f"{file}: the {name.replace('_', ' ')} of later steps are fewer than those of earlier ones")


def scan(folders: str | Path | Iterable[str | Path]) -> tuple[list[StoredRun], list[Skipped]]:
    """All runs below ``folders`` (each a run folder, or a directory of them), sorted by path, and what had to be left out.

    A run that is unfinished, empty or damaged is named with its reason, never guessed around; a failed run is a result. Two
    copies of one run (the same configuration and seed) count once; of two states of a component's code the newer run does.

    Raises:
        ConfigError: one of ``folders`` is not there.
    """
    runs: list[StoredRun] = []
    skipped: list[Skipped] = []
    seen: dict[tuple[str, int], StoredRun] = {}
    for path in _run_folders(folders):
        try:
            run = read_run(path)
        except HgmsError as error:
            skipped.append(Skipped(path, str(error)))
            continue
        same = seen.setdefault(_identity(run), run)
        if same is run:
            runs.append(run)
        elif same.environment.get("code", {}) == run.environment.get("code", {}):
            skipped.append(Skipped(path, f"it is the same configuration and seed as {same.path}"))
        else:
            older, newer = sorted((same, run), key=lambda one: (one.path / "summary.json").stat().st_mtime_ns)
            runs[runs.index(same)] = seen[_identity(run)] = newer
            skipped.append(Skipped(older.path, f"the code of a component has changed since; {newer.path} is the newer run"))
    return runs, skipped


def read_run(path: Path) -> StoredRun:
    """The run in ``path``.

    Raises:
        CheckpointError: it is empty, unfinished or damaged; the message is the reason.
    """
    try:
        names = {entry.name for entry in os.scandir(path)}
        if not names & _FILES:
            raise CheckpointError("the folder is empty" if not names - {".lock"} else "it holds no run files")
        if "config.toml" not in names:
            raise CheckpointError("config.toml is missing")
        config = _config(read_file(path / "config.toml", _CONFIG).decode())
        if "summary.json" not in names:
            steps = read_file(path / "steps.jsonl", ROWS).count(b"\n") - 1 if "steps.jsonl" in names else 0
            raise CheckpointError(f"the run is not finished: no summary.json yet, {max(steps, 0)} steps so far")
        summary = _object(path / "summary.json")
        if "checksum" in summary:
            summary = RunFolder(path).read_summary() or {}  # compares it
        if summary.get("status") not in ("done", "failed"):
            raise CheckpointError(f"summary.json has no status 'done' or 'failed': {str(summary.get('status'))[:40]!r}")
        if "steps.jsonl" not in names and summary["status"] == "done":
            raise CheckpointError("steps.jsonl is missing")
        environment = _object(path / "env.json") if "env.json" in names else {}
        resources, scores = (_object(path / name) if name in names else {} for name in ("resources.json", "scores.json"))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CheckpointError("config.toml is not text") from None
    run = StoredRun(path=path, config=config, summary=summary, environment=environment, resources=resources, scores=scores)
    _check_config(run)
    _check_summary(summary)
    _check_scores(scores)
    about = environment.get("task") or {}
    if not isinstance(about, dict) or not isinstance(about.get("metrics") or {}, dict):
        raise CheckpointError("env.json: 'task' does not hold the task's version and metrics")
    _check_directions("env.json", about.get("metrics") or {})
    _expect_number("resources.json", "peak_memory_bytes", resources.get("peak_memory_bytes"))
    return run


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
    """Valid JSON is not yet a summary: what will be added up has to be numbers (or null, where one was not finite)."""
    for name in ("outer_steps", "oracle_calls"):
        _expect_number("summary.json", name, summary.get(name))
        if (summary.get(name) or 0) % 1 != 0:
            raise CheckpointError(f"summary.json: {name!r} is no whole number: {summary[name]}")
    _expect_number("summary.json", "upper_loss", summary.get("upper_loss"), signed=True)
    for name in ("metrics", "cost"):
        table = summary.get(name)
        if not isinstance(table, dict | None):
            raise CheckpointError(f"summary.json: {name!r} is no table of numbers: {str(table)[:40]}")
        for key, value in (table or {}).items():
            _expect_number("summary.json", f"{name}.{key}", value, signed=name == "metrics")
    if not isinstance(summary.get("error"), str | None):
        raise CheckpointError("summary.json: 'error' is no text")


def _check_scores(scores: Mapping[str, Any]) -> None:
    if not all(isinstance(scores.get(key, {}), dict) for key in ("metrics", "higher_is_better")):
        raise CheckpointError("scores.json does not hold the tables 'metrics' and 'higher_is_better'")
    for name, value in scores.get("metrics", {}).items():
        _expect_number("scores.json", f"metrics.{name}", value, signed=True)
    _check_directions("scores.json", scores.get("higher_is_better", {}))


def _check_directions(file: str, table: Mapping[str, Any]) -> None:
    for name, higher in table.items():
        if not isinstance(higher, bool):
            raise CheckpointError(f"{file}: whether {name[:40]!r} is better where it is higher is neither true nor false")


def _expect_number(file: str, name: str, value: object, *, signed: bool = False) -> None:
    if len(name) > _NAME:
        raise CheckpointError(f"{file}: a name has more than {_NAME} characters: {name[:40]}…")
    if not isinstance(value, int | float | None) or isinstance(value, bool):
        raise CheckpointError(f"{file}: {name!r} is no number: {str(value)[:40]}")
    if not signed and value is not None and not 0 <= value < 2**63:
        raise CheckpointError(f"{file}: {name!r} is no number that counts something: {value}")


def scan_sweeps(folders: str | Path | Iterable[str | Path]) -> tuple[list[StoredSweep], list[Skipped]]:
    """Every ``sweep.json`` below a ``sweeps`` directory in ``folders``, and the ones that cannot be read."""
    found: list[StoredSweep] = []
    skipped: list[Skipped] = []
    for root in _roots(folders):
        for path in sorted(root.rglob("sweep.json")):
            if SWEEPS not in path.parts:
                continue
            try:
                found.append(StoredSweep(path=path, table=_sweep(path)))
            except (CheckpointError, OSError) as error:
                skipped.append(Skipped(path, str(error)))
    return found, skipped


def short_names(tables: Mapping[str, Mapping[str, Any]], label: Mapping[str, str]) -> dict[str, str]:
    """A name for every table: its label, and where several share one, what they differ in.

    >>> short_names({"a": {"name": "t", "rho": 0.4}, "b": {"name": "t", "rho": 0.6}}, {"a": "t", "b": "t"})
    {'a': 't (rho = 0.4)', 'b': 't (rho = 0.6)'}
    """
    alike: dict[str, list[str]] = {}
    for key in tables:
        alike.setdefault(label[key], []).append(key)
    differing = {name: difference([tables[key] for key in keys]) for name, keys in alike.items()}
    found = {}
    for key, table in tables.items():
        flat = flatten(table)
        told = ", ".join(f"{name} = {flat.get(name, 'none')}" for name in differing[label[key]])
        found[key] = f"{label[key]} ({told})" if told else label[key]
    return found


# --- files -------------------------------------------------------------------------------------------------------------


def _roots(folders: str | Path | Iterable[str | Path]) -> list[Path]:
    given = [folders] if isinstance(folders, str | Path) else list(folders)
    roots = [Path(one) for one in given]
    for root in roots:
        if not root.is_dir():
            what = "is a file, not a folder of runs" if root.exists() else "does not exist"
            raise ConfigError(f"{root} {what}; give run folders, or the directory they are in (the --out of `hgms run`)")
    return roots


def _run_folders(folders: str | Path | Iterable[str | Path]) -> list[Path]:
    found: dict[Path, None] = {}
    for root in _roots(folders):
        for directory, below, files in os.walk(root):
            name = os.path.basename(directory)
            if _FILES.intersection(files):
                found[Path(directory)] = None
                below.clear()
            elif re.fullmatch(r"seed-\d+", name):
                if REWEIGHT in below and not os.path.islink(Path(directory, REWEIGHT)):  # a mix, whose run is its first stage
                    found[Path(directory, REWEIGHT)] = None
                else:
                    found[Path(directory)] = None
                below.clear()
            below[:] = sorted(each for each in below if each != SWEEPS and not each.startswith("."))
    return list(found)


def _identity(run: StoredRun) -> tuple[str, int]:
    table = {key: value for key, value in run.config.items() if key != "seed"}
    settings = {key: value for key, value in run.settings.items() if key != "out" and value != "none"}
    return json.dumps([{**table, "run": settings}, run.task_version], sort_keys=True, default=str), run.seed


def _config(text: str) -> dict[str, Any]:
    """The configuration; the runs of one cell differ in the line of the seed only, so the rest is parsed once for all."""
    head = text.partition("\n[")[0]
    seed = _SEED.search(head + "\n")
    if seed is None:
        return parse_toml(text, "config.toml")
    return {**_parsed(text[: seed.start()] + text[seed.end() :]), "seed": int(seed[1])}


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> dict[str, Any]:
    return parse_toml(text, "config.toml")


def _object(path: Path) -> dict[str, Any]:
    value = parse_json(read_file(path), path.name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} does not hold an object")
    return value


def _sweep(path: Path) -> dict[str, Any]:
    table = _object(path)
    trials = table.get("trials") or []
    for trial in trials if isinstance(trials, list) else [trials]:
        if not isinstance(trial, dict) or not isinstance(trial.get("values") or {}, dict):
            raise CheckpointError("sweep.json: 'trials' is no list of tables with 'values'")
        _expect_number("sweep.json", "number", trial.get("number"))
        _expect_number("sweep.json", "loss", trial.get("loss"), signed=True)
    return table


def _table(value: Any) -> Mapping[str, Any]:
    return {"name": value} if isinstance(value, str) else value


def _said(value: Any) -> str:
    """A text of the configuration, where "none" stands for none."""
    return "" if value in (None, "none") else str(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


__all__ = ["Skipped", "StoredRun", "StoredSweep", "read_run", "scan", "scan_sweeps", "short_names"]
