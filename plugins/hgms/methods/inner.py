"""The pipeline inside a wrapper, and the best of its states."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from attrs import Attribute
from torch.utils._pytree import tree_map

from hgms.facts import innermost
from hgms_core import ConfigError, Pipeline, Problem, State


def another(problem: Problem, key: Hashable, make: Callable[[], Problem]) -> Problem:
    """Return a wrapper's problem for this problem, the same object at every step.

    Compiled functions and recorded values are cached by its losses. This problem refers to the new
    problem. The new problem must not refer back: the memory of a reference cycle is released late.
    """
    if key not in problem.kept:
        problem.kept[key] = make()
    other: Problem = problem.kept[key]
    return other


def around_a_pipeline(_wrapper: object, attribute: Attribute[Any], value: Any) -> None:
    """Require that a wrapper's method is a pipeline, since the wrapper relies on a pipeline's
    state.
    """
    if not isinstance(innermost(value), Pipeline):
        raise ConfigError(
            "wrong-value",
            f"{attribute.name}={value.name!r} must be a pipeline, or a wrapper around a pipeline",
            place=(attribute.name,),
        )


def check_stop_rows(problem: Problem) -> None:
    """Require the validation rows on which ``keep = "best"`` compares states."""
    if "stop" not in problem.upper_data:
        raise ConfigError(
            "no-rows-for-role",
            "keep='best' requires validation rows in the role 'stop', but there are 0",
            place=("method", "keep"),
            hint='set keep = "last", or add rows with this role',
        )


def better(found: State, best: State | None) -> State:
    """Return the state with the lower loss. The host does not wait for an accelerator."""
    if best is None:
        return found
    is_better = (found["loss"] < best["loss"]) | ~torch.isfinite(best["loss"])
    if is_better.device.type == "cpu":
        return found if is_better else best
    chosen: State = tree_map(partial(torch.where, is_better), found, best)
    return chosen
