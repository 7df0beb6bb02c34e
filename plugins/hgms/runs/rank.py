"""Runs on several ranks: how rank 0 gets the others, and what they do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
from hgms_core.components import evolve


def objects_on_ranks(count: int) -> ConfigError:
    """Return the error for a run on several ranks whose task or method is a Python object."""
    return ConfigError(
        "not-supported",
        f"ranks={count} requires a task and a method with registered names, because objects of "
        "this process do not exist in the others",
        place=("run", "ranks"),
        hint="register the task and the method as components, and run a configuration file",
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
        raise objects_on_ranks(count)
    if settings.compile is True:
        raise ConfigError(
            "conflicting-options",
            f"compile=true is not supported with ranks={count}",
            place=("run", "compile"),
            hint="remove it, or set run.ranks = 1",
        )
    if settings.diagnose is not None:
        raise ConfigError(
            "conflicting-options",
            f"diagnose={settings.diagnose} is not supported with ranks={count}",
            place=("run", "diagnose"),
            hint="remove it, or set run.ranks = 1",
        )
    exact = evolve(
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
