"""Hypergradients `implicit`, `unrolled`, `one-step`, `through-step`, `aligned`, `sama`,
`averaged`, `carried` and `fixed`.
"""

from __future__ import annotations

from hgms.hypergradients.aligned import Aligned as Aligned
from hgms.hypergradients.averaged import Averaged as Averaged
from hgms.hypergradients.carried import Carried as Carried
from hgms.hypergradients.fixed import Fixed as Fixed
from hgms.hypergradients.implicit import Implicit as Implicit
from hgms.hypergradients.one_step import OneStep as OneStep
from hgms.hypergradients.sama import Sama as Sama
from hgms.hypergradients.through_step import ThroughStep as ThroughStep
from hgms.hypergradients.unrolled import Unrolled as Unrolled
from hgms_core import hookimpl


@hookimpl
def hgms_register_hypergradients() -> list[type]:
    return [Implicit, Unrolled, OneStep, ThroughStep, Aligned, Sama, Averaged, Carried, Fixed]
