"""Conversion of tables to objects.

A TOML table is converted to the object that the types of its fields describe. Values are not
converted to other types. Every value is checked against the type and the validator of its field.
All errors are reported together, each with its place (:class:`hgms_core.errors.ErrorGroup`).

If the type of a field is a protocol, the registry is searched for the ``name`` in its table.
:mod:`hgms.config.as_table` is the inverse conversion.
"""

from __future__ import annotations

import contextlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import attrs
import cattrs
from attrs import define, field

from hgms import facts
from hgms.arguments import collect_errors, require_known
from hgms.config.as_table import NO_RESTARTS, is_at_rest
from hgms.config.budget import Budget
from hgms.config.invalid import (
    PROTOCOLS,
    SCALARS,
    available,
    init_fields,
    origin_is,
    spell,
    type_hints,
)
from hgms.config.tables import Short, overridden, show
from hgms.plugins import Registry, inside, layers_of
from hgms_core import Composition, ConfigError, HgmsError, Pipeline
from hgms_core.annotations import reader
from hgms_core.arguments import as_error, complaint
from hgms_core.components import Checked
from hgms_core.errors import closest, raise_all, unknown_name


def traits_of(registry: Registry, task: object) -> frozenset[str]:
    """Return the traits of the task that a table names.

    The result is empty for a task that does not exist. Another check reports that error.
    """
    name = task.get("name") if isinstance(task, Mapping) else task
    component = registry.find("task", name) if isinstance(name, str) else None
    traits = None if component is None else facts.traits_of(component.target)
    return traits or frozenset()


def role_of(registry: Registry, method: object) -> str:
    """Return the role of a registered method in comparisons.

    The role is ``"floor"``, ``"ceiling"`` or an empty string.
    """
    component = registry.find("method", method) if isinstance(method, str) else None
    return "" if component is None else facts.role_of(component.target)


def structure(
    table: object, wanted: Any, registry: Registry, traits: frozenset[str] = frozenset()
) -> Any:
    """Return the object of the type ``wanted`` that a table describes.

    A composition has its defaults for a task with ``traits``.

    Raises
    ------
    HgmsError
    ErrorGroup
        ; the places start at the table.
    """
    return _Reader(registry, traits).converter.structure(table, wanted)


@define(eq=False)
class _Reader:
    """The functions of a converter. Each takes a value and the wanted type."""

    registry: Registry
    traits: frozenset[str]
    converter: cattrs.Converter = field(
        factory=lambda: cattrs.Converter(detailed_validation=False), init=False
    )

    def __attrs_post_init__(self) -> None:
        for scalar in SCALARS:
            self.converter.register_structure_hook(scalar, _plain)
        for predicate, function in (
            (attrs.has, self.table),
            (lambda hint: typing.get_origin(hint) is Literal, _plain),
            (lambda hint: typing.get_origin(hint) in (typing.Union, types.UnionType), self.union),
            (lambda hint: origin_is(hint, tuple, list, Sequence), self.sequence),
            (lambda hint: origin_is(hint, Mapping), self.mapping),
            (
                lambda hint: origin_is(hint, Callable),
                lambda *_: fail("not-supported", "a function can be set in Python only"),
            ),
            (lambda hint: hint in PROTOCOLS, self.component),
        ):
            self.converter.register_structure_hook_func(predicate, function)
        self.converter.register_structure_hook(Budget, self.budget)

    def component(self, value: object, protocol: Any) -> Any:
        """Create a component by its name, from the other keys of its table."""
        kind = PROTOCOLS[protocol]
        table: Any = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, Mapping):
            if isinstance(value, type):
                fail(
                    "wrong-part",
                    f"expected {kind.with_article}, got the class {value.__name__}",
                    hint=f"use {value.__name__}(…)",
                )
            if all(callable(getattr(value, method, None)) for method in kind.methods()):
                return value  # a user's component, from Python
            message = f"expected a table with the name of {kind.with_article}, got {show(value)}"
            fail("wrong-type", message)
        name = table.get("name")
        if not isinstance(name, str):
            fail(
                "missing-option" if name is None else "wrong-type",
                f"the table must contain the name of {kind.with_article} as a string",
                place=("name",),
                hint=available(self.registry, kind),
            )
        component = self.registry.find(kind.name, name)
        if component is None:
            place = () if isinstance(value, str) else ("name",)
            raise self.registry.unknown(kind.name, name).at(*place)
        rest = {key: item for key, item in table.items() if key != "name"}
        if isinstance(component.target, Composition):
            return self.table(overridden(component.target, rest, self.traits), component.target.of)
        is_flat = kind.name != "method" and inside(component.target) is None
        wrappers = self.registry.wrappers_of(kind.name) if is_flat else ()
        return self.table(rest, component.target, wrappers)

    def table(self, value: object, cls: type, wrappers: Sequence[type] = ()) -> Any:
        """Create an object of an attrs class from the table of its fields.

        The table may also contain the fields of ``wrappers``, which then wrap the object. All
        fields are checked, even if another field has an error. A string sets the field that the
        class names as its ``shorthand``.
        """
        shorthand = getattr(cls, "shorthand", None)
        if shorthand is not None and (isinstance(value, str) or _is_laid(value)):
            return self.short(value, cls, shorthand)
        if not isinstance(value, Mapping):
            fail("wrong-type", f"expected a table ({cls.__name__}), got {show(value)}")
        layers, table = self.layers(cls, value, wrappers)
        known = {key: None for fields in layers.values() for key in fields}
        errors: list[HgmsError] = []
        errors += [unknown_option(key, cls, known) for key in table if key not in known]
        first, *around = layers
        arguments = {first: self.values(table, first, layers[first], errors)}
        for layer in around:
            if layers[layer].keys() & table.keys() or (
                layer is cls and not layers[cls].keys() & value.keys()
            ):
                arguments[layer] = self.values(table, layer, layers[layer], errors)
        if errors:
            raise_all(errors)
        try:
            built = first(**arguments.pop(first))
            for layer, fields in arguments.items():
                built = layer(**{str(inside(layer)): built, **fields})
        except (ValueError, TypeError, HgmsError) as error:
            raise as_error(error) from None
        return built

    def short(self, value: Any, cls: type, shorthand: str) -> Any:
        """Create an object from a string in place of its table.

        A table may have been merged over the string.
        """
        if isinstance(value, str):
            return self.table({shorthand: value}, cls)
        own = {key: item for key, item in value.items() if key != "name"}
        try:
            return self.table({shorthand: str(value["name"]), **own}, cls)
        except HgmsError as error:
            # the table may replace the string: config for path
            with contextlib.suppress(HgmsError):
                return self.table(own, cls)
            raise error from None

    def layers(
        self, cls: type, table: Mapping[str, Any], wrappers: Sequence[type]
    ) -> tuple[dict[type, dict[str, attrs.Attribute[Any]]], Mapping[str, Any]]:
        """Return the classes that the keys of a table may belong to, and the table.

        The classes are ordered from the inside outwards, each with its fields. The returned table
        excludes the defaults of wrappers that are not used.
        """
        classes = layers_of(cls, table)
        if classes[0] is not Pipeline:
            layers = {layer: init_fields(layer) for layer in (cls, *wrappers)}
            for wrapper in wrappers:
                del layers[wrapper][str(inside(wrapper))]
            # a table names restarts also where no plugin has them
            others = NO_RESTARTS.keys() | {key for wrapper in wrappers for key in layers[wrapper]}
            others -= layers[cls].keys()
            unused = {key for key in others if table.get(key) in (None, "none")}
            return layers, {key: table[key] for key in table if key not in unused}
        layers = {
            layer: init_fields(layer) for layer in (Pipeline, *self.registry.wrappers, *classes)
        }
        # a key belongs to the first class that has it: the pipeline, then wrappers of HGMS
        taken: set[str] = set()
        for layer, fields in layers.items():
            layers[layer] = {
                key: field
                for key, field in fields.items()
                if key not in taken and key != inside(layer)
            }
            taken |= layers[layer].keys()
        return layers, {
            key: value
            for key, value in table.items()
            if key in layers[Pipeline] or not is_at_rest(key, value)
        }

    def values(
        self,
        table: Mapping[str, Any],
        cls: type,
        fields: Mapping[str, attrs.Attribute[Any]],
        errors: list[HgmsError],
    ) -> dict[str, Any]:
        """Return the values of the fields of a class; add errors to ``errors``."""
        hints = type_hints(cls)
        arguments = {}
        for key, attribute in fields.items():
            if key in table:
                with collect_errors(errors, key):
                    arguments[key] = self.converter.structure(table[key], hints[attribute.name])
                    refused = _complaint(attribute, arguments[key])
                    errors += () if refused is None else refused.errors
            elif attribute.default is attrs.NOTHING:
                hint = hints[attribute.name]
                errors.append(
                    ConfigError(
                        "missing-option",
                        f"{key} is required: {spell(hint)}{_required_fields(hint)}",
                        place=(key,),
                    )
                )
        return arguments

    def union(self, value: object, hint: Any) -> Any:
        """Return the value of the first member that accepts it, exact types first.

        For a table, errors come from the member that is a table.
        """
        members = list(typing.get_args(hint))
        if type(None) in members and value in (None, "none"):
            return None
        wrappers = [member for member in members if inside(member) is not None]
        members = [member for member in members if member not in (type(None), *wrappers)]
        names = {member: facts.declared_name(member) for member in members if attrs.has(member)}
        parts = {name: member for member, name in names.items() if isinstance(name, str)}
        if len(members) > 1 and parts and (len(parts) == len(members) or _is_named(value)):
            return self.part(value, parts, wrappers)
        members = [
            member for member in members if len(members) == 1 or member not in parts.values()
        ]
        # a file cannot contain a function
        members = [member for member in members if not origin_is(member, Callable)] or members
        members.sort(key=lambda member: type(value) is not member)
        failures = []
        for member in members:
            try:
                return self.converter.structure(value, member)
            except HgmsError as error:
                failures.append((error, attrs.has(member) or member in PROTOCOLS))
        telling = [error for error, table in failures if table == isinstance(value, Mapping)]
        if len(members) == 1 and (isinstance(value, (Mapping, list)) or len(telling) == 1):
            raise failures[0][0]
        if isinstance(value, Mapping) and len(telling) == 1:
            raise telling[0]
        _fail_type(hint, value)

    def part(self, value: object, parts: Mapping[str, type], wrappers: Sequence[type]) -> Any:
        """Create an object of one of a few classes, selected by name.

        The other keys of the table are its arguments, and those of ``wrappers``. Plugins cannot
        add classes to this choice.
        """
        table: Any = {"name": value} if isinstance(value, str) else value
        names = ", ".join(parts)
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            fail(
                "wrong-type",
                f"expected one of {names}, or a table with such a name, got {show(value)}",
            )
        name = table["name"]
        place = () if isinstance(value, str) else ("name",)
        require_known("name", name, parts, place)
        rest = {key: item for key, item in table.items() if key != "name"}
        return self.table(rest, parts[name], wrappers)

    def sequence(self, value: object, hint: Any) -> Any:
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if not isinstance(value, (list, tuple)):
            _fail_type(hint, value)
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        if fixed and len(value) != len(arguments):
            fail("wrong-length", f"expected {spell(hint)}, got {len(value)}")
        items = self.gather(
            (index, item, arguments[index if fixed else 0]) for index, item in enumerate(value)
        )
        return list(items.values()) if origin is list else tuple(items.values())

    def mapping(self, value: object, hint: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            _fail_type(hint, value)
        inner = typing.get_args(hint)[1]
        # the table replaces these entries
        named = ((key, item, inner) for key, item in value.items() if not isinstance(item, Short))
        return self.gather(named)

    def gather(self, items: Iterable[tuple[Any, Any, Any]]) -> dict[Any, Any]:
        """Return each (key, value, type) as key and read value.

        Raises
        ------
        HgmsError
            With all errors together.
        """
        values = {}
        errors: list[HgmsError] = []
        for key, item, hint in items:
            with collect_errors(errors, key):
                values[key] = self.converter.structure(item, hint)
        if errors:
            raise_all(errors)
        return values

    def budget(self, value: object, _: object) -> Budget:
        if isinstance(value, str):
            return Budget.parse(value)
        if not isinstance(value, Mapping):
            fail("wrong-type", f"expected {spell(Budget)}, got {show(value)}")
        return typing.cast(Budget, self.table(value, Budget))


def unknown_option(key: str, cls: type, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that no field has, with the nearest valid key.

    Keys of inner tables are compared by their last name and by their whole place: for
    ``ramp.steps`` these are ``steps`` and ``ramp_steps``.
    """
    error = unknown_name("option", key, known, (key,))
    places = {**_inner_places(cls), **{name: name for name in known}}
    near = closest(key, places)
    if near is None:
        return error
    return ConfigError(**{**error.as_dict(), "did_you_mean": (places[near],)})


def _inner_places(cls: type) -> dict[str, str]:
    """Return the places of all keys in the tables of the fields of ``cls``, by their spellings."""
    places: dict[str, str] = {}
    for name, attribute in init_fields(cls).items():
        hint = type_hints(cls)[attribute.name]
        for member in filter(attrs.has, (hint, *typing.get_args(hint))):
            inner = {**_inner_places(member), **{key: key for key in init_fields(member)}}
            for key, place in inner.items():
                places.setdefault(key, f"{name}.{place}")
                places.setdefault(f"{name}_{key}", f"{name}.{place}")
    return places


def _is_named(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "name" in value)


def _is_laid(value: object) -> bool:
    """Return whether the value is a table that was merged over a string."""
    return isinstance(value, Mapping) and isinstance(value.get("name"), Short)


def _plain(value: object, hint: Any) -> Any:
    """Return a number, string, boolean or literal; the core checks it as it does in Python."""
    if isinstance(value, float) and hint is float:
        return value  # the class decides whether infinity is a value
    read = reader(hint)
    return value if read is None else read((), value)


def _fail_type(hint: Any, value: object) -> NoReturn:
    fail("wrong-type", f"expected {spell(hint)}, got {show(value)}")


def _complaint(attribute: attrs.Attribute[Any], value: object) -> HgmsError | None:
    """Return the error of a field's validator, so that all errors can be reported.

    Validators that read the whole object run when it is built.
    """
    check = attribute.validator
    is_own = attribute.converter is not None and not isinstance(attribute.converter, Checked)
    if check is None or is_own:
        return None
    name = attribute.alias or attribute.name
    return complaint(lambda value: check(None, attribute, value), value, name)


def _required_fields(hint: Any) -> str:
    """Return a text that lists the required fields of a class."""
    fields = init_fields(hint) if isinstance(hint, type) and attrs.has(hint) else {}
    names = [key for key, attribute in fields.items() if attribute.default is attrs.NOTHING]
    return f" with {' and '.join(names)}" if names else ""


def fail(code: str, message: str, **parts: Any) -> NoReturn:
    """Raise ConfigError about the value being read; the callers add its place."""
    raise ConfigError(code, message, **parts)
