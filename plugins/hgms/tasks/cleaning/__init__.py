"""Task `hyper-cleaning`: learn one weight per training example from a few clean validation
images.
"""

from __future__ import annotations

from hgms.tasks.cleaning.task import HyperCleaning as HyperCleaning
from hgms.tasks.cleaning.task import Start as Start
from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [HyperCleaning]
