"""Which settings a component takes: ``frozen``, which checks them by their types, validators for
``attrs.field(validator=…)``, and what they mean for memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from attrs import validators

from hgms.config.component import checked as checked
from hgms.config.reading import Invalid as Invalid
from hgms.config.reading import choice_of as choice_of
from hgms.config.reading import complaint as complaint
from hgms.config.reading import fail as fail
from hgms.config.reading import gathered as gathered
from hgms.config.words import Words as Words
from hgms.config.words import origin_is as origin_is
from hgms.config.words import sentence as sentence
from hgms_core import ROLES, ConfigError

if TYPE_CHECKING:
    from attrs import define as define
    from attrs import frozen as frozen  # for type checkers it is what they know
else:
    from hgms.config.component import define as define
    from hgms.config.component import frozen as frozen

positive: Any = validators.gt(0)
"""A number > 0."""
not_negative: Any = validators.ge(0)
"""A number ≥ 0."""
share: Any = [validators.ge(0), validators.le(1)]
"""A number in [0, 1]."""
decay_rate: Any = [validators.ge(0), validators.lt(1)]
"""A number in [0, 1): what is kept of a running mean."""
whole: Any = [validators.instance_of(int), validators.gt(0)]
"""A whole number > 0."""
optional_positive: Any = validators.optional(positive)
"""A number > 0, or None."""
optional_whole: Any = validators.optional(whole)
"""A whole number > 0, or None."""


def decay_rates(instance: object, attribute: Any, value: tuple[float, float]) -> None:
    """Two numbers in [0, 1): Adam's β₁ and β₂."""
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"{attribute.name!r} must be two numbers in [0, 1): {value}")


def validation_shares(instance: object, attribute: Any, value: tuple[float, ...]) -> None:
    """Which share of the validation rows each role sees (:func:`hgms_core.roles`)."""
    disjoint = len(value) == 3 and min(value) > 0 and math.isclose(sum(value), 1)
    if not disjoint and value != (1, 1, 1):
        raise ValueError(
            f"{attribute.name!r} must be three positive shares ({', '.join(ROLES)}) that sum to 1, "
            f"or (1, 1, 1) to share all rows: {value}"
        )


def check_memory(what: str, *shape: int, bytes_each: int = 8) -> None:
    """ConfigError where an array of that shape, with the copies that are made of it, cannot fit the
    machine's memory.

    Called before the first number is drawn: just below the machine's memory no allocator refuses,
    and the system stops whichever process it likes. ``what`` names the settings that make up the
    shape.

    >>> check_memory("rows × features", 10**12, 20)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: rows × features = 1,000,000,000,000 × 20: 160,000 GB are more ...
      make it smaller
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on every system
        return
    size = bytes_each * math.prod(shape)
    # an array is standardised into a second one, moved into a third, and a fourth is a step's
    if 4 * size > memory:
        *product, gigabytes = (
            f"{n:,}" if n < 10**15 else f"{Decimal(n):.2e}" for n in (*shape, size // 10**9)
        )
        raise ConfigError(
            f"{what} = {' × '.join(product)}: {gigabytes} GB are more than this machine can "
            "hold\n  make it smaller"
        )


def lowering(*, same: Sequence[str] = (), other: Sequence[str] = ()) -> Callable[[Any], list[str]]:
    """The method ``lighter`` of a component whose fields bound its memory: which to lower, first
    those that change no result (``same``), then the others. A field that is 1 cannot be lowered;
    one that is None takes everything at once.

    >>> from attrs import frozen
    >>> @frozen
    ... class Shuffle:
    ...     batch_size: int | None = None
    ...     chunk: int = 8
    ...     lighter = lowering(same=["chunk"], other=["batch_size"])
    >>> Shuffle().lighter()
    ['lower chunk (now 8; the same result)', 'lower batch_size (now all)']
    """

    def lighter(self: Any) -> list[str]:
        fields = [(name, "; the same result") for name in same] + [(name, "") for name in other]
        values = [(name, getattr(self, name), note) for name, note in fields]
        return [
            f"lower {name} (now {'all' if value is None else value}{note})"
            for name, value, note in values
            if value != 1
        ]

    return lighter
