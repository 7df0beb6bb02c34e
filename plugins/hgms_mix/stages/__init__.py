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
    from hgms_mix.stages.config import resolved as resolved
    from hgms_mix.stages.mix import STAGES as STAGES
    from hgms_mix.stages.mix import Mix as Mix
    from hgms_mix.stages.sample import Sampling as Sampling
    from hgms_mix.stages.stage_folder import Done as Done
    from hgms_mix.stages.summary import LEASES as LEASES
    from hgms_mix.stages.summary import carry_out as carry_out
    from hgms_mix.stages.summary import claimed as claimed
    from hgms_mix.stages.summary import finished as finished
    from hgms_mix.stages.summary import mix_path as mix_path
    from hgms_mix.stages.work import read_rows as read_rows


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms_mix.stages.command import mix

    cli.add_command(mix)


_SHARED = {
    "Done": "stage_folder",
    "LEASES": "summary",
    "Mix": "mix",
    "MixConfig": "config",
    "OF_GRIDS": "config",
    "STAGES": "mix",
    "Sampling": "sample",
    "carry_out": "summary",
    "claimed": "summary",
    "finished": "summary",
    "load": "config",
    "mix_path": "summary",
    "read": "config",
    "read_rows": "work",
    "resolved": "config",
}
"""Names for other programs, and their modules. They are imported on first access, because
every command line imports this package.
"""


def __getattr__(name: str) -> Any:
    if name not in _SHARED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_SHARED[name]}"), name)
