"""Jobs in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from attrs import define

from hgms.executors.jobs import Ending, Job, Report, as_error, called


@define(eq=False)
class Here:
    """Executor that runs one job after another in this process; the default of programs.

    >>> job = Job(title="a pair", function="hgms.executors.local:echo", arguments={"number": 2})
    >>> [ending.outcome for ending in Here().carry_out([job], lambda job, event: None)]
    [{'number': 2}]
    """

    name: ClassVar[str] = "here"

    def carry_out(self, jobs: Iterable[Job], report: Report) -> Iterator[Ending]:
        for job in jobs:
            try:
                outcome = called(job.function)(
                    job.arguments, lambda _job=job, **event: report(_job, event)
                )
            except Exception as error:
                yield Ending(job=job, error=as_error(error))
            else:
                yield Ending(job=job, outcome=outcome)

    def close(self) -> None:
        pass
