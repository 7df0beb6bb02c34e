"""RDS+: choose training rows whose representations are like those of validation rows, in turns:
method `rds`.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.rds.rds import Rds as Rds


@hookimpl
def hgms_register_methods() -> list[type]:
    return [Rds]
