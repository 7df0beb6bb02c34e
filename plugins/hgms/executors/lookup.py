"""An executor by its name, with its settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hgms.executors.jobs import Executor
from hgms_core import ConfigError, PluginError, UnknownComponent, unknown
from hgms_core.host import Host

HOOK = "hgms_register_executors"


def registered(host: Host) -> dict[str, type[Any]]:
    """The executors of all plugins by name; the first of a name keeps it, and ours come first."""
    classes: dict[str, type[Any]] = {}
    for info, implementation in host.implementations(HOOK):
        with host.watched(info):
            returned: Iterable[Any] = implementation.function()  # type: ignore[assignment]
        for cls in returned:
            lacking = [
                name for name in ("carry_out", "close") if not callable(getattr(cls, name, None))
            ]
            if lacking or not isinstance(getattr(cls, "name", None), str):
                called = getattr(cls, "__qualname__", repr(cls))
                what = ", ".join(lacking) or "a class variable `name`"
                host.blame(
                    info, PluginError(f"{called} is not an executor: it lacks {what}"), part=True
                )
            else:
                classes.setdefault(cls.name, cls)
    return classes


def executor_of(name: str, settings: Mapping[str, Any], host: Host) -> Executor:
    """The executor of that name with these settings.

    Errors: UnknownComponent with the nearest name; ConfigError for a setting that it does not have
    or take; MissingExtra with the line that installs what it needs."""
    classes = registered(host)
    if name not in classes:
        missing = [
            f"{info.name}: {info.install}"
            for info in host.infos.values()
            if info.status == "missing-extra"
        ]
        hint = "".join(f"\n  {line}" for line in missing if line.startswith(name))
        raise UnknownComponent(unknown("executor", name, classes) + hint)
    try:
        executor: Executor = classes[name](**settings)
    except ConfigError as error:
        raise ConfigError(f"{error}\n  it is a setting of the executor {name!r}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the executor {name!r} does not take these settings: {error}") from None
    return executor
