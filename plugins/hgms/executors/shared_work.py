"""Pieces of work that are done once, whoever does them: any number of processes, on any
machines, may be at the same ones.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, define, frozen

from hgms.executors.board import Board, to_stderr
from hgms.executors.digests import code_of
from hgms.executors.jobs import Executor, Job, Needs, Tell
from hgms.executors.retries import tried_again
from hgms.runs import LEASE, FolderInUse, HeldFolders, Interrupted, stoppable
from hgms_core import HgmsError

BUSY: Mapping[str, Any] = {"busy": True}
"""What a piece's job returns where another process is at it."""
POLL = 2.0
"""Seconds between two looks at pieces that other processes do."""


@frozen(kw_only=True, eq=False)
class Piece:
    """``function`` with its ``arguments`` is the job, which may need ``plugins`` that no
    distribution announces. It claims ``leases`` in the folder ``path``, which holds what came of
    it, and returns ``BUSY`` where another process has one (:func:`unless_busy`). ``finished`` reads
    that folder: None where something is left to do. ``notice`` is what a person should know when
    its turn comes, empty for nothing; ``result`` is what the job's outcome stands for, and
    ``words`` says what came of it in a few of them.
    """

    title: str
    path: Path
    function: str
    arguments: Mapping[str, Any]
    needs: Needs = Needs()
    plugins: Sequence[str] = ()
    finished: Callable[[], Any]
    notice: Callable[[], str] = lambda: ""
    result: Callable[[Mapping[str, Any]], Any] = lambda outcome: outcome
    words: Callable[[Any], str] = lambda result: "done"
    leases: Sequence[str] = (LEASE,)

    def __str__(self) -> str:
        return self.title

    def job(self) -> Job:
        return Job(
            title=self.title,
            function=self.function,
            arguments=self.arguments,
            needs=self.needs,
            code=code_of(self.plugins),
        )


def unless_busy(
    function: Callable[[Mapping[str, Any], Tell], Mapping[str, Any]],
) -> Callable[[Mapping[str, Any], Tell], Mapping[str, Any]]:
    """The function of a job, which is ``BUSY`` where another process has its folder."""

    @functools.wraps(function)
    def called(arguments: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
        try:
            return function(arguments, tell)
        except FolderInUse:
            return BUSY

    return called


def carried_out_together(
    pieces: Sequence[Piece],
    executor: Executor,
    *,
    kind: str = "run",
    bars: bool = False,
    say: Callable[[str], None] = to_stderr,
) -> tuple[dict[Piece, Any], dict[Piece, HgmsError]]:
    """What came of the pieces, in their order, and why some failed: one that fails stops no other.
    What is finished needs no job, what another process does is waited for, and taken up where that
    is gone. ``executor`` is closed at the end; ``kind`` is what messages call a piece. How far all
    is shows a :class:`Board`, with ``bars`` on a terminal; else ``say`` is told.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; every job saves what it has and ends. A second one
            kills them.
    """
    board = Board(len(pieces), bars=bars, echo=say)
    together = _Together(pieces, board, kind)
    try:
        with stoppable(), contextlib.closing(executor), board:
            together.look()
            while together.left():
                together.ask(executor)
    except KeyboardInterrupt as error:
        why = (
            f"interrupted after {len(together.results)} of {len(pieces)} "
            f"{_several(kind, len(pieces))}"
        )
        number = getattr(error, "number", signal.SIGINT)
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

    def left(self) -> list[Piece]:
        return [
            piece
            for piece in self.pieces
            if piece not in self.results and piece not in self.failures
        ]

    def look(self) -> None:
        """Takes what is finished, whoever did it."""
        for piece in self.left():
            if (result := piece.finished()) is not None:
                self.results[piece] = result
        if self.results:
            self.board.found(count := len(self.results))
            self.board.say(
                f"{count} of {len(self.pieces)} {_several(self.kind, len(self.pieces))} done before"
            )

    def ask(self, executor: Executor) -> None:
        """Carries out what nobody is at; then looks at what others do, and which of it they have
        left.
        """
        for ending in tried_again(executor, self.jobs(), self.hear, self.board.say):
            piece = self.asked.pop(ending.job)
            if ending.outcome is None:
                self.failures[piece] = ending.failure
                self.board.ended(piece, "failed", self.failures[piece])
            elif ending.outcome == BUSY:
                self.elsewhere.append(piece)
            else:
                self.end(piece, piece.result(ending.outcome))
        if not self.elsewhere:
            return
        if (count := len(self.elsewhere)) != self.awaited:
            self.board.say(
                f"waiting for {count} {_several(self.kind, count)} that another process makes"
            )
        self.awaited = count
        time.sleep(POLL)
        for piece in list(self.elsewhere):
            # asked first: who is done lets go of it afterwards
            free = self.held.free(piece.path, *piece.leases)
            if (result := piece.finished()) is not None:
                self.elsewhere.remove(piece)
                self.end(piece, result)
            elif free:
                self.elsewhere.remove(piece)  # nobody makes it any more

    def jobs(self) -> Iterator[Job]:
        for piece in self.left():
            if piece not in self.elsewhere:
                if notice := piece.notice():
                    self.board.say(f"{piece}: {notice}")
                self.asked[job := piece.job()] = piece
                self.board.began(piece)
                yield job

    def end(self, piece: Piece, result: Any) -> None:
        self.results[piece] = result
        self.board.ended(piece, piece.words(result))

    def hear(self, job: Job, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            self.board.step(self.asked[job], event["share"], event["record"])
        elif event["event"] in ("stage", "look"):
            self.board.stage(self.asked[job], event.get("text", ""))


def _several(kind: str, count: int) -> str:
    """
    >>> _several("mix", 2), _several("run", 3), _several("run", 1)
    ('mixes', 'runs', 'run')
    """
    return kind if count == 1 else kind + ("es" if kind.endswith("x") else "s")
