"""Stages that all ranks of a mix (``run.ranks``) run together.

Rank 0 runs the mix and calls the other ranks for a stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from hgms.distributed import (
    LAUNCHED,
    Ranks,
    alone,
    as_launched,
    call,
    ensure_launched,
    join,
    launched,
    start,
)
from hgms.plugins import Host
from hgms.runs import unannounced
from hgms_mix.stages.config import resolved
from hgms_mix.stages.stage import Stage

if TYPE_CHECKING:
    from hgms_mix.stages.config import MixConfig
    from hgms_mix.stages.work import Work

AGAIN = "the same command"
"""The command to repeat after a rank was lost."""


@contextlib.contextmanager
def together(mix: Work, stage: Stage, folder: Path) -> Iterator[Ranks | None]:
    """Yield all ranks of the mix to rank 0 during this stage.

    The other ranks run :meth:`Stage.follow`. Yield None if the mix has one rank, or if one rank
    runs the stage.

    Errors: RankLost if one of the ranks is gone; ConfigError if a rank cannot start.
    """
    if not stage.parted(mix):
        with alone() if mix.config.run.ranks > 1 else contextlib.nullcontext():
            yield None
        return
    what = _assignment(mix, stage, folder)
    with (
        threads_of(mix.config) as threads,
        _joined(mix, what, threads) as ranks,
        ranks.together(stage.name, AGAIN),
        as_launched(0, ranks.count),
    ):
        yield ranks
        mix.others_seconds += float(ranks.total(torch.zeros((), dtype=torch.float64)))


@contextlib.contextmanager
def _joined(mix: Work, what: Mapping[str, Any], threads: int) -> Iterator[Ranks]:
    config = mix.config
    if launched() is None:
        host = config.host or Host.load()
        arguments = {**what, "config": resolved(config), "plugins": unannounced(host)}
        ranks = start(config.run.ranks, mix.device, "hgms_mix.stages.follower", arguments, threads)
    else:
        ranks = Ranks(ensure_launched(config.run.ranks), config.run.ranks)
        call(what)
        join(ranks.rank, ranks.count, mix.device, LAUNCHED)
    try:
        yield ranks
    finally:
        ranks.close(say=False)  # the other ranks detect the end of the stage


def _assignment(mix: Work, stage: Stage, folder: Path) -> dict[str, Any]:
    done = {
        name: {**attrs.asdict(before, recurse=False), "path": str(before.path)}
        for name, before in mix.done.items()
    }
    return {"stage": stage.name, "at": str(mix.folder), "folder": str(folder), "done": done}


def call_to_reweight(config: MixConfig) -> None:
    """Notify the other ranks of the start of the run, if torchrun started the ranks."""
    if config.run.ranks > 1 and launched() is not None:
        call({"stage": "reweight"})


def call_off(config: MixConfig) -> None:
    """Notify the other ranks of the end of the mix, if torchrun started the ranks."""
    if config.run.ranks > 1 and launched() is not None:
        call(None)


@contextlib.contextmanager
def threads_of(config: MixConfig) -> Iterator[int]:
    """Set and yield the threads of a rank.

    The number is ``run.threads``, or an equal share of the threads of this process.
    """
    before = torch.get_num_threads()
    own = config.run.threads or (
        max(1, before // config.run.ranks) if launched() is None else before
    )
    torch.set_num_threads(own)
    try:
        yield own
    finally:
        torch.set_num_threads(before)
