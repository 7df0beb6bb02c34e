"""Runs below a directory: every folder there is either a finished run or named with the reason why it is not one.

What is small is read (configuration, summary, environment). Folders below a ``sweeps`` directory are trials of a pilot sweep,
not results: :func:`scan_sweeps` reads those. A folder may be a stranger's: nothing outside it is read, and whatever its files
hold, it is a run or gets a reason.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from attrs import field, frozen

from hgms_core import CheckpointError, ConfigError, HgmsError
from hgms_results.checks import check_run, check_sweep, shorten
from hgms_results.stored import StoredRun, StoredSweep
from hgms_run import ROWS, RunFolder, parse_json, parse_toml, read_file

SWEEPS = "sweeps"
_FILES = frozenset({"config.toml", "env.json", "steps.jsonl", "timings.jsonl", "summary.json", "checkpoint.json"})
_SEED = re.compile(r"^seed = ([0-9]{1,18})\n", re.MULTILINE)
_CONFIG = 512 * 2**10  # bytes; tomllib needs seconds for more


@frozen
class Skipped:
    """A folder that looks like a run and cannot be read as one."""

    path: Path
    reason: str = field(converter=shorten)


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
    for path in dict.fromkeys(_run_folders(folders)):
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
            older, newer = sorted((same, run), key=lambda run: (run.path / "summary.json").stat().st_mtime_ns)
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
        environment, resources, scores = (
            _object(path / name) if name in names else {} for name in ("env.json", "resources.json", "scores.json")
        )
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CheckpointError("config.toml is not text") from None
    run = StoredRun(path=path, config=config, summary=summary, environment=environment, resources=resources, scores=scores)
    check_run(run)
    return run


def scan_sweeps(folders: str | Path | Iterable[str | Path]) -> tuple[list[StoredSweep], list[Skipped]]:
    """Every ``sweep.json`` below a ``sweeps`` directory in ``folders``, and the ones that cannot be read."""
    sweeps: list[StoredSweep] = []
    skipped: list[Skipped] = []
    for root in _roots(folders):
        for path in sorted(root.rglob("sweep.json")):
            if SWEEPS not in path.parts:
                continue
            try:
                table = _object(path)
                check_sweep(table)
                sweeps.append(StoredSweep(path=path, table=table))
            except (CheckpointError, OSError) as error:
                skipped.append(Skipped(path, str(error)))
    return sweeps, skipped


def _roots(folders: str | Path | Iterable[str | Path]) -> list[Path]:
    roots = [Path(root) for root in ([folders] if isinstance(folders, str | Path) else folders)]
    for root in roots:
        if not root.is_dir():
            what = "is a file, not a folder of runs" if root.exists() else "does not exist"
            raise ConfigError(f"{root} {what}; give run folders, or the directory they are in (the --out of `hgms run`)")
    return roots


def _run_folders(folders: str | Path | Iterable[str | Path]) -> Iterator[Path]:
    for root in _roots(folders):
        for directory, below, files in os.walk(root):
            below[:] = sorted(name for name in below if name != SWEEPS and not name.startswith("."))
            here = Path(directory)
            if _FILES.intersection(files):
                yield here
            elif re.fullmatch(r"seed-\d+", here.name):
                # a folder of several stages holds its run in one of them
                stages = [here / name for name in below if not (here / name).is_symlink()]
                yield next((stage for stage in stages if (stage / "config.toml").exists()), here)
            else:
                continue
            below.clear()


def _identity(run: StoredRun) -> tuple[str, int]:
    table = {key: value for key, value in run.config.items() if key != "seed"}
    settings = {key: value for key, value in run.settings.items() if key not in ("out", "track") and value != "none"}
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
