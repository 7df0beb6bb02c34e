"""OP-Mix, method `op-mix`: simulate mixtures by interpolation of one trained state per source.

A law of their losses gives the best mixture.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.contrib.op_mix.op_mix import OpMix as OpMix


@hookimpl
def hgms_register_methods() -> list[type]:
    return [OpMix]
