"""Outer optimisers `sgd`, `projected-gradient`, `adam`, `adamw`, `exponentiated-gradient`, `dual-averaging` and `split`."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_outer.additive import Adam as Adam
from hgms_outer.additive import AdamW as AdamW
from hgms_outer.additive import ProjectedGradient as ProjectedGradient
from hgms_outer.additive import Sgd as Sgd
from hgms_outer.averaging import DualAveraging as DualAveraging
from hgms_outer.exponentiated import ExponentiatedGradient as ExponentiatedGradient
from hgms_outer.shape import Projection as Projection
from hgms_outer.shape import Schedule as Schedule
from hgms_outer.split import Split as Split
from hgms_outer.torch_optimizer import TorchOptimizer as TorchOptimizer


@hookimpl
def hgms_register_outer_optimizers() -> list[type]:
    return [Sgd, ProjectedGradient, Adam, AdamW, ExponentiatedGradient, DualAveraging, Split, TorchOptimizer]
