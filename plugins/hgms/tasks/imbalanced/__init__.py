"""Task `imbalanced-loss`: learn shifts and scales of logits in the loss, for rare classes."""

from __future__ import annotations

from hgms.tasks.imbalanced.task import Adjustment as Adjustment
from hgms.tasks.imbalanced.task import ImbalancedLoss as ImbalancedLoss
from hgms.tasks.imbalanced.task import Layers as Layers
from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [ImbalancedLoss]
