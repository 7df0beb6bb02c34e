"""Methods that weigh rows of the lower level by their losses or gradients."""

from __future__ import annotations

from hgms_core import hookimpl


@hookimpl
def hgms_register_methods() -> list[type]:
    return []
