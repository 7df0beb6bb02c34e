"""Tables to objects: a TOML table as the object that its fields' types describe.

Nothing is turned into something else on the way: every value is checked against the type and the
validator of its field, and what was wrong is reported all at once, each with its place
(:class:`Invalid`). A field whose type is a protocol is looked up in the registry by the ``name`` in
its table. :mod:`hgms.config.as_table` goes back.
"""

from __future__ import annotations

import contextlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import attrs
import cattrs
from attrs import define, field

from hgms.config import Invalid, choice_of, complaint, fail, gathered, origin_is, sentence
from hgms.config.as_table import is_at_rest
from hgms.config.invalid import (
    PROTOCOLS,
    SCALARS,
    init_fields,
    is_plain,
    named,
    plain_attribute,
    spell,
    type_hints,
)
from hgms.config.tables import Place, Short, show
from hgms_core import Budget, Composition, ConfigError, HgmsError, Pipeline, closest
from hgms_core.registry import Registry, inside, layers_of


def traits_of(registry: Registry, task: object) -> frozenset[str]:
    """What the task that a table names promises; nothing of one that does not exist (which is
    reported elsewhere).
    """
    name = task.get("name") if isinstance(task, Mapping) else task
    component = registry.find("task", name) if isinstance(name, str) else None
    return frozenset(getattr(component.target, "traits", ()) if component is not None else ())


def role_of(registry: Registry, method: object) -> str:
    """What the registered method of that name is in comparisons: "floor", "ceiling", or nothing."""
    component = registry.find("method", method) if isinstance(method, str) else None
    return str(getattr(component.target, "role", "")) if component is not None else ""


def structured(
    table: object, wanted: Any, registry: Registry, traits: frozenset[str] = frozenset()
) -> Any:
    """The object of the type ``wanted`` that a table describes; a composition with its defaults on
    a task with ``traits``.

    Raises:
        Invalid: all that is wrong, with places.
    """
    return converter_for(registry, traits).structure(table, wanted)


def converter_for(registry: Registry, traits: frozenset[str] = frozenset()) -> cattrs.Converter:
    """A strict converter: nothing is turned into something else, and components are looked up in
    ``registry``. Compositions have the defaults that they have on a task with ``traits``."""
    return _Reader(registry, traits).converter


@define(eq=False)
class _Reader:
    """The functions of a converter, each from a value and the type that is wanted."""

    registry: Registry
    traits: frozenset[str]
    converter: cattrs.Converter = field(
        factory=lambda: cattrs.Converter(detailed_validation=False), init=False
    )

    def __attrs_post_init__(self) -> None:
        for scalar in SCALARS:
            self.converter.register_structure_hook(scalar, _scalar)
        for predicate, function in (
            (attrs.has, self.table),
            (
                lambda hint: typing.get_origin(hint) is Literal,
                lambda value, hint: choice_of(value, hint, _unexpected),
            ),
            (lambda hint: typing.get_origin(hint) in (typing.Union, types.UnionType), self.union),
            (lambda hint: origin_is(hint, tuple, list, Sequence), self.sequence),
            (lambda hint: origin_is(hint, Mapping), self.mapping),
            (
                lambda hint: origin_is(hint, Callable),
                lambda *_: fail("a function can only be given from Python"),
            ),
            (lambda hint: hint in PROTOCOLS, self.component),
        ):
            self.converter.register_structure_hook_func(predicate, function)
        self.converter.register_structure_hook(Budget, self.budget)

    def component(self, value: object, protocol: Any) -> Any:
        """A component by its name, from the other keys of its table."""
        kind = PROTOCOLS[protocol]
        table: Any = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, Mapping):
            if isinstance(value, type):
                fail(
                    f"expected {kind.with_article}, got the class {value.__name__}; write "
                    f"{value.__name__}(…)"
                )
            if all(callable(getattr(value, method, None)) for method in kind.methods()):
                return value  # of a person's own, from Python
            fail(f"expected a table with the name of {kind.with_article}, got {show(value)}")
        name = table.get("name")
        if not isinstance(name, str):
            message = (
                f"the name of the {kind.label} is missing"
                if name is None
                else f"expected a string, got {show(name)}"
            )
            raise Invalid((("name",), f"{message}\n{named(self.registry, kind)}"))
        component = self.registry.find(kind.name, name)
        if component is None:
            place = () if isinstance(value, str) else ("name",)
            raise Invalid((place, "\n".join(self.registry.unknown(kind.name, name))))
        rest = {key: item for key, item in table.items() if key != "name"}
        if isinstance(component.target, Composition):
            return self.table(
                component.target.with_overrides(rest, self.traits), component.target.of
            )
        return self.table(rest, component.target)

    def table(self, value: object, cls: type) -> Any:
        """An attrs class from the table of its fields, in the wrappers whose fields stand among
        them. Every field is looked at, whatever is wrong with another. A string is the field that
        the class names as its ``shorthand``.
        """
        shorthand = getattr(cls, "shorthand", None)
        if shorthand is not None and (isinstance(value, str) or _is_laid(value)):
            return self.short(value, cls, shorthand)
        if not isinstance(value, Mapping):
            fail(f"expected a table ({cls.__name__}), got {show(value)}")
        layers, table = self.layers(cls, value)
        known = {key: None for fields in layers.values() for key in fields}
        errors: list[tuple[Place, str]] = []
        for key in table:
            if key not in known:
                near = closest(key, known)
                hint = f"; did you mean {near!r}?" if near else ""
                plain = next((layer for layer in layers if is_plain(layer, key)), None)
                hint = hint if plain is None else f"; {plain_attribute(plain, key)}"
                errors.append(
                    ((key,), f"unknown key {key!r}{hint} (known: {', '.join(known) or 'none'})")
                )
        first, *around = layers
        arguments = {first: self.values(table, first, layers[first], errors)}
        for layer in around:
            if layers[layer].keys() & table.keys() or (
                layer is cls and not layers[cls].keys() & value.keys()
            ):
                arguments[layer] = self.values(table, layer, layers[layer], errors)
        if errors:
            raise Invalid(*errors)
        try:
            built = first(**arguments.pop(first))
            for layer, fields in arguments.items():
                built = layer(**{str(inside(layer)): built, **fields})
        except (ValueError, TypeError, HgmsError) as error:
            # those of a component have places
            raise Invalid(*getattr(error, "errors", [((), sentence(error))])) from None
        return built

    def short(self, value: Any, cls: type, shorthand: str) -> Any:
        """A class from the string in place of its table, over which a table may have been laid."""
        if isinstance(value, str):
            return self.table({shorthand: value}, cls)
        own = {key: item for key, item in value.items() if key != "name"}
        try:
            return self.table({shorthand: str(value["name"]), **own}, cls)
        except Invalid as invalid:
            # the table may stand in the string's place: hub for path
            with contextlib.suppress(Invalid):
                return self.table(own, cls)
            raise invalid from None

    def layers(
        self, cls: type, table: Mapping[str, Any]
    ) -> tuple[dict[type, dict[str, attrs.Attribute[Any]]], Mapping[str, Any]]:
        """The classes that the keys of a table may belong to, from the inside, each with its
        fields; and the table without what wrappers that are not there have in every table."""
        classes = layers_of(cls, table)
        if classes[0] is not Pipeline:
            return {cls: init_fields(cls)}, table
        layers = {
            layer: init_fields(layer) for layer in (Pipeline, *self.registry.wrappers, *classes)
        }
        # a key is that of the first class that has it: of the pipeline, then of wrappers of ours
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
        errors: list[tuple[Place, str]],
    ) -> dict[str, Any]:
        """The values of a class's fields; what is wrong goes to ``errors``."""
        hints = type_hints(cls)
        arguments = {}
        for key, attribute in fields.items():
            if key in table:
                try:
                    arguments[key] = self.converter.structure(table[key], hints[attribute.name])
                    _validate(attribute, arguments[key])
                except Invalid as invalid:
                    errors += invalid.below(key)
            elif attribute.default is attrs.NOTHING:
                errors.append(
                    (
                        (key,),
                        (
                            "missing: "
                            f"{spell(hints[attribute.name])}{_required(hints[attribute.name])}"
                        ),
                    )
                )
        return arguments

    def union(self, value: object, hint: Any) -> Any:
        """The first member that fits, exact types first. The member that is a table speaks for a
        table.
        """
        members = list(typing.get_args(hint))
        if type(None) in members and value in (None, "none"):
            return None
        members = [member for member in members if member is not type(None)]
        names = {member: getattr(member, "name", None) for member in members if attrs.has(member)}
        parts = {name: member for member, name in names.items() if isinstance(name, str)}
        if len(members) > 1 and parts and (len(parts) == len(members) or _is_named(value)):
            return self.part(value, parts)
        members = [
            member for member in members if len(members) == 1 or member not in parts.values()
        ]
        # a file holds no function
        members = [member for member in members if not origin_is(member, Callable)] or members
        members.sort(key=lambda member: type(value) is not member)
        failures = []
        for member in members:
            try:
                return self.converter.structure(value, member)
            except Invalid as invalid:
                failures.append((invalid, attrs.has(member) or member in PROTOCOLS))
        telling = [invalid for invalid, table in failures if table == isinstance(value, Mapping)]
        if len(members) == 1 and (isinstance(value, (Mapping, list)) or len(telling) == 1):
            raise failures[0][0]
        if isinstance(value, Mapping) and len(telling) == 1:
            raise telling[0]
        _unexpected(hint, value)

    def part(self, value: object, parts: Mapping[str, type]) -> Any:
        """One of a few classes by its name, from the other keys of its table: a choice that no
        plugin adds to.
        """
        table: Any = {"name": value} if isinstance(value, str) else value
        names = ", ".join(parts)
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            fail(f"expected one of {names}, or a table with such a name, got {show(value)}")
        name = table["name"]
        if name not in parts:
            near = closest(name, parts)
            message = (
                f"unknown name {name!r}{f'; did you mean {near!r}?' if near else ''} "
                f"(known: {names})"
            )
            raise Invalid((() if isinstance(value, str) else ("name",), message))
        return self.table({key: item for key, item in table.items() if key != "name"}, parts[name])

    def sequence(self, value: object, hint: Any) -> Any:
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if not isinstance(value, (list, tuple)):
            _unexpected(hint, value)
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        if fixed and len(value) != len(arguments):
            fail(f"expected {spell(hint)}, got {len(value)} of them")
        readers = [self.reader(argument) for argument in arguments if argument is not Ellipsis]
        items = gathered(
            (index, item, readers[index if fixed else 0]) for index, item in enumerate(value)
        )
        return list(items.values()) if origin is list else tuple(items.values())

    def mapping(self, value: object, hint: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            _unexpected(hint, value)
        inner = self.reader(typing.get_args(hint)[1])
        # which the table replaces
        named = ((key, item, inner) for key, item in value.items() if not isinstance(item, Short))
        return gathered(named)

    def reader(self, hint: Any) -> Callable[[Any], Any]:
        return lambda value: self.converter.structure(value, hint)

    def budget(self, value: object, _: object) -> Budget:
        if isinstance(value, str):
            try:
                return Budget.parse(value)
            except ConfigError as error:
                fail(str(error))
        if not isinstance(value, Mapping):
            fail(f"expected {spell(Budget)}, got {show(value)}")
        return typing.cast(Budget, self.table(value, Budget))


def _is_named(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "name" in value)


def _is_laid(value: object) -> bool:
    """Whether it is a table that was laid over a string."""
    return isinstance(value, Mapping) and isinstance(value.get("name"), Short)


def _scalar(value: object, wanted: type) -> Any:
    if type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            return float(value)
    fail(f"expected {SCALARS[wanted]}, got {show(value)}")


def _unexpected(hint: Any, value: object) -> NoReturn:
    fail(f"expected {spell(hint)}, got {show(value)}")


def _validate(attribute: attrs.Attribute[Any], value: object) -> None:
    """Run a field's validator alone, so that one bad field does not hide the next; those that look
    at the whole object run when it is built."""
    check = attribute.validator
    if check is None or attribute.converter is not None:
        return
    message = complaint(lambda value: check(None, attribute, value), value)
    if message is not None:
        fail(message)


def _required(hint: Any) -> str:
    """What a table of this class cannot do without."""
    fields = init_fields(hint) if isinstance(hint, type) and attrs.has(hint) else {}
    names = [key for key, attribute in fields.items() if attribute.default is attrs.NOTHING]
    return f" with {' and '.join(names)}" if names else ""
