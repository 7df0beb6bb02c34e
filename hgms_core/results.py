"""Finished runs, read back: every folder under a directory is either a run or named with the reason why it is not one.

:func:`scan` reads what is small (configuration, summary, environment); the rows of a run are read when they are asked for:
:meth:`StoredRun.records` gives them whole, :meth:`StoredRun.columns` only the named fields, which is what a table of a million
rows needs. Folders below a ``sweeps`` directory are trials of a pilot sweep, not results: :func:`sweeps` reads those.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from hgms_core.budget import Budget
from hgms_core.columns import last_seconds, read_columns
from hgms_core.errors import CheckpointError, ConfigError, HgmsError
from hgms_core.folder import RunFolder

SWEEPS = "sweeps"
REWEIGHT = "reweight"
_FILES = frozenset({"config.toml", "env.json", "steps.jsonl", "timings.jsonl", "summary.json", "checkpoint.json"})
_SEED = re.compile(r"^seed = (\d+)\n", re.MULTILINE)


@frozen
class Skipped:
    """A folder that looks like a run and cannot be read as one."""

    path: Path
    reason: str


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
        return int(self.config["seed"])

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
        if path.exists():
            with path.open("rb") as stream:
                for line in itertools.islice(stream, 3):
                    try:
                        row = json.loads(line)
                    except ValueError:
                        break  # `columns` says which line
                    found |= dict.fromkeys(row if isinstance(row, dict) else ())
        return list(found)

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The named fields of every row as arrays: float64 (NaN where a row lacks it), or objects where any is a string.

        A list of numbers (a batch of linear solves) counts by its largest.

        Raises:
            CheckpointError: a line other than the last is not valid JSON.
        """
        wanted = tuple(dict.fromkeys(name for name in ("step", *names) if name != "seconds"))
        found = read_columns(self.path / "steps.jsonl", wanted)
        if "seconds" in names:
            steps, seconds = read_columns(self.path / "timings.jsonl", ("step", "seconds")).values()
            if np.array_equal(steps, found["step"]):
                found["seconds"] = seconds
            else:
                at = dict(zip(steps.tolist(), seconds.tolist(), strict=True))
                found["seconds"] = np.array([at.get(step, np.nan) for step in found["step"].tolist()], dtype=float)
        return {name: found[name] for name in dict.fromkeys(("step", *names))}


@frozen(kw_only=True)
class StoredSweep:
    """A pilot sweep's record: ``sweep.json`` as it was written."""

    path: Path
    table: Mapping[str, Any]


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
            run = read(path)
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


def read(path: Path) -> StoredRun:
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
        config = _config((path / "config.toml").read_text(encoding="utf-8"))
        if "summary.json" not in names:
            steps = _count_lines(path / "steps.jsonl") - 1
            raise CheckpointError(f"the run is not finished: no summary.json yet, {max(steps, 0)} steps so far")
        summary = _object(path / "summary.json")
        if summary.get("status") not in ("done", "failed"):
            raise CheckpointError(f"summary.json has no status 'done' or 'failed': {summary.get('status')!r}")
        if "steps.jsonl" not in names and summary["status"] == "done":
            raise CheckpointError("steps.jsonl is missing")
        environment = _object(path / "env.json") if "env.json" in names else {}
        resources, scores = (_object(path / name) if name in names else {} for name in ("resources.json", "scores.json"))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CheckpointError("config.toml is not text") from None
    run = StoredRun(path=path, config=config, summary=summary, environment=environment, resources=resources, scores=scores)
    try:
        _ = (run.task_name, run.method_name, run.seed, run.budget, run.label, run.task_label)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise CheckpointError(f"config.toml does not describe a run: {what}") from None
    _check_summary(summary)
    told = environment.get("task")
    if not isinstance(told, dict | None) or not isinstance((told or {}).get("metrics"), dict | None):
        raise CheckpointError("env.json: 'task' does not hold the task's version and metrics")
    _check_scores(scores)
    _expect_number("resources.json", "peak_memory_bytes", resources.get("peak_memory_bytes"))
    return run


def _check_summary(summary: Mapping[str, Any]) -> None:
    """Valid JSON is not yet a summary: what will be added up has to be numbers (or null, where one was not finite)."""
    for name in ("outer_steps", "oracle_calls", "upper_loss"):
        _expect_number("summary.json", name, summary.get(name))
    for name in ("metrics", "cost"):
        table = summary.get(name)
        if not isinstance(table, dict | None):
            raise CheckpointError(f"summary.json: {name!r} is no table of numbers: {str(table)[:40]}")
        for key, value in (table or {}).items():
            _expect_number("summary.json", f"{name}.{key}", value)


def _check_scores(scores: Mapping[str, Any]) -> None:
    if not all(isinstance(scores.get(key, {}), dict) for key in ("metrics", "higher_is_better")):
        raise CheckpointError("scores.json does not hold the tables 'metrics' and 'higher_is_better'")
    for name, value in scores.get("metrics", {}).items():
        _expect_number("scores.json", f"metrics.{name}", value)


def _expect_number(file: str, name: str, value: object) -> None:
    if not isinstance(value, int | float | None) or isinstance(value, bool):
        raise CheckpointError(f"{file}: {name!r} is no number: {str(value)[:40]}")


def sweeps(folders: str | Path | Iterable[str | Path]) -> tuple[list[StoredSweep], list[Skipped]]:
    """Every ``sweep.json`` below a ``sweeps`` directory in ``folders``, and the ones that cannot be read."""
    found: list[StoredSweep] = []
    skipped: list[Skipped] = []
    for root in _roots(folders):
        for path in sorted(root.rglob("sweep.json")):
            if SWEEPS not in path.parts:
                continue
            try:
                found.append(StoredSweep(path=path, table=_object(path)))
            except (CheckpointError, OSError) as error:
                skipped.append(Skipped(path, str(error)))
    return found, skipped


def names(tables: Mapping[str, Mapping[str, Any]], label: Mapping[str, str]) -> dict[str, str]:
    """A name for every table: its label, and where several share one, what they differ in.

    >>> names({"a": {"name": "t", "rho": 0.4}, "b": {"name": "t", "rho": 0.6}}, {"a": "t", "b": "t"})
    {'a': 't (rho = 0.4)', 'b': 't (rho = 0.6)'}
    """
    found = {}
    for key, table in tables.items():
        alike = [other for other in tables if label[other] == label[key]]
        if len(alike) == 1:
            found[key] = label[key]
            continue
        differing = difference([tables[other] for other in alike])
        flat = flatten(table)
        told = ", ".join(f"{name} = {flat.get(name, 'none')}" for name in differing)
        found[key] = f"{label[key]} ({told})" if told else label[key]
    return found


def difference(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    """The dotted keys in which the tables differ, in the order in which they first come.

    >>> difference([{"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3, "d": 0}}])
    ['b.c', 'b.d']
    """
    flat = [flatten(table) for table in tables]
    keys = dict.fromkeys(key for one in flat for key in one)
    missing = object()
    return [key for key in keys if any(one.get(key, missing) != flat[0].get(key, missing) for one in flat[1:])]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table with dotted keys.

    >>> flatten({"solver": {"name": "cg"}, "lr": 0.1})
    {'solver.name': 'cg', 'lr': 0.1}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
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
                if REWEIGHT in below:  # a mix, whose run is its first stage
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
    try:
        if seed is None:
            return tomllib.loads(text)
        return {**_parsed(text[: seed.start()] + text[seed.end() :]), "seed": int(seed[1])}
    except tomllib.TOMLDecodeError as error:
        raise CheckpointError(f"config.toml is not valid TOML: {error}") from None


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} does not hold an object")
    return value


def _table(value: Any) -> Mapping[str, Any]:
    return {"name": value} if isinstance(value, str) else value


def _said(value: Any) -> str:
    """A text of the configuration, where "none" stands for none."""
    return "" if value in (None, "none") else str(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


__all__ = ["Skipped", "StoredRun", "StoredSweep", "difference", "flatten", "names", "read", "scan", "sweeps"]
