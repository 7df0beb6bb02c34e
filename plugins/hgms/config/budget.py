"""Budgets: the maximum length of a run, in one of three units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field, frozen

from hgms.arguments import require, require_known
from hgms_core import ConfigError
from hgms_core.components import read_by_annotation
from hgms_core.errors import closest
from hgms_core.validators import optional_positive

_UNITS = {
    "s": ("seconds", 1),
    "sec": ("seconds", 1),
    "second": ("seconds", 1),
    "seconds": ("seconds", 1),
    "min": ("seconds", 60),
    "minute": ("seconds", 60),
    "minutes": ("seconds", 60),
    "h": ("seconds", 3600),
    "hour": ("seconds", 3600),
    "hours": ("seconds", 3600),
    "step": ("outer_steps", 1),
    "steps": ("outer_steps", 1),
    "outer step": ("outer_steps", 1),
    "outer steps": ("outer_steps", 1),
    "call": ("oracle_calls", 1),
    "calls": ("oracle_calls", 1),
    "oracle call": ("oracle_calls", 1),
    "oracle calls": ("oracle_calls", 1),
}


@frozen(kw_only=True, init=False, field_transformer=read_by_annotation)
class Budget:
    """The budget of a run: wall-clock seconds, outer steps or oracle calls.

    Set exactly one limit, or pass a text in a format of :meth:`parse`. Evaluation and compilation
    do not count towards any budget. Records contain the seconds of compilation as
    ``compile_seconds``.

    Raises
    ------
    ConfigError
        If there is not exactly one limit, or if a limit is not positive and finite.

    Examples
    --------
    >>> Budget("60s")
    Budget(seconds=60.0, outer_steps=None, oracle_calls=None)
    >>> Budget(outer_steps=25).spent_share(seconds=3.0, steps=5, calls=900)
    0.2
    """

    seconds: float | None = field(default=None, validator=optional_positive)
    outer_steps: int | None = field(default=None, validator=optional_positive)
    oracle_calls: int | None = field(default=None, validator=optional_positive)

    def __init__(self, text: str | Budget | None = None, /, **limits: Any) -> None:
        for name in limits:
            require_known("option", name, attrs.fields_dict(Budget), (name,), "limit of a budget")
        if text is not None:
            limits |= attrs.asdict(
                text if isinstance(text, Budget) else self.parse(text),
                filter=lambda _, limit: limit,
            )
        self.__attrs_init__(**limits)

    def __attrs_post_init__(self) -> None:
        limits = [name for name, value in attrs.asdict(self).items() if value is not None]
        require(
            len(limits) == 1,
            "wrong-budget",
            f"the budget has {len(limits)} limits, but must have one of seconds, outer_steps, "
            "oracle_calls",
            hint='keep one, or use --set budget="25 steps"',
        )

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse ``"60s"``, ``"2 min"``, ``"25 steps"`` or ``"1e5 calls"``.

        Units are seconds, minutes, hours, outer steps and oracle calls. Common short forms are
        accepted.

        Raises
        ------
        ConfigError
            If the text is not a number with a unit.
        """
        match = re.fullmatch(
            r"([0-9]+\.?[0-9]*|\.[0-9]+)(e\+?[0-9]+)? ?([a-z ]+)",
            " ".join(str(text).lower().split()),
        )
        if match is None or match[3] not in _UNITS:
            near = closest(match[3], _UNITS) if match else None
            raise ConfigError(
                "wrong-budget",
                f"the budget {text!r} is not a number with a unit",
                did_you_mean=(f"{match[1]} {near}",) if match and near else (),
                hint="use for example '60s', '25 steps' or '1e5 calls'",
            )
        amount, (name, factor) = float(match[1] + (match[2] or "")), _UNITS[match[3]]
        require(
            name == "seconds" or amount.is_integer(),
            "wrong-budget",
            f"the budget {text!r} is not a whole number of {match[3]}",
        )
        return cls(seconds=amount * factor) if name == "seconds" else cls(**{name: int(amount)})

    @property
    def limit(self) -> tuple[str, float]:
        """The name of the limit, and its amount."""
        limits = attrs.asdict(self).items()
        return next((name, limit) for name, limit in limits if limit is not None)

    def share_of_limit(self, seconds: float, steps: int, calls: int) -> float:
        """Return the share of the budget used; it is above 1 if the last step ended later."""
        name, limit = self.limit
        return {"seconds": seconds, "outer_steps": steps, "oracle_calls": calls}[name] / limit

    def spent_share(self, seconds: float, steps: int, calls: int) -> float:
        """Return the share of the budget used, from 0 to 1."""
        return min(1.0, max(0.0, self.share_of_limit(seconds, steps, calls)))

    def __str__(self) -> str:
        name, limit = self.limit
        if name == "seconds":
            return f"{limit:g} s"
        return f"{limit} {name.replace('_', ' ').removesuffix('s')}{'s' * (limit != 1)}"


def as_budget(value: Any) -> Budget:
    """Convert a text or a table to a budget: the converter of a field.

    Raises
    ------
    ConfigError
        ``wrong-type``, and the errors of :class:`Budget`.
    """
    if isinstance(value, Mapping):
        return Budget(**value)
    if isinstance(value, Budget | str):
        return Budget(value)
    raise ConfigError("wrong-type", f"budget={value!r} must be a Budget or a text such as '60s'")
