"""Task `many-minima`: a network whose lower level has many minima that differ in upper value."""

from __future__ import annotations

from hgms.tasks.minima.task import ManyMinima as ManyMinima
from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [ManyMinima]
