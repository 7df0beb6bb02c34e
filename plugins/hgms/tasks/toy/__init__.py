"""Task `toy-penalty`: the numerical example of the paper on penalty methods, with many starts."""

from __future__ import annotations

from hgms.tasks.toy.task import ToyPenalty as ToyPenalty
from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [ToyPenalty]
