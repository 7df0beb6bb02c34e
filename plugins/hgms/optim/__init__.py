"""Optimisers and schedules of torch as functions of values.

Components use them to step an optimiser, save it and resume.
"""

from __future__ import annotations

from hgms.optim.stepper import Build as Build
from hgms.optim.stepper import Stepper as Stepper
from hgms.optim.stepper import needs_closure as needs_closure
from hgms.optim.timetable import Schedule as Schedule
from hgms.optim.timetable import Timetable as Timetable
