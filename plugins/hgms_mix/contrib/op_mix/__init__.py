"""OP-Mix: mixtures simulated by interpolating one trained state a source, a law of their losses,
the best mixture: `op-mix`.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.contrib.op_mix.op_mix import OpMix as OpMix


@hookimpl
def hgms_register_methods() -> list[type]:
    return [OpMix]
