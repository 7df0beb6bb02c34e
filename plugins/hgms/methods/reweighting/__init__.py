"""Methods that weight rows of the lower level by their losses or gradients."""

from __future__ import annotations

from hgms.methods.reweighting.agreement import Agreement as Agreement
from hgms.methods.reweighting.learning_to_reweight import LearningToReweight as LearningToReweight
from hgms.methods.reweighting.mw_net import MwNet as MwNet
from hgms.methods.reweighting.out_of_fold import OutOfFoldFilter as OutOfFoldFilter
from hgms.methods.reweighting.small_loss import SmallLoss as SmallLoss
from hgms_core import hookimpl


@hookimpl
def hgms_register_methods() -> list[type]:
    return [LearningToReweight, MwNet, SmallLoss, Agreement]
