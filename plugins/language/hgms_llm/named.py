"""Language models that installed packages bring, called by name: the entry-point group ``hgms.models``."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from hgms_core import ConfigError, HgmsError
from hgms_llm.files import expand
from hgms_llm.store import warn

GROUP = "hgms.models"
"""An entry, ``mine = "package:folder"``, is a function without arguments that returns the folder of a model in transformers'
format. It is called when the model is first needed, and may make the folder then."""


def named_models() -> dict[str, EntryPoint]:
    """The models that installed packages bring, by name.

    Errors: ConfigError where two packages bring different models of one name.
    """
    models: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = models.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two installed packages bring a model called {entry.name!r}: {_brought_by(other)} and {_brought_by(entry)}\n"
                "  uninstall one of them, or write task.model.path as a folder"
            )
    return models


def model_folder(spec: str, place: str) -> Path:
    """The folder that ``spec`` stands for: a folder that is here, or that of the installed model of this name. For anything
    else (a name on the Hub) the path as it is written, which is no folder then.

    A folder in the working directory goes before an installed model of its name, with a warning.

    Errors: ConfigError where the package that brings the model fails.
    """
    folder = expand(spec, place)
    entry = named_models().get(spec)
    if entry is None:
        return folder
    if folder.is_dir():
        warn(
            f"{spec!r} is the folder of that name here, not the model that {_brought_by(entry)} brings @ {place}\n"
            f"  write './{spec}' for the folder, or rename it to get the model"
        )
        return folder
    try:
        return Path(entry.load()())
    except HgmsError:
        raise
    except Exception as error:  # an installed package may raise anything
        why = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"the model {spec!r}, which {_brought_by(entry)} brings, cannot be had ({type(error).__name__}: {why}) @ {place}\n"
            "  install that package again, or write task.model.path as a folder"
        ) from error


def _brought_by(entry: EntryPoint) -> str:
    return f"{entry.dist.name} ({entry.value})" if entry.dist is not None else entry.value
