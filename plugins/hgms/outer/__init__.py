"""Outer optimisers `sgd`, `projected-gradient`, `adam`, `adamw`, `exponentiated-gradient`,
`dual-averaging` and `split`.
"""

from __future__ import annotations

from hgms.outer.additive import Adam as Adam
from hgms.outer.additive import AdamW as AdamW
from hgms.outer.additive import ProjectedGradient as ProjectedGradient
from hgms.outer.additive import Sgd as Sgd
from hgms.outer.averaging import DualAveraging as DualAveraging
from hgms.outer.exponentiated import ExponentiatedGradient as ExponentiatedGradient
from hgms.outer.shape import Projection as Projection
from hgms.outer.shape import Schedule as Schedule
from hgms.outer.split import Split as Split
from hgms.outer.torch_optimizer import TorchOptimizer as TorchOptimizer
from hgms_core import hookimpl


@hookimpl
def hgms_register_outer_optimizers() -> list[type]:
    return [
        Sgd,
        ProjectedGradient,
        Adam,
        AdamW,
        ExponentiatedGradient,
        DualAveraging,
        Split,
        TorchOptimizer,
    ]
