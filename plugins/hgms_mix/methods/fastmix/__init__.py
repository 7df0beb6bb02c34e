"""FastMix, method `fastmix`: source weights from the agreement of gradients, in one run.

A source gains weight if its gradient agrees with the gradient of the validation loss.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.fastmix.fastmix import FastMix as FastMix


@hookimpl
def hgms_register_methods() -> list[type]:
    return [FastMix]
