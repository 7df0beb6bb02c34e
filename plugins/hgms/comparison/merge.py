"""``hgms merge``: merge result folders of several machines into one."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from hgms.config.tables import parse_json
from hgms.runs import RunFolder
from hgms.store import ROWS, hold_lease, is_marker, open_file, read_file, replace_file
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError, raise_all

REMEDY = "remove the wrong folder, or omit its source"
ASIDE = ".merged-"
"""Prefix of an incomplete copy, and of a folder that is being replaced."""
FREE = ("trials", "chosen", "chosen_values", "note")
"""Keys of a sweep's table that describe its trials so far. The other keys identify the sweep."""


@frozen(kw_only=True)
class Step:
    """The action for one folder.

    ``copy`` adds a folder that the target lacks, ``replace`` uses a source that has progressed
    further, and ``keep`` leaves the target unchanged.
    """

    what: str
    source: Path
    target: Path


def plan(sources: Sequence[Path], target: Path) -> list[Step]:
    """Return the steps that merge ``sources`` into ``target``, without changing files.

    A finished run takes precedence over an unfinished run. Between two unfinished runs, the run
    that has progressed further takes precedence.

    Raises:
        ConfigError: if two folders of one run have different contents; the error names both. Also
            if a source is not a folder, is the target, or is inside the target.
    """
    steps: dict[Path, Step] = {}
    faults: list[ConfigError] = []
    for source in sources:
        if not source.is_dir():
            raise ConfigError("missing-file", "the folder does not exist", place=(str(source),))
        if source.resolve() == target.resolve() or target.resolve() in source.resolve().parents:
            message = f"the source must not be the target {target} or a folder in it"
            raise ConfigError("wrong-value", message, place=(str(source),))
        for folder in sorted(_folders(source)):
            place = target / folder.relative_to(source)
            before = steps.get(place)
            other = (
                before.source
                if before is not None and before.what != "keep"
                else place
                if place.is_dir()
                else None
            )
            try:
                _ensure_regular(folder)
                further = other is None or _further(folder, other)
            except CheckpointError as error:
                faults += [
                    ConfigError(**{**fault.as_dict(), "hint": REMEDY}) for fault in error.errors
                ]
                continue
            if further:
                steps[place] = Step(
                    what="replace" if place.is_dir() else "copy", source=folder, target=place
                )
            elif before is None:
                steps[place] = Step(what="keep", source=folder, target=place)
    if faults:
        raise_all(faults)
    return list(steps.values())


def carry_out(steps: Sequence[Step], tables: Mapping[Path, Path]) -> None:
    """Copy each folder to a temporary name next to its target, then rename it. After an
    interruption, the same call resumes.

    Errors: FolderInUse if a run in progress uses a folder; completed steps are kept.
    """
    for step in steps:
        if step.what == "keep":
            continue
        new = step.target.with_name(f"{ASIDE}{step.target.name}")
        old = step.target.with_name(f"{ASIDE}old-{step.target.name}")
        with contextlib.ExitStack() as held:
            # the folder of a finished run no longer changes, and may be read-only
            if not (step.source / "summary.json").exists():
                held.enter_context(hold_lease(step.source))
            if step.what == "replace":
                held.enter_context(hold_lease(step.target))
            shutil.rmtree(new, ignore_errors=True)
            _ensure_regular(step.source)
            shutil.copytree(step.source, new, ignore=_of_here, symlinks=True, copy_function=_copy)
            if step.what == "replace":
                shutil.rmtree(old, ignore_errors=True)
                os.replace(step.target, old)
            os.replace(new, step.target)
        shutil.rmtree(old, ignore_errors=True)
    for table, place in tables.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, read_file(table, ROWS))


def _of_here(folder: str, names: list[str]) -> set[str]:
    """Return names that a copy excludes: lease markers and files of an interrupted merge."""
    return {name for name in names if is_marker(name) or name.startswith(ASIDE)}


def _ensure_regular(folder: Path) -> None:
    """Raise CheckpointError if a folder contains links, pipes or devices, which are not copied."""
    for directory, below, names in os.walk(folder):
        for path in (Path(directory, name) for name in [*below, *names]):
            kind = path.lstat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                what = "a symbolic link" if stat.S_ISLNK(kind) else "not a regular file"
                raise CheckpointError(
                    "not-a-file", f"the path is {what}, which is not merged", place=(str(path),)
                )


def _copy(source: str, target: str) -> None:
    """Copy a regular file; reject any other kind of file that has replaced it."""
    with open_file(Path(source), sys.maxsize) as stream, open(target, "xb") as copy:
        shutil.copyfileobj(stream, copy)
    shutil.copystat(source, target, follow_symlinks=False)


def _folders(root: Path) -> Iterator[Path]:
    """Yield the run folders below ``root``, without folders inside a run folder."""
    for directory, below, files in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith(ASIDE))
        if "config.toml" in files:
            below.clear()
            yield Path(directory)


def sweeps(sources: Sequence[Path], target: Path) -> dict[Path, Path]:
    """Return the sweep tables that the target lacks, with their target paths.

    The next `hgms compare` rebuilds existing tables from the trials.

    Errors: ConfigError if two folders contain different sweeps of one method.
    """
    lacking: dict[Path, Path] = {}
    for source in sources:
        for path in sorted(source.glob("sweeps/*/*/sweep.json")):
            place = target / path.relative_to(source)
            if not place.exists():
                lacking[path] = place
                continue
            own, known = (parse_json(read_file(file, ROWS), file.name) for file in (path, place))
            if any(
                own.get(key) != known.get(key) for key in (own.keys() | known.keys()) - set(FREE)
            ):
                raise ConfigError(
                    "other-settings",
                    f"the sweep differs from the sweep in {place}",
                    place=(str(path),),
                    hint="remove the wrong folder",
                )
    return lacking


def _further(folder: Path, other: Path) -> bool:
    """Return whether the run in ``folder`` has progressed further than the same run in ``other``.

    Errors: CheckpointError, with both places, if they are different runs or contain different rows.
    """
    mine = RunFolder(folder)
    theirs = RunFolder(other)
    if not theirs.config.exists():
        return True
    if not theirs.holds(read_file(mine.config).decode(errors="replace")):
        raise CheckpointError(
            "other-settings",
            f"the configuration of the run differs from the one in {other}",
            place=(str(folder),),
        )
    done = [run.read_summary() for run in (mine, theirs)]
    rows = [
        read_file(run.steps, ROWS) if os.path.lexists(run.steps) else b"" for run in (mine, theirs)
    ]
    own, known = (data[: data.rfind(b"\n") + 1] for data in rows)
    same = own.startswith(known) or known.startswith(own)
    if done[0] is not None and done[1] is not None:
        same = own == known and done[0] == done[1]
    if not same:
        raise CheckpointError(
            "other-results",
            f"the results of the run differ from the results of the same run in {other}",
            place=(str(folder),),
        )
    if (done[0] is None) != (done[1] is None):
        return done[0] is not None
    return len(own) > len(known)
