"""Stages that all ranks of a mix (``run.ranks``) make together: rank 0 is the mix, the others
are called for a stage.
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
from hgms.runs import follow_run, unannounced
from hgms_core import ConfigError, HgmsError
from hgms_core.host import Host
from hgms_core.registry import Registry
from hgms_mix.stages.stage import Done, Stage

if TYPE_CHECKING:
    from hgms_mix.stages.config import MixConfig
    from hgms_mix.stages.mix import Mix

AGAIN = "the same command"
"""What goes on after a rank was lost."""


@contextlib.contextmanager
def together(mix: Mix, stage: Stage, folder: Path) -> Iterator[Ranks | None]:
    """All ranks of the mix, as rank 0 has them while it makes this stage: each of the others is
    then in :meth:`Stage.follow`. None where the mix has one rank, or the stage is made by one.

    Errors: RankLost where one of them is gone; ConfigError where one cannot begin.
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
        ranks.close(say=False)  # the others know where the stage ends


def _assignment(mix: Mix, stage: Stage, folder: Path) -> dict[str, Any]:
    done = {
        name: {**attrs.asdict(before, recurse=False), "path": str(before.path)}
        for name, before in mix.done.items()
    }
    return {"stage": stage.name, "at": str(mix.folder), "folder": str(folder), "done": done}


def follow_started() -> None:
    """What a process does that rank 0 has started for a stage."""
    from hgms_mix.stages.config import read

    assignment, ready = begun()
    try:
        config = read(
            assignment["config"], "the mix", registry=Registry.load(assignment["plugins"])
        )
        ready()
        _follow(config, assignment, assignment["rank"], assignment["method"])
    except HgmsError as error:  # rank 0 quotes the last line, where it has not met the error itself
        sys.exit("; ".join(line.strip() for line in error.lines()))


def follow_launched(config: MixConfig) -> None:
    """Where torchrun has started this process as another rank than 0 of a mix: it does what rank 0
    calls for, and exits when the mix is over."""
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
    """Where torchrun has started the ranks: the others are told that the run begins."""
    if config.run.ranks > 1 and launched() is not None:
        call({"stage": "reweight"})


def call_off(config: MixConfig) -> None:
    """Where torchrun has started the ranks: the others are told that the mix is over."""
    if config.run.ranks > 1 and launched() is not None:
        call(None)


def _follow(
    config: MixConfig, assignment: Mapping[str, Any], rank: int, method: str, began: float = 0.0
) -> None:
    """This rank's part of a stage. ``began``: the processor seconds of this process that were
    none of it.
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
    """The threads of a rank: ``run.threads``, else an equal share of what this process has."""
    before = torch.get_num_threads()
    own = config.run.threads or (
        max(1, before // config.run.ranks) if launched() is None else before
    )
    torch.set_num_threads(own)
    try:
        yield own
    finally:
        torch.set_num_threads(before)
