"""Tables: TOML and JSON read without trust (bounds on depth and numbers), values laid over a
table, tables compared.
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms_core import CheckpointError, ConfigError, overlay

DEPTH = 64
"""Levels of tables and lists in a file, at most."""

SETTING_DEPTH = 32
"""Levels of the key of one ``--set``, at most."""

LARGEST = 1 << 20
"""Bytes of a configuration file, at most: those that people write have thousands."""

# The tokens of TOML as far as keys need them. After a quote that begins no complete string the text
# is not valid TOML, so the search ends there; this also keeps its time linear.
_TOKEN = re.compile(
    r"""
    (?P<text> "{3} (?: [^"\\] | \\. | "(?!"") )*+ "{3,5}+ | '{3} (?: [^'] | '(?!'') )*+ '{3,5}+
        | \#[^\n]*+ )
    | (?P<triple> "{3} | '{3} )
    | (?P<part> " (?: [^"\\\n] | \\[^\n] )*+ " | '[^'\n]*+' | [\w-]++ )
    | (?P<quote> ["'] )
    | (?P<dot> [ \t]*+ \. [ \t]*+ )
    | (?P<other> [^"'\#.\w \t-]++ | [ \t]++ )
    """,
    re.DOTALL | re.VERBOSE,
)
_NUMBER = re.compile(r"[+-]?(?:\d+\.|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
"""Numbers as people write them and TOML does not: ``.5``, ``5.``"""


def parse_json(data: bytes, name: str) -> Any:
    """A value of JSON; CheckpointError, naming the file, for any other text and for what
    :func:`check` refuses.
    """
    return _parsed(json.loads, data, name, "JSON ({})")


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """A table of TOML; CheckpointError, naming the file, for any other text and for what
    :func:`check` refuses.
    """
    if has_deep_key(text):
        raise _too_deep(name)
    table: dict[str, Any] = _parsed(tomllib.loads, text, name, "TOML: {}")
    return table


def has_deep_key(text: str) -> bool:
    r"""Whether TOML has a dotted key of more than ``DEPTH`` parts, for which tomllib takes time in
    the square of the parts. Takes time in proportion to the text.

    >>> has_deep_key(".".join([r'"a\"b"'] * 65) + " = 1")
    True
    >>> has_deep_key('text = "a.' + "b." * 100 + '"')
    False
    """
    if all(line.count(".") < DEPTH for line in text.split("\n")):
        return False
    dots = 0
    before = ""
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind in ("triple", "quote"):
            return False
        if kind == "dot" and before == "part":
            dots += 1
        elif kind != "part" or before != "dot":
            dots = 0
        if dots >= DEPTH:
            return True
        before = kind or ""
    return False


def _parsed(parser: Callable[[Any], Any], text: str | bytes, name: str, form: str) -> Any:
    try:
        value = parser(text)
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:
        message = f"the file is not valid {form.format(error)}"
        raise CheckpointError("wrong-format", message, place=(name,)) from None
    check(value, name)
    return value


def check(value: object, name: str) -> None:
    """CheckpointError where a value is nested too deeply to be walked, or holds a whole number of
    more than 64 bits or text that no encoding has."""
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
    message = f"the data has more than {DEPTH} levels of tables and lists"
    return CheckpointError("too-deep", message, place=(name,))


# --- configuration files
# --------------------------------------------------------------------------------------------------


def tables_of(path: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file; ``what`` it is, for the ConfigError of one that cannot be read."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe has no end
            raise OSError("the path is not a regular file")
        with path.open("rb") as stream:
            data = stream.read(LARGEST + 1)
        text = data.decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        message = f"the {what} cannot be read: {why}"
        raise ConfigError("unreadable-file", message, place=(str(path),)) from None
    if len(data) > LARGEST:
        message = f"the {what} has more than {LARGEST >> 20} MiB"
        raise ConfigError("too-large", message, place=(str(path),))
    return read_toml(text, path.name)


def read_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of a TOML text; ``source`` is its file's name, for the ConfigError of one that
    is not valid.
    """
    try:
        return parse_toml(text, source)
    except CheckpointError as error:
        raise ConfigError(**error.as_dict()) from None


def lay_options(
    table: dict[str, Any], sets: Iterable[str], seed: int | None = None, **run: str | None
) -> list[tuple[str, ...]]:
    """Lay what a command line says over a file's table: each ``--set``, the seed, and settings of
    ``[run]`` (None: the file's). The places of what was set."""
    places = [lay(table, assignment) for assignment in sets]
    if seed is not None:
        table["seed"] = seed
    settings = {key: value for key, value in run.items() if value is not None}
    if settings and isinstance(below := table.setdefault("run", {}), dict):
        below |= settings
    return places


def lay(table: dict[str, Any], assignment: str, written: str | None = None) -> tuple[str, ...]:
    """Lay one ``a.b.c=value`` over the table. The value is TOML; numbers may also be written as
    ``.5`` and ``5.``; other text, and dates, are strings. ``written`` is the whole option as the
    user wrote it, for messages.
    """
    key, equals, text = assignment.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(
            "wrong-format",
            f"{assignment!r} is not an assignment",
            place=(f"--set {written or assignment}",),
            hint="use --set key=value, for example --set method.generator.count=4",
        )
    value = _value(text)
    option = f"--set {written or assignment}"
    if len(path) > SETTING_DEPTH:
        message = f"the key has {len(path)} levels, but at most {SETTING_DEPTH} are supported"
        raise ConfigError("too-deep", message, place=(option,))
    try:
        check(value, "value")
        put(table, path, value)
    except (ConfigError, CheckpointError) as error:
        parts = {**error.as_dict(), "place": (option,)}
        raise ConfigError(**parts) from None
    return path


def _value(text: str) -> Any:
    if "\n" in text or len(text) > 20_000 or has_deep_key(text):
        return text
    if _NUMBER.fullmatch(text.strip()):
        return WrittenFloat(float(text), text)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    if type(value) is float:
        return WrittenFloat(value, text)
    if type(value) is int:
        return WrittenInt(value, text)
    return text if isinstance(value, datetime.date | datetime.time) else value


class WrittenInt(int):
    """A number of a command line with its ``text``, which a field of text takes."""

    text: str

    def __new__(cls, value: int, text: str) -> WrittenInt:
        number = super().__new__(cls, value)
        number.text = text
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.text)


class WrittenFloat(float):
    """A number of a command line with its ``text``, which a field of text takes."""

    text: str

    def __new__(cls, value: float, text: str) -> WrittenFloat:
        number = super().__new__(cls, value)
        number.text = text
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (float(self), self.text)


def readings(value: Any) -> list[Any]:
    """The values that a setting may stand for: a number of a command line also for its text."""
    if isinstance(value, WrittenInt):
        return [int(value), value.text]
    if isinstance(value, WrittenFloat):
        return [float(value), value.text]
    return [value]


class Short(str):
    """A string over which a table was laid, as the ``name`` in that table: a component's name, or
    the field that a class has as its ``shorthand``. Which one, only the reader of the table can
    know.
    """

    __slots__ = ()


def put(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets ``table[a][b][c]``. A string on the way becomes a table and stays what it means
    (:class:`Short`).
    """
    for depth, part in enumerate(path[:-1]):
        below = table.setdefault(part, {})
        if isinstance(below, str) and part != "budget":
            below = table[part] = {"name": Short(below)}
        if not isinstance(below, dict):
            place = tuple(path[: depth + 1])
            message = f"{'.'.join(place)} is {show(below)}, not a table"
            raise ConfigError("wrong-type", message, place=place)
        table = below
    table[path[-1]] = value


def laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`hgms_core.overlay`, where a string over which a table is laid stays what it means
    (:class:`Short`).
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
    """A value as the user wrote it."""
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
    """The dotted keys in which the tables differ, in the order in which they first come.

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


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table with dotted keys.

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
