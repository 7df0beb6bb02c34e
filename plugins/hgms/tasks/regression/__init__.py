"""Tasks `ridge-cv` and `logistic-cv`: tune one penalty per feature on rows of real tables."""

from __future__ import annotations

from hgms.tasks.regression.logistic import LogisticCv as LogisticCv
from hgms.tasks.regression.newton import LogisticClosedForm as LogisticClosedForm
from hgms.tasks.regression.ridge import RidgeCv as RidgeCv
from hgms.tasks.regression.tables import Table as Table
from hgms.tasks.regression.tables import load_table as load_table
from hgms.tasks.ridge_closed_form import RidgeClosedForm as RidgeClosedForm
from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [RidgeCv, LogisticCv]
