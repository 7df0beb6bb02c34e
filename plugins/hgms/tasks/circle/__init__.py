"""Tasks `circle-kink` and `circle-degenerate`: the paper's examples of non-smooth
hyper-objectives.
"""

from __future__ import annotations

from hgms.tasks.circle.degenerate import CircleDegenerate as CircleDegenerate
from hgms.tasks.circle.degenerate import DegenerateClosedForm as DegenerateClosedForm
from hgms.tasks.circle.kink import CircleKink as CircleKink
from hgms.tasks.circle.kink import KinkClosedForm as KinkClosedForm
from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [CircleKink, CircleDegenerate]
