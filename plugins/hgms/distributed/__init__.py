"""One run on many ranks: branches and rows placed on processes, each with its cores or its GPU.

This package is a library for programs.
"""

from __future__ import annotations

from hgms.distributed.group import LAUNCHED, RankLost, Ranks, begun, device_of, join, start
from hgms.distributed.launcher import alone, as_launched, call, ensure_launched, heard, launched
from hgms.distributed.mesh import Mesh
from hgms.distributed.method import OnRanks, follow
from hgms.distributed.placing import placed
from hgms.distributed.rows import by_rows

__all__ = [
    "LAUNCHED",
    "Mesh",
    "OnRanks",
    "RankLost",
    "Ranks",
    "alone",
    "as_launched",
    "begun",
    "by_rows",
    "call",
    "device_of",
    "ensure_launched",
    "follow",
    "heard",
    "join",
    "launched",
    "placed",
    "start",
]
