"""LESS, method `less`: select training rows by the influence of their gradients on validation
rows.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.less.less import GradientProjection as GradientProjection
from hgms_mix.methods.less.less import Less as Less
from hgms_mix.methods.less.less import Warmup as Warmup


@hookimpl
def hgms_register_methods() -> list[type]:
    return [Less]
