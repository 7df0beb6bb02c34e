"""Hypergradients `implicit`, `unrolled`, `one-step`, `through-step`, `aligned`, `sama`,
`averaged`, `carried` and `fixed`.
"""

from __future__ import annotations

from hgms.hypergradients.alignment import Aligned as Aligned
from hgms.hypergradients.averaging import Averaged as Averaged
from hgms.hypergradients.implicit import Implicit as Implicit
from hgms.hypergradients.one_step import OneStep as OneStep
from hgms.hypergradients.sama import Sama as Sama
from hgms.hypergradients.step_derivative import ThroughStep as ThroughStep
from hgms.hypergradients.unrolling import Unrolled as Unrolled
from hgms.hypergradients.upper_gradient import Carried as Carried
from hgms.hypergradients.zero_gradient import Fixed as Fixed
from hgms_core import hookimpl


@hookimpl
def hgms_register_hypergradients() -> list[type]:
    return [Implicit, Unrolled, OneStep, ThroughStep, Aligned, Sama, Averaged, Carried, Fixed]
