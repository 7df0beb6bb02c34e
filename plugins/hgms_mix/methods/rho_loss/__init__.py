"""RHO-LOSS, method `rho-loss`: select training rows by the part of their loss that can be learned.

A reference model estimates this part.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.rho_loss.rho_loss import Reference as Reference
from hgms_mix.methods.rho_loss.rho_loss import RhoLoss as RhoLoss


@hookimpl
def hgms_register_methods() -> list[type]:
    return [RhoLoss]
