"""FastMix: weights of sources by how their gradients agree with that of the validation loss, in
one run: method `fastmix`.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.fastmix.fastmix import FastMix as FastMix


@hookimpl
def hgms_register_methods() -> list[type]:
    return [FastMix]
