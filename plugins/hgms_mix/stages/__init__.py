"""`hgms mix`: learn a mixture of data sources, fine-tune a base model on it, and evaluate.

The results are a learned mixture, a fine-tuned adapter and its losses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms.lazy import Places, attach
from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

    from hgms_mix.stages.config import OF_GRIDS as OF_GRIDS
    from hgms_mix.stages.config import MixConfig as MixConfig
    from hgms_mix.stages.config import load as load
    from hgms_mix.stages.config import read as read
    from hgms_mix.stages.config import reject_benchmarks as reject_benchmarks
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


_SHARED: Places = {
    "hgms_mix.stages.graph": "Finished Log Runner fingerprint",
    "hgms_mix.stages.mix": "LEASES STAGES claim ensure_runnable finished_report mix_path run_mix "
    "runner_of",
    "hgms_mix.stages.reweight": "Learned",
    "hgms_mix.stages.config": "MixConfig OF_GRIDS load read reject_benchmarks",
    "hgms_mix.stages.tuned_model": "TunedModel read_rows",
}
"""Names for other programs, by module. They are imported on first access, because every command
line imports this package.
"""

__getattr__ = attach(__name__, _SHARED)[0]
