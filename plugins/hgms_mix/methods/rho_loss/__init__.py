"""RHO-LOSS: choose training rows by how much of their loss a reference model says can be
learned: method `rho-loss`.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.rho_loss.rho_loss import RhoLoss as RhoLoss


@hookimpl
def hgms_register_methods() -> list[type]:
    return [RhoLoss]
