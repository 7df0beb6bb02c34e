"""Create an executor from its name and its settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hgms.executors.jobs import Executor
from hgms.plugins import Host
from hgms_core import ConfigError, HgmsError
from hgms_core.errors import PluginError, unknown_name

HOOK = "hgms_register_executors"


def registered(host: Host) -> dict[str, type[Any]]:
    """Return the executors of all plugins by name.

    If two executors have the same name, the first is used; HGMS's executors come first.
    """
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
                fault = PluginError(
                    "wrong-plugin", f"{called} is not an executor: it lacks {what}", place=(HOOK,)
                )
                host.blame(info, fault, part=True)
            else:
                classes.setdefault(cls.name, cls)
    return classes


def executor_of(name: str, settings: Mapping[str, Any], host: Host) -> Executor:
    """Return the executor of that name with these settings.

    Errors: ConfigError ``unknown-executor`` with the nearest name; ConfigError for an unknown
    setting or an invalid value; MissingExtra with the command that installs its package.
    """
    classes = registered(host)
    if name not in classes:
        error = unknown_name("executor", name, classes, ("--executor",))
        for info in host.infos.values():
            if info.status == "missing-extra" and info.name.startswith(name):
                error = ConfigError(**{**error.as_dict(), "install": info.install})
        raise error
    try:
        executor: Executor = classes[name](**settings)
    except HgmsError as error:
        raise error.at("executor") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "wrong-value",
            f"the executor {name!r} rejects its settings: {error}",
            place=("executor",),
        ) from None
    return executor
