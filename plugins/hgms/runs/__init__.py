"""One run: its configuration, its folder, its clock; the commands `run`, `describe` and
`compat`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms.config import Invalid
from hgms.config.as_table import described, plain
from hgms.config.convert import converter_for, role_of, structured, traits_of
from hgms.config.fingerprinting import fingerprint
from hgms.config.invalid import (
    PROTOCOLS,
    init_fields,
    kinds_of,
    named,
    nearness,
    plain_attribute,
    spell,
    type_hints,
)
from hgms.config.tables import (
    difference,
    flatten,
    laid_over,
    lay,
    lay_options,
    parse_json,
    parse_toml,
    put,
    read_toml,
    show,
    tables_of,
)
from hgms.runs.advice import line_of
from hgms.runs.checkpoint import load_state, pack, save_state, unpack
from hgms.runs.command import built, load
from hgms.runs.config import SCHEMA, UNCOMPARED, RunConfig, RunSettings, tables_of_others
from hgms.runs.execution import Compilation, Execution
from hgms.runs.files import ROWS, DiskError, appending, ensure_seal, opened, read_file, replace_file
from hgms.runs.folder import RunFolder
from hgms.runs.launch import device_called, record_failure, run, run_config, show_object
from hgms.runs.lease import LEASE, FolderInUse, HeldFolders, holder, is_marker, leased
from hgms.runs.loop import ignore
from hgms.runs.notebook import frame, reporter
from hgms.runs.own_problem import LOSS, OwnProblem, higher_is_better
from hgms.runs.progress import Progress, View
from hgms.runs.provenance import data_of, environment, unannounced
from hgms.runs.rank import follow_run
from hgms.runs.result import RunResult
from hgms.runs.signals import Interrupted, Interrupts, leave, leaving, stoppable
from hgms.runs.timing import counted, counting
from hgms.runs.traits import TRAITS, meant, misfit, missing_traits, needs, wanted_traits
from hgms.runs.watchers import Patience, StopRun, Watcher, pruned
from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

__all__ = [
    "LEASE",
    "LOSS",
    "PROTOCOLS",
    "ROWS",
    "SCHEMA",
    "TRAITS",
    "UNCOMPARED",
    "Compilation",
    "DiskError",
    "Execution",
    "FolderInUse",
    "HeldFolders",
    "Interrupted",
    "Interrupts",
    "Invalid",
    "OwnProblem",
    "Patience",
    "Progress",
    "RunConfig",
    "RunFolder",
    "RunResult",
    "RunSettings",
    "StopRun",
    "View",
    "Watcher",
    "appending",
    "built",
    "converter_for",
    "counted",
    "counting",
    "data_of",
    "described",
    "device_called",
    "difference",
    "ensure_seal",
    "environment",
    "fingerprint",
    "flatten",
    "follow_run",
    "frame",
    "higher_is_better",
    "holder",
    "ignore",
    "init_fields",
    "is_marker",
    "kinds_of",
    "laid_over",
    "lay",
    "lay_options",
    "leased",
    "leave",
    "leaving",
    "line_of",
    "load",
    "load_state",
    "meant",
    "misfit",
    "missing_traits",
    "named",
    "nearness",
    "needs",
    "opened",
    "pack",
    "parse_json",
    "parse_toml",
    "plain",
    "plain_attribute",
    "pruned",
    "put",
    "read_file",
    "read_toml",
    "record_failure",
    "replace_file",
    "reporter",
    "role_of",
    "run",
    "run_config",
    "save_state",
    "show",
    "show_object",
    "spell",
    "stoppable",
    "structured",
    "tables_of",
    "tables_of_others",
    "traits_of",
    "type_hints",
    "unannounced",
    "unpack",
    "wanted_traits",
]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.runs.command import compat, describe, run

    cli.add_command(run)
    cli.add_command(describe)
    cli.add_command(compat)
