"""``python -m hgms.runs.follower``: a rank other than 0, started by rank 0 of a run."""

from __future__ import annotations

import torch

from hgms.distributed import Ranks, begin_rank, device_of, join
from hgms.plugins import Registry
from hgms.runs.config import RunConfig
from hgms.runs.rank import follow_config


def main() -> None:
    """Follow a run as a rank that another process started (:func:`hgms.distributed.start`)."""
    told, ready = begin_rank()
    config = RunConfig.from_dict(told["config"], registry=Registry.load(told["plugins"]))
    device = device_of(torch.device(config.run.device), told["rank"])
    ready()
    join(told["rank"], told["count"], device, told["method"])
    follow_config(config, device, Ranks(told["rank"], told["count"]))


if __name__ == "__main__":
    main()
