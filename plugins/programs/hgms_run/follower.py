"""``python -m hgms_run.follower``: another rank than 0 of a run, as that starts it."""

from __future__ import annotations

import torch

from hgms_core.registry import Registry
from hgms_ranks import Ranks, begun, device_of, join
from hgms_run.config import RunConfig
from hgms_run.rank import follow_config


def main() -> None:
    """A rank that another process has started (:func:`hgms_ranks.start`)."""
    told, ready = begun()
    config = RunConfig.from_dict(told["config"], registry=Registry.load(told["plugins"]))
    device = device_of(torch.device(config.run.device), told["rank"])
    ready()
    join(told["rank"], told["count"], device, told["method"])
    follow_config(config, device, Ranks(told["rank"], told["count"]))


if __name__ == "__main__":
    main()
