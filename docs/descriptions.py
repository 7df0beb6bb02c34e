"""Describe public names for the reference: typed signatures, tables of fields, lists of members.

The meaning of a field comes from the section Parameters of the class's docstring, from a string
below the field, or from ``fields.toml`` next to this file.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import itertools
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

MEANINGS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    (Path(__file__).parent / "fields.toml").read_text(encoding="utf-8")
)
"""Meanings of the fields of a class, by ``package.Class`` and the field's name."""

SHORT = 60
"""The maximum length of a meaning that may occur twice in a table."""

SECTION = re.compile(r"([A-Z]\w+)\n-{3,}\n")
"""The heading of a section of numpydoc."""


def signature(thing: Any) -> str:
    """Return parameters with types and defaults, and the return type, on one line.

    Complex defaults are ``...``.
    """
    whole = inspect.signature(thing)
    # attrs has no type for a field with a converter
    types_ = (
        {field.alias: field.type for field in attrs.fields(thing)}
        if inspect.isclass(thing) and attrs.has(thing)
        else {}
    )
    shown = [
        parameter.replace(default=_default(parameter.default))
        for parameter in whole.parameters.values()
    ]
    typed = [
        item.replace(annotation=types_.get(item.name, item.annotation))
        if item.annotation is item.empty
        else item
        for item in shown
    ]
    kept = [
        item
        for item in typed
        if item.name not in ("self", "cls") or item.annotation is not item.empty
    ]
    returned = whole.return_annotation if not inspect.isclass(thing) else inspect.Signature.empty
    text = str(
        whole.replace(
            parameters=[_spelt(parameter) for parameter in kept],
            return_annotation=inspect.Signature.empty,
        )
    )
    return text + ("" if returned is inspect.Signature.empty else f" -> {annotation(returned)}")


class _Dots:
    def __repr__(self) -> str:
        return "..."


class _Plain:
    """The text of a type in the code."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _default(value: Any) -> Any:
    """Return a default whose text can be in a signature."""
    simple = (
        value is inspect.Parameter.empty
        or value is None
        or isinstance(value, bool | int | float | str)
    )
    return (
        value
        if simple
        or (isinstance(value, tuple) and all(isinstance(part, int | float | str) for part in value))
        else _Dots()
    )


def _spelt(parameter: inspect.Parameter) -> inspect.Parameter:
    if parameter.annotation is parameter.empty:
        return parameter
    return parameter.replace(annotation=_Plain(annotation(parameter.annotation)))


def annotation(hint: Any) -> str:
    """Return a type as the code spells it."""
    if isinstance(hint, str):
        return hint
    if hint is None or hint is type(None):
        return "None"
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return hint.__qualname__
    text = inspect.formatannotation(hint)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", text).replace("NoneType", "None")


def fields(cls: type) -> list[attrs.Attribute[Any]]:
    """Return the public fields of an attrs class."""
    return (
        [field for field in attrs.fields(cls) if not field.name.startswith("_")]
        if attrs.has(cls)
        else []
    )


def default_of(field: attrs.Attribute[Any]) -> str:
    """Return a default for a table: code, ``required``, or the result of a function."""
    if not field.init:
        return "–"
    if field.default is attrs.NOTHING:
        return "required"
    value = field.default
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        if value.takes_self or value.factory not in (dict, list, tuple):
            return "computed"
        value = value.factory()
    if inspect.isroutine(value):
        return "a function"
    if attrs.has(type(value)) and value == _made(type(value)):
        return f"`{type(value).__name__}()`"
    return f"`{value.__qualname__}`" if inspect.isclass(value) else f"`{value!r}`"


def _made(cls: type) -> Any:
    """Return an object with all defaults, or None if that is impossible."""
    try:
        return cls()
    except TypeError:
        return None


def meanings(cls: type, module: str) -> dict[str, str]:
    """Return the meaning of each field.

    Sources: the section Parameters, the string below the field, and ``fields.toml``.
    """
    names = {field.name for field in attrs.fields(cls)} if attrs.has(cls) else set()
    read = {
        name: text
        for name, text in {**parameters(cls.__doc__), **notes(cls)}.items()
        if name in names
    }
    return {**read, **MEANINGS.get(f"{module}.{cls.__name__}", {})}


@functools.cache  # the source of a class is parsed once, not for each of its fields
def notes(cls: type) -> dict[str, str]:
    """Return the strings below a class's fields, by name."""
    statements = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    return {
        statement.target.id: " ".join(note.value.value.split()).rstrip(".")
        for statement, note in itertools.pairwise(getattr(statements, "body", []))
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if isinstance(note, ast.Expr)
        and isinstance(note.value, ast.Constant)
        and isinstance(note.value.value, str)
    }


def parameters(doc: str | None) -> dict[str, str]:
    """Return the entries of the section Parameters of a docstring, by name.

    Names may share an entry (``low, high``). The first name has the text, and the others have it
    if it is short, else a reference to the first name.
    """
    entries: dict[str, str] = {}
    for head, items in sections(inspect.cleandoc(doc or "")):
        for names, text in items if head == "Parameters" else ():
            first, *others = names.split(", ")
            meaning = text.rstrip(".")
            entries[first] = meaning
            shared = meaning if len(meaning) <= SHORT else f"see ``{first}``"
            entries |= dict.fromkeys(others, shared)
    return entries


def sections(doc: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the heading of each section of numpydoc, and its names with their texts."""
    for part in doc.split("\n\n"):
        match = SECTION.match(part)
        if match is not None:
            yield match[1], entries_of(part[match.end() :])


def entries_of(body: str) -> list[tuple[str, str]]:
    """Return the names in a section, with their texts."""
    pairs = [item.partition("\n") for item in re.split(r"\n(?=\S)", body)]
    return [(name, " ".join(text.split())) for name, _, text in pairs]


@attrs.frozen
class Member:
    """A method or property: name, directive with argument and options, docstring."""

    name: str
    directive: str
    text: str
    options: tuple[str, ...]
    doc: str


def members(cls: type) -> list[Member]:
    """Return the members of an enumeration, or the public methods and properties of a class."""
    shown = []
    for value in cls if issubclass(cls, enum.Enum) else ():
        full = f"{cls.__name__}.{value.name}"
        shown.append(Member(value.name, "py:attribute", full, (), str(value.value)))
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        full = f"{cls.__name__}.{name}"
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            returned = inspect.signature(member.fget).return_annotation  # type: ignore[arg-type]
            options = (
                () if returned is inspect.Signature.empty else (f":type: {annotation(returned)}",)
            )
            shown.append(Member(name, "py:property", full, options, inspect.getdoc(member) or ""))
        elif inspect.isfunction(function):
            options = (
                (f":{type(member).__name__}:",)
                if isinstance(member, classmethod | staticmethod)
                else ()
            )
            # without cls
            called = getattr(cls, name) if isinstance(member, classmethod) else function
            shown.append(
                Member(
                    name,
                    "py:method",
                    full + signature(called),
                    options,
                    inspect.getdoc(function) or "",
                )
            )
    return shown


def is_class(thing: Any) -> bool:
    """Return whether a name is a class instead of an alias of a type."""
    return inspect.isclass(thing) and thing is not Any and typing.get_origin(thing) is None


def value(name: str, thing: Any) -> tuple[str, str, tuple[str, ...]]:
    """Return the directive of a name that is an alias of a type or a constant."""
    if thing is Any or typing.get_origin(thing) is not None:
        return "py:type", name, (f":canonical: {annotation(thing)}",)
    shown = repr(thing)
    short = len(shown) < 100 and not shown.startswith("<")
    return (
        "py:data",
        name,
        (f":type: {type(thing).__name__}", *([f":value: {shown}"] if short else [])),
    )
