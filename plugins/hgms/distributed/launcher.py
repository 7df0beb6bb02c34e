"""Ranks that a launcher such as torchrun has started.

The module reads the launcher's settings, provides meeting points, and sends calls from rank 0 to
the other ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hgms_core import ConfigError

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables with which a launcher identifies this rank; libraries read only the first three."""
NEVER = timedelta(days=365)
"""Time limit for waiting ranks: rank 0 may do other work for any length of time. If rank 0 ends,
the launcher ends the other ranks.
"""


def launched() -> tuple[int, int] | None:
    """Return (rank, number of ranks) if a launcher such as torchrun started this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def ensure_launched(count: int) -> int:
    """Return this process's rank under torchrun.

    Errors: ConfigError if torchrun started a different number of ranks.
    """
    place = launched()
    assert place is not None
    if place[1] != count:
        raise ConfigError(
            "wrong-value",
            f"ranks={count}, but torchrun has started {place[1]} processes",
            place=("run", "ranks"),
            hint=f"use torchrun --nproc-per-node {count}, or set run.ranks = {place[1]}",
        )
    return place[0]


_MET: dict[str, Any] = {"groups": 0, "calls": 0}


def meeting(rank: int, count: int) -> Any:
    """Return an empty meeting point for the next group of launched ranks.

    It contains no data of an earlier group.
    """
    _MET["groups"] += 1
    return dist.PrefixStore(f"hgms-group-{_MET['groups']}", _store(rank, count))


def _store(rank: int, count: int) -> Any:
    if "store" not in _MET:
        _MET["store"] = next(rendezvous("env://", rank, count, timeout=timedelta(minutes=30)))[0]
    return _MET["store"]


def call(what: Mapping[str, Any] | None) -> None:
    """Send a call from rank 0 to the other launched ranks; None ends them.

    The other ranks may have been waiting for a long time.
    """
    place = launched()
    assert place is not None
    _MET["calls"] += 1
    _store(*place).set(f"hgms-call-{_MET['calls']}", json.dumps(what))


def heard() -> Any:
    """Return the next call of rank 0, on another launched rank."""
    place = launched()
    assert place is not None
    _MET["calls"] += 1
    key = f"hgms-call-{_MET['calls']}"
    store = _store(*place)
    store.wait([key], NEVER)
    return json.loads(store.get(key))


@contextlib.contextmanager
def as_launched(rank: int, count: int) -> Iterator[None]:
    """Set the environment variables of this rank as torchrun does, inside the context.

    Libraries such as accelerate read them.
    """
    threads = str(torch.get_num_threads())
    own = {"RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": threads}
    if launched() is None:
        own |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    with _environment(own):
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Remove all variables about ranks from the environment, inside the context.

    A single rank can then use such a library without the other ranks.
    """
    with _environment(dict.fromkeys(PLACE)):
        yield


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set these variables, and restore them afterwards.

    The variables that accelerate sets in addition are restored too.
    """
    before = {
        name: os.environ.get(name) for name in (*changes, *PLACE, "MASTER_ADDR", "MASTER_PORT")
    }
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
