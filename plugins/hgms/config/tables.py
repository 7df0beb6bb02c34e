"""Tables: read TOML and JSON, merge values, compare tables.

The input is not trusted: its depth and its numbers are bounded.
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hgms.arguments import require
from hgms_core import Composition, ConfigError
from hgms_core.errors import CheckpointError

Key = TypeVar("Key")
Value = TypeVar("Value")

DEPTH = 64
"""Maximum number of levels of tables and lists in a file."""

DOTS = 2000
"""Maximum number of dots in a line: the time of tomllib is quadratic in the parts of a key."""

SETTING_DEPTH = 32
"""Maximum number of levels in the key of one ``--set``."""

LARGEST = 1 << 20
"""Maximum size of a configuration file in bytes.

Files that users write have thousands of bytes.
"""

_NUMBER = re.compile(r"[+-]?(?:\d+\.|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
"""Numbers that users write but TOML does not allow: ``.5``, ``5.``"""


def parse_json(data: bytes, name: str) -> Any:
    """Parse a JSON value; ``name`` is the file name in errors.

    Raises
    ------
    CheckpointError
        If the text is not valid JSON, or if :func:`check` rejects the value.
    """
    return _parse(json.loads, data, name, "JSON ({})")


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Parse a TOML table; ``name`` is the file name in errors.

    Raises
    ------
    CheckpointError
        If the text is not valid TOML, or if :func:`check` rejects the table.
    """
    require(
        not any(line.count(".") > DOTS for line in text.split("\n")),
        "too-deep",
        f"a line has more than {DOTS:,} dots, so a key may be too deep",
        place=(name,),
        error=CheckpointError,
    )
    return _parse(tomllib.loads, text, name, "TOML: {}")


def _parse(parser: Callable[[Any], Any], text: str | bytes, name: str, form: str) -> Any:
    try:
        value = parser(text)
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:
        raise CheckpointError(
            "wrong-format", f"the file is not valid {form.format(error)}", place=(name,)
        ) from None
    check(value, name)
    return value


def check(value: object, name: str) -> None:
    """Check the depth, the integers and the text of a value.

    Raises
    ------
    CheckpointError
        If the value is nested too deeply to traverse. Also for an integer of more than 64 bits, and
        for text that cannot be encoded.
    """
    level = [value]
    for _ in range(DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                if not item.isascii() and any("\ud800" <= letter <= "\udfff" for letter in item):
                    message = "the text contains surrogates, which are not valid Unicode"
                    raise CheckpointError("wrong-format", message, place=(name,))
            elif isinstance(item, int) and not -(2**63) <= item < 2**63:
                message = "an integer has more than 64 bits"
                raise CheckpointError("out-of-range", message, place=(name,))
        level = below
    if level:
        raise _too_deep(name)


def _too_deep(name: str) -> CheckpointError:
    return CheckpointError(
        "too-deep", f"the data has more than {DEPTH} levels of tables and lists", place=(name,)
    )


# --- configuration files
# --------------------------------------------------------------------------------------------------


def tables_of(path: Path, what: str) -> dict[str, Any]:
    """Return the tables of a TOML file; ``what`` describes the file in errors.

    Raises
    ------
    ConfigError
        If the file cannot be read.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe may have no end
            raise OSError("the path is not a regular file")
        with path.open("rb") as stream:
            data = stream.read(LARGEST + 1)
        text = data.decode()
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        message = f"the {what} cannot be read: {why}"
        raise ConfigError("unreadable-file", message, place=(str(path),)) from None
    require(
        len(data) <= LARGEST,
        "too-large",
        f"the {what} has more than {LARGEST >> 20} MiB",
        place=(str(path),),
    )
    return read_toml(text, path.name)


def read_toml(text: str, source: str) -> dict[str, Any]:
    """Return the tables of a TOML text; ``source`` is its file name in errors.

    Raises
    ------
    ConfigError
        If the text is not valid.
    """
    try:
        return parse_toml(text, source)
    except CheckpointError as error:
        raise ConfigError(**error.as_dict()) from None


def merge_options(
    table: dict[str, Any], sets: Iterable[str], seed: int | None = None, **run: str | None
) -> list[tuple[str, ...]]:
    """Merge the settings of a command line into the table of a file.

    The settings are each ``--set``, the seed, and settings of ``[run]``. ``None`` keeps the value
    of the file. The result is the places of each ``--set``.
    """
    places = [merge_setting(table, assignment) for assignment in sets]
    if seed is not None:
        table["seed"] = seed
    settings = {key: value for key, value in run.items() if value is not None}
    if settings and isinstance(below := table.setdefault("run", {}), dict):
        below |= settings
    return places


def merge_setting(
    table: dict[str, Any], assignment: str, written: str | None = None
) -> tuple[str, ...]:
    """Merge one assignment ``a.b.c=value`` into the table.

    The value is TOML. Numbers may also be written as ``.5`` and ``5.``. Other text, and dates,
    become strings; a number for a field of text needs quotes. ``written`` is the whole option as
    the user wrote it, for messages.
    """
    option = f"--set {written or assignment}"
    key, equals, text = assignment.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    require(
        equals and all(path),
        "wrong-format",
        f"{assignment!r} is not an assignment",
        hint="use --set key=value, for example --set method.generator.count=4",
        place=(option,),
    )
    value = _value(text)
    require(
        len(path) <= SETTING_DEPTH,
        "too-deep",
        f"the key has {len(path)} levels, but at most {SETTING_DEPTH} are supported",
        place=(option,),
    )
    try:
        check(value, "value")
        set_value(table, path, value)
    except (ConfigError, CheckpointError) as error:
        parts = {**error.as_dict(), "place": (option,)}
        raise ConfigError(**parts) from None
    return path


def _value(text: str) -> Any:
    if "\n" in text or len(text) > 20_000:
        return text
    if _NUMBER.fullmatch(text.strip()):
        return float(text)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, datetime.date | datetime.time) else value


class Short(str):
    """A string over which a table was merged, as the ``name`` in that table.

    It is the name of a component, or the field that a class has as its ``shorthand``. Only the
    reader of the table can distinguish these cases.
    """


def set_value(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set ``table[a][b][c]``.

    A string on the path becomes a table and keeps its meaning (:class:`Short`).
    """
    for depth, part in enumerate(path[:-1]):
        below = table.setdefault(part, {})
        if isinstance(below, str) and part != "budget":
            below = table[part] = {"name": Short(below)}
        if not isinstance(below, dict):
            place = tuple(path[: depth + 1])
            raise ConfigError(
                "wrong-type", f"{'.'.join(place)} is {show(below)}, not a table", place=place
            )
        table = below
    table[path[-1]] = value


def overridden(
    composition: Composition, table: Mapping[str, Any], traits: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the parts of a composition for a task with these traits, overridden by ``table``."""
    parts: Mapping[str, Any] = composition.parts
    for trait in sorted(set(traits) & set(composition.on)):
        parts = overlay(parts, composition.on[trait])
    return overlay(parts, table)


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables key by key.

    A table that names another component replaces the whole part.

    Examples
    --------
    >>> overlay({"solver": {"name": "cg", "rtol": 1e-3}}, {"solver": {"max_steps": 5}})
    {'solver': {'name': 'cg', 'rtol': 0.001, 'max_steps': 5}}
    """
    merged = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in base.items()
    }
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping):
            if "name" in below and isinstance(value, str) and value != "none":
                value = {"name": value}
            if isinstance(value, Mapping) and value.get("name", below.get("name")) == below.get(
                "name"
            ):
                value = overlay(below, value)
        merged[key] = dict(value) if isinstance(value, Mapping) else value
    return merged


def overlay_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables like :func:`overlay`, with support for strings.

    A string over which a table is merged keeps its meaning (:class:`Short`).
    """
    return overlay(_with_room(base, over), over)


def _with_room(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    table = dict(base)
    for key, value in over.items():
        below = table.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            table[key] = _with_room(below, value)
        elif (
            isinstance(value, Mapping)
            and isinstance(below, str)
            and "name" not in value
            and key != "budget"
        ):
            table[key] = {"name": Short(below)}
    return table


def show(value: object) -> str:
    """Return the text of a value as the user wrote it."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    text = (
        json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, (str, list))
        else repr(value)
    )
    return text if len(text) <= 200 else f"{text[:100]} … ({len(text):,} characters)"


def difference(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys in which the tables differ.

    The keys have the order of their first occurrence.

    Examples
    --------
    >>> difference([{"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3, "d": 0}}])
    ['b.c', 'b.d']
    """
    flat = [flatten(table) for table in tables]
    missing = object()
    keys = dict.fromkeys(key for table in flat for key in table)
    return [
        key
        for key in keys
        if any(table.get(key, missing) != flat[0].get(key, missing) for table in flat[1:])
    ]


def group_values(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in order.

    Examples
    --------
    >>> group_values([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table as a flat table with dotted keys.

    Examples
    --------
    >>> flatten({"solver": {"name": "cg"}, "lr": 0.1})
    {'solver.name': 'cg', 'lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat
