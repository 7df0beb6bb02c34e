"""Tasks `ridge-cv` and `logistic-cv`: one penalty per feature of a regression, chosen on validation rows of real tables."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_task_regression.logistic import LogisticCv as LogisticCv
from hgms_task_regression.newton import LogisticClosedForm as LogisticClosedForm
from hgms_task_regression.ridge import RidgeClosedForm as RidgeClosedForm
from hgms_task_regression.ridge import RidgeCv as RidgeCv
from hgms_task_regression.tables import Table as Table
from hgms_task_regression.tables import load_table as load_table


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [RidgeCv, LogisticCv]
