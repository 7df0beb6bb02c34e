"""The plugin host: find and load plugins, record their status, call observers.

A plugin is a module with functions marked ``@hgms_core.hookimpl``; :mod:`hgms.plugins.hookspecs`
specifies them. The host finds a plugin through the entry-point group ``hgms`` of an installed
distribution. Users can also name a single file (``--plugin ./my_solver.py``).

The effect of a failure depends on its cause and on the owner of the plugin:

- A missing optional extra adds a row to ``hgms plugins``, with the command that installs the extra.
- A third-party plugin causes one warning and a row in ``hgms plugins``.
- A part of HGMS itself, or a file named by the user, raises an error.

Environment variables:

- ``HGMS_DISABLE_PLUGINS=a,b`` blocks these plugins.
- ``HGMS_PLUGINS=a,b`` loads only these plugins (an empty value loads no plugin).
- ``HGMS_STRICT_PLUGINS=1`` turns every failure into an error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pluggy

from hgms.arguments import require
from hgms.plugins import hookspecs
from hgms.plugins.discovery import (
    GROUP,
    PROGRAMS,
    Entry,
    PluginInfo,
    Status,
    canonical,
    find_entries,
    import_plugin,
    install_line,
)
from hgms.plugins.sandbox import Watch, watch_plugin
from hgms_core import PLUGIN_API
from hgms_core.errors import (
    ConfigError,
    ErrorGroup,
    HgmsError,
    MissingExtra,
    PluginError,
    unknown_name,
)

LOG = logging.getLogger("hgms.plugins")


class Host:
    """The plugins of a command or a program.

    The host reads entry points once; :meth:`load` loads the components. With ``tolerant``, the
    host records every failure instead of raising it (``hgms plugins``).
    """

    def __init__(self, *, tolerant: bool = False) -> None:
        self.strict = _is_set("HGMS_STRICT_PLUGINS") and not tolerant
        self.tolerant = tolerant
        self.infos: dict[str, PluginInfo] = {}
        self._manager = pluggy.PluginManager("hgms")
        self._manager.add_hookspecs(hookspecs)
        self._silenced: set[str] = set()
        self._complete = False

    @classmethod
    def load(
        cls, plugins: Iterable[str | Path | ModuleType] = (), *, tolerant: bool = False
    ) -> Host:
        """Load installed plugins in the order of their names, then ``plugins``.

        The environment variables of this module select the installed plugins.
        """
        return cls(tolerant=tolerant).complete(plugins)

    @functools.cached_property
    def installed_entries(self) -> dict[str, list[Entry]]:
        return find_entries()

    @functools.cached_property
    def programs(self) -> dict[str, list[Entry]]:
        """The providers of each command, by the name of the command.

        The built-in program is last, so that an installed program can replace it.
        """
        entries: dict[str, list[Entry]] = {}
        for entry in self.installed_entries[PROGRAMS]:
            entries.setdefault(entry.name, []).insert(0, entry)
        return entries

    def complete(self, plugins: Iterable[str | Path | ModuleType] = ()) -> Host:
        """Load the installed plugins once, and ``plugins``; return this host."""
        if not self._complete:
            self._complete = True
            self._load_installed()
        for plugin in plugins:
            self.add(plugin)
        return self

    def add(self, plugin: str | Path | ModuleType) -> PluginInfo:
        """Load one more plugin: a file ending in ``.py``, a module's name, or a module."""
        where = plugin.__name__ if isinstance(plugin, ModuleType) else str(plugin)
        for info in self.infos.values():
            if _place(info.module) == _place(where) and info.distribution is None:
                return info
        name = Path(where).stem if where.endswith(".py") else where
        return self._load(
            Entry(
                name=where if name in self.infos else name,
                module=where,
                load=lambda: plugin if isinstance(plugin, ModuleType) else import_plugin(where),
            )
        )

    def add_program(self, entry: Entry) -> PluginInfo:
        """Load the program that provides a command (:attr:`programs`).

        Its name is the name of its module, since it may provide several commands.
        """
        if entry.module in self.infos:
            return self.infos[entry.module]
        return self._load(attrs.evolve(entry, name=entry.module, program=True))

    def implementations(self, hook: str) -> list[tuple[PluginInfo, pluggy.HookImpl]]:
        """Return the implementations of ``hook`` in the order of loading.

        This is the reverse of the order in which pluggy calls them.
        """
        caller = getattr(self._manager.hook, hook)
        return [(self.infos[impl.plugin_name], impl) for impl in caller.get_hookimpls()]

    def call_hook(self, info: PluginInfo, impl: pluggy.HookImpl) -> list[Any]:
        """Return the list that a plugin registers by a hook; blame the plugin if the hook fails."""
        hook = impl.function.__name__
        try:
            with self.watch_plugin(info):
                returned: Any = impl.function()
            is_class = isinstance(returned, type)
            if (
                is_class
                or isinstance(returned, str | Mapping)
                or not isinstance(returned, Iterable)
            ):
                what = f"the class {returned.__name__}" if is_class else type(returned).__name__
                raise PluginError(
                    "wrong-hook-result",
                    f"{hook} returns {what}, but must return a list of classes",
                    place=(hook,),
                )
            return list(returned)
        except (Exception, SystemExit) as error:
            if not isinstance(error, HgmsError):
                error = PluginError("plugin-failed", f"{hook} raised {describe(error)}")
            self.blame(info, error, part=True)
            return []

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call the observers of ``hook`` one at a time.

        If an observer raises, the error is reported once and its plugin is not notified again.
        At the start of a comparison or run, ConfigError and MissingExtra are raised instead: an
        early error is better than a long run without its curves.
        """
        for info, impl in self.implementations(hook):
            if info.name in self._silenced:
                continue
            try:
                # an observer may change its record; the run and others must not be affected
                values = [arguments[name] for name in impl.argnames]
                copies = [deepcopy(one) if isinstance(one, dict) else one for one in values]
                impl.function(*copies)
            except (Exception, SystemExit) as error:
                if hook in ("hgms_ready", "hgms_run_started") and isinstance(
                    error, ConfigError | MissingExtra
                ):
                    raise
                if self.strict:
                    error.add_note(f"raised by {hook} of the plugin {info.name!r} ({info.owner})")
                    raise
                self._silenced.add(info.name)
                text = f"{hook} raised {describe(error)}"
                self._update(
                    info,
                    status="incomplete",
                    error=text,
                    traceback="".join(traceback.format_exception(error)),
                )
                rest = "its observers are not called again, the run continues"
                LOG.warning("plugin %r (%s): %s; %s", info.name, info.owner, text, rest)

    def blame(self, info: PluginInfo, error: BaseException, *, part: bool = False) -> None:
        """Handle a failure of a plugin, or of a ``part`` of a plugin.

        The docstring of the module defines the effects.
        """
        install = install_line(info, error)
        status: Status = "missing-extra" if install else ("incomplete" if part else "failed")
        info = self.infos.get(info.name, info)
        text = describe(error)
        earlier = f"{info.error}\n" if info.error else ""
        self._update(
            info,
            status=status,
            error=earlier + text,
            install=install,
            traceback="".join(traceback.format_exception(error)),
        )
        if install:
            if self.strict:
                raise _failure(MissingExtra, info, error, install) from error
            return
        failure = _failure(PluginError, info, error)
        if self.strict or (info.vital and not self.tolerant):
            raise failure from error
        lines = [line.strip(" -") for line in failure.lines()]
        if isinstance(error, HgmsError):  # other failures already have this hint
            lines.append("run `hgms plugins -v` for more")
        LOG.warning("%s", "; ".join(lines))

    def failures(self) -> list[PluginInfo]:
        return [
            info
            for info in self.infos.values()
            if info.status in ("failed", "incomplete", "missing-extra")
        ]

    def note(self, info: PluginInfo, text: str) -> None:
        """Log a message, once, about a plugin that still works."""
        notes = self.infos[info.name].notes
        if text not in notes:
            self._update(info, notes=(*notes, text))
            LOG.warning("plugin %r (%s): %s", info.name, info.owner, text)

    @contextlib.contextmanager
    def watch_plugin(self, info: PluginInfo) -> Iterator[Watch]:
        """Watch the code of a plugin, and note changed settings on the plugin."""
        with watch_plugin() as watch:
            yield watch
        if watch.changed:
            self.note(
                info, f"it changed {' and '.join(watch.changed)}, for everybody; this was undone"
            )

    def _update(self, info: PluginInfo, **changes: Any) -> None:
        self.infos[info.name] = attrs.evolve(self.infos.get(info.name, info), **changes)

    def _load_installed(self) -> None:
        entries = self.installed_entries[GROUP]
        names = {entry.name for entry in entries}
        allowed = _names("HGMS_PLUGINS")
        blocked = _names("HGMS_DISABLE_PLUGINS") or set()
        for name in sorted((allowed or set()) - names):
            if not self.tolerant:
                raise _not_installed("HGMS_PLUGINS", name, names)
        for name in sorted(blocked - names):
            error = _not_installed("HGMS_DISABLE_PLUGINS", name, names)
            LOG.warning("%s", "; ".join(error.lines()))
        owners: dict[str, PluginInfo] = {}
        for entry in entries:
            twin = owners.setdefault(canonical(entry.name), entry)
            if twin is not entry:
                info = attrs.evolve(entry, name=f"{entry.name} ({entry.distribution})")
                self.blame(
                    info,
                    PluginError(
                        "duplicate-name",
                        f"{twin.owner} has a plugin with the name {twin.name!r} (case, - and _ are "
                        "ignored)",
                        place=(entry.name,),
                        hint="rename one of the plugins",
                    ),
                )
            elif entry.name in blocked or (allowed is not None and entry.name not in allowed):
                variable = "HGMS_DISABLE_PLUGINS" if entry.name in blocked else "HGMS_PLUGINS"
                self._update(entry, status="blocked", error=f"by {variable}")
            else:
                self._load(entry)

    def _load(self, info: Entry) -> PluginInfo:
        watch = Watch()
        try:
            with self.watch_plugin(info) as watch:
                self._register(info, info.load())
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # also sys.exit, pytest's skip and similar: the other plugins must still load
            if self._manager.has_plugin(info.name):
                self._manager.unregister(name=info.name)
            self.blame(info, error)
        self._update(info, seconds=watch.seconds)
        return self.infos[info.name]

    def _register(self, info: PluginInfo, plugin: object) -> None:
        wanted = getattr(plugin, "hgms_plugin_api", PLUGIN_API)
        require(
            wanted == PLUGIN_API,
            "wrong-plugin-api",
            f"the plugin requires plugin API {wanted!r}, but this hgms has {PLUGIN_API}",
            hint="upgrade the older of hgms and the plugin; plugin authors set "
            f"hgms_plugin_api = {PLUGIN_API} and follow the changelog",
            place=("hgms_plugin_api",),
            error=PluginError,
        )
        known = {name for name in vars(self._manager.hook) if name.startswith("hgms_")}
        hooks = []
        for name in dir(plugin):
            options = self._manager.parse_hookimpl_opts(plugin, name)
            if options is None:
                if name in known and callable(getattr(plugin, name)):
                    raise PluginError(
                        "unmarked-hook",
                        f"the function {name} is not marked as a hook",
                        place=(name,),
                        hint="add @hookimpl",
                    )
                continue
            require(
                not (options.get("wrapper") or options.get("hookwrapper")),
                "not-supported",
                f"{name} is a hook wrapper, which is not supported",
                place=(name,),
                hint="use a plain hook function",
                error=PluginError,
            )
            hook = options.get("specname") or name
            if hook not in known:
                raise _as_plugin_error(unknown_name("hook", hook, known, (name,)))
            hooks.append(hook)
        require(
            hooks,
            "no-hooks",
            "the plugin implements no hook",
            hint="define a function hgms_register_…, marked by @hookimpl",
            error=PluginError,
        )
        if (other := self._manager.get_name(plugin)) is not None:
            raise PluginError(
                "duplicate-plugin",
                f"the entry points {other!r} and {info.name!r} refer to the same module "
                f"{info.module}",
                place=(info.name,),
                hint="remove one of them",
            )
        try:
            self._manager.register(plugin, name=info.name)
        except pluggy.PluginValidationError as error:
            text = " ".join(str(error).split())
            raise PluginError("wrong-signature", text, place=(info.name,)) from error
        self.infos[info.name] = attrs.evolve(info, hooks=tuple(hooks))


def _is_set(variable: str) -> bool:
    """Return whether an environment variable is 1 or true.

    Raises
    ------
    ConfigError
        For values other than 0, 1, false, true and an empty text.
    """
    text = os.environ.get(variable, "")
    meaning = {"": False, "0": False, "false": False, "1": True, "true": True}
    require(
        text.lower() in meaning,
        "wrong-value",
        f"{variable}={text!r} must be 0 or 1",
        place=(variable,),
    )
    return meaning[text.lower()]


def _place(where: str) -> str:
    """Return the absolute path of a file, or the name of a module.

    Two spellings of the path of one file therefore refer to one plugin.
    """
    return str(Path(os.path.expanduser(where)).resolve()) if where.endswith(".py") else where


def _as_plugin_error(error: HgmsError) -> PluginError:
    return PluginError(**error.as_dict())


def _failure(
    of: type[PluginError | MissingExtra],
    info: PluginInfo,
    error: BaseException,
    install: str | None = None,
) -> PluginError | MissingExtra:
    """Return the error with the name of its plugin in the message."""
    what = f"plugin {info.name!r} ({info.owner})"
    if isinstance(error, HgmsError):
        if error.place[:1] == (info.module,):  # the place already names the owner, a file
            what = f"plugin {info.name!r}"
        message = f"{what}: {error.message}"
        if isinstance(error, ErrorGroup):
            return of(error.code, message, hint="\n".join(error.lines()[1:]), install=install)
        parts = error.as_dict()
        return of(**{**parts, "message": message, "install": install or error.install})
    return of(
        "missing-package" if install else "plugin-failed",
        f"{what} failed to load: {describe(error)}",
        hint=None if install else "run `hgms plugins -v` for the traceback",
        install=install,
    )


def describe(error: BaseException) -> str:
    """Return the message of an HgmsError, or the type and first line of other errors."""
    text = str(error).strip()
    if isinstance(error, SystemExit):
        return f"SystemExit: it calls sys.exit({text})"
    return (
        text
        if isinstance(error, HgmsError)
        else f"{type(error).__name__}: {text.splitlines()[0] if text else '(no text)'}"
    )


def _names(variable: str) -> set[str] | None:
    text = os.environ.get(variable)
    return None if text is None else {name.strip() for name in text.split(",") if name.strip()}


def _not_installed(variable: str, name: str, names: Iterable[str]) -> PluginError:
    return _as_plugin_error(unknown_name("plugin", name, names, (variable,)))
