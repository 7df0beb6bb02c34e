"""Task `imbalanced-loss`: shift and scale the logits of a classifier's loss, so that rare
classes are learned too.
"""

from __future__ import annotations

from hgms.tasks.imbalanced.task import ImbalancedLoss as ImbalancedLoss
from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [ImbalancedLoss]
