"""RDS+, method `rds`: select training rows with representations similar to validation rows.

Validation rows take turns.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.rds.rds import Rds as Rds


@hookimpl
def hgms_register_methods() -> list[type]:
    return [Rds]
