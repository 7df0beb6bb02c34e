"""Find and import plugins: installed distributions, modules, and single files."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from attrs import field, frozen

from hgms.arguments import require
from hgms.facts import module_file
from hgms_core.errors import MissingExtra, PluginError, closest

GROUP = "hgms"
PROGRAMS = "hgms.programs"
"""The entry-point groups: ``GROUP`` for components and observers, ``PROGRAMS`` for programs.

Each entry of ``PROGRAMS`` is a command.
"""
FIRST_PARTY = "hgms"


@frozen
class Entry:
    """An entry point of an installed distribution."""

    name: str
    module: str
    distribution: str
    version: str
    load: Callable[[], object] = field(eq=False, repr=False)


def find_entries() -> dict[str, list[Entry]]:
    """Return the entry points of both groups in the order of their names.

    For equal names, built-in plugins come first, so that a third party cannot take their names.
    """
    every = importlib.metadata.entry_points()

    @functools.cache  # the metadata of a distribution is parsed once for all its entry points
    def owner_of(dist: Any) -> Any:
        return dist.metadata if dist else {"Name": "(unknown)", "Version": "?"}

    entries: dict[str, list[Entry]] = {GROUP: [], PROGRAMS: []}
    for group in entries:
        for point in every.select(group=group):
            owner = owner_of(point.dist)
            entry = Entry(point.name, point.value, owner["Name"], owner["Version"], point.load)
            entries[group].append(entry)
        entries[group].sort(
            key=lambda entry: (
                canonical(entry.name),
                entry.distribution != FIRST_PARTY,
                entry.distribution,
            )
        )
    return entries


def import_plugin(where: str) -> ModuleType:
    """Import a module by its name, or from a file.

    The module of a file gets a name that cannot clash with the name of an installed module.
    """
    path = Path(os.path.expanduser(where))
    if path.suffix != ".py":
        require(
            re.fullmatch(r"\w+(\.\w+)*", where),
            "wrong-value",
            f"{where!r} is neither a file that ends in .py nor the name of a module",
            hint="use the file with the hooks, such as ./my_plugin.py",
            place=(where,),
            error=PluginError,
        )
        return importlib.import_module(where)
    if not path.is_file():
        near = (
            closest(path.name, [file.name for file in path.parent.glob("*.py")])
            if path.parent.is_dir()
            else None
        )
        raise PluginError(
            "missing-file",
            "the file does not exist",
            place=(where,),
            did_you_mean=(str(path.with_name(near)),) if near else (),
        )
    name = "hgms_file_" + re.sub(r"\W", "_", path.stem)
    if name in sys.modules and module_file(name) != str(path.resolve()):
        # keep both modules if files in two folders have the same name
        name += f"_{zlib.crc32(str(path.resolve()).encode()):x}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise PluginError("unreadable-file", "the file cannot be imported", place=(where,))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # attrs and typing look up a class's module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def install_line(plugin: Any, error: BaseException) -> str | None:
    """Return the command that installs the missing package of ``error``, else None.

    For a module that is missing, it is the extra that the entry point names.
    """
    if isinstance(error, MissingExtra):
        return error.install
    if not isinstance(error, ModuleNotFoundError) or plugin.distribution is None:
        return None
    extras = importlib.metadata.EntryPoint(plugin.name, plugin.module, GROUP).extras
    return f"pip install '{plugin.distribution}[{','.join(extras)}]'" if extras else None


def canonical(name: str) -> str:
    """Normalise a name for comparisons: ``Fast_CG`` becomes ``fast-cg``.

    Case and the kind of separator are ignored.
    """
    return re.sub(r"[-_.]+", "-", name).lower()
