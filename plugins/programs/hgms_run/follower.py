"""``python -m hgms_run.follower``: another rank than 0 of a run, as that starts it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

from hgms_core.registry import Registry
from hgms_ranks import READY, Ranks, device_of, join
from hgms_run.config import RunConfig
from hgms_run.rank import follow_config


def main() -> None:
    """A rank that another process has started (:func:`hgms_ranks.start`)."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a plugin prints is no answer
    told: Mapping[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # rank 0 is gone, or done
    sys.path += [place for place in told["places"] if place not in sys.path]
    torch.set_num_threads(told["threads"])
    config = RunConfig.from_dict(told["config"], registry=Registry.load(told["plugins"]))
    device = device_of(torch.device(config.run.device), told["rank"])
    out.write(READY)
    out.close()
    join(told["rank"], told["count"], device, told["method"])
    follow_config(config, device, Ranks(told["rank"], told["count"]))


if __name__ == "__main__":
    main()
