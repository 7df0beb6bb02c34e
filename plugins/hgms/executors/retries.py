"""Jobs that are tried again where their workers are lost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from attrs import Factory, define, evolve

from hgms.executors.jobs import Ending, Executor, Job, Report

TRIES = 3
"""Workers that may be lost with one job before it has failed: what takes three with it is the
job's own doing.
"""


def tried_again(
    executor: Executor,
    jobs: Iterable[Job],
    report: Report = lambda job, event: None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Ending]:
    """The endings of all ``jobs``, which give each once, as they come. A job whose worker is lost
    is carried out again, TRIES times in all; ``say`` gets a line for each loss.
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
    """The jobs that wait, lost ones first; each is taken once, however often this is iterated."""

    others: Iterable[Job]
    lost: deque[Job] = Factory(deque)

    def __iter__(self) -> Iterator[Job]:
        while self.lost:
            yield self.lost.popleft()
        others = iter(self.others)
        # `yield from` would close a generator with the first iterator of this
        while (job := next(others, None)) is not None:
            yield job
