"""One run on many ranks: branches and rows placed on processes, each with its cores or its GPU. A library of programs."""

from __future__ import annotations

from hgms_ranks.group import READY, RankLost, Ranks, device_of, ensure_launched, join, launched, start
from hgms_ranks.mesh import Mesh
from hgms_ranks.method import OnRanks, follow
from hgms_ranks.placing import placed
from hgms_ranks.rows import by_rows

__all__ = [
    "READY", "Mesh", "OnRanks", "RankLost", "Ranks", "by_rows", "device_of", "ensure_launched", "follow", "join", "launched",
    "placed", "start",
]  # fmt: skip
