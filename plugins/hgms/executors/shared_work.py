"""Work items that several processes share: each item is done once.

The processes may run on any machines and may work on the same list at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, define, frozen

from hgms.executors.board import Board, to_stderr
from hgms.executors.jobs import Executor, Job, Needs, Tell, run_with_retries
from hgms.runs import Interrupted, stoppable
from hgms.store import LEASE, FolderInUse, HeldFolders
from hgms_core import HgmsError

BUSY: Mapping[str, Any] = {"busy": True}
"""Result of an item's job if another process is working on the item."""
POLL = 2.0
"""Seconds between two checks of items that other processes are working on."""


@frozen(kw_only=True, eq=False)
class Piece:
    """A work item: a job, its folder and the function that reads its result.

    The job calls ``function`` with ``arguments``. It claims ``leases`` in the folder ``path``,
    which stores the result. It returns ``BUSY`` if another process has one of these leases
    (:func:`unless_busy`). Subclasses may decide when a job is ready, and record a failure.

    ``finished`` reads the folder and returns None if work remains. ``result`` converts the job's
    outcome to the result, and ``words`` summarizes the result in a short text; ``error`` is the
    reason of a result without success.
    """

    title: str
    path: Path
    function: str = ""
    arguments: Mapping[str, Any] = Factory(dict)
    needs: Needs = Needs()
    finished: Callable[[], Any]
    result: Callable[[Mapping[str, Any]], Any] = lambda outcome: outcome
    words: Callable[[Any], str] = lambda result: "done"
    error: Callable[[Any], HgmsError | None] = lambda result: None
    leases: Sequence[str] = (LEASE,)

    def __str__(self) -> str:
        return self.title

    def job(self) -> Job:
        return Job(
            title=self.title, function=self.function, arguments=self.arguments, needs=self.needs
        )

    def is_ready(self) -> bool:
        """Return whether the job can start now; otherwise a later call may return True."""
        return True

    def release(self) -> None:
        """Note that no other process works on the item any more."""

    def fail(self, error: HgmsError) -> Any:
        """Return the result of a job without an outcome; ``None`` reports the error.

        ``BUSY`` means that another process works on the item now.
        """
        return None


def unless_busy(
    function: Callable[[Mapping[str, Any], Tell], Mapping[str, Any]],
) -> Callable[[Mapping[str, Any], Tell], Mapping[str, Any]]:
    """Return a job function that returns ``BUSY`` if another process has its folder."""

    @functools.wraps(function)
    def call(arguments: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
        try:
            return function(arguments, tell)
        except FolderInUse:
            return BUSY

    return call


def run_together(
    pieces: Sequence[Piece],
    executor: Executor,
    *,
    kind: str = "run",
    bars: bool = False,
    say: Callable[[str], None] = to_stderr,
    look: bool = True,
) -> tuple[dict[Piece, Any], dict[Piece, HgmsError]]:
    """Run all work items and return their results in order, and the reasons for failures.

    A failed item does not stop the others. Finished items need no job. Items of another process are
    awaited; if that process ends, its items are resumed here. The function closes ``executor`` at
    the end. ``kind`` is the name of an item in messages. A :class:`Board` displays the progress,
    with ``bars`` on a terminal; without bars, ``say`` receives the lines. Without ``look``, no item
    is finished.

    Raises
    ------
    Interrupted
        After Ctrl-C, SIGTERM or SIGHUP. Every job saves its state and ends; a second signal kills
        the jobs.
    """
    board = Board(len(pieces), bars=bars, echo=say)
    together = _Together(pieces, board, kind)
    try:
        with stoppable(), contextlib.closing(executor), board:
            if look:
                together.look()
            while together.remaining():
                together.ask(executor)
    except KeyboardInterrupt as error:
        why = (
            f"interrupted after {len(together.results)} of {len(pieces)} "
            f"{_several(kind, len(pieces))}"
        )
        number = Interrupted.number_of(error)
        raise Interrupted(why, number, hint="run the same command again to resume") from None
    return {
        piece: together.results[piece] for piece in pieces if piece in together.results
    }, together.failures


@define(eq=False)
class _Together:
    pieces: Sequence[Piece]
    board: Board
    kind: str
    results: dict[Piece, Any] = Factory(dict)
    failures: dict[Piece, HgmsError] = Factory(dict)
    elsewhere: list[Piece] = Factory(list)
    asked: dict[Job, Piece] = Factory(dict)
    held: HeldFolders = Factory(HeldFolders)
    awaited: int = 0

    def remaining(self) -> list[Piece]:
        return [
            piece
            for piece in self.pieces
            if piece not in self.results and piece not in self.failures
        ]

    def look(self) -> None:
        """Collect finished items, including those that other processes finished."""
        for piece in self.remaining():
            if (result := piece.finished()) is not None:
                self.results[piece] = result
        if self.results:
            self.board.add_found(count := len(self.results))
            self.board.say(
                f"{count} of {len(self.pieces)} {_several(self.kind, len(self.pieces))} done before"
            )

    def ask(self, executor: Executor) -> None:
        """Run the items that no process is working on.

        Afterwards check the items of other processes, and find those that they abandoned.
        """
        for ending in run_with_retries(executor, self, self.hear, self.board.say):
            piece = self.asked.pop(ending.job)
            is_lost = ending.outcome is None
            outcome = piece.fail(ending.failure) if is_lost else ending.outcome
            if outcome == BUSY:
                self.elsewhere.append(piece)
            elif outcome is None:
                self.failures[piece] = ending.failure
                self.board.end(piece, "failed", self.failures[piece])
            else:
                self.end(piece, outcome if is_lost else piece.result(outcome))
        if not self.elsewhere:
            return
        if (count := len(self.elsewhere)) != self.awaited:
            self.board.say(f"waiting for {count} {_several(self.kind, count)} of other processes")
        self.awaited = count
        time.sleep(POLL)
        for piece in list(self.elsewhere):
            # Check the leases first: a process releases them only after it has finished.
            free = self.held.free(piece.path, *piece.leases)
            if (result := piece.finished()) is not None:
                self.elsewhere.remove(piece)
                self.end(piece, result)
            elif free:
                self.elsewhere.remove(piece)
                piece.release()
                self.board.say(f"{piece}: its process has ended; it resumes here")

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs that can start now; executors restart the iteration for a free place."""
        for piece in self.remaining():
            busy = piece in self.elsewhere or piece in self.asked.values()
            if not busy and piece.is_ready():
                self.asked[job := piece.job()] = piece
                self.board.began(piece)
                yield job

    def end(self, piece: Piece, result: Any) -> None:
        self.results[piece] = result
        self.board.end(piece, piece.words(result), piece.error(result))

    def hear(self, job: Job, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            self.board.step(self.asked[job], event["share"], event["record"])
        elif event["event"] == "stage":
            self.board.show(self.asked[job], 0.0, event["text"])


def _several(kind: str, count: int) -> str:
    """Return the plural of a kind if there are several.

    Examples
    --------
    >>> _several("mix", 2), _several("run", 3), _several("run", 1)
    ('mixes', 'runs', 'run')
    """
    return kind if count == 1 else kind + ("es" if kind.endswith("x") else "s")
