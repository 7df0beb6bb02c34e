"""``frozen`` for components: the class of attrs, whose objects say at once what is wrong with their arguments."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from hgms_core import ConfigError, HgmsError, as_html, unknown
from hgms_fields.reading import Place, Reader, Wrong, config_error, reader
from hgms_fields.words import got, sentence, spelled


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

    Cost: a few microseconds an object.

    .. versionadded:: 0.5
    """
    if cls is None:
        return functools.partial(frozen, **options)
    made: Any = attrs.frozen(cls, **options)
    write = made.__init__

    @functools.wraps(write)
    def __init__(self: Any, *args: Any, **arguments: Any) -> None:
        read = _read(made, args, arguments)
        try:
            write(self, **read)
        except (ValueError, TypeError, HgmsError) as error:
            errors = [*_refused(made, read)]
            if errors or not isinstance(error, TypeError):  # else a mistake in the class, whose traceback says where
                raise config_error(made.__name__, errors or [((), sentence(error))]) from None
            raise

    made.__init__ = __init__
    if not hasattr(made, "_repr_html_"):
        made._repr_html_ = as_html
    return made


@functools.cache
def _readers(cls: Any) -> dict[str, tuple[attrs.Attribute[Any], Any, Reader]]:
    """The fields of a class by the names of their arguments, with their types. Types that cannot be evaluated are not looked
    at: they may name what is imported for them alone."""
    try:
        hints = typing.get_type_hints(cls)
    except Exception:
        hints = {}
    fields = [field for field in attrs.fields(cls) if field.init]
    return {field.alias: (field, hint := hints.get(field.name, Any), reader(hint)) for field in fields}


def _read(cls: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the class takes them."""
    readers, read = _readers(cls), {}
    errors: list[tuple[Place, str]] = []
    if args:
        arguments = _named(cls, args, arguments)
    for name, value in arguments.items():
        if name not in readers:
            errors.append(((), unknown("argument", name, readers)))
            continue
        field, _, function = readers[name]
        try:
            # what a converter of the field's own takes is its affair
            read[name] = function(value) if field.converter is None else value
        except Wrong as error:
            default = "" if value is not None or field.default is attrs.NOTHING else "; leave it out for the default"
            errors += [(place, message + default) for place, message in error.below(name)]
    if len(read) < len(readers) and not errors:
        for name, (field, hint, _) in readers.items():
            if name not in arguments and field.default is attrs.NOTHING:
                errors.append(((name,), f"missing: {spelled(hint)}"))
    if errors:
        raise config_error(cls.__name__, [*errors, *_refused(cls, read)])
    return read


def _named(cls: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with those that were given by position under their names, where the class takes them so."""
    fields = [field for field in attrs.fields(cls) if field.init]
    places = [field.alias for field in fields if not field.kw_only]
    if len(args) > len(places):
        names = ", ".join(f"{field.alias}={got(value)}" for field, value in zip(fields, args, strict=False))
        known = f"write {cls.__name__}({names})" if names else "it takes no arguments"
        raise ConfigError(f"{cls.__name__} takes its arguments by name, and got {len(args)} by position\n  {known}")
    return {**dict(zip(places, args, strict=False)), **arguments}


def _refused(cls: Any, arguments: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    """What the validators of single fields say, each asked by itself; those that look at the whole object are not."""
    for name, (field, _, _) in _readers(cls).items():
        if field.validator is None or name not in arguments or field.converter is not None:
            continue
        try:
            typing.cast(Callable[..., None], field.validator)(None, field, arguments[name])
        except (ValueError, HgmsError) as error:
            yield (name,), sentence(error)
        except Exception as error:
            if isinstance(error, TypeError) and len(error.args) == 4:  # how attrs' instance_of speaks
                yield (name,), sentence(error)
