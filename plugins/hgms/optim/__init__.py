"""Lower optimisers, and optimisers and schedules of torch as functions of values."""

from __future__ import annotations

from hgms.optim.lower import SGD as SGD
from hgms.optim.lower import AdamW as AdamW
from hgms.optim.lower import Clip as Clip
from hgms.optim.lower import Cosine as Cosine
from hgms.optim.lower import LowerOptimizer as LowerOptimizer
from hgms.optim.lower import Torch as Torch
from hgms.optim.stepper import Build as Build
from hgms.optim.stepper import Stepper as Stepper
from hgms.optim.timetable import Schedule as Schedule
from hgms.optim.timetable import Timetable as Timetable
from hgms.optim.timetable import timetable_of as timetable_of
