"""Task `quadratic`: ridge regression with a closed-form hypergradient."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_task_quadratic.task import Quadratic as Quadratic
from hgms_task_quadratic.task import RidgeClosedForm as RidgeClosedForm


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [Quadratic]
