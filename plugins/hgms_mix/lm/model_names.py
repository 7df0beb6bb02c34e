"""Language models from installed packages, selected by name.

The entry-point group is ``hgms.models``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from hgms.config import expand
from hgms_core import ConfigError, HgmsError
from hgms_core.errors import Place, dotted
from hgms_core.torch_errors import first_line
from hgms_mix.lm.store import warn

GROUP = "hgms.models"
"""The entry-point group of models.

An entry, ``mine = "package:folder"``, is a function without arguments. It returns a folder with a
model in transformers' format. It is called when the model is first needed, and may create the
folder then.

The function may have an attribute ``identity``: a function without arguments that returns an
identifier of the folder's contents. It must not create the folder.
"""


def named_models() -> list[str]:
    """Return the names of the models of installed packages."""
    return sorted(entry_points(group=GROUP).names)


def model_folder(spec: str, place: Place) -> Path:
    """Return the folder for ``spec``: an existing folder, or the folder of the installed model.

    For any other ``spec`` (a name on the Hub), return the path unchanged; it is then not a folder.

    A folder in the working directory takes precedence over an installed model of the same name,
    with a warning.

    Errors: ConfigError if the package of the model fails, or if two packages define different
    models with the name.
    """
    entry = _entry(spec, place)
    if entry is None:
        return expand(spec, place)
    with _brought(spec, entry, place):
        folder = Path(entry.load()())
        if not folder.is_dir():
            raise FileNotFoundError(f"no such folder: {folder}")
        return folder


def named_identity(spec: str, place: Place) -> str | None:
    """Return an identifier of the installed model's contents, without creating its folder.

    This is the identity from its package, else the version of the package. Return None for any
    other ``spec``. Errors: as for :func:`model_folder`.
    """
    entry = _entry(spec, place)
    if entry is None:
        return None
    with _brought(spec, entry, place):
        identity = getattr(entry.load(), "identity", None)
        if identity is not None:
            return str(identity())
        return f"{entry.value} {entry.dist.version if entry.dist is not None else ''}"


def _entry(spec: str, place: Place) -> EntryPoint | None:
    """Return the installed model that ``spec`` names.

    Return None if ``spec`` is an existing folder or anything else.
    """
    entries = list({entry.value: entry for entry in entry_points(group=GROUP, name=spec)}.values())
    if not entries:
        return None
    if expand(spec, place).is_dir():
        warn(
            f"{spec!r} is the folder of that name here, not the model that "
            f"{_brought_by(entries[0])} provides ({dotted(place)})\n"
            f"  write './{spec}' for the folder, or rename it to get the model"
        )
        return None
    if len(entries) > 1:
        raise ConfigError(
            "duplicate-name",
            f"two installed packages provide a model {spec!r}: "
            f"{' and '.join(map(_brought_by, entries[:2]))}",
            place=place,
            hint="uninstall one of them, or set task.model.path to a folder",
        )
    return entries[0]


@contextlib.contextmanager
def _brought(spec: str, entry: EntryPoint, place: Place) -> Iterator[None]:
    """Convert a failure in the model's package into a ConfigError that names the package."""
    try:
        yield
    except HgmsError:
        raise
    except Exception as error:  # an installed package may raise anything
        raise ConfigError(
            "cannot-load",
            f"the model {spec!r} of {_brought_by(entry)} cannot be loaded: "
            f"{type(error).__name__}: {first_line(error)}",
            place=place,
            hint="install that package again, or set task.model.path to a folder",
        ) from error


def _brought_by(entry: EntryPoint) -> str:
    return f"{entry.dist.name} ({entry.value})" if entry.dist is not None else entry.value
