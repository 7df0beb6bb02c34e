"""``hgms.tune``: hyperparameters learned by gradient, with baselines as candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms.tuning.candidate import Judgement
from hgms.tuning.result import TuneResult
from hgms.tuning.tuner import TuneOptions, tune
from hgms_core import hookimpl

if TYPE_CHECKING:
    import click

__all__ = ["Judgement", "TuneOptions", "TuneResult", "tune"]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.tuning.command import tune_command

    cli.add_command(tune_command)
