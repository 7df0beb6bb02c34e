"""Candidate generators `branches` (N runs of SGD or AdamW) and `trajectory` (the iterates of one
run), and the wrapper `restarts` of any generator.
"""

from __future__ import annotations

from hgms.generators.branches.branches import Branches as Branches
from hgms.generators.branches.branches import Diversity as Diversity
from hgms.generators.branches.restarts import Restarts as Restarts
from hgms.generators.branches.trajectory import Trajectory as Trajectory
from hgms_core import hookimpl


@hookimpl
def hgms_register_generators() -> list[type]:
    return [Branches, Trajectory, Restarts]
