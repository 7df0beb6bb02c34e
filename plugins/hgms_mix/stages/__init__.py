"""`hgms mix`: learn a mixture of data sources, fine-tune a base model on it, and evaluate.

The results are a learned mixture, a fine-tuned adapter and its scores.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

    from hgms_mix.stages.config import OF_GRIDS as OF_GRIDS
    from hgms_mix.stages.config import MixConfig as MixConfig
    from hgms_mix.stages.config import load as load
    from hgms_mix.stages.config import read as read
    from hgms_mix.stages.config import resolved_table as resolved_table
    from hgms_mix.stages.graph import Finished as Finished
    from hgms_mix.stages.graph import Log as Log
    from hgms_mix.stages.graph import Runner as Runner
    from hgms_mix.stages.graph import fingerprint as fingerprint
    from hgms_mix.stages.mix import LEASES as LEASES
    from hgms_mix.stages.mix import STAGES as STAGES
    from hgms_mix.stages.mix import claim as claim
    from hgms_mix.stages.mix import ensure_runnable as ensure_runnable
    from hgms_mix.stages.mix import finished_report as finished_report
    from hgms_mix.stages.mix import mix_path as mix_path
    from hgms_mix.stages.mix import run_mix as run_mix
    from hgms_mix.stages.mix import runner_of as runner_of
    from hgms_mix.stages.reweight import Learned as Learned
    from hgms_mix.stages.tuned_model import TunedModel as TunedModel
    from hgms_mix.stages.tuned_model import read_rows as read_rows


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_mix.stages.command import mix

    cli.add_command(mix)


_SHARED = {
    "Finished": "graph",
    "LEASES": "mix",
    "Learned": "reweight",
    "Log": "graph",
    "MixConfig": "config",
    "OF_GRIDS": "config",
    "Runner": "graph",
    "STAGES": "mix",
    "TunedModel": "tuned_model",
    "claim": "mix",
    "ensure_runnable": "mix",
    "fingerprint": "graph",
    "finished_report": "mix",
    "load": "config",
    "mix_path": "mix",
    "read": "config",
    "read_rows": "tuned_model",
    "resolved_table": "config",
    "run_mix": "mix",
    "runner_of": "mix",
}
"""Names for other programs, and their modules. They are imported on first access, because
every command line imports this package.
"""


def __getattr__(name: str) -> Any:
    if name not in _SHARED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_SHARED[name]}"), name)
