"""Ranks that torchrun or the like has started: what it says of them, where they meet, and which
of rank 0's calls they hear.
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
"""Where a launcher says which rank this process is; the first three are all that a library
reads.
"""
NEVER = timedelta(days=365)
"""Rank 0 may be at something of its own for as long as it likes; where it is gone, the launcher
ends the others.
"""


def launched() -> tuple[int, int] | None:
    """(This process's rank, their number), where torchrun or the like has started it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def ensure_launched(count: int) -> int:
    """This process's rank under torchrun. Errors: ConfigError where that started another number."""
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
    """A place for the next group of launched ranks to meet, with nothing of an earlier one in
    it.
    """
    _MET["groups"] += 1
    return dist.PrefixStore(f"hgms-group-{_MET['groups']}", _store(rank, count))


def _store(rank: int, count: int) -> Any:
    if "store" not in _MET:
        _MET["store"] = next(rendezvous("env://", rank, count, timeout=timedelta(minutes=30)))[0]
    return _MET["store"]


def call(what: Mapping[str, Any] | None) -> None:
    """Rank 0 calls the other launched ranks to something; None: it is over. They may be waiting
    for it since long ago.
    """
    place = launched()
    assert place is not None
    _MET["calls"] += 1
    _store(*place).set(f"hgms-call-{_MET['calls']}", json.dumps(what))


def heard() -> Any:
    """What rank 0 calls for next, on another launched rank."""
    place = launched()
    assert place is not None
    _MET["calls"] += 1
    key = f"hgms-call-{_MET['calls']}"
    store = _store(*place)
    store.wait([key], NEVER)
    return json.loads(store.get(key))


@contextlib.contextmanager
def as_launched(rank: int, count: int) -> Iterator[None]:
    """Inside, the environment says of this rank what torchrun would have said, for libraries
    that look there (accelerate).
    """
    threads = str(torch.get_num_threads())
    own = {"RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": threads}
    if launched() is None:
        own |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    with _environment(own):
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, the environment says nothing of ranks: for what one of them does by itself with
    such a library.
    """
    with _environment(dict.fromkeys(PLACE)):
        yield


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """These variables, and those that accelerate sets beside them, have their old values
    afterwards.
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
