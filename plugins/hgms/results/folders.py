"""Runs below a directory.

Each folder is a finished run, or is skipped with a reason.

Only small files are read: configuration, summary and environment. Folders can come from an
untrusted source. The functions read no file outside the folder. For any file content, they return
a run or a reason.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from hgms.arguments import errors_at, require
from hgms.config import check_types
from hgms.config.tables import parse_json, parse_toml
from hgms.results.stored_run import StoredRun, relative
from hgms.runs import UNCOMPARED, config_key
from hgms.store import ROWS, SMALL, Folder, digest, read_file
from hgms_core import ConfigError, HgmsError
from hgms_core.errors import CheckpointError

_FILES = frozenset({"config.toml", "env.json", "steps.jsonl", "timings.jsonl", "summary.json"})
_NAME = 300  # maximum characters of a label; a folder's name has 255
_CONFIG = 512 * 2**10  # bytes; tomllib needs seconds for a larger file


def shorten(text: str, most: int = 400) -> str:
    """Return the text, or its beginning and its length.

    Examples
    --------
    >>> shorten("a" * 5000, most=10)
    'aaaaaaaaaa… (5,000 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


@frozen
class Skipped:
    """A folder that looks like a run but is not readable as a run.

    ``place`` is inside the folder.
    """

    path: Path
    code: str
    reason: str = field(converter=shorten)
    place: tuple[str | int, ...] = ()

    @classmethod
    def of(cls, path: Path, error: HgmsError) -> Skipped:
        """Return the folder with the code, the first line and the place of an error."""
        return cls(path, error.code, error.lines()[0], error.place)


def scan(folders: str | Path | Iterable[str | Path]) -> tuple[list[StoredRun], list[Skipped]]:
    """Return all runs below ``folders``, sorted by path, and the skipped folders.

    Each of ``folders`` is a run folder, or a directory of run folders. An unfinished, empty or
    damaged run is skipped with its reason; nothing is guessed. A failed run is a result. Two copies
    of one run (the same configuration and seed) count once. If two such runs differ in the state of
    the task's data or of a component's code, the newer run counts.

    Raises
    ------
    ConfigError
        One of ``folders`` does not exist.
    """
    skipped: list[Skipped] = []
    runs: dict[tuple[str, int], StoredRun] = {}
    for path, names in dict(_run_folders(folders)).items():
        try:
            run = _read_run(path, names)
        except HgmsError as error:
            skipped.append(Skipped.of(path, error))
            continue
        same = runs.setdefault(_identity(run), run)
        if same is run:
            continue
        changed = _describe_change(same, run)
        if not changed:
            label = "" if run.label == same.label else ", under another label"
            reason = f"it has the same configuration and seed as {same.path}{label}"
            skipped.append(Skipped(path, "duplicate-run", reason))
        else:
            older, newer = sorted(
                (same, run), key=lambda run: (run.path / "summary.json").stat().st_mtime_ns
            )
            runs[_identity(run)] = newer
            reason = f"{changed} since; {newer.path} is the newer run"
            skipped.append(Skipped(older.path, "outdated-run", reason))
    return list(runs.values()), skipped


def _describe_change(run: StoredRun, other: StoredRun) -> str:
    """Describe the differences between two runs of one configuration and seed.

    The text is empty for copies.
    """
    here, there = (
        ((known.get("task") or {}).get("data_fingerprint"), known.get("code", {}))
        for known in (run.environment, other.environment)
    )
    if here[0] != there[0]:
        return "the task's data have changed"
    return "the code of a component has changed" if here != there else ""


def _without_run(names: set[str]) -> CheckpointError:
    """Return the error for a folder with these names, which contains no run."""
    if "mix.toml" in names:
        return CheckpointError("unfinished-run", "hgms mix ended before the first step")
    return CheckpointError("no-runs", "the folder contains no files of a run")


def read_run(path: Path) -> StoredRun:
    """Read the run in ``path``.

    Raises
    ------
    CheckpointError
        The folder is empty, unfinished or damaged.
    """
    with errors_at(str(path)):
        return _read_run(path)


def _read(path: Path, most: int = SMALL) -> bytes:
    with relative(path.parent):
        return read_file(path, most)


def _read_run(path: Path, entries: set[str] | None = None) -> StoredRun:
    """Return the run in ``path``, which contains these ``entries``; places are relative to it."""
    try:
        names = set(os.listdir(path)) if entries is None else entries
        if not names & _FILES:
            raise _without_run(names)
        if "config.toml" not in names:
            raise _missing("config.toml")
        config = parse_toml(_read(path / "config.toml", _CONFIG).decode(), "config.toml")
        with relative(path):
            manifest = Folder(path, config_key(config)).manifest()
        if "summary.json" not in names & manifest.files.keys():
            steps = (
                _read(path / "steps.jsonl", ROWS).count(b"\n") - 1 if "steps.jsonl" in names else 0
            )
            raise CheckpointError(
                "unfinished-run",
                f"the run is not finished: it has {max(steps, 0)} steps and no summary",
                place=("summary.json",),
            )
        data = _read(path / "summary.json")
        require(
            digest(data) == manifest.files["summary.json"].sha256,
            "damaged-file",
            "the file does not match the sha256 in manifest.json",
            place=("summary.json",),
            error=CheckpointError,
        )
        summary = _as_table(parse_json(data, "summary.json"), "summary.json")
        require(
            summary.get("status") in ("done", "failed"),
            "wrong-value",
            f"status={str(summary.get('status'))[:40]!r} must be 'done' or 'failed'",
            place=("summary.json", "status"),
            error=CheckpointError,
        )
        if "steps.jsonl" not in names and summary["status"] == "done":
            raise _missing("steps.jsonl")
        environment = _object(path / "env.json") if "env.json" in names else {}
        resources, scores = (
            _object(path / name) if name in names else {}
            for name in ("resources.json", "scores.json")
        )
    except OSError as error:
        raise CheckpointError(
            "unreadable-file", f"the folder cannot be read: {error.strerror}"
        ) from None
    except UnicodeDecodeError:
        raise CheckpointError(
            "wrong-format", "the file is not UTF-8 text", place=("config.toml",)
        ) from None
    run = StoredRun(
        path=path,
        config=config,
        summary=summary,
        environment=environment,
        facts=manifest.facts,
        resources=resources,
        scores=scores,
    )
    _check_config(run)
    _check(summary, "summary.json")
    _check(scores, "scores.json")
    _check(environment, "env.json")
    _check(environment.get("task") or {}, "env.json", "task")
    _check(resources, "resources.json")
    return run


def _missing(name: str) -> CheckpointError:
    return CheckpointError("missing-file", "the file is missing", place=(name,))


def _roots(folders: str | Path | Iterable[str | Path]) -> list[Path]:
    roots = [Path(root) for root in ([folders] if isinstance(folders, str | Path) else folders)]
    hint = "use run folders, or a folder of them, such as --out of `hgms run`"
    for root in roots:
        require(
            root.exists(),
            "missing-file",
            "the folder does not exist",
            hint=hint,
            place=(str(root),),
        )
        require(
            root.is_dir(),
            "not-a-folder",
            "the path is a file, but must be a folder of runs",
            hint=hint,
            place=(str(root),),
        )
    return roots


def _run_folders(folders: str | Path | Iterable[str | Path]) -> Iterator[tuple[Path, set[str]]]:
    """Yield each folder that looks like a run, with the names of its entries."""
    for root in _roots(folders):
        for directory, below, files in os.walk(root):
            names = {*below, *files}
            below[:] = sorted(name for name in below if not name.startswith("."))
            here = Path(directory)
            if _FILES.intersection(files) or re.fullmatch(r"seed-\d+", here.name):
                yield here, names
                below.clear()  # skip folders that hgms mix wrote inside the run


def _identity(run: StoredRun) -> tuple[str, int]:
    table = {key: value for key, value in run.config.items() if key != "seed"}
    settings = {
        key: value
        for key, value in run.settings.items()
        if key not in UNCOMPARED and value != "none"
    }
    identity = [{**table, "run": settings}, run.task_version]
    return json.dumps(identity, sort_keys=True, default=str), run.seed


def _object(path: Path) -> dict[str, Any]:
    return _as_table(parse_json(_read(path), path.name), path.name)


def _as_table(value: Any, name: str) -> dict[str, Any]:
    require(
        isinstance(value, dict),
        "wrong-type",
        "the file does not contain a JSON object",
        place=(name,),
        error=CheckpointError,
    )
    return value


# --- checks of a run's files before any value is used
# --------------------------------------------------------------------------------------------------

_HINTS: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("config.toml",): {
        "seed": int,
        "task": dict[str, Any] | str,
        "method": dict[str, Any] | str,
        "run": dict[str, Any] | None,
        "budget": dict[str, Any] | str,
    },
    ("config.toml", "task"): {"name": str},
    ("config.toml", "method"): {"name": str},
    ("summary.json",): {
        "outer_steps": int | None,
        "oracle_calls": int | None,
        "upper_loss": float | None,
        "metrics": dict[str, float | None] | None,
        "cost": dict[str, float | None] | None,
        "error": str | None,
    },
    ("env.json",): {"task": dict[str, Any] | None},
    ("env.json", "task"): {
        "metrics": dict[str, bool] | None,
        "metric_rows": dict[str, str | None] | None,
    },
    ("scores.json",): {
        "metrics": dict[str, float | None] | None,
        "higher_is_better": dict[str, bool] | None,
    },
    ("resources.json",): {"peak_memory_bytes": float | None},
}


def _check(table: Mapping[str, Any], *place: str) -> None:
    """Raise CheckpointError if a value of a file has another type."""
    try:
        check_types(table, _HINTS[place], place)
    except ConfigError as error:
        raise CheckpointError(error.code, shorten(error.message), place=error.place) from None


def _check_config(run: StoredRun) -> None:
    _check(run.config, "config.toml")
    _check(run.task, "config.toml", "task")
    _check(run.method, "config.toml", "method")
    names = (run.task_name, run.task_label, run.method_name, run.label)
    if longest := next((name for name in names if len(name) > _NAME), None):
        raise CheckpointError(
            "too-large",
            f"the name {longest[:40] + '…'!r} has more than {_NAME} characters",
            place=("config.toml",),
        )
    try:
        _ = run.budget
    except ConfigError as error:
        [cause, *_] = error.errors
        place = ("config.toml", "budget", *cause.place)
        raise CheckpointError(cause.code, shorten(cause.message), place=place) from None
