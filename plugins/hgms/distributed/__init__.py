"""One run on many ranks: branches and rows placed on processes, each with its cores or its GPU.

This package is a library for programs.
"""

from __future__ import annotations

from hgms.distributed.group import (
    LIBRARIES,
    RankLost,
    Ranks,
    begin_rank,
    describe_exit,
    device_of,
    join,
    start,
)
from hgms.distributed.launcher import LAUNCHED, alone, ensure_launched, launcher_rank
from hgms.distributed.mesh import Mesh
from hgms.distributed.method import OnRanks, follow
from hgms.distributed.placement import place_parts
from hgms.distributed.rows import by_rows

__all__ = [
    "LAUNCHED",
    "LIBRARIES",
    "Mesh",
    "OnRanks",
    "RankLost",
    "Ranks",
    "alone",
    "begin_rank",
    "by_rows",
    "describe_exit",
    "device_of",
    "ensure_launched",
    "follow",
    "join",
    "launcher_rank",
    "place_parts",
    "start",
]
