"""Shared parts of the readers of other trainers' configurations.

They read files, locations of data, and numbers, and raise errors with their place.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms_core import ConfigError
from hgms_core.errors import Place
from hgms_core.torch_errors import first_line
from hgms_mix.exchange.trainer import yaml

BUILDERS = ("arrow", "csv", "json", "pandas", "parquet", "text")
"""Names of file types that ``load_dataset`` accepts in place of a data set."""
MOST_VALUES = 1_000_000
"""The largest number of values of a configuration.

A few lines of aliases can expand beyond any memory.
"""
COMMIT = "COMMIT"
"""A placeholder for the missing commit of a Hub data set; a source requires a commit."""


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a YAML or JSON file (JSON is YAML) that contains a mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            "unreadable-file", f"the file cannot be read: {why}", place=(str(path),)
        ) from None
    try:
        table = json.loads(text) if path.suffix == ".json" else yaml().safe_load(text)
        size = _size(table, {})
    except (ValueError, yaml().YAMLError, RecursionError) as error:
        line: tuple[int, ...] = ()
        if isinstance(error, json.JSONDecodeError):
            line = (error.lineno,)
        elif isinstance(error, yaml().MarkedYAMLError) and error.problem_mark is not None:
            line = (error.problem_mark.line + 1,)
        raise ConfigError(
            "wrong-format",
            f"the file is not valid {'JSON' if path.suffix == '.json' else 'YAML'}: "
            f"{first_line(error)}",
            place=(str(path), *line),
        ) from None
    if not isinstance(table, dict):
        raise ConfigError(
            "wrong-format",
            f"the file contains a {type(table).__name__}, but a {what} must be a table",
            place=(str(path),),
        )
    if size > MOST_VALUES:
        raise ConfigError(
            "too-large",
            f"the file has {size:.3g} values with its aliases, but at most {MOST_VALUES:,} are "
            "possible",
            place=(str(path),),
            hint="remove aliases (*NAME)",
        )
    return table


def _size(node: Any, sizes: dict[int, float]) -> float:
    """Return the number of values below a node; infinite if an alias is inside its own anchor."""
    if not isinstance(node, list | dict):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")
        children = node.values() if isinstance(node, dict) else node
        sizes[id(node)] = 1 + sum(_size(child, sizes) for child in children)
    return sizes[id(node)]


def shares_of(value: Any, names: Collection[str], place: Place) -> dict[str, float]:
    """Return probabilities or fractions by name, from a list or a text with commas.

    Raise ConfigError unless there is one number per data set.
    """
    name = place[-1]
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    try:
        values = [float(part) for part in (listed if isinstance(listed, list) else [listed])]
    except (TypeError, ValueError):
        raise ConfigError(
            "wrong-type", f"{name}={value!r} must be a list of numbers", place=place
        ) from None
    if len(values) != len(names):
        raise ConfigError(
            "wrong-length",
            f"{name}={value!r} has {len(values)} numbers, but there are {len(names)} data sets",
            place=place,
        )
    if any(not 0 <= part < float("inf") for part in values) or sum(values) <= 0:
        raise ConfigError(
            "out-of-range",
            f"{name}={value!r} must have finite numbers of at least 0, and one above 0",
            place=place,
        )
    return dict(zip(names, values, strict=True))


def data_sets(listed: Any, path: Path, option: str, key: str) -> list[dict[str, Any]]:
    """Return the data sets of an option: tables, each with a text at ``key``.

    Raise ConfigError for another value, and for a single data set.
    """
    if not isinstance(listed, list) or not all(
        isinstance(part, dict) and isinstance(part.get(key), str) for part in listed
    ):
        raise ConfigError(
            "wrong-type",
            f"{option}={listed!r} must be a list of tables, each with {key}",
            place=(str(path), option),
        )
    check_several(listed, (str(path), option))
    return listed


def check_several(listed: Sequence[Any], place: Place) -> None:
    """Raise ConfigError for a single data set, before its rows are counted."""
    if len(listed) < 2:
        raise ConfigError(
            "wrong-length",
            f"a mixture requires at least two data sets, but the configuration has {len(listed)}",
            place=place,
            hint="split the data set by the origin of its rows: hgms mix reads one source per file",
        )


def unread_keys(
    table: Mapping[str, Any],
    place: Place,
    *,
    read: Collection[str],
    harmless: Collection[str] = (),
    rejected: Collection[str] = (),
) -> list[str]:
    """Return a line for the user with the keys of a table that are not imported.

    Keys in ``read`` are imported. Keys in ``harmless`` change neither rows nor shares. A key in
    ``rejected`` that is set raises ConfigError, since it changes the rows for training.
    """
    given = [key for key, value in table.items() if value not in (None, "", False, [], {})]
    for key in given:
        if key in rejected:
            raise ConfigError(
                "not-supported",
                f"{key}={table[key]!r} changes which rows are learned, but it cannot be imported",
                place=(*place, key),
                hint="write the rows that it selects to a file, and remove it",
            )
    # Notes are comments of the mix file, so a name must be one line.
    unread = [printable(key) for key in given if key not in read and key not in harmless]
    where = ".".join(map(printable, place[1:] or place))
    return [f"not imported from {where}: {', '.join(unread)}"] if unread else []


def printable(name: Any) -> str:
    text = str(name)
    return text if text.isprintable() else repr(text)


def table_at(table: Mapping[str, Any], key: str, place: Place) -> dict[str, Any]:
    """Return the table at a key, empty if missing; raise ConfigError for another value."""
    value = table.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError("wrong-type", f"{key}={value!r} must be a table", place=(*place, key))
    return value or {}


def in_columns(form: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the format of a source, and the columns whose names differ from their fields."""
    own = {field: column for field, column in fields.items() if field != column}
    return {"format": form, **({"fields": own} if own else {})}


def expect(table: Mapping[str, Any], key: str, values: Collection[Any], place: Place) -> None:
    """Raise ConfigError unless a key of the table is missing or has one of the values."""
    if (value := table.get(key)) is not None and value not in values:
        raise ConfigError(
            "not-supported",
            f"{key}={value!r} cannot be imported",
            place=(*place, key),
            hint=f"rename it in the rows, and set it to {' or '.join(map(str, values))}",
        )


def part_of(split: Any, name: str, source: Mapping[str, Any], file: Path, place: Place) -> Any:
    """Return ``skip`` and ``rows`` of a local source from a slice: "train[:10%]".

    The slice has the syntax of ``load_dataset``. A percentage is rounded to the nearest row, as in
    ``load_dataset``.
    """
    if split in (None, "", "train"):
        return {}
    match = re.fullmatch(
        r"train\[(?:(-?\d{1,12})(%?))?:(?:(-?\d{1,12})(%?))?\]", str(split).replace(" ", "")
    )
    if match is None:
        raise ConfigError(
            "not-supported",
            f"split={split!r} must be train or a slice of it for a local file",
            place=place,
            hint="write the rows that it selects to a file, and remove it",
        )
    count = count_rows(name, source, file)
    share = "%" in match.groups()

    def bound(text: str | None, default: int) -> int:
        if text is None:
            return default
        value = round(int(text) * count / 100) if share else int(text)
        return min(max(value + count if value < 0 else value, 0), count)

    start = bound(match[1], 0)
    stop = bound(match[3], count)
    if stop <= start:
        raise ConfigError("no-rows", f"split={split!r} selects no row of {count}", place=place)
    whole = {"skip": start, "rows": None if stop == count else stop - start}
    return {key: value for key, value in whole.items() if value}


def place_of(name: str, file: Path) -> Path | None:
    """Return the path at which a trainer finds a file, a folder or a pattern of files.

    The name is relative to the working directory of the trainer, else to the folder of its
    configuration.
    """
    for base in (Path.cwd(), file.resolve().parent):
        if (base / name).exists() or (
            glob.has_magic(name) and glob.glob(str(base / name), recursive=True)
        ):
            return base / name
    return None


def locate(name: str, file: Path, *option: str | int) -> str:
    """Return the path of a data file for the mix file.

    The path is relative if it is below the working directory, else absolute. ``option`` is the
    place of the name in the configuration ``file``.
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
    """Return a source name from its file or folder; for a pattern, from the folder.

    >>> name_of("data/code.jsonl.gz"), name_of("data/*.jsonl")
    ('code', 'data')
    """
    path = Path(place)
    return (path.parent if glob.has_magic(path.name) else path).name.split(".")[0] or "data"


def of_hub(name: str, commit: Any = None, subset: Any = None, split: Any = None) -> dict[str, Any]:
    """Return a data set of the Hub as a source. A branch or a tag does not count as a commit."""
    pinned = (
        commit if isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{7,40}", commit) else COMMIT
    )
    part = {"subset": subset, "split": None if split == "train" else split}
    return {"hub": name, "revision": pinned, **{key: value for key, value in part.items() if value}}


def of_load_dataset(
    part: Mapping[str, Any], file: Path, *option: str | int, columns: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return a name and the source for a data set in the arguments of ``datasets.load_dataset``.

    ``option`` is the place of the data set in the configuration ``file``. ``columns`` are its
    format and fields.
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
    folder = place_of(part["path"], file)
    if local is None and folder is not None:
        local = part["path"]
    elif local is not None and part["path"] not in BUILDERS:
        if folder is None:
            raise ConfigError(
                "not-supported",
                f"data_files={local!r} of the data set {part['path']!r} cannot be imported",
                place=(str(file), *option, "data_files"),
                hint="download the file, and use its path",
            )
        local = f"{part['path']}/{local}"
    if local is None:
        hub = of_hub(part["path"], part.get("revision"), part.get("name"), part.get("split"))
        return part["path"].split("/")[-1], {**hub, **columns}
    name = name_of(local)
    source = {"path": locate(local, file, *option, "data_files"), **columns}
    place = (str(file), *option, "split")
    return name, source | part_of(part.get("split"), name, source, file, place)


def row_counts(sources: Mapping[str, Mapping[str, Any]], file: Path) -> dict[str, float]:
    """Count the rows of each source."""
    return {name: float(count_rows(name, source, file)) for name, source in sources.items()}


def count_rows(name: str, table: Mapping[str, Any], file: Path) -> int:
    """Count the rows of a source.

    Raise ConfigError for a source of the Hub, whose rows are not local. ``file`` is the
    configuration that names the source.
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
