"""The part of a rank other than 0 in the stages of a mix.

``python -m hgms_mix.stages.follower`` is a process that rank 0 started for one stage.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from click.exceptions import Exit

from hgms.distributed import (
    LAUNCHED,
    Ranks,
    as_launched,
    begun,
    ensure_launched,
    heard,
    join,
    launched,
)
from hgms.plugins import Registry
from hgms.runs import device_called, follow_run
from hgms_core import ConfigError, HgmsError
from hgms_mix.stages.config import MixConfig, read
from hgms_mix.stages.mix import STAGES
from hgms_mix.stages.on_ranks import AGAIN, threads_of
from hgms_mix.stages.stage_folder import Done
from hgms_mix.stages.work import Work


def follow_started() -> None:
    """Run the part of a process that rank 0 started for a stage."""
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
    while (assignment := heard()) is not None:
        with threads_of(config):
            if assignment["stage"] == "reweight":
                follow_run(config.reweight, device_called(config.run.device))
            else:
                _follow(config, assignment, rank, LAUNCHED, time.process_time())
    raise Exit(0)


def _follow(
    config: MixConfig, assignment: Mapping[str, Any], rank: int, method: str, began: float = 0.0
) -> None:
    """Run this rank's part of a stage.

    ``began``: processor seconds of this process before the stage.
    """
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
    mix = Work(config, Path(assignment["at"]), rank=rank)
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


if __name__ == "__main__":
    follow_started()
