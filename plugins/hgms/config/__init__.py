"""Which settings a component takes: ``frozen``, which checks them by their types, validators for
``attrs.field(validator=…)``, and what they mean for memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from hgms.config.budget import Budget as Budget
from hgms.config.component import checked as checked
from hgms.config.paths import cache_folder as cache_folder
from hgms.config.paths import data_fingerprint as data_fingerprint
from hgms.config.paths import expand as expand
from hgms.config.paths import file_digest as file_digest
from hgms.config.validators import all_of as all_of
from hgms.config.validators import at_least as at_least
from hgms.config.validators import at_most as at_most
from hgms.config.validators import each as each
from hgms.config.validators import greater_than as greater_than
from hgms.config.validators import less_than as less_than
from hgms.config.validators import not_empty as not_empty
from hgms.config.validators import optional as optional
from hgms.config.validators import reject as reject
from hgms.config.validators import whole_number as whole_number
from hgms.config.words import Words as Words
from hgms.config.words import origin_is as origin_is
from hgms_core import ROLES, ConfigError

if TYPE_CHECKING:
    from attrs import define as define
    from attrs import frozen as frozen  # for type checkers it is what they know
else:
    from hgms.config.component import define as define
    from hgms.config.component import frozen as frozen

positive = greater_than(0)
"""A number > 0."""
not_negative = at_least(0)
"""A number ≥ 0."""
share = all_of(at_least(0), at_most(1))
"""A number in [0, 1]."""
decay_rate = all_of(at_least(0), less_than(1))
"""A number in [0, 1): the decay rate of a running mean."""
whole = all_of(whole_number, greater_than(0))
"""A whole number > 0."""
optional_positive = optional(positive)
"""A number > 0, or None."""
optional_whole = optional(whole)
"""A whole number > 0, or None."""


def decay_rates(instance: object, attribute: Any, value: tuple[float, float]) -> None:
    """Two numbers in [0, 1): Adam's β₁ and β₂."""
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        reject("out-of-range", attribute, value, "two numbers in [0, 1)")


def validation_shares(instance: object, attribute: Any, value: tuple[float, ...]) -> None:
    """The share of the validation rows of each role (:func:`hgms_core.roles`)."""
    disjoint = len(value) == 3 and min(value) > 0 and math.isclose(sum(value), 1)
    if not disjoint and value != (1, 1, 1):
        requirement = (
            f"three positive shares ({', '.join(ROLES)}) that sum to 1, or (1, 1, 1) to share all "
            "rows"
        )
        reject("wrong-value", attribute, value, requirement)


def check_memory(what: str, *shape: int, bytes_each: int = 8) -> None:
    """ConfigError where an array of that shape, with the copies that are made of it, cannot fit the
    machine's memory.

    Called before the first number is drawn: just below the machine's memory no allocator refuses,
    and the system stops whichever process it likes. ``what`` names the settings that make up the
    shape.

    >>> check_memory("rows × features", 10**12, 20)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: rows × features = 1,000,000,000,000 × 20 requires 160,000 GB, ...
      decrease it
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
            "too-large",
            f"{what} = {' × '.join(product)} requires {gigabytes} GB, more than the memory of this "
            "machine",
            hint="decrease it",
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
