"""The processes of a run's ranks: rank 0 is the run itself, the others wait for what it says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from attrs import define

from hgms.distributed.launcher import meeting
from hgms_core import ConfigError, HgmsError
from hgms_core.torch_errors import first_line, is_lost_connection

PATIENCE = 10.0
"""Seconds that a rank has to be found gone, once another has lost it, and to go when the run is
over.
"""
READY = b"ready\n"
"""What another rank prints first, once it has loaded."""
LAUNCHED = "env://"
SILENCE = timedelta(minutes=30)
"""After this long without an answer a rank is given up, should nobody have seen it go."""


class RankLost(HgmsError):
    """A rank is gone in the middle of a step. The run can be resumed."""


@define(eq=False)
class Ranks:
    """All ranks of a run, seen from one of them. ``processes`` are those that this one has
    started.
    """

    rank: int
    count: int
    processes: Sequence[subprocess.Popen[bytes]] = ()
    place: tempfile.TemporaryDirectory[str] | None = None
    """Where they meet, and what they print."""

    def say(self, message: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """What rank 0 says, to all: numbers, strings, and tensors, no code."""
        stream = io.BytesIO()
        if self.rank == 0:
            torch.save(message, stream)
        size = torch.tensor([stream.tell()])
        dist.broadcast(size, src=0, group=_talk())
        payload = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            payload.copy_(torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8))
        dist.broadcast(payload, src=0, group=_talk())
        if self.rank == 0:
            return message
        heard: Mapping[str, Any] | None = torch.load(
            io.BytesIO(payload.numpy().tobytes()), weights_only=True, map_location="cpu"
        )
        return heard

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. All ask together, and go on together."""
        return bool(self.total(torch.tensor(int(flag))))

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Σ over all ranks of a tensor on the CPU."""
        total = value.clone()
        dist.all_reduce(total, group=_talk())
        return total

    @contextlib.contextmanager
    def together(self, where: str, then: str = "--resume") -> Iterator[None]:
        """Inside, a connection that breaks is a RankLost that names who is gone. ``where`` it
        happened, and what goes on ``then``."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            who = self._gone() or f"a rank does not respond ({first_line(error)[:120]})"
            raise RankLost(
                "rank-lost",
                f"{where}: {who}",
                place=("run", "ranks"),
                hint=f"use {then} to resume from the last saved state",
            ) from error

    def _gone(self) -> str:
        """Which of the started ranks has ended, and how."""
        until = time.monotonic() + PATIENCE
        while self.processes and time.monotonic() < until:
            for number, process in enumerate(self.processes, start=1):
                if (code := process.poll()) is not None:
                    return f"rank {number} of {self.count} {_how(code)}{self._last_words()}"
            time.sleep(0.05)
        return ""

    def await_ready(self) -> None:
        """Until all that were started say that they have loaded. Errors: ConfigError where one
        of them could not.
        """
        for number, process in enumerate(self.processes, start=1):
            assert process.stdout is not None
            if process.stdout.readline() != READY:
                raise ConfigError(
                    "rank-lost",
                    f"rank {number} of {self.count} {_how(process.wait())}{self._last_words()}",
                    place=("run", "ranks"),
                )

    def _last_words(self) -> str:
        assert self.place is not None
        lines = Path(self.place.name, "errors").read_text(errors="replace").strip().splitlines()
        return f"; its last output: {lines[-1]}" if lines else ""

    def close(self, say: bool = True) -> None:
        """The others end: those that this process has started, at once. ``say``: launched ones
        wait to be told.
        """
        if say and self.rank == 0 and not self.processes and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                self.say(None)
        for process in self.processes:
            process.kill()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    cast("IO[bytes]", stream).close()
            process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.place is not None:
            self.place.cleanup()
        _TALK.clear()


_TALK: dict[str, Any] = {}


def _talk() -> Any:
    """The group that messages take: they are on the CPU whatever the numbers are on."""
    return _TALK.get("group", dist.group.WORLD)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def join(rank: int, count: int, device: torch.device, method: str) -> None:
    """This process becomes a rank. ``method``: where they meet; LAUNCHED: where torchrun says."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place: Any = {"store": meeting(rank, count)} if method == LAUNCHED else {"init_method": method}
    dist.init_process_group(backend, rank=rank, world_size=count, timeout=SILENCE, **place)
    if backend != "gloo":
        _TALK["group"] = dist.new_group(backend="gloo")


def device_of(device: torch.device, rank: int) -> torch.device:
    """The device of a rank: of GPUs the next one for each on a machine.

    >>> device_of(torch.device("cpu"), 1), device_of(torch.device("cuda"), 1)
    (device(type='cpu'), device(type='cuda', index=1))
    """
    if device.type != "cuda":
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))


def start(
    count: int, device: torch.device, module: str, arguments: Mapping[str, Any], threads: int
) -> Ranks:
    """This process as rank 0, and the others as ``python -m module``. That reads ``arguments`` with
    its ``rank``, ``count`` and ``method`` (where they meet) from the first line of its standard
    input, prints READY, and ends where its input closes.

    Errors: ConfigError where one of them ends before it is ready.
    """
    place = tempfile.TemporaryDirectory(prefix="hgms-ranks-")
    method = f"file://{place.name}/meet"
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(libraries, str(threads))
    processes: list[subprocess.Popen[bytes]] = []
    ranks = Ranks(0, count, processes, place)
    try:
        with Path(place.name, "errors").open("ab") as errors:
            for rank in range(1, count):
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,
                )
                processes.append(process)
                line = {
                    **arguments,
                    "rank": rank,
                    "count": count,
                    "method": method,
                    "places": sys.path,
                    "threads": threads,
                }
                # it is gone already: it will not say that it is ready
                with contextlib.suppress(BrokenPipeError):
                    stdin = cast("IO[bytes]", process.stdin)
                    stdin.write(json.dumps(line).encode() + b"\n")
                    stdin.flush()
        ranks.await_ready()
        join(0, count, device, method)
    except BaseException:
        ranks.close()
        raise
    return ranks


def begun() -> tuple[Mapping[str, Any], Callable[[], None]]:
    """In a process that :func:`start` has started, first of all: what it is told, and what tells
    rank 0 that it has loaded.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a plugin prints is no answer
    settings: Mapping[str, Any] = json.loads(sys.stdin.readline())
    # rank 0 is gone, or done
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    sys.path += [place for place in settings["places"] if place not in sys.path]
    torch.set_num_threads(settings["threads"])

    def ready() -> None:
        out.write(READY)
        out.close()

    return settings, ready
