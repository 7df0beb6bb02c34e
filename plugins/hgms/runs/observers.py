"""The observers of a run: hooks of plugins, and functions of the user.

The functions may end the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import define, field

from hgms.plugins import Host
from hgms.runs.watchers import StopRun, Watcher, check_watchers
from hgms_core import Record, RunInfo


def ignore(*_: Any, **__: Any) -> None:
    """Ignore all arguments: the default watcher."""


@define(eq=False, kw_only=True)
class Observers:
    """The watchers and hooks of a run.

    The functions in ``watch`` are called after every step, and the hooks of ``host`` at events of
    the run. ``stopped`` names the observer that ended the run before its budget, and the reason.
    """

    watch: Sequence[Watcher] = field(factory=list, validator=check_watchers)
    host: Host | None = None
    stopped: str | None = field(default=None, init=False)

    @classmethod
    def of(cls, watch: Watcher | Host | Sequence[Watcher | Host]) -> Observers:
        """Return the observers for one watcher or several; a host adds its plugins."""
        several: list[Any] = list(watch) if isinstance(watch, list | tuple) else [watch]
        return cls(
            watch=[item for item in several if not isinstance(item, Host)],
            host=next((item for item in several if isinstance(item, Host)), None),
        )

    @contextlib.contextmanager
    def may_stop(self, who: str) -> Iterator[None]:
        """End the run after this step if StopRun or StopIteration is raised inside."""
        try:
            yield
        except (StopRun, StopIteration) as stop:
            self.stopped = self.stopped or f"{who}: {stop}".removesuffix(": ")

    def notify(self, hook: str, info: RunInfo, **arguments: Any) -> None:
        """Call the hooks of plugins, if the run has a host."""
        if self.host is not None:
            with self.may_stop("observer"):
                self.host.notify(hook, run=info, **arguments)

    def see(self, info: RunInfo, row: Record, share: float) -> None:
        """Show the row of a step to all observers."""
        self.notify("hgms_step_finished", info, record=row)
        for watch in self.watch:
            with self.may_stop("watch"):
                if watch(info, row, share) is True:
                    raise StopRun
