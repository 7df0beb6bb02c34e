"""One run: its configuration, its folder and its clock.

The package also defines the commands `run` and `describe`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms.runs.advice import line_of
from hgms.runs.checkpoint import load_state, pack, save_state, unpack
from hgms.runs.clock import counting, total_seconds
from hgms.runs.command_line import build_component, load
from hgms.runs.config import SCHEMA, UNCOMPARED, RunConfig, RunSettings, tables_of_others
from hgms.runs.execution import Compilation, Execution
from hgms.runs.folder import RunFolder
from hgms.runs.identity import config_key
from hgms.runs.launch import device_called, record_failure, run, run_config
from hgms.runs.matmul import Product, RouteChoice, calibrated, choose
from hgms.runs.notebook import reporter
from hgms.runs.observers import ignore
from hgms.runs.own_problem import LOSS, OwnProblem, higher_is_better
from hgms.runs.progress import Progress, View
from hgms.runs.provenance import data_of, environment, undeclared_plugins
from hgms.runs.rank import follow_launched
from hgms.runs.result import RunResult
from hgms.runs.route import matrix_route
from hgms.runs.signals import LEAVING, Interrupted, Interrupts, stoppable
from hgms.runs.traits import TRAITS, misfit, missing_traits, needs, suggest_trait
from hgms.runs.watchers import StopRun, Watcher, trial_pruner
from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

__all__ = [
    "LEAVING",
    "LOSS",
    "SCHEMA",
    "TRAITS",
    "UNCOMPARED",
    "Compilation",
    "Execution",
    "Interrupted",
    "Interrupts",
    "OwnProblem",
    "Product",
    "Progress",
    "RouteChoice",
    "RunConfig",
    "RunFolder",
    "RunResult",
    "RunSettings",
    "StopRun",
    "View",
    "Watcher",
    "build_component",
    "calibrated",
    "choose",
    "config_key",
    "counting",
    "data_of",
    "device_called",
    "environment",
    "follow_launched",
    "higher_is_better",
    "ignore",
    "line_of",
    "load",
    "load_state",
    "matrix_route",
    "misfit",
    "missing_traits",
    "needs",
    "pack",
    "record_failure",
    "reporter",
    "run",
    "run_config",
    "save_state",
    "stoppable",
    "suggest_trait",
    "tables_of_others",
    "total_seconds",
    "trial_pruner",
    "undeclared_plugins",
    "unpack",
]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.runs.command import describe, run

    cli.add_command(run)
    cli.add_command(describe)
