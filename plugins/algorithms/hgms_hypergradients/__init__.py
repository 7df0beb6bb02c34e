"""Hypergradients `implicit`, `unrolled`, `one-step`, `through-step`, `aligned`, `sama`, `averaged`, `carried` and `fixed`."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_hypergradients.aligned import Aligned as Aligned
from hgms_hypergradients.averaged import Averaged as Averaged
from hgms_hypergradients.carried import Carried as Carried
from hgms_hypergradients.fixed import Fixed as Fixed
from hgms_hypergradients.implicit import Implicit as Implicit
from hgms_hypergradients.one_step import OneStep as OneStep
from hgms_hypergradients.sama import Sama as Sama
from hgms_hypergradients.through_step import ThroughStep as ThroughStep
from hgms_hypergradients.unrolled import Unrolled as Unrolled


@hookimpl
def hgms_register_hypergradients() -> list[type]:
    return [Implicit, Unrolled, OneStep, ThroughStep, Aligned, Sama, Averaged, Carried, Fixed]
