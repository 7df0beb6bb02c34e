"""Cyclical Langevin candidates for HGMS: a generator, records of the selected cycles, a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms_core import hookimpl
from hgms_cyclical.langevin import CyclicalLangevin as CyclicalLangevin
from hgms_cyclical.observer import hgms_run_finished as hgms_run_finished
from hgms_cyclical.observer import hgms_run_started as hgms_run_started
from hgms_cyclical.observer import hgms_step_finished as hgms_step_finished

if TYPE_CHECKING:
    import click

__version__ = "0.1.0"

hgms_plugin_api = 2
"""The supported version of hooks and protocols. A host with another version prints a message."""


@hookimpl
def hgms_register_generators() -> list[type]:
    return [CyclicalLangevin]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    # imported here, so that other commands do not load it
    from hgms_cyclical.command import cycles

    cli.add_command(cycles)
