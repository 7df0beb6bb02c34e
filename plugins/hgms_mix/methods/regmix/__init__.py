"""RegMix: short runs at random mixtures, a regression of their validation losses, the best
predicted mixture: `regmix`.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.regmix.regmix import RegMix as RegMix


@hookimpl
def hgms_register_methods() -> list[type]:
    return [RegMix]
