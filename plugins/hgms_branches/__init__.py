"""Candidate generator `branches`: N runs of SGD or AdamW."""

from __future__ import annotations

from hgms_branches.branches import Branches as Branches
from hgms_core import hookimpl


@hookimpl
def hgms_register_generators() -> list[type]:
    return [Branches]
