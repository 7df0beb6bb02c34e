"""Tasks `circle-kink` and `circle-degenerate`: the paper's two examples of how a hyper-objective loses smoothness."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_task_circle.degenerate import CircleDegenerate as CircleDegenerate
from hgms_task_circle.degenerate import DegenerateClosedForm as DegenerateClosedForm
from hgms_task_circle.kink import CircleKink as CircleKink
from hgms_task_circle.kink import KinkClosedForm as KinkClosedForm


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [CircleKink, CircleDegenerate]
