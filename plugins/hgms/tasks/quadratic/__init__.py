"""Task `quadratic`: ridge regression with a closed-form hypergradient."""

from __future__ import annotations

from hgms.tasks.quadratic.task import Quadratic as Quadratic
from hgms.tasks.quadratic.task import RidgeClosedForm as RidgeClosedForm
from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [Quadratic]
