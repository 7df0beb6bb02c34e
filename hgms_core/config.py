"""Configurations: what a TOML file says, as objects; and what was wrong with it, all of it, each with its place.

A table of a file is the fields of a class, nothing else::

    seed = 0
    budget = "60s"

    [task]
    name = "hyper-cleaning"
    corruption = 0.4

    [method]
    name = "hg-ms"
    generator.count = 8
    hypergradient.solver.rtol = 1e-3

A field whose type is a protocol (a part, a solver, a task) is a table with the ``name`` of a registered component, or the name
alone. ``"none"`` stands for Python's None.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import attrs
import cattrs
import tomlkit
from attrs import Factory, field, frozen, validators

from hgms_core import registry as registries
from hgms_core.budget import Budget
from hgms_core.code import digests
from hgms_core.composition import Composition
from hgms_core.errors import ConfigError, HgmsError, closest, unknown
from hgms_core.protocols import Method, Task
from hgms_core.registry import KINDS, Kind, Registry

SCHEMA = 1

LATER = ("sample", "finetune", "evaluate")
"""The tables that a file for `hgms mix` has for what comes after the run; a run and a grid pass over them."""

PROTOCOLS: dict[Any, Kind] = {kind.protocol: kind for kind in KINDS.values()}

Place = tuple[str | int, ...]


def _device(_settings: object, _attribute: object, value: str) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", value):
        raise ValueError(f'\'device\' must be "cpu", "cuda", "cuda:N" or "mps": {value!r}')


def _label(_settings: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", value):
        raise ValueError(f"{attribute.name!r} must be letters, digits and . _ + - (it names a folder): {value!r}")


@frozen(kw_only=True)
class RunSettings:
    """How a run is carried out: nothing here changes what is computed, except ``device`` and ``dtype``.

    ``out`` is where run folders go; ``threads`` the number of CPU threads (None: torch's choice); a row is evaluated every
    ``evaluate_every`` outer steps, or ``evaluations`` times at equal shares of the budget where that is set, so that methods of
    very different speed get curves of the same length; a checkpoint is written every ``checkpoint_seconds`` seconds (0: after
    every step). ``clock`` is what a budget in seconds counts: ``wall`` time, or the ``cpu`` time of the process, which other
    programs on the machine disturb less (of all its threads together; not for GPUs).
    ``label`` and ``task_label`` are what the run's method and task are called in folders and tables (None: by their names), so
    that two variants of one method can stand side by side.
    """

    out: str = field(default="runs", validator=validators.min_len(1))
    device: str = field(default="cpu", validator=_device)
    dtype: Literal["float32", "float64"] = field(default="float32", validator=validators.in_(["float32", "float64"]))
    threads: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    evaluate_every: int = field(default=1, validator=validators.ge(1))
    evaluations: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    clock: Literal["wall", "cpu"] = field(default="wall", validator=validators.in_(["wall", "cpu"]))
    checkpoint_seconds: float = field(default=30.0, validator=validators.ge(0))
    label: str | None = field(default=None, validator=validators.optional(_label))
    task_label: str | None = field(default=None, validator=validators.optional(_label))


def _known_schema(_config: object, _attribute: object, value: int) -> None:
    if value != SCHEMA:
        raise ValueError(f"schema {value} is not known to this version of hgms, which reads schema {SCHEMA}")


@frozen(kw_only=True)
class RunConfig:
    """One run: a task, a method, a seed and a budget.

    ``method_name`` is what the method is registered as (``hg-ms`` is a :class:`Pipeline` underneath); records and tables
    are labelled with it. ``RunConfig(task=…, method=Pipeline(…), budget=Budget.parse("60s"))`` needs no registry.
    """

    schema: int = field(default=SCHEMA, validator=_known_schema)
    seed: int = field(default=0, validator=validators.ge(0))
    task: Task
    method: Method
    budget: Budget
    run: RunSettings = RunSettings()
    method_name: str = field(default=Factory(lambda self: self.method.name, takes_self=True), metadata={"toml": False})

    @classmethod
    def from_dict(
        cls, table: Mapping[str, Any], *, source: str = "config", registry: Registry | None = None, sets: Iterable[Place] = ()
    ) -> RunConfig:
        """The objects that ``table`` describes, or one :class:`ConfigError` with everything that is wrong with it."""
        registry = registry if registry is not None else registries.default()
        converter = converter_for(registry, traits_of(registry, table.get("task")))
        known = {each.name for each in attrs.fields(cls)}
        try:
            config: RunConfig = converter.structure({k: v for k, v in table.items() if k in known or k not in LATER}, cls)
        except Invalid as invalid:
            raise ConfigError(invalid.render(source, tuple(sets))) from None
        method = table["method"]
        return attrs.evolve(config, method_name=method if isinstance(method, str) else method["name"])

    @classmethod
    def from_toml(cls, text: str, *, source: str = "config", registry: Registry | None = None) -> RunConfig:
        return cls.from_dict(read_toml(text, source), source=source, registry=registry)

    def resolved(self) -> dict[str, Any]:
        """Every value of every field, defaults too, as plain TOML values; ``from_dict`` of it is this configuration."""
        table: dict[str, Any] = plain(self)
        table["method"]["name"] = self.method_name
        for key in ("label", "task_label"):
            if table["run"][key] == "none":
                del table["run"][key]
        return table

    def to_toml(self) -> str:
        return tomlkit.dumps(self.resolved())

    @property
    def config_hash(self) -> str:
        """Eight hex digits that are the same for runs that may be averaged: everything but the seed, the folder and the
        labels, the version of the task, and the code of components that are not ours."""
        table = self.resolved()
        del table["seed"]
        for key in ("out", "label", "task_label"):
            table["run"].pop(key, None)
        code = digests([self.task, self.method])
        text = json.dumps([table, str(getattr(self.task, "version", "")), *([code] if code else [])], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def load(
    path: str | Path,
    sets: Sequence[str] = (),
    *,
    seed: int | None = None,
    out: str | None = None,
    registry: Registry | None = None,
) -> RunConfig:
    """The configuration in a TOML file, with ``--set key.of.it=value``, ``--seed`` and ``--out`` laid over it."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {getattr(error, 'strerror', None) or error}") from None
    table = read_toml(text, path.name)
    places = [lay(table, assignment) for assignment in sets]
    if seed is not None:
        table["seed"] = seed
    if out is not None:
        run = table.setdefault("run", {})
        if isinstance(run, dict):
            run["out"] = out
    return RunConfig.from_dict(table, source=path.name, registry=registry, sets=places)


def read_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of a TOML text; ``source`` is its file's name, for the ConfigError of one that is not valid."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None


def lay(table: dict[str, Any], assignment: str, given: str | None = None) -> Place:
    """Lay one ``a.b.c=value`` over the table. The value is TOML; what is not valid TOML is a string. ``given`` is what a person
    wrote, for messages."""
    key, equals, text = assignment.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {given or assignment}: write --set key=value, for example --set method.generator.count=4")
    try:
        value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        value = text
    try:
        put(table, path, value)
    except ConfigError as error:
        raise ConfigError(f"--set {given or assignment}: {error}") from None
    return path


def put(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets ``table[a][b][c]``. A component given by its name alone becomes a table with that name."""
    for depth, part in enumerate(path[:-1]):
        below = table.setdefault(part, {})
        if isinstance(below, str) and part != "budget":
            below = table[part] = {"name": below}
        if not isinstance(below, dict):
            raise ConfigError(f"{'.'.join(path[: depth + 1])} is {show(below)}, not a table")
        table = below
    table[path[-1]] = value


# --- structuring -------------------------------------------------------------------------------------------------------


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


def show(value: object) -> str:
    """A value as the user wrote it."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, list)) else repr(value)


_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def spell(hint: Any) -> str:
    """A type in words, for messages and ``hgms describe``."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint in PROTOCOLS:
        return PROTOCOLS[hint].one
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


def converter_for(registry: Registry, traits: frozenset[str] = frozenset()) -> cattrs.Converter:
    """A strict converter: nothing is turned into something else, and components are looked up in ``registry``. Compositions
    have the defaults that they have on a task with ``traits``."""
    converter = cattrs.Converter(detailed_validation=False)
    for scalar in _SCALARS:
        converter.register_structure_hook(scalar, _scalar)

    def hook(predicate: Callable[[Any], bool], function: Callable[[Any, Any], Any]) -> None:
        converter.register_structure_hook_func(predicate, function)

    hook(attrs.has, lambda value, cls: _table(converter, value, cls))
    hook(lambda hint: typing.get_origin(hint) is Literal, _choice)
    hook(lambda hint: typing.get_origin(hint) in (typing.Union, types.UnionType), lambda *pair: _union(converter, *pair))
    hook(lambda hint: _origin_is(hint, (tuple, list, Sequence)), lambda *pair: _sequence(converter, *pair))
    hook(lambda hint: _origin_is(hint, (Mapping,)), lambda *pair: _mapping(converter, *pair))
    hook(lambda hint: _origin_is(hint, (Callable,)), lambda *_: fail("a function can only be given from Python"))
    hook(lambda hint: hint in PROTOCOLS, lambda *pair: _component(converter, registry, traits, *pair))
    converter.register_structure_hook(Budget, lambda value, _: _budget(converter, value))
    return converter


def _origin_is(hint: Any, classes: tuple[Any, ...]) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, classes)


def _scalar(value: object, wanted: type) -> Any:
    if type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
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


def _table(converter: cattrs.Converter, value: object, cls: type) -> Any:
    """An attrs class from the table of its fields. Every field is looked at, whatever is wrong with another."""
    if not isinstance(value, Mapping):
        fail(f"expected a table ({cls.__name__}), got {show(value)}")
    fields, hints = init_fields(cls), type_hints(cls)
    errors: list[tuple[Place, str]] = []
    arguments: dict[str, Any] = {}
    for key in value:
        if key not in fields:
            near = closest(key, fields)
            hint = f"; did you mean {near!r}?" if near else ""
            errors.append(((key,), f"unknown key {key!r}{hint} (known: {', '.join(fields) or 'none'})"))
    for key, one in fields.items():
        if key in value:
            try:
                arguments[key] = converter.structure(value[key], hints[one.name])
                _validate(one, arguments[key])
            except Invalid as invalid:
                errors += invalid.below(key)
        elif one.default is attrs.NOTHING:
            errors.append(((key,), f"missing: {spell(hints[one.name])}"))
    if errors:
        raise Invalid(*errors)
    try:
        return cls(**arguments)
    except (ValueError, TypeError, HgmsError) as error:
        fail(_said(error))


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


def _budget(converter: cattrs.Converter, value: object) -> Budget:
    if isinstance(value, str):
        try:
            return Budget.parse(value)
        except ConfigError as error:
            fail(str(error))
    if not isinstance(value, Mapping):
        fail(f"expected {spell(Budget)}, got {show(value)}")
    return typing.cast(Budget, _table(converter, value, Budget))


def _component(converter: cattrs.Converter, registry: Registry, traits: frozenset[str], value: object, protocol: Any) -> Any:
    """A component by its name, from the other keys of its table."""
    kind = PROTOCOLS[protocol]
    table: Mapping[str, Any] = {"name": value} if isinstance(value, str) else typing.cast("Mapping[str, Any]", value)
    if not isinstance(table, Mapping):
        fail(f"expected a table with the name of {kind.one}, got {show(value)}")
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
        return _table(converter, target.with_overrides(rest, traits), target.of)
    return _table(converter, rest, target)


# --- back to plain values ----------------------------------------------------------------------------------------------


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
    return named | items


def _arguments(hint: Any, classes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a collection's type, also where it is one member of a union."""
    for member in (hint, *typing.get_args(hint)):
        if _origin_is(member, classes):
            return typing.get_args(member)
    return ()
