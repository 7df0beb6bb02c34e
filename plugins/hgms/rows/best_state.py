"""The best of the states of a method, by the loss on the rows in the role ``stop``."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils._pytree import tree_map

from hgms_core import ConfigError, Problem, State


def check_stop_rows(problem: Problem) -> None:
    """Require the validation rows on which ``keep = "best"`` compares states."""
    if "stop" not in problem.upper_data:
        raise ConfigError(
            "no-rows-for-role",
            "keep='best' requires validation rows in the role 'stop', but there are 0",
            place=("method", "keep"),
            hint='set keep = "last", or add rows with this role',
        )


def require_stop_rows(problem: Problem, method: str) -> None:
    """Require validation rows in the role ``stop`` for a method that always uses them."""
    if "stop" not in problem.upper_data:
        raise ConfigError(
            "no-rows-for-role",
            f"method {method!r} requires validation rows in the role 'stop', but there are 0",
            place=("method",),
        )


def better_state(found: State, best: State | None) -> State:
    """Return the state with the lower loss. The host does not wait for an accelerator."""
    if best is None:
        return found
    is_better = (found["loss"] < best["loss"]) | ~torch.isfinite(best["loss"])
    if is_better.device.type == "cpu":
        return found if is_better else best
    return tree_map(partial(torch.where, is_better), found, best)
