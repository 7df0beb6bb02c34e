"""`hgms mix`: from named data sources and a base model to a learned mixture, a fine-tuned adapter and its scores."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hgms_core import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_mix.command import mix

    cli.add_command(mix)


_SHARED = {"load": "config", "mix_path": "summary", "read_rows": "sample"}
"""What other programs use, and where it is: loaded when it is asked for, since every command line loads this package."""


def __getattr__(name: str) -> Any:
    if name not in _SHARED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_SHARED[name]}"), name)
