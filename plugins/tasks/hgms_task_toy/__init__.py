"""Task `toy-penalty`: the numerical example of the paper on penalty methods, from many starts at once."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_task_toy.task import ToyPenalty as ToyPenalty


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [ToyPenalty]
