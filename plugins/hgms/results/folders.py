"""Runs below a directory: every folder there is either a finished run or named with the reason why
it is not one.

What is small is read (configuration, summary, environment). Folders below a ``sweeps`` directory
are trials of a pilot sweep, not results: :func:`scan_sweeps` reads those; nor are those of a
``null-test``. A folder may be a stranger's: nothing outside it is read, and whatever its files
hold, it is a run or gets a reason.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from hgms.config.tables import parse_json, parse_toml
from hgms.results.stored import StoredRun, StoredSweep
from hgms.runs import ROWS, ensure_seal, is_marker, read_file
from hgms_core import CheckpointError, ConfigError, HgmsError

SWEEPS = "sweeps"
NULL_TEST = "null-test"
"""Where `hgms mix null` puts its runs: on halves of sources, so they are no results of the
sources.
"""
_FILES = frozenset(
    {"config.toml", "env.json", "steps.jsonl", "timings.jsonl", "summary.json", "checkpoint.json"}
)
_SEED = re.compile(r"^seed = ([0-9]{1,18})\n", re.MULTILINE)
_NAME = 300  # characters of a label or metric; a folder's name has 255
_CONFIG = 512 * 2**10  # bytes; tomllib needs seconds for more
# bytes; what many runs have word for word is short, and longer texts would fill memory
_ALIKE = 2**15
_toml_alike = functools.lru_cache(maxsize=1024)(parse_toml)
_json_alike = functools.lru_cache(maxsize=1024)(parse_json)


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


def scan(folders: str | Path | Iterable[str | Path]) -> tuple[list[StoredRun], list[Skipped]]:
    """All runs below ``folders`` (each a run folder, or a directory of them), sorted by path, and
    what had to be left out.

    A run that is unfinished, empty or damaged is named with its reason, never guessed around; a
    failed run is a result. Two copies of one run (the same configuration and seed) count once; of
    two states of the task's data or of a component's code the newer run does.

    Raises:
        ConfigError: one of ``folders`` is not there.
    """
    runs: list[StoredRun] = []
    skipped: list[Skipped] = []
    seen: dict[tuple[str, int], StoredRun] = {}
    visited: set[Path] = set()
    with uncollected():
        for path, names in _run_folders(folders):
            if path in visited:
                continue
            visited.add(path)
            try:
                run = _read_run(path, names)
            except HgmsError as error:
                skipped.append(Skipped(path, str(error)))
                continue
            same = seen.setdefault(_identity(run), run)
            if same is run:
                runs.append(run)
            elif not (changed := _changed(same, run)):
                skipped.append(
                    Skipped(path, f"it is the same configuration and seed as {same.path}")
                )
            else:
                older, newer = sorted(
                    (same, run), key=lambda run: (run.path / "summary.json").stat().st_mtime_ns
                )
                runs[runs.index(same)] = seen[_identity(run)] = newer
                skipped.append(
                    Skipped(older.path, f"{changed} since; {newer.path} is the newer run")
                )
    return runs, skipped


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python does not look for garbage: what is read from files has no cycles, and to look
    through all of it again and again takes a third of the time that reading it does.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _changed(run: StoredRun, other: StoredRun) -> str:
    """What two runs of one configuration and seed differ in; nothing for copies."""
    here = run.environment
    there = other.environment
    if (here.get("task") or {}).get("made_of") != (there.get("task") or {}).get("made_of"):
        return "the task's data have changed"
    return (
        "the code of a component has changed"
        if here.get("code", {}) != there.get("code", {})
        else ""
    )


def _without_run(names: set[str]) -> str:
    """What a folder is, with these names in it, that holds no run."""
    if "mix.toml" in names:
        return "hgms mix ended before it had learned anything"
    return "the folder is empty" if all(map(is_marker, names)) else "it holds no run files"


def read_run(path: Path) -> StoredRun:
    """The run in ``path``.

    Raises:
        CheckpointError: it is empty, unfinished or damaged; the message is the reason.
    """
    try:
        names = set(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}") from None
    return _read_run(path, names)


def _read_run(path: Path, names: set[str]) -> StoredRun:
    """The run in ``path``, where there are files of these names."""
    try:
        if not names & _FILES:
            raise CheckpointError(_without_run(names))
        if "config.toml" not in names:
            raise CheckpointError("config.toml is missing")
        config = _config(read_file(path / "config.toml", _CONFIG).decode())
        if "summary.json" not in names:
            steps = (
                read_file(path / "steps.jsonl", ROWS).count(b"\n") - 1
                if "steps.jsonl" in names
                else 0
            )
            raise CheckpointError(
                f"the run is not finished: no summary.json yet, {max(steps, 0)} steps so far"
            )
        summary = _object(path / "summary.json")
        ensure_seal(summary, path / "summary.json")
        summary.pop("checksum", None)
        if summary.get("status") not in ("done", "failed"):
            raise CheckpointError(
                "summary.json has no status 'done' or 'failed': "
                f"{str(summary.get('status'))[:40]!r}"
            )
        if "steps.jsonl" not in names and summary["status"] == "done":
            raise CheckpointError("steps.jsonl is missing")
        environment = _object(path / "env.json", alike=True) if "env.json" in names else {}
        resources, scores = (
            _object(path / name) if name in names else {}
            for name in ("resources.json", "scores.json")
        )
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CheckpointError("config.toml is not text") from None
    run = StoredRun(
        path=path,
        config=config,
        summary=summary,
        environment=environment,
        resources=resources,
        scores=scores,
    )
    _check_run(run)
    return run


def scan_sweeps(
    folders: str | Path | Iterable[str | Path],
) -> tuple[list[StoredSweep], list[Skipped]]:
    """Every ``sweep.json`` below a ``sweeps`` directory in ``folders``, and the ones that cannot
    be read.
    """
    sweeps: list[StoredSweep] = []
    skipped: list[Skipped] = []
    for root in _roots(folders):
        for path in sorted(root.rglob("sweep.json")):
            if SWEEPS not in path.parts:
                continue
            try:
                table = _object(path)
                _check_sweep(table)
                sweeps.append(StoredSweep(path=path, table=table))
            except (CheckpointError, OSError) as error:
                skipped.append(Skipped(path, str(error)))
    return sweeps, skipped


def _roots(folders: str | Path | Iterable[str | Path]) -> list[Path]:
    roots = [Path(root) for root in ([folders] if isinstance(folders, str | Path) else folders)]
    for root in roots:
        if not root.is_dir():
            what = "is a file, not a folder of runs" if root.exists() else "does not exist"
            raise ConfigError(
                f"{root} {what}; give run folders, or the directory they are in (the --out of "
                "`hgms run`)"
            )
    return roots


def _run_folders(folders: str | Path | Iterable[str | Path]) -> Iterator[tuple[Path, set[str]]]:
    """Each folder that looks like a run, and the names of what is in it."""
    for root in _roots(folders):
        for directory, below, files in os.walk(root):
            names = {*below, *files}
            below[:] = sorted(
                name
                for name in below
                if name not in (SWEEPS, NULL_TEST) and not name.startswith(".")
            )
            here = Path(directory)
            if _FILES.intersection(files) or re.fullmatch(r"seed-\d+", here.name):
                yield here, names
                below.clear()  # what hgms mix made of the run


def _identity(run: StoredRun) -> tuple[str, int]:
    table = {key: value for key, value in run.config.items() if key != "seed"}
    settings = {
        key: value
        for key, value in run.settings.items()
        if key not in ("out", "track") and value != "none"
    }
    return json.dumps(
        [{**table, "run": settings}, run.task_version], sort_keys=True, default=str
    ), run.seed


def _config(text: str) -> dict[str, Any]:
    """The configuration; the runs of one cell differ in the line of the seed only, so the rest
    is parsed once for all.
    """
    seed = _SEED.search(text.partition("\n[")[0] + "\n")
    if seed is None:
        return parse_toml(text, "config.toml")
    rest = text[: seed.start()] + text[seed.end() :]
    parse = _toml_alike if len(rest) <= _ALIKE else parse_toml
    return {**parse(rest, "config.toml"), "seed": int(seed[1])}


def _object(path: Path, *, alike: bool = False) -> dict[str, Any]:
    """The table in a file of JSON; ``alike``: many runs have the same, which is then parsed
    once, and nobody writes to it.
    """
    data = read_file(path)
    value = (_json_alike if alike and len(data) <= _ALIKE else parse_json)(data, path.name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} does not hold an object")
    return value


# --- what the files of a run must hold before anything is added up
# --------------------------------------------------------------------------------------------------


def _check_run(run: StoredRun) -> None:
    """CheckpointError where a file of the run does not hold what it should."""
    _check_config(run)
    _check_summary(run.summary)
    _check_scores(run.scores)
    about = run.environment.get("task") or {}
    if not isinstance(about, dict) or not isinstance(about.get("metrics") or {}, dict):
        raise CheckpointError("env.json: 'task' does not hold the task's version and metrics")
    _check_directions("env.json", about.get("metrics") or {})
    _check_number("resources.json", "peak_memory_bytes", run.resources.get("peak_memory_bytes"))


def _check_sweep(table: Mapping[str, Any]) -> None:
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
        what = (
            f"it lacks {error}"
            if isinstance(error, KeyError)
            else shorten(str(error).splitlines()[0])
        )
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
            raise CheckpointError(
                f"summary.json: {name!r} is no table of numbers: {str(table)[:40]}"
            )
        for key, value in (table or {}).items():
            _check_number("summary.json", f"{name}.{key}", value, signed=name == "metrics")
    if not isinstance(summary.get("error"), str | None):
        raise CheckpointError("summary.json: 'error' is no text")


def _check_scores(scores: Mapping[str, Any]) -> None:
    if not all(isinstance(scores.get(key, {}), dict) for key in ("metrics", "higher_is_better")):
        raise CheckpointError(
            "scores.json does not hold the tables 'metrics' and 'higher_is_better'"
        )
    for name, value in scores.get("metrics", {}).items():
        _check_number("scores.json", f"metrics.{name}", value, signed=True)
    _check_directions("scores.json", scores.get("higher_is_better", {}))


def _check_directions(file: str, table: Mapping[str, Any]) -> None:
    for name, higher in table.items():
        if not isinstance(higher, bool):
            raise CheckpointError(
                f"{file}: whether {name[:40]!r} is better where it is higher is neither true nor "
                "false"
            )


def _check_number(file: str, name: str, value: object, *, signed: bool = False) -> None:
    """It is null, or a number that counts something; ``signed``: any number."""
    if len(name) > _NAME:
        raise CheckpointError(f"{file}: a name has more than {_NAME} characters: {name[:40]}…")
    if not isinstance(value, int | float | None) or isinstance(value, bool):
        raise CheckpointError(f"{file}: {name!r} is no number: {str(value)[:40]}")
    if not signed and value is not None and not 0 <= value < 2**63:
        raise CheckpointError(f"{file}: {name!r} is no number that counts something: {value}")
