"""Settings: budgets, paths, memory, and functions whose arguments are checked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from hgms.config.budget import Budget as Budget
from hgms.config.checked import checked as checked
from hgms.config.paths import cache_folder as cache_folder
from hgms.config.paths import data_fingerprint as data_fingerprint
from hgms.config.paths import expand as expand
from hgms.config.paths import file_digest as file_digest
from hgms_core import ROLES, ConfigError
from hgms_core.validators import reject


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
