"""The number of threads of a run: one, or torch's default, by a measurement at the start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping

import torch
from attrs import Factory, frozen

from hgms_core import Key, Problem, slopes
from hgms_core.trees import require_grad

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which a user sets the number of threads."""
ROWS = (8, 32, 128, 512, 2048, 8192)
"""Numbers of rows to measure; the first that takes ``LEAST`` seconds on one thread is used."""
LEAST = 0.005
ROUNDS = 5
GAIN = 0.9
"""Maximum time of several threads, as a share of the time of one thread."""


@frozen(kw_only=True)
class ThreadChoice:
    """The selected number of ``threads``, the ``reason``, and ``seconds`` of a lower gradient by
    number of threads.
    """

    threads: int
    reason: str
    seconds: Mapping[str, float] = Factory(dict)


def are_set(threads: int | None) -> bool:
    """Return whether the user has set the number of threads, by a setting or a variable."""
    return threads is not None or any(os.environ.get(name) for name in VARIABLES)


def choose_threads(problem: Problem, clock: Callable[[], float]) -> ThreadChoice | None:
    """Select one thread or torch's number of threads, whichever computes a lower gradient faster.

    If other programs use the processors, each parallel operation waits for the thread that the
    system runs last; several threads are then slower than one. The mean of alternating repetitions
    shows this. The result is ``None`` if torch has one thread, the problem is not on a CPU, its
    losses count their calls, or its gradient raises an error, which the first step reports.

    Notes
    -----
    Cost: 12 gradients on as many rows as take 5 ms (at least 8 rows, which may take longer),
    excluded from every count.
    """
    most = torch.get_num_threads()
    leaves = [*problem.x0.values()]
    on_cpu = bool(leaves) and leaves[0].device.type == "cpu"
    if most == 1 or not on_cpu or problem.counters is not None:
        return None
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
        return _measure(problem, most, clock)
    return None


def _measure(problem: Problem, most: int, clock: Callable[[], float]) -> ThreadChoice:
    def seconds(threads: int, rows: int) -> float:
        batch, _ = problem.lower_data.sample(Key(0).fold("threads", rows), rows)
        x = require_grad(problem.x0)
        with number_of_threads(threads):
            began = clock()
            slopes(problem.g(problem.theta0, x, batch), list(x.values()))
            return clock() - began

    size = problem.lower_data.count(None)
    for rows in ROWS:
        rows = min(rows, size)
        seconds(1, rows)  # the first call initialises libraries
        if rows == size or seconds(1, rows) >= LEAST:
            break
    spent = {1: 0.0, most: 0.0}
    for _ in range(ROUNDS):
        for threads in spent:
            spent[threads] += seconds(threads, rows) / ROUNDS
    share = spent[most] / spent[1] if spent[1] else 1.0
    return ThreadChoice(
        threads=most if share <= GAIN else 1,
        reason=f"{most} threads take {share:.2g} times the time of one",
        seconds={str(threads): value for threads, value in spent.items()},
    )


@contextlib.contextmanager
def number_of_threads(threads: int | None) -> Iterator[None]:
    """Let torch use this number of threads inside the context (``None``: unchanged)."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
