"""``frozen`` for components and ``checked`` for functions: what is wrong with arguments is said at once, with its place."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import attrs

from hgms_core import ConfigError, HgmsError, as_html, unknown
from hgms_fields.reading import Place, Reader, Wrong, config_error, reader
from hgms_fields.words import got, sentence, spelled

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def frozen(cls: type | None = None, /, **options: Any) -> Any:
    """``attrs.frozen`` whose classes read their arguments by the types of their fields.

    Numbers of numpy and tensors of one number are taken as numbers, lists as tuples, a dictionary of arguments as the object
    that a field holds. All else that does not fit its type or its validator, an argument that is misspelt, missing or given by
    position, is one :class:`hgms_core.ConfigError` with all that is wrong, each with its place. An object shows itself in a
    notebook.

    >>> from hgms_fields import positive
    >>> @frozen(kw_only=True)
    ... class Step:
    ...     lr: float = attrs.field(default=0.1, validator=positive)
    ...     betas: tuple[float, float] = (0.9, 0.999)
    >>> import numpy as np
    >>> Step(lr=np.float32(0.5), betas=[0.5, 0.9])
    Step(lr=0.5, betas=(0.5, 0.9))
    >>> Step(rate=0.1)
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: unknown argument 'rate'; no close match. @ Step
      available: betas, lr
    >>> Step(lr="1e-2", betas=0.9)
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: 2 errors in Step:
      expected a number, got '1e-2'; write 0.01 @ Step.lr
      expected 2 values (a number, a number), got 0.9 @ Step.betas

    A field with a converter, or with ``metadata={"own": True}``, is the class's own affair. Cost: a few microseconds an object.

    .. versionadded:: 0.5
    """
    return functools.partial(frozen, **options) if cls is None else _checking(attrs.frozen(cls, **options))


def define(cls: type | None = None, /, **options: Any) -> Any:
    """``attrs.define``, for objects that change, with the checks of :func:`frozen`.

    .. versionadded:: 0.5
    """
    return functools.partial(define, **options) if cls is None else _checking(attrs.define(cls, **options))


def _checking(built: Any) -> Any:
    """A class of attrs, with the arguments of its constructor read first."""
    write = built.__init__

    @functools.wraps(write)
    def __init__(self: Any, *args: Any, **arguments: Any) -> None:
        read = _read(built, args, arguments)
        try:
            write(self, **read)
        except (ValueError, TypeError, HgmsError) as error:
            errors = [*_refused(built, read)]
            if errors or not isinstance(error, TypeError):  # else a mistake in the class, whose traceback says where
                raise config_error(built.__name__, errors or [((), sentence(error))]) from None
            raise

    built.__init__ = __init__
    if not hasattr(built, "_repr_html_"):
        built._repr_html_ = as_html
    return built


def checked(*own: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """A decorator of functions whose arguments are read by their types, as :func:`frozen` does; those that are called ``own``
    are the function's own affair.

    >>> @checked("rows")
    ... def train(rows: list, steps: int = 10) -> int:
    ...     return steps * len(rows)
    >>> train("ab", step=3)
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: unknown argument 'step'; did you mean 'steps'? @ train
      available: rows, steps

    .. versionadded:: 0.5
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        _OWN[function] = frozenset(own)

        @functools.wraps(function)
        def call(*args: Arguments.args, **arguments: Arguments.kwargs) -> Result:
            return function(**_read(function, args, arguments))  # type: ignore[call-arg]

        return call

    return decorate


_OWN: dict[Any, frozenset[str]] = {}


@attrs.frozen
class _Argument:
    """What is known of an argument: of a field, or of a function's parameter."""

    hint: Any
    read: Reader
    required: bool
    by_position: bool
    validator: Any = None


@functools.cache
def _arguments(owner: Any) -> Mapping[str, _Argument]:
    """Those of a class of attrs or of a function, by their names. Types that cannot be evaluated are not looked at: they may
    name what is imported for them alone."""
    try:
        hints = typing.get_type_hints(owner)
    except Exception:
        hints = {}
    if not isinstance(owner, type):
        known = {name: Any if name in _OWN[owner] else hints.get(name, Any) for name in inspect.signature(owner).parameters}
        return {
            name: _Argument(known[name], reader(known[name]), item.default is item.empty, item.kind is not item.KEYWORD_ONLY)
            for name, item in inspect.signature(owner).parameters.items()
        }
    arguments = {}
    for field in attrs.fields(owner):
        plain = field.converter is None and not field.metadata.get("own")
        hint = hints.get(field.name, Any)
        if field.init:
            arguments[field.alias] = _Argument(
                hint, reader(hint if plain else Any), field.default is attrs.NOTHING, not field.kw_only,
                (field, field.validator) if field.converter is None and field.validator is not None else None,
            )  # fmt: skip
    return arguments


def _read(owner: Any, args: tuple[Any, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the class or the function takes them."""
    arguments, read = _arguments(owner), {}
    errors: list[tuple[Place, str]] = []
    for name, value in (_named(owner, args, values) if args else values).items():
        if name not in arguments:
            errors.append(((), unknown("argument", name, arguments)))
            continue
        try:
            read[name] = arguments[name].read(value)
        except Wrong as error:
            default = "" if value is not None or arguments[name].required else "; leave it out for the default"
            errors += [(place, message + default) for place, message in error.below(name)]
    if len(read) < len(arguments) and not errors:
        missing = [name for name, argument in arguments.items() if argument.required and name not in read]
        errors = [((name,), f"missing: {spelled(arguments[name].hint)}") for name in missing]
    if errors:
        raise config_error(owner.__name__, [*errors, *_refused(owner, read)])
    return read


def _named(owner: Any, args: tuple[Any, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with those that were given by position under their names, where they may be."""
    arguments = _arguments(owner)
    places = [name for name, argument in arguments.items() if argument.by_position]
    if len(args) > len(places):
        names = ", ".join(f"{name}={got(value)}" for name, value in zip(arguments, args, strict=False))
        known = f"write {owner.__name__}({names})" if names else "it takes no arguments"
        by_name = "its arguments by name" if not places else f"{len(places)} arguments by position and the others by name"
        raise ConfigError(f"{owner.__name__} takes {by_name}, and got {len(args)} by position\n  {known}")
    return {**dict(zip(places, args, strict=False)), **values}


def _refused(owner: Any, read: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """What the validators of single fields say, each asked by itself; those that look at the whole object are not."""
    for name, argument in _arguments(owner).items():
        if argument.validator is None or name not in read:
            continue
        field, validator = argument.validator
        try:
            validator(None, field, read[name])
        except (ValueError, HgmsError) as error:
            yield (name,), sentence(error)
        except Exception as error:
            if isinstance(error, TypeError) and len(error.args) == 4:  # how attrs' instance_of speaks
                yield (name,), sentence(error)
