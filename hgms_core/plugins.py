"""The plugin host: finds plugins, loads them one by one, says what became of each, and calls their observers.

A plugin is a module with functions marked ``@hgms_core.hookimpl`` (see :mod:`hgms_core.hookspecs`), found through the
entry-point group ``hgms`` of an installed distribution or named as a single file (``--plugin ./my_solver.py``).

What happens to a plugin that fails:

- installed by somebody else: one warning, and a row in ``hgms plugins``; everything else works;
- a module of an optional extra is missing: no warning, still listed, with the line that installs it;
- a part of HGMS itself, or a file named by the user: an error, since nothing can be right without it.

``HGMS_DISABLE_PLUGINS=a,b`` blocks plugins, ``HGMS_PLUGINS=a,b`` loads only those (empty: none), and
``HGMS_STRICT_PLUGINS=1`` turns every failure into an error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import attrs
import pluggy
from attrs import frozen

from hgms_core import hookspecs
from hgms_core.errors import ConfigError, HgmsError, MissingExtra, PluginError, closest

GROUP = "hgms"
FIRST_PARTY = "hgms"
LOG = logging.getLogger("hgms.plugins")

Status = Literal["loaded", "incomplete", "failed", "missing-extra", "blocked"]


@frozen(kw_only=True)
class PluginInfo:
    """What became of one plugin. ``incomplete``: it loaded, but some of its components were refused."""

    name: str
    module: str
    distribution: str | None = None
    version: str | None = None
    status: Status = "loaded"
    hooks: tuple[str, ...] = ()
    error: str | None = None
    install: str | None = None
    traceback: str | None = None
    extras: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """``hgms-fastcg 2.1``, or ``file my_solver.py``."""
        return f"{self.distribution} {self.version}" if self.distribution else f"file {self.module}"

    @property
    def vital(self) -> bool:
        """A failure of this plugin is an error: it is ours, or the user named it."""
        return self.distribution in (None, FIRST_PARTY)

    def row(self) -> dict[str, Any]:
        shown = attrs.asdict(self, filter=lambda field, _: field.name not in ("traceback", "extras"))
        return {**shown, "hooks": list(self.hooks)}


class Host:
    """The plugins of one process. ``tolerant`` records every failure instead of raising it (``hgms plugins``)."""

    def __init__(self, *, strict: bool = False, tolerant: bool = False) -> None:
        self.strict = strict and not tolerant
        self.tolerant = tolerant
        self.infos: dict[str, PluginInfo] = {}
        self._manager = pluggy.PluginManager("hgms")
        self._manager.add_hookspecs(hookspecs)
        self._silenced: set[str] = set()

    @classmethod
    def load(cls, plugins: Iterable[str | Path | ModuleType] = (), *, tolerant: bool = False) -> Host:
        """Every installed plugin that the environment lets in, in the order of their names, then ``plugins``."""
        host = cls(strict=os.environ.get("HGMS_STRICT_PLUGINS", "") not in ("", "0"), tolerant=tolerant)
        host._load_installed()
        for plugin in plugins:
            host.add(plugin)
        return host

    def add(self, plugin: str | Path | ModuleType) -> PluginInfo:
        """One more plugin: a file ending in ``.py``, the name of a module, or a module."""
        where = plugin.__name__ if isinstance(plugin, ModuleType) else str(plugin)
        for info in self.infos.values():
            if info.module == where and info.distribution is None:
                return info
        name = Path(where).stem if where.endswith(".py") else where
        info = PluginInfo(name=where if name in self.infos else name, module=where)
        with self._guarded(info):
            module = plugin if isinstance(plugin, ModuleType) else import_plugin(str(plugin))
            self._register(info, module)
        return self.infos[info.name]

    def implementations(self, hook: str) -> list[tuple[PluginInfo, pluggy.HookImpl]]:
        """Who implements ``hook``, in the order of loading (pluggy's own calls go the other way round)."""
        caller = getattr(self._manager.hook, hook)
        return [(self.infos[impl.plugin_name], impl) for impl in caller.get_hookimpls()]

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call the observers of ``hook`` one at a time. One that raises is reported once, and its plugin hears no more.

        Only what a person asked for and cannot have (ConfigError, MissingExtra at the start of a run) stops the run: better now
        than a night without the curves.
        """
        for info, impl in self.implementations(hook):
            if info.name in self._silenced:
                continue
            try:
                impl.function(*[arguments[name] for name in impl.argnames])
            except Exception as error:
                if hook in ("hgms_ready", "hgms_run_started") and isinstance(error, ConfigError | MissingExtra):
                    raise
                if self.strict:
                    error.add_note(f"raised by {hook} of the plugin {info.name!r} ({info.owner})")
                    raise
                self._silenced.add(info.name)
                text = f"{hook} raised {describe(error)}"
                self.infos[info.name] = attrs.evolve(
                    self.infos[info.name], status="incomplete", error=text, traceback=_trace(error)
                )
                LOG.warning(
                    "plugin %r (%s): %s; its observers are not called again, the run goes on", info.name, info.owner, text
                )

    def blame(self, info: PluginInfo, error: BaseException, *, part: bool = False) -> None:
        """Deal with a failure of a plugin, or of a ``part`` of it, as the module's docstring says."""
        install = _install_line(info, error)
        status: Status = "missing-extra" if install else ("incomplete" if part else "failed")
        earlier = self.infos.get(info.name, info).error
        text = describe(error)
        self.infos[info.name] = attrs.evolve(
            self.infos.get(info.name, info),
            status=status,
            error=f"{earlier}\n{text}" if earlier else text,
            install=install,
            traceback=_trace(error),
        )
        what = f"plugin {info.name!r} ({info.owner})"
        message = f"{what}: {text}" if isinstance(error, HgmsError) else f"{what} failed to load: {text}"
        if install:
            if self.strict:
                raise MissingExtra(f"{message}\n  {install}") from error
            return
        if self.strict or (info.vital and not self.tolerant):
            raise PluginError(f"{message}\n  `hgms plugins -v` shows the traceback") from error
        first, *rest = (line.strip(" -") for line in message.splitlines())
        LOG.warning("%s (`hgms plugins -v` shows more)", " ".join([first, "; ".join(rest)]).strip())

    def failed(self) -> list[PluginInfo]:
        """The plugins that are not there, or not whole."""
        return [info for info in self.infos.values() if info.status in ("failed", "incomplete", "missing-extra")]

    def _load_installed(self) -> None:
        found = importlib.metadata.entry_points(group=GROUP)
        # ours first among equals, so that a third party cannot take a built-in plugin's name
        owners = {
            id(dist): (dist.name, dist.version) for dist in {id(entry.dist): entry.dist for entry in found}.values() if dist
        }
        owned = [(entry.name, *owners.get(id(entry.dist), ("(unknown)", "?")), entry) for entry in found]
        owned.sort(key=lambda item: (item[0], item[1] != FIRST_PARTY, item[1]))
        names = {name for name, *_ in owned}
        allowed, blocked = _names("HGMS_PLUGINS"), _names("HGMS_DISABLE_PLUGINS") or set()
        for name in sorted((allowed or set()) - names):
            if not self.tolerant:
                raise PluginError(_not_installed("HGMS_PLUGINS", name, names))
        for name in sorted(blocked - names):
            LOG.warning("%s", _not_installed("HGMS_DISABLE_PLUGINS", name, names))
        for _, distribution, version, entry in owned:
            info = PluginInfo(
                name=entry.name,
                module=entry.value,
                distribution=distribution,
                version=version,
                extras=tuple(entry.extras),
            )
            if entry.name in self.infos:
                twin = self.infos[entry.name]
                info = attrs.evolve(info, name=f"{entry.name} ({distribution})")
                self.blame(info, PluginError(f"a plugin of {twin.owner} is already called {entry.name!r}; rename one"))
            elif entry.name in blocked or (allowed is not None and entry.name not in allowed):
                variable = "HGMS_DISABLE_PLUGINS" if entry.name in blocked else "HGMS_PLUGINS"
                self.infos[entry.name] = attrs.evolve(info, status="blocked", error=f"by {variable}")
            else:
                with self._guarded(info):
                    self._register(info, entry.load())

    @contextlib.contextmanager
    def _guarded(self, info: PluginInfo) -> Iterator[None]:
        try:
            # a plugin that prints while it is imported must not spoil --json
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except (Exception, SystemExit) as error:
            if self._manager.has_plugin(info.name):
                self._manager.unregister(name=info.name)
            self.blame(info, error)

    def _register(self, info: PluginInfo, plugin: object) -> None:
        known = {name for name in dir(hookspecs) if name.startswith("hgms_")}
        hooks = []
        for name in dir(plugin):
            options = self._manager.parse_hookimpl_opts(plugin, name)
            if options is None:
                if name in known and callable(getattr(plugin, name)):
                    raise PluginError(f"the function {name} is not marked; put @hookimpl above it")
                continue
            if options.get("wrapper") or options.get("hookwrapper"):
                raise PluginError(f"{name} is a hook wrapper; HGMS calls plain hook functions only")
            hook = options.get("specname") or name
            if hook not in known:
                near = closest(hook, known)
                hint = f"did you mean {near!r}?" if near else f"known: {', '.join(sorted(known))}"
                raise PluginError(f"unknown hook {hook!r}; {hint}")
            hooks.append(hook)
        if not hooks:
            raise PluginError("it implements no hook; mark its functions with @hookimpl (called hgms_register_…)")
        try:
            self._manager.register(plugin, name=info.name)
        except pluggy.PluginValidationError as error:
            raise PluginError(" ".join(str(error).split())) from error
        self.infos[info.name] = attrs.evolve(info, hooks=tuple(hooks))


_current: Host | None = None


def host(plugins: Iterable[str | Path | ModuleType] = ()) -> Host:
    """The host of this process: loaded at the first call, and ``plugins`` added to it."""
    global _current
    if _current is None:
        _current = Host.load()
    for plugin in plugins:
        _current.add(plugin)
    return _current


def notify(hook: str, **arguments: Any) -> None:
    """:meth:`Host.notify` of this process's host."""
    host().notify(hook, **arguments)


def describe(error: BaseException) -> str:
    """One of our own messages as it is; any other exception with its type."""
    text = str(error).strip()
    return text if isinstance(error, HgmsError) else f"{type(error).__name__}: {text.splitlines()[0] if text else '(no text)'}"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _names(variable: str) -> set[str] | None:
    text = os.environ.get(variable)
    return None if text is None else {name.strip() for name in text.split(",") if name.strip()}


def _not_installed(variable: str, name: str, names: Iterable[str]) -> str:
    near = closest(name, names)
    hint = f"; did you mean {near!r}?" if near else ""
    return (
        f"{variable} names {name!r}, which is not an installed plugin{hint} (installed: {', '.join(sorted(names)) or 'none'})"
    )


def import_plugin(where: str) -> ModuleType:
    """A module by its name, or from a file under a name that cannot clash with an installed module's."""
    path = Path(where)
    if path.suffix != ".py":
        if os.sep in where:
            raise PluginError(f"{where} is not a Python file (a plugin file ends in .py)")
        return importlib.import_module(where)
    if not path.is_file():
        raise PluginError(f"there is no file {where}")
    name = "hgms_file_" + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise PluginError(f"{where} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # attrs and typing look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _install_line(info: PluginInfo, error: BaseException) -> str | None:
    """The command that installs what ``error`` misses, if that is an optional extra of the plugin's distribution."""
    if isinstance(error, MissingExtra):
        found = re.search(r"pip install '?[^'\s`]+'?", str(error))
        return found[0] if found else None
    if not isinstance(error, ModuleNotFoundError) or not error.name or info.distribution is None:
        return None
    module = error.name.partition(".")[0]
    if module in sys.modules or module == info.module.partition(".")[0].partition(":")[0]:
        return None  # the package is there: a part of it is not, which no extra cures
    extra = _extra_of(info, module)
    return f"pip install '{info.distribution}[{extra}]'" if extra else None


def _extra_of(info: PluginInfo, module: str) -> str | None:
    """The extra that brings ``module``: named by the entry point, called like it, or requiring a project called like it."""
    try:
        distribution = importlib.metadata.distribution(info.distribution or "")
    except importlib.metadata.PackageNotFoundError:
        return None
    extras = distribution.metadata.get_all("Provides-Extra") or []
    wanted = _canonical(module)
    requiring = [
        found[2]
        for requirement in distribution.requires or []
        if (found := re.match(r"([\w.-]+).*extra\s*==\s*['\"]([^'\"]+)", requirement)) and _canonical(found[1]) == wanted
    ]
    likely = [extra for extra in info.extras if extra in extras]
    likely += [extra for extra in extras if _canonical(extra) == wanted] + requiring
    return likely[0] if likely else None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
