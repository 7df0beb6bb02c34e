"""A small problem from the literature on penalty methods."""

from __future__ import annotations

from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return []
