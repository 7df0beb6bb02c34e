"""Methods that weigh rows of the lower level by their losses or gradients."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_reweighting.agreement import Agreement as Agreement
from hgms_reweighting.learning_to_reweight import LearningToReweight as LearningToReweight
from hgms_reweighting.mw_net import MwNet as MwNet
from hgms_reweighting.small_loss import SmallLoss as SmallLoss


@hookimpl
def hgms_register_methods() -> list[type]:
    return [LearningToReweight, MwNet, SmallLoss, Agreement]
