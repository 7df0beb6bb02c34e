"""Ranks that a launcher such as torchrun has started.

The module reads the launcher's settings and provides meeting points.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hgms_core import ConfigError

LAUNCHED = "env://"
"""The meeting point of ranks that a launcher has started."""
SILENCE = timedelta(minutes=30)
"""Time without a reply after which a rank counts as lost, even if no process saw it end."""
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables with which a launcher identifies this rank; libraries read only the first three."""


def launcher_rank() -> tuple[int, int] | None:
    """Return (rank, number of ranks) if a launcher such as torchrun started this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def ensure_launched(count: int) -> int:
    """Return this process's rank under torchrun.

    Raises
    ------
    ConfigError
        If torchrun started a different number of ranks.
    """
    place = launcher_rank()
    assert place is not None
    if place[1] != count:
        raise ConfigError(
            "wrong-value",
            f"ranks={count}, but torchrun has started {place[1]} processes",
            place=("run", "ranks"),
            hint=f"use torchrun --nproc-per-node {count}, or set run.ranks = {place[1]}",
        )
    return place[0]


_MET: dict[str, Any] = {"groups": 0}


def meeting(rank: int, count: int) -> Any:
    """Return an empty meeting point for the next group of launched ranks.

    It contains no data of an earlier group.
    """
    _MET["groups"] += 1
    if "store" not in _MET:
        _MET["store"] = next(rendezvous(LAUNCHED, rank, count, timeout=SILENCE))[0]
    return dist.PrefixStore(f"hgms-group-{_MET['groups']}", _MET["store"])


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Remove all variables about ranks from the environment, inside the context.

    A single rank can then use such a library without the other ranks.
    """
    before = dict(os.environ)
    for name in PLACE:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name in (*PLACE, "MASTER_ADDR", "MASTER_PORT"):  # accelerate sets them
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
