"""Runs on several ranks: how rank 0 gets the others, and what they do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs
import torch
from click.exceptions import Exit

from hgms.compiled import matrix_route
from hgms.distributed import (
    LAUNCHED,
    OnRanks,
    Ranks,
    device_of,
    ensure_launched,
    follow,
    join,
    launched,
    placed,
    start,
)
from hgms.runs.config import RunConfig, RunSettings
from hgms_core import ConfigError, Method, Problem

OBJECTS_ON_RANKS = (
    "a run on ranks is in several processes, and objects of this one cannot be in the others @ "
    "run.ranks\n"
    "  write the task and the method as components with names, and run their configuration"
)


@contextlib.contextmanager
def on_ranks(
    config: RunConfig, device: torch.device, plugins: list[str]
) -> Iterator[tuple[Method, RunSettings]]:
    """The method of a configuration, with its parts on ``run.ranks`` ranks while this lasts, and
    the settings that a run on ranks has: nothing is compiled, and matrix products take one route.

    Errors: ConfigError for a method without parts, for objects of this process alone, for ``compile
    = true`` and ``diagnose``, and where torchrun has started another number."""
    settings = config.run
    count = config.run.ranks
    if count == 1:
        yield config.method, settings
        return
    if config.own:
        raise ConfigError(OBJECTS_ON_RANKS)
    if settings.compile is True:
        raise ConfigError(
            "compile = true is for one rank @ run.compile\n  leave it out, or set run.ranks = 1"
        )
    if settings.diagnose is not None:
        raise ConfigError(
            "a run on ranks cannot be diagnosed beside @ run.diagnose\n"
            "  leave it out, or set run.ranks = 1"
        )
    exact = attrs.evolve(
        settings, compile=False, matmul="exact" if settings.matmul == "auto" else settings.matmul
    )
    before = torch.get_num_threads()
    if launched() is None:
        threads = settings.threads or max(1, before // count)
        torch.set_num_threads(threads)
        arguments = {"config": config.resolved(), "plugins": plugins}
        ranks = start(count, device, "hgms.runs.follower", arguments, threads)
    else:
        rank = ensure_launched(count)
        ranks = Ranks(rank, count)
        join(rank, count, device_of(device, rank), LAUNCHED)
    try:
        with contextlib.closing(ranks):
            sharded = is_sharded(config)
            yield OnRanks(placed(config.method, count, device, sharded), ranks, sharded), exact
    finally:
        torch.set_num_threads(before)


def follow_launched(config: RunConfig, device: torch.device) -> None:
    """Where torchrun has started this process as another rank than 0: follows, and exits when
    the run is over.
    """
    if config.run.ranks == 1 or launched() is None or ensure_launched(config.run.ranks) == 0:
        return
    follow_run(config, device)
    raise Exit(0)


def follow_run(config: RunConfig, device: torch.device) -> None:
    """What another rank than 0 that torchrun has started does while rank 0 carries out this run."""
    rank = ensure_launched(config.run.ranks)
    device = device_of(device, rank)
    ranks = Ranks(rank, config.run.ranks)
    join(rank, ranks.count, device, LAUNCHED)
    with contextlib.closing(ranks):
        follow_config(config, device, ranks)


def follow_config(config: RunConfig, device: torch.device, ranks: Ranks) -> None:
    """What another rank does with a configuration: it builds the same problem, and follows."""

    def make() -> Problem:
        problem: Problem = config.task.problem(
            config.seed, device, getattr(torch, config.run.dtype)
        )
        return problem

    route = config.run.matmul if config.run.matmul != "auto" else "exact"
    with matrix_route(route, device):
        follow(placed(config.method, ranks.count, device, is_sharded(config)), make, ranks)


def is_sharded(config: RunConfig) -> bool:
    """Whether each rank holds a part of the task's model alone."""
    return bool(getattr(config.task, "sharded", False))
