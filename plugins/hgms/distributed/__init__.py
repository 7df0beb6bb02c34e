"""One run on many ranks: branches and rows placed on processes, each with its cores or its GPU.

This package is a library for programs.
"""

from __future__ import annotations

from hgms.distributed.group import (
    LIBRARIES,
    RankLost,
    Ranks,
    begun,
    describe_exit,
    device_of,
    join,
    start,
)
from hgms.distributed.launcher import LAUNCHED, alone, ensure_launched, launched
from hgms.distributed.mesh import Mesh
from hgms.distributed.method import OnRanks, follow
from hgms.distributed.placing import placed
from hgms.distributed.rows import by_rows

__all__ = [
    "LAUNCHED",
    "LIBRARIES",
    "Mesh",
    "OnRanks",
    "RankLost",
    "Ranks",
    "alone",
    "begun",
    "by_rows",
    "describe_exit",
    "device_of",
    "ensure_launched",
    "follow",
    "join",
    "launched",
    "placed",
    "start",
]
