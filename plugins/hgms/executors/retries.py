"""Retry jobs after their workers are lost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from attrs import Factory, define, evolve

from hgms.executors.jobs import Ending, Executor, Job, Report

TRIES = 3
"""Number of lost workers after which a job fails: the job itself is then the likely cause."""


def tried_again(
    executor: Executor,
    jobs: Iterable[Job],
    report: Report = lambda job, event: None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Ending]:
    """Yield the endings of all ``jobs`` as they arrive; ``jobs`` yields each job once.

    A job whose worker is lost is retried, up to TRIES runs in total. ``say`` receives one line per
    loss.
    """
    losses = Counter[Job]()
    left = _Left(others=jobs)
    begun = False
    while not begun or left.lost:
        begun = True
        for ending in executor.carry_out(left, report):
            if not ending.lost:
                yield ending
                continue
            losses[ending.job] += 1
            if losses[ending.job] < TRIES:
                say(f"{ending.job.title}: {ending.lost}; it is taken up again")
                left.lost.append(ending.job)
            else:
                yield evolve(ending, lost=f"{ending.lost}, for the {TRIES}rd time")


@define(eq=False)
class _Left:
    """Waiting jobs, lost jobs first. Each job is taken once, even with several iterations."""

    others: Iterable[Job]
    lost: deque[Job] = Factory(deque)

    def __iter__(self) -> Iterator[Job]:
        while self.lost:
            yield self.lost.popleft()
        others = iter(self.others)
        # `yield from` would close the generator together with the first iterator of this object.
        while (job := next(others, None)) is not None:
            yield job
