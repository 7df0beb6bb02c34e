"""Tables and objects: a TOML table as the object that its fields' types describe, and an object as a table again.

Nothing is turned into something else on the way: every value is checked against the type and the validator of its field, and
what was wrong is told all at once, each with its place (:class:`Invalid`). A field whose type is a protocol is looked up in the
registry by the ``name`` in its table. :func:`plain` goes back; :func:`spell` says a type in words.
"""

from __future__ import annotations

import contextlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import attrs
import cattrs

from hgms_core import Budget, Composition, ConfigError, HgmsError, Pipeline, closest, unknown
from hgms_core.registry import KINDS, Kind, Registry, inside, layers_of
from hgms_run.tables import Place, show

PROTOCOLS: dict[Any, Kind] = {kind.protocol: kind for kind in KINDS.values()}

AT_REST: Mapping[str, Any] = {
    "reference": "none", "mixture": "none", "keep": "last", "learn_start": False, "answer": "selected", "tilt": 0.0,
}  # fmt: skip
"""What the table of every pipeline says, in this order, where nothing else is said: of wrappers that it is not in, too, so that
a configuration has one hash, whatever is installed."""


# --- what was wrong, and where -----------------------------------------------------------------------------------------


class Invalid(Exception):
    """Errors with their places, gathered from the bottom of a table upwards."""

    def __init__(self, *errors: tuple[Place, str]) -> None:
        super().__init__(*errors)
        self.errors = errors

    def below(self, key: str | int) -> list[tuple[Place, str]]:
        return [((key, *place), message) for place, message in self.errors]

    def render(self, source: str, sets: tuple[Place, ...] = ()) -> str:
        """One message with the place behind its first line; several ones under a heading."""
        shown = []
        for place, message in self.errors:
            given = any(place[: len(one)] == one for one in sets)
            first, *rest = message.splitlines()
            shown.append(
                "\n  ".join([f"{first} @ {'--set ' if given else source + '.' * bool(place)}{spell_place(place)}", *rest])
            )
        if len(shown) == 1:
            return shown[0]
        return f"{len(shown)} errors in {source}:\n" + "\n".join("  " + one.replace("\n", "\n  ") for one in shown)


def fail(message: str) -> NoReturn:
    raise Invalid(((), message))


def spell_place(place: Place) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


# --- types in words ----------------------------------------------------------------------------------------------------

_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def spell(hint: Any) -> str:
    """A type in words, for messages and ``hgms describe``."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint in PROTOCOLS:
        return PROTOCOLS[hint].with_article
    if hint is Budget:
        return 'a budget like "60s", "25 steps" or "1e5 calls"'
    if hint in (None, type(None)):
        return '"none"'
    return f"a table ({hint.__name__})" if attrs.has(hint) else _spell_generic(hint, typing.get_args(hint))


def _spell_generic(hint: Any, arguments: tuple[Any, ...]) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " or ".join(show(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spell(member) for member in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} values ({', '.join(spell(one) for one in arguments)})"
    if _origin_is(hint, (tuple, list, Sequence)):
        return f"a list ({spell(arguments[0])} each)"
    if _origin_is(hint, (Mapping,)):
        return f"a table ({spell(arguments[1])} each)"
    if _origin_is(hint, (Callable,)):
        return "a function (from Python only)"
    return getattr(hint, "__name__", str(hint))


# --- tables to objects -------------------------------------------------------------------------------------------------


def type_hints(cls: type) -> dict[str, Any]:
    """The types of an attrs class's fields, evaluated."""
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"the types of {cls.__module__}:{cls.__qualname__} cannot be resolved ({error}); "
            "import what its annotations name outside of TYPE_CHECKING"
        ) from None


def init_fields(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """The fields that a configuration may set, by the name of their argument."""
    return {one.alias or one.name: one for one in attrs.fields(cls) if one.init and one.metadata.get("toml", True)}


def traits_of(registry: Registry, task: object) -> frozenset[str]:
    """What the task that a table names promises; nothing of one that does not exist (which is found wrong elsewhere)."""
    name = task.get("name") if isinstance(task, Mapping) else task
    found = registry.find("task", name) if isinstance(name, str) else None
    return frozenset(getattr(found.target, "traits", ()) if found is not None else ())


def structured(table: object, wanted: Any, registry: Registry, traits: frozenset[str] = frozenset()) -> Any:
    """The object of the type ``wanted`` that a table describes; a composition with its defaults on a task with ``traits``.

    Raises:
        Invalid: all that is wrong, with places.
    """
    return converter_for(registry, traits).structure(table, wanted)


def converter_for(registry: Registry, traits: frozenset[str] = frozenset()) -> cattrs.Converter:
    """A strict converter: nothing is turned into something else, and components are looked up in ``registry``. Compositions
    have the defaults that they have on a task with ``traits``."""
    converter = cattrs.Converter(detailed_validation=False)
    for scalar in _SCALARS:
        converter.register_structure_hook(scalar, _scalar)

    def hook(predicate: Callable[[Any], bool], function: Callable[[Any, Any], Any]) -> None:
        converter.register_structure_hook_func(predicate, function)

    hook(attrs.has, lambda value, cls: _table(converter, registry, value, cls))
    hook(lambda hint: typing.get_origin(hint) is Literal, _choice)
    hook(lambda hint: typing.get_origin(hint) in (typing.Union, types.UnionType), lambda *pair: _union(converter, *pair))
    hook(lambda hint: _origin_is(hint, (tuple, list, Sequence)), lambda *pair: _sequence(converter, *pair))
    hook(lambda hint: _origin_is(hint, (Mapping,)), lambda *pair: _mapping(converter, *pair))
    hook(lambda hint: _origin_is(hint, (Callable,)), lambda *_: fail("a function can only be given from Python"))
    hook(lambda hint: hint in PROTOCOLS, lambda *pair: _component(converter, registry, traits, *pair))
    converter.register_structure_hook(Budget, lambda value, _: _budget(converter, registry, value))
    return converter


def _origin_is(hint: Any, classes: tuple[Any, ...]) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, classes)


def _scalar(value: object, wanted: type) -> Any:
    if type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            return float(value)
    fail(f"expected {_SCALARS[wanted]}, got {show(value)}")


def _choice(value: object, hint: Any) -> Any:
    choices = typing.get_args(hint)
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    if isinstance(value, str) and all(isinstance(choice, str) for choice in choices):
        fail(unknown("choice", value, choices).replace("\n  ", "\n"))
    fail(f"expected {spell(hint)}, got {show(value)}")


def _union(converter: cattrs.Converter, value: object, hint: Any) -> Any:
    """The first member that fits, exact types first. The member that is a table speaks for a table."""
    members = list(typing.get_args(hint))
    if type(None) in members and value in (None, "none"):
        return None
    members = [member for member in members if member is not type(None)]
    members.sort(key=lambda member: type(value) is not member)
    failures = []
    for member in members:
        try:
            return converter.structure(value, member)
        except Invalid as invalid:
            failures.append((invalid, attrs.has(member) or member in PROTOCOLS))
    telling = [invalid for invalid, table in failures if table == isinstance(value, Mapping)]
    if len(members) == 1 and (isinstance(value, (Mapping, list)) or len(telling) == 1):
        raise failures[0][0]
    if isinstance(value, Mapping) and len(telling) == 1:
        raise telling[0]
    fail(f"expected {spell(hint)}, got {show(value)}")


def _sequence(converter: cattrs.Converter, value: object, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if not isinstance(value, (list, tuple)):
        fail(f"expected {spell(hint)}, got {show(value)}")
    fixed = origin is tuple and arguments[-1] is not Ellipsis
    if fixed and len(value) != len(arguments):
        fail(f"expected {spell(hint)}, got {len(value)} of them")
    errors, items = [], []
    for index, item in enumerate(value):
        try:
            items.append(converter.structure(item, arguments[index] if fixed else arguments[0]))
        except Invalid as invalid:
            errors += invalid.below(index)
    if errors:
        raise Invalid(*errors)
    return items if origin is list else tuple(items)


def _mapping(converter: cattrs.Converter, value: object, hint: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        fail(f"expected {spell(hint)}, got {show(value)}")
    errors, items = [], {}
    for key, item in value.items():
        try:
            items[key] = converter.structure(item, typing.get_args(hint)[1])
        except Invalid as invalid:
            errors += invalid.below(key)
    if errors:
        raise Invalid(*errors)
    return items


def _table(converter: cattrs.Converter, registry: Registry, value: object, cls: type) -> Any:
    """An attrs class from the table of its fields, in the wrappers whose fields stand among them. Every field is looked at,
    whatever is wrong with another."""
    if not isinstance(value, Mapping):
        fail(f"expected a table ({cls.__name__}), got {show(value)}")
    layers, table = _layers(registry, cls, value)
    known = {key: None for fields in layers.values() for key in fields}
    errors: list[tuple[Place, str]] = []
    for key in table:
        if key not in known:
            near = closest(key, known)
            hint = f"; did you mean {near!r}?" if near else ""
            errors.append(((key,), f"unknown key {key!r}{hint} (known: {', '.join(known) or 'none'})"))
    first, *around = layers
    arguments = {first: _values(converter, table, first, layers[first], errors)}
    for layer in around:
        if layers[layer].keys() & table.keys() or (layer is cls and not layers[cls].keys() & value.keys()):
            arguments[layer] = _values(converter, table, layer, layers[layer], errors)
    if errors:
        raise Invalid(*errors)
    try:
        built = first(**arguments.pop(first))
        for layer, fields in arguments.items():
            built = layer(**{str(inside(layer)): built, **fields})
    except (ValueError, TypeError, HgmsError) as error:
        fail(_said(error))
    return built


def _layers(
    registry: Registry, cls: type, table: Mapping[str, Any]
) -> tuple[dict[type, dict[str, attrs.Attribute[Any]]], Mapping[str, Any]]:
    """The classes that the keys of a table may belong to, from the inside, each with its fields; and the table without what
    wrappers that are not there have in every table (:data:`AT_REST`)."""
    classes = layers_of(cls, table)
    if classes[0] is not Pipeline:
        return {cls: init_fields(cls)}, table
    layers = {layer: init_fields(layer) for layer in (Pipeline, *registry.wrappers, *classes)}
    for layer, fields in layers.items():
        fields.pop(str(inside(layer)), None)
    return layers, {key: value for key, value in table.items() if key in layers[Pipeline] or not _at_rest(key, value)}


def _values(
    converter: cattrs.Converter,
    table: Mapping[str, Any],
    cls: type,
    fields: Mapping[str, attrs.Attribute[Any]],
    errors: list[tuple[Place, str]],
) -> dict[str, Any]:
    """The values of a class's fields; what is wrong goes to ``errors``."""
    hints, arguments = type_hints(cls), {}
    for key, one in fields.items():
        if key in table:
            try:
                arguments[key] = converter.structure(table[key], hints[one.name])
                _validate(one, arguments[key])
            except Invalid as invalid:
                errors += invalid.below(key)
        elif one.default is attrs.NOTHING:
            errors.append(((key,), f"missing: {spell(hints[one.name])}"))
    return arguments


def _at_rest(key: str, value: object) -> bool:
    """Whether a wrapper's key says what the table of every pipeline says: then there is no wrapper."""
    rest, value = AT_REST.get(key), "none" if value is None else value
    return key in AT_REST and value == rest and isinstance(value, bool) is isinstance(rest, bool)


def _validate(one: attrs.Attribute[Any], value: object) -> None:
    """Run a field's validator alone, so that one bad field does not hide the next; those that look at the whole object run
    when it is built."""
    if one.validator is None or one.converter is not None:
        return
    message = None
    try:
        one.validator(None, one, value)
    except (ValueError, HgmsError) as error:
        message = _said(error)
    except Exception as error:
        if isinstance(error, TypeError) and len(error.args) == 4:  # how attrs' instance_of speaks
            message = _said(error)
    if message is not None:
        fail(message)


def _said(error: BaseException) -> str:
    """The sentence of an exception; attrs' own ones carry more arguments behind it."""
    return str(error.args[0]) if error.args else type(error).__name__


def _budget(converter: cattrs.Converter, registry: Registry, value: object) -> Budget:
    if isinstance(value, str):
        try:
            return Budget.parse(value)
        except ConfigError as error:
            fail(str(error))
    if not isinstance(value, Mapping):
        fail(f"expected {spell(Budget)}, got {show(value)}")
    return typing.cast(Budget, _table(converter, registry, value, Budget))


def _component(converter: cattrs.Converter, registry: Registry, traits: frozenset[str], value: object, protocol: Any) -> Any:
    """A component by its name, from the other keys of its table."""
    kind = PROTOCOLS[protocol]
    table: Mapping[str, Any] = {"name": value} if isinstance(value, str) else typing.cast("Mapping[str, Any]", value)
    if not isinstance(table, Mapping):
        fail(f"expected a table with the name of {kind.with_article}, got {show(value)}")
    name = table.get("name")
    if not isinstance(name, str):
        names = ", ".join(item.name for item in registry.components(kind.name)) or "none is installed"
        message = f"the name of the {kind.label} is missing" if name is None else f"expected a string, got {show(name)}"
        raise Invalid((("name",), f"{message}\navailable: {names}"))
    found = registry.find(kind.name, name)
    if found is None:
        raise Invalid((() if isinstance(value, str) else ("name",), "\n".join(registry.unknown(kind.name, name))))
    target = found.target
    rest = {key: item for key, item in table.items() if key != "name"}
    if isinstance(target, Composition):
        return _table(converter, registry, target.with_overrides(rest, traits), target.of)
    return _table(converter, registry, rest, target)


# --- objects to tables -------------------------------------------------------------------------------------------------


def plain(value: Any, hint: Any = None) -> Any:
    """A component or configuration as TOML values: tables, lists, strings, numbers, booleans, "none"."""
    if value is None:
        return "none"
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        members = typing.get_args(hint) or (hint,)
        return float(value) if float in members and int not in members else value
    if isinstance(value, float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        inner = _arguments(hint, (tuple, list, Sequence))
        fixed = len(inner) == len(value) and Ellipsis not in inner
        return [plain(item, inner[index] if fixed else inner[0] if inner else None) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        inner = _arguments(hint, (Mapping,))
        return {str(key): plain(item, inner[1] if inner else None) for key, item in value.items()}
    if attrs.has(type(value)):
        return _plain_fields(value)
    raise _NotPlain(value)


class _NotPlain(ConfigError):
    """A value that TOML has no word for."""

    def __init__(self, value: object) -> None:
        super().__init__(f"{value!r} cannot be written into a configuration; it can only be used from Python")


def _plain_fields(value: Any) -> dict[str, Any]:
    cls = type(value)
    hints, name = type_hints(cls), getattr(cls, "name", None)
    named: dict[str, Any] = {"name": name} if isinstance(name, str) else {}
    items = {}
    for key, one in init_fields(cls).items():
        try:
            items[key] = plain(getattr(value, one.name), hints[one.name])
        except _NotPlain as error:
            raise ConfigError(
                f"the field {key!r} of {name or cls.__name__!r}: {error}\n"
                "  let the field hold a name, a number, a table or a component to have it in configurations"
            ) from None
    if isinstance(value, Budget):
        return {key: item for key, item in items.items() if item != "none"}
    if isinstance(value, Pipeline):
        return {**named, **{key: item for key, item in items.items() if key not in AT_REST}, **AT_REST, **items}
    return _beside(named, items, inside(cls))


def _beside(named: dict[str, Any], items: dict[str, Any], within: str | None) -> dict[str, Any]:
    """A wrapper's table: its fields among those of the pipeline inside; or above them, where one stands there already."""
    if within is None or not AT_REST.keys() <= items[within].keys():
        return named | items
    own = {key: item for key, item in items.items() if key != within}
    if any(key in items[within] and not _at_rest(key, items[within][key]) for key in own):
        return named | items
    return items[within] | own


def _arguments(hint: Any, classes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a collection's type, also where it is one member of a union."""
    for member in (hint, *typing.get_args(hint)):
        if _origin_is(member, classes):
            return typing.get_args(member)
    return ()
