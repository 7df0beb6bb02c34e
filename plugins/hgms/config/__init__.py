"""Settings: budgets, paths, memory, and checks of arguments."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from hgms.config.argument_checks import check_arguments as check_arguments
from hgms.config.argument_checks import check_types as check_types
from hgms.config.budget import Budget as Budget
from hgms.config.paths import data_fingerprint as data_fingerprint
from hgms.config.paths import expand as expand
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
    """Raise ConfigError if an array of this shape and its copies exceed the memory.

    Call this function before generating data. Slightly below the machine's memory, allocations
    still succeed, and the system then kills an arbitrary process. ``what`` names the settings that
    determine the shape.

    Examples
    --------
    >>> check_memory("rows × features", 10**12, 20)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: rows × features = 1,000,000,000,000 × 20 requires 160,000 GB, ...
      decrease it
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not available on every system
        return
    size = bytes_each * math.prod(shape)
    # copies: standardisation, the move to the device, and the computation of a step
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
    """Return the method ``memory_hints`` of a component whose fields limit its memory.

    The method lists the fields to decrease: first the fields that do not change the result
    (``same``), then the ``other`` fields. A field with the value 1 cannot be decreased. A field
    with the value ``None`` processes all data at once.

    Examples
    --------
    >>> from attrs import frozen
    >>> @frozen
    ... class Shuffle:
    ...     batch_size: int | None = None
    ...     chunk: int = 8
    ...     memory_hints = lowering(same=["chunk"], other=["batch_size"])
    >>> Shuffle().memory_hints()
    ['lower chunk (now 8; the same result)', 'lower batch_size (now all)']
    """

    def memory_hints(self: Any) -> list[str]:
        fields = [(name, "; the same result") for name in same] + [(name, "") for name in other]
        values = [(name, getattr(self, name), note) for name, note in fields]
        return [
            f"lower {name} (now {'all' if value is None else value}{note})"
            for name, value, note in values
            if value != 1
        ]

    return memory_hints
