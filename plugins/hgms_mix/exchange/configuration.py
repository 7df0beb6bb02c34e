"""What readers of other trainers' configurations share: files, places of data, and numbers, each
with its message.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from hgms_core import ConfigError, Place
from hgms_core.torch_errors import first_line
from hgms_mix.exchange.trainer import yaml

COMMIT = "COMMIT"
"""Where a data set of the Hub is named without its commit, which a source has to have."""


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """A YAML or JSON file (which is YAML) with a mapping in it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(
            "unreadable-file", f"the file cannot be read: {why}", place=(str(path),)
        ) from None
    try:
        table = json.loads(text) if path.suffix == ".json" else yaml().safe_load(text)
    except (ValueError, yaml().YAMLError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        mark = getattr(error, "problem_mark", None)
        line = getattr(error, "lineno", None) if mark is None else mark.line + 1
        raise ConfigError(
            "wrong-format",
            f"the file is not valid {kind}: {first_line(error)}",
            place=(str(path),) if line is None else (str(path), line),
        ) from None
    if not isinstance(table, dict):
        raise ConfigError(
            "wrong-format",
            f"the file contains a {type(table).__name__}, but a {what} must be a table",
            place=(str(path),),
        )
    return table


def numbers(value: Any, count: int, place: Place) -> list[float]:
    """Probabilities or fractions: a list, or a text with commas; ConfigError unless there is one
    for each source.
    """
    name = place[-1]
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    try:
        values = [float(part) for part in (listed if isinstance(listed, list) else [listed])]
    except (TypeError, ValueError):
        raise ConfigError(
            "wrong-type", f"{name}={value!r} must be a list of numbers", place=place
        ) from None
    if len(values) != count:
        raise ConfigError(
            "wrong-length",
            f"{name}={value!r} has {len(values)} numbers, but there are {count} data sets",
            place=place,
        )
    if any(not 0 <= part < float("inf") for part in values):
        raise ConfigError(
            "out-of-range", f"{name}={value!r} must have finite numbers of at least 0", place=place
        )
    if sum(values) <= 0:
        raise ConfigError(
            "out-of-range", f"{name}={value!r} must have a number greater than 0", place=place
        )
    return values


def is_tables(listed: Any, key: str) -> TypeGuard[list[dict[str, Any]]]:
    """Whether this is a list of tables, not empty, with a text at ``key`` in each."""
    return (
        isinstance(listed, list)
        and bool(listed)
        and all(isinstance(part, dict) and isinstance(part.get(key), str) for part in listed)
    )


def place_of(name: str, file: Path) -> Path | None:
    """Where a trainer finds a file, a folder or a pattern of files: from where it is started,
    else beside its configuration.
    """
    for base in (Path.cwd(), file.resolve().parent):
        if (base / name).exists() or (
            glob.has_magic(name) and glob.glob(str(base / name), recursive=True)
        ):
            return base / name
    return None


def located(name: str, file: Path, *option: str | int) -> str:
    """A data file as the mix file shall have it: relative to here if it is below, else absolute.

    ``option`` is the place of the name in the configuration ``file``.
    """
    if (place := place_of(name, file)) is None:
        raise ConfigError(
            "missing-file",
            f"there is no file {name!r} in the current folder or next to {file.name}",
            place=(str(file), *option),
            hint="run this command in the folder where the trainer is started",
        )
    path = place.resolve()
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else str(path)


def name_of(place: str) -> str:
    """A source's name from its file or folder; that of the folder where the file is a pattern.

    >>> name_of("data/code.jsonl.gz"), name_of("data/*.jsonl")
    ('code', 'data')
    """
    path = Path(place)
    return (path.parent if glob.has_magic(path.name) else path).name.split(".")[0] or "data"


def of_hub(name: str, commit: Any = None, subset: Any = None, split: Any = None) -> dict[str, Any]:
    """A data set of the Hub as a source. A branch or a tag is no commit."""
    pinned = (
        commit if isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{7,40}", commit) else COMMIT
    )
    part = {"subset": subset, "split": None if split == "train" else split}
    return {"hub": name, "revision": pinned, **{key: value for key, value in part.items() if value}}


def of_load_dataset(
    part: Mapping[str, Any], file: Path, *option: str | int
) -> tuple[str, dict[str, Any]]:
    """A data set in the arguments of ``datasets.load_dataset``: a name for it, and the source.

    ``option`` is the place of the data set in the configuration ``file``.
    """
    files = part.get("data_files")
    local = files[0] if isinstance(files, list) and len(files) == 1 else files
    if not isinstance(local, str | None):
        raise ConfigError(
            "wrong-type",
            f"data_files={files!r} of {part['path']!r} must be one text",
            place=(str(file), *option, "data_files"),
            hint="use one file, a folder or a pattern per source",
        )
    if local is None and place_of(part["path"], file) is not None:
        local = part["path"]
    if local is not None:
        return name_of(local), {"path": located(local, file, *option, "data_files")}
    return part["path"].split("/")[-1], of_hub(
        part["path"], part.get("revision"), part.get("name"), part.get("split")
    )


def count_rows(name: str, table: Mapping[str, Any], file: Path) -> int:
    """Rows of a source; ConfigError for one of the Hub, whose rows are not here.

    ``file`` is the configuration that names the source.
    """
    from hgms_mix.lm import Source, read_examples

    if "path" not in table:
        raise ConfigError(
            "not-supported",
            f"the share of {name!r} depends on its number of rows, which is unknown for "
            f"{table.get('hub')!r} of the Hub",
            place=(str(file),),
            hint="download the data set and use its file, or set the weights of the trainer",
        )
    return len(read_examples(name, Source(**table)))
