"""Language models that installed packages bring, called by name: the entry-point group
``hgms.models``.
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
"""An entry, ``mine = "package:folder"``, is a function without arguments that returns the folder of
a model in transformers' format. It is called when the model is first needed, and may make the
folder then. Its attribute ``identity``, if it has one, is a function without arguments that tells
what the folder's contents depend on, and makes nothing.
"""


def named_models() -> list[str]:
    """The names of the models that installed packages bring."""
    return sorted(entry_points(group=GROUP).names)


def model_folder(spec: str, place: Place) -> Path:
    """The folder that ``spec`` stands for: a folder that is here, or that of the installed model of
    this name. For anything else (a name on the Hub) the path as it is written, which is no folder
    then.

    A folder in the working directory goes before an installed model of its name, with a warning.

    Errors: ConfigError where the package that brings the model fails, and where two packages bring
    different models of the name.
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
    """What identifies the contents of the installed model of this name, without making its folder:
    what its package says, else that package's version. None for anything else. Errors: as
    :func:`model_folder`.
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
    """The installed model that ``spec`` stands for, None where it stands for a folder that is
    here, or for something else.
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
    """What fails in the package that brings the model is a ConfigError with its name."""
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
