"""Runs on several ranks: how rank 0 starts the other ranks, and their work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from click.exceptions import Exit

from hgms.arguments import require
from hgms.distributed import (
    LAUNCHED,
    OnRanks,
    Ranks,
    device_of,
    ensure_launched,
    follow,
    join,
    launcher_rank,
    place_parts,
    start,
)
from hgms.runs.config import RunConfig, RunSettings
from hgms.runs.route import matrix_route
from hgms.runs.threads import number_of_threads
from hgms_core import ConfigError, Method, Problem
from hgms_core.capabilities import Sharded, find
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
    """Provide the method on ``run.ranks`` ranks inside the context, and the settings of the run.

    With several ranks, these settings disable compilation and use one route for matrix products.

    Raises
    ------
    ConfigError
        For a method without parts, for objects of this process, for ``compile = true``, for
        ``diagnose``, and if torchrun has started another number of processes.
    """
    settings = config.run
    count = config.run.ranks
    if count == 1:
        yield config.method, settings
        return
    if config.own:
        raise objects_on_ranks(count)
    require(
        settings.compile is not True,
        "conflicting-options",
        f"compile=true is not supported with ranks={count}",
        hint="remove it, or set run.ranks = 1",
        place=("run", "compile"),
    )
    require(
        settings.diagnose is None,
        "conflicting-options",
        f"diagnose={settings.diagnose} is not supported with ranks={count}",
        hint="remove it, or set run.ranks = 1",
        place=("run", "diagnose"),
    )
    exact = evolve(
        settings, compile=False, matmul="exact" if settings.matmul == "auto" else settings.matmul
    )
    with number_of_threads(None):
        if launcher_rank() is None:
            threads = settings.threads or max(1, torch.get_num_threads() // count)
            torch.set_num_threads(threads)
            arguments = {"config": config.as_dict(), "plugins": plugins}
            ranks = start(count, device, "hgms.runs.follower", arguments, threads)
        else:
            rank = ensure_launched(count)
            ranks = Ranks(rank, count)
            join(rank, count, device_of(device, rank), LAUNCHED)
        with contextlib.closing(ranks):
            sharded = is_sharded(config)
            yield OnRanks(place_parts(config.method, count, device, sharded), ranks, sharded), exact


def follow_launched(config: RunConfig, device: torch.device) -> None:
    """Follow the run and exit when it is over, if torchrun started this process as another rank.

    Otherwise, return at once.
    """
    if config.run.ranks == 1 or launcher_rank() is None:
        return
    if (rank := ensure_launched(config.run.ranks)) == 0:
        return
    device = device_of(device, rank)
    ranks = Ranks(rank, config.run.ranks)
    join(rank, ranks.count, device, LAUNCHED)
    with contextlib.closing(ranks):
        follow_config(config, device, ranks)
    raise Exit(0)


def follow_config(config: RunConfig, device: torch.device, ranks: Ranks) -> None:
    """Build the same problem as rank 0, and follow its steps."""

    def make() -> Problem:
        return config.task.problem(config.seed, device, getattr(torch, config.run.dtype))

    route = config.run.matmul if config.run.matmul != "auto" else "exact"
    with matrix_route(route, device):
        follow(place_parts(config.method, ranks.count, device, is_sharded(config)), make, ranks)


def is_sharded(config: RunConfig) -> bool:
    """Return whether each rank stores only a part of the task's model."""
    task = find(config.task, Sharded)
    return task is not None and task.sharded
