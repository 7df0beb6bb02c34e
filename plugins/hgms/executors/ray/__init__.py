"""Jobs on a Ray cluster: the executor `ray`."""

from __future__ import annotations

from typing import Any

from hgms_core import hookimpl


@hookimpl
def hgms_register_executors() -> list[type[Any]]:
    from hgms.executors.ray.executor import Ray

    return [Ray]
