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
from typing import Any, Literal

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


Status = Literal["loaded", "incomplete", "failed", "missing-extra", "blocked"]


@frozen(kw_only=True)
class PluginInfo:
    """The status of one plugin.

    - ``status``: ``incomplete`` if the plugin loaded, but some of its components were rejected.
    - ``seconds``: the duration of its import.
    - ``notes``: further messages about the plugin for users.
    - ``program``: whether the plugin provides commands.
    """

    name: str
    module: str
    distribution: str | None = None
    version: str | None = None
    status: Status = "loaded"
    hooks: tuple[str, ...] = ()
    error: str | None = None
    install: str | None = None
    traceback: str | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    program: bool = False

    @property
    def owner(self) -> str:
        """The distribution or file: ``hgms-fastcg 2.1``, or ``file my_solver.py``."""
        return f"{self.distribution} {self.version}" if self.distribution else f"file {self.module}"

    @property
    def vital(self) -> bool:
        """Whether a failure is an error: the plugin is built in, or the user named it."""
        return self.distribution in (None, FIRST_PARTY)


@frozen(kw_only=True)
class Entry(PluginInfo):
    """A plugin before its import, which ``load`` performs."""

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
            info = Entry(
                name=point.name,
                module=point.value,
                distribution=owner["Name"],
                version=owner["Version"],
                load=point.load,
            )
            entries[group].append(info)
        entries[group].sort(
            key=lambda info: (
                canonical(info.name),
                info.distribution != FIRST_PARTY,
                info.distribution,
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


def install_line(plugin: PluginInfo, error: BaseException) -> str | None:
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
