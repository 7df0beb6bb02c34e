"""Processes of a run's ranks: rank 0 is the run, the others wait for its messages."""

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
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from attrs import define

from hgms.distributed.launcher import LAUNCHED, SILENCE, meeting
from hgms.torch_errors import is_lost_connection
from hgms_core import ConfigError, HgmsError
from hgms_core.torch_errors import first_line

PATIENCE = 10.0
"""Seconds to wait for the end of a rank: after another rank has lost its connection, and at the end
of the run.
"""
LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables with the number of threads that libraries use in a process."""
READY = b"ready\n"
"""First line that another rank prints, after it has loaded."""


class RankLost(HgmsError):
    """A rank ended during a step. The run can be resumed."""


@define(eq=False)
class Ranks:
    """All ranks of a run, as seen from one rank. ``processes`` are those that this rank started."""

    rank: int
    count: int
    processes: Sequence[subprocess.Popen[bytes]] = ()
    place: tempfile.TemporaryDirectory[str] | None = None
    """Folder with the meeting point and the output of the ranks."""

    def say(self, message: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Send a message from rank 0 to all ranks: numbers, strings and tensors, but no code."""
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
        return torch.load(
            io.BytesIO(payload.numpy().tobytes()), weights_only=True, map_location="cpu"
        )

    @contextlib.contextmanager
    def together(self, where: str) -> Iterator[None]:
        """Convert a broken connection inside the context to a RankLost that names the lost rank.

        ``where`` is the location of the failure.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            who = (
                self._describe_lost_rank() or f"a rank does not respond ({first_line(error)[:120]})"
            )
            raise RankLost(
                "rank-lost",
                f"{where}: {who}",
                place=("run", "ranks"),
                hint="use --resume to resume from the last saved state",
            ) from error

    def _describe_lost_rank(self) -> str:
        """Return which of the started ranks has ended, and how."""
        until = time.monotonic() + PATIENCE
        while self.processes and time.monotonic() < until:
            for number, process in enumerate(self.processes, start=1):
                if (code := process.poll()) is not None:
                    return (
                        f"rank {number} of {self.count} {describe_exit(code)}{self._last_words()}"
                    )
            time.sleep(0.05)
        return ""

    def await_ready(self) -> None:
        """Wait until all started ranks report that they have loaded.

        Raises
        ------
        ConfigError
            If a rank could not load.
        """
        for number, process in enumerate(self.processes, start=1):
            assert process.stdout is not None
            if process.stdout.readline() != READY:
                raise ConfigError(
                    "rank-lost",
                    f"rank {number} of {self.count} {describe_exit(process.wait())}"
                    f"{self._last_words()}",
                    place=("run", "ranks"),
                )

    def _last_words(self) -> str:
        assert self.place is not None
        lines = Path(self.place.name, "errors").read_text(errors="replace").strip().splitlines()
        return f"; its last output: {lines[-1]}" if lines else ""

    def close(self) -> None:
        """End the other ranks; those that this process started end at once.

        Launched ranks wait for a message.
        """
        if self.rank == 0 and not self.processes and dist.is_initialized():
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
    """Return the group for messages, which are on the CPU for every device."""
    return _TALK.get("group", dist.group.WORLD)


def describe_exit(code: int) -> str:
    """Describe how a process ended, by its exit code.

    Examples
    --------
    >>> describe_exit(3), describe_exit(-9)
    ('ended with exit code 3', 'was killed by SIGKILL')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def join(rank: int, count: int, device: torch.device, method: str) -> None:
    """Make this process a rank. ``method``: the meeting point; LAUNCHED: the one of torchrun."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place: Any = {"store": meeting(rank, count)} if method == LAUNCHED else {"init_method": method}
    dist.init_process_group(backend, rank=rank, world_size=count, timeout=SILENCE, **place)
    if backend != "gloo":
        _TALK["group"] = dist.new_group(backend="gloo")


def device_of(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank; ranks on one machine use consecutive GPUs.

    Examples
    --------
    >>> device_of(torch.device("cpu"), 1), device_of(torch.device("cuda"), 1)
    (device(type='cpu'), device(type='cuda', index=1))
    """
    if device.type != "cuda":
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))


def start(
    count: int, device: torch.device, module: str, arguments: Mapping[str, Any], threads: int
) -> Ranks:
    """Start the ranks: this process as rank 0, and the others as ``python -m module``.

    Each new process reads ``arguments`` with its ``rank``, ``count`` and ``method`` (the meeting
    point) from the first line of its standard input. It then prints READY, and ends when its input
    closes.

    Raises
    ------
    ConfigError
        If a process ends before it is ready.
    """
    place = tempfile.TemporaryDirectory(prefix="hgms-ranks-")
    method = f"file://{place.name}/meet"
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
                    env=os.environ | dict.fromkeys(LIBRARIES, str(threads)),
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
                # The process may have ended already; it then never reports that it is ready.
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


def begin_rank() -> tuple[Mapping[str, Any], Callable[[], None]]:
    """Start a process of :func:`start`: return its arguments and a function.

    Call this function first. The returned function reports to rank 0 that the process has loaded.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of plugins must not mix with messages
    settings: Mapping[str, Any] = json.loads(sys.stdin.readline())
    # Input closes when rank 0 ends or has finished.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    sys.path += [place for place in settings["places"] if place not in sys.path]
    torch.set_num_threads(settings["threads"])

    def ready() -> None:
        out.write(READY)
        out.close()

    return settings, ready
