"""Carries out the mixes of a grid, a process each."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, define, frozen

from hgms_compare import load, scaled
from hgms_core import ConfigError, unknown
from hgms_mix_compare.outcome import Outcome
from hgms_run import Interrupted, tables_of


@frozen(kw_only=True)
class Contest:
    """Which mixes are compared: the methods of a grid by their labels, with their roles, on its one task, over seeds."""

    grid: Path
    labels: tuple[str, ...]
    roles: Mapping[str, str]
    seeds: tuple[int, ...]
    reference: str
    options: tuple[str, ...]
    """What every `hgms mix` is called with beside method and seed."""

    @classmethod
    def of(
        cls, grid: Path, labels: Sequence[str] | None, seeds: int | Sequence[int] | None, reference: str | None, *,
        out: str | None = None, scale: str | None = None, sets: Sequence[str] = (),
    ) -> Contest:  # fmt: skip
        """The contest that a grid describes.

        Raises:
            ConfigError: the grid is wrong, has several tasks, or has no such method.
        """
        table = scaled(tables_of(grid, "grid"), scale, grid.name)
        if not isinstance(table.get("method"), list):
            raise ConfigError(f"{grid.name} has one method, so there is nothing to compare\n  write [[method]] tables")
        table |= {} if seeds is None else {"seeds": seeds if isinstance(seeds, int) else list(seeds)}
        cells = list(load(table, source=grid.name, methods=labels or ()).cells())
        if len({cell.task for cell in cells}) > 1:
            raise ConfigError(f"{grid.name} has several tasks\n  a mix has one: give each a grid of its own")
        roles = {cell.method: cell.config.role for cell in cells}
        chosen = tuple(roles)
        own = table.get("reference") if reference is None else reference
        own = own if own is not None else "uniform" if "uniform" in chosen else chosen[0]
        if own not in chosen:
            raise ConfigError(f"{unknown('reference', own, chosen)}\n  name it among --methods, or give another --reference")
        given = {"--out": out, "--scale": scale}
        options = [word for key, value in given.items() if value is not None for word in (key, value)]
        options += [word for line in sets for word in ("--set", line)]
        every = tuple(dict.fromkeys(cell.config.seed for cell in cells))
        return cls(grid=grid, labels=chosen, roles=roles, seeds=every, reference=own, options=tuple(options))

    def mixes(self) -> Iterator[tuple[str, int]]:
        """Label and seed of every mix: all methods of a seed before the next seed, so that what is there can be compared."""
        return ((label, seed) for seed in self.seeds for label in self.labels)


@define
class _Crew:
    """The processes that are running, and whether they were told to stop."""

    running: set[subprocess.Popen[str]] = Factory(set)
    stopped: bool = False
    lock: threading.Lock = Factory(threading.Lock)

    def begin(self, command: Sequence[str]) -> subprocess.Popen[str] | None:
        with self.lock:
            if self.stopped:
                return None
            pipe = subprocess.PIPE
            # A group of its own: Ctrl-C reaches it through us alone, once.
            child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=0)
            self.running.add(child)
            return child

    def ended(self, child: subprocess.Popen[str]) -> None:
        with self.lock:
            self.running.discard(child)

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for child in self.running:
                child.send_signal(signal.SIGINT)


def carry_out(contest: Contest, jobs: int, say: Callable[[str], None]) -> Outcome:
    """All mixes, ``jobs`` at a time; one that fails stops no other.

    Raises:
        Interrupted: Ctrl-C; every mix saves what it has and ends.
    """
    mixes, crew = list(contest.mixes()), _Crew()
    reports: dict[tuple[str, int], dict[str, Any]] = {}
    failures: dict[tuple[str, int], str] = {}

    def make(mix: tuple[str, int]) -> None:
        label, seed = mix
        command = [sys.executable, "-m", "hgms_cli", "mix", "all", str(contest.grid), "--method", label, "--seed", str(seed)]
        began, child = time.monotonic(), crew.begin([*command, *contest.options, "--json"])
        if child is None:
            return
        out, complaints = child.communicate()
        crew.ended(child)
        if child.returncode == 0:
            reports[mix] = json.loads(out)
            outcome = f"done after {time.monotonic() - began:.1f} s"
        else:
            failures[mix] = complaints.strip() or f"exit code {child.returncode}"
            outcome = f"stopped: {failures[mix].splitlines()[-1]}" if crew.stopped else f"failed: {failures[mix]}"
        say(f"[{len(reports) + len(failures)}/{len(mixes)}] {label}, seed {seed}: {outcome}")

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(make, mix) for mix in mixes]
        try:
            for task in tasks:
                task.result()
        except KeyboardInterrupt:
            crew.stop()
            for task in tasks:
                task.cancel()
            concurrent.futures.wait(tasks)
            why = f"interrupted after {len(reports)} of {len(mixes)} mixes\n  run the same command again to go on from there"
            raise Interrupted(why, signal.SIGINT) from None
    return Outcome(reports=reports, failures=failures, labels=contest.labels, roles=contest.roles, reference=contest.reference)
