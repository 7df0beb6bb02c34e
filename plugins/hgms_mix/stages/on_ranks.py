"""Stages that all ranks of a mix (``run.ranks``) run together.

Rank 0 runs the mix and calls the other ranks for a stage.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from click.exceptions import Exit

from hgms.distributed import (
    LAUNCHED,
    Ranks,
    alone,
    as_launched,
    begun,
    call,
    ensure_launched,
    heard,
    join,
    launched,
    start,
)
from hgms.plugins import Host, Registry
from hgms.runs import follow_run, unannounced
from hgms_core import ConfigError, HgmsError
from hgms_mix.stages.stage import Done, Stage

if TYPE_CHECKING:
    from hgms_mix.stages.config import MixConfig
    from hgms_mix.stages.mix import Mix

AGAIN = "the same command"
"""The command to repeat after a rank was lost."""


@contextlib.contextmanager
def together(mix: Mix, stage: Stage, folder: Path) -> Iterator[Ranks | None]:
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
        _threads(mix.config) as threads,
        _joined(mix, what, threads) as ranks,
        ranks.together(stage.name, AGAIN),
        as_launched(0, ranks.count),
    ):
        yield ranks
        mix.others_seconds += float(ranks.total(torch.zeros((), dtype=torch.float64)))


@contextlib.contextmanager
def _joined(mix: Mix, what: Mapping[str, Any], threads: int) -> Iterator[Ranks]:
    config = mix.config
    if launched() is None:
        from hgms_mix.stages.summary import resolved

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


def _assignment(mix: Mix, stage: Stage, folder: Path) -> dict[str, Any]:
    done = {
        name: {**attrs.asdict(before, recurse=False), "path": str(before.path)}
        for name, before in mix.done.items()
    }
    return {"stage": stage.name, "at": str(mix.folder), "folder": str(folder), "done": done}


def follow_started() -> None:
    """Run the part of a process that rank 0 started for a stage."""
    from hgms_mix.stages.config import read

    assignment, ready = begun()
    try:
        config = read(
            assignment["config"], "the mix", registry=Registry.load(assignment["plugins"])
        )
        ready()
        _follow(config, assignment, assignment["rank"], assignment["method"])
    except HgmsError as error:  # rank 0 quotes the last line, unless it detected the error
        sys.exit("; ".join(line.strip() for line in error.lines()))


def follow_launched(config: MixConfig) -> None:
    """Run the stages that rank 0 calls, and exit at the end of the mix.

    This applies if torchrun started this process as a rank other than 0; otherwise return
    immediately.
    """
    if (
        config.run.ranks == 1
        or launched() is None
        or (rank := ensure_launched(config.run.ranks)) == 0
    ):
        return
    from hgms.runs import device_called

    while (assignment := heard()) is not None:
        with _threads(config):
            if assignment["stage"] == "reweight":
                follow_run(config.reweight, device_called(config.run.device))
            else:
                _follow(config, assignment, rank, LAUNCHED, time.process_time())
    raise Exit(0)


def call_to_reweight(config: MixConfig) -> None:
    """Notify the other ranks of the start of the run, if torchrun started the ranks."""
    if config.run.ranks > 1 and launched() is not None:
        call({"stage": "reweight"})


def call_off(config: MixConfig) -> None:
    """Notify the other ranks of the end of the mix, if torchrun started the ranks."""
    if config.run.ranks > 1 and launched() is not None:
        call(None)


def _follow(
    config: MixConfig, assignment: Mapping[str, Any], rank: int, method: str, began: float = 0.0
) -> None:
    """Run this rank's part of a stage.

    ``began``: processor seconds of this process before the stage.
    """
    from hgms_mix.stages.mix import STAGES, Mix

    if not Path(assignment["at"]).is_dir():
        raise ConfigError(
            "missing-file",
            f"rank {rank} does not find the folder {assignment['at']}",
            place=("run", "out"),
            hint="set out to a folder on a disk that the machines of all ranks share",
        )
    done = {
        name: Done(**{**fields, "path": Path(fields["path"])})
        for name, fields in assignment["done"].items()
    }
    mix = Mix(config, Path(assignment["at"]), rank=rank)
    mix.done.update(done)
    stage = next(stage for stage in STAGES if stage.name == assignment["stage"])
    ranks = Ranks(rank, config.run.ranks)
    join(rank, ranks.count, mix.device, method)
    try:
        with ranks.together(stage.name, AGAIN), as_launched(rank, ranks.count):
            stage.follow(mix, Path(assignment["folder"]), ranks)
            ranks.total(torch.tensor(time.process_time() - began, dtype=torch.float64))
    finally:
        ranks.close(say=False)


@contextlib.contextmanager
def _threads(config: MixConfig) -> Iterator[int]:
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
