"""Optional packages: import a module, or report the command that installs it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hgms_core.errors import MissingExtra, Place

if TYPE_CHECKING:
    import pandas


def optional_module(
    module: str, user: str, extra: str, *, place: Place = (), hint: str | None = None
) -> Any:
    """Import a module of an optional package; ``user`` names the feature that requires it.

    Raises
    ------
    MissingExtra
        With the command that installs the ``extra`` of HGMS.

    Examples
    --------
    >>> optional_module("no_such_package.part", "the solver mine", "mine")
    Traceback (most recent call last):
        ...
    hgms_core.errors.MissingExtra: the solver mine requires no_such_package, which is not installed
      install it: pip install 'hgms[mine]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = error.name or module.partition(".")[0]
        raise MissingExtra(
            "missing-package",
            f"{user} requires {name}, which is not installed",
            place=place,
            hint=hint,
            install=f"pip install 'hgms[{extra}]'",
        ) from error


def frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return rows as a pandas data frame. Errors: MissingExtra without pandas."""
    module = optional_module("pandas", "a data frame", "notebook")
    return module.DataFrame(list(rows))
