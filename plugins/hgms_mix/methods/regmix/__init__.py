"""RegMix, method `regmix`: regression from random mixtures to validation losses of short runs.

The method selects the mixture with the best prediction.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.regmix.regmix import RegMix as RegMix


@hookimpl
def hgms_register_methods() -> list[type]:
    return [RegMix]
