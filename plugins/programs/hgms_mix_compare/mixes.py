"""Carries out the mixes of a grid, a process each."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import Factory, define, frozen

import hgms_compare
import hgms_mix
from hgms_compare import scaled
from hgms_core import ConfigError
from hgms_core.registry import Registry
from hgms_mix import MixConfig
from hgms_mix_compare.outcome import Outcome
from hgms_run import Interrupted, stoppable, tables_of

Seeded = tuple[str, int]
"""The label of a method, and a seed."""


@frozen(kw_only=True)
class Contest:
    """Which mixes are compared: those of a grid's methods on its one task, over seeds. All methods of a seed come before the
    next seed, so that what is there can be compared."""

    grid: Path
    mixes: Mapping[Seeded, MixConfig]
    reference: str
    options: tuple[str, ...]
    """What every `hgms mix` is called with beside method and seed."""

    @classmethod
    def of(
        cls, grid: Path, labels: Sequence[str] | None = None, seeds: int | Sequence[int] | None = None,
        reference: str | None = None, *, out: str | None = None, scale: str | None = None, sets: Sequence[str] = (),
        registry: Registry | None = None,
    ) -> Contest:  # fmt: skip
        """The contest of the methods that a grid names; references which it only adds to `hgms compare` have no mix.

        Raises:
            ConfigError: the grid is wrong, has several tasks or no test set, or has no such method.
        """
        table = scaled(tables_of(grid, "grid"), scale, grid.name)
        if not isinstance(table.get("method"), list):
            raise ConfigError(f"{grid.name} has one method, so there is nothing to compare\n  write [[method]] tables")
        own = {"seeds": seeds if seeds is None or isinstance(seeds, int) else list(seeds), "reference": reference}
        table |= {key: value for key, value in own.items() if value is not None}
        table.pop("references", None)
        registry = registry or Registry.load()
        runs = hgms_compare.load(table, source=grid.name, methods=labels or (), registry=registry)
        if len(runs.tasks) > 1:
            raise ConfigError(f"{grid.name} has several tasks\n  a mix has one: give each a grid of its own")
        of_method = {
            method.label: hgms_mix.load(grid, sets, out=out, method=method.label, scale=scale, registry=registry)
            for method in runs.methods
        }
        if not all(config.task.test for config in of_method.values()):  # type: ignore[attr-defined]
            raise ConfigError(f"{grid.name} has no test set, by which models are compared\n  write a table [task.test.NAME]")
        # plugins that no distribution announces: the others are found
        files = [info.module for info in registry.host.infos.values() if info.distribution is None and info.status == "loaded"]
        flags = {"--out": [out], "--scale": [scale], "--set": sets, "--plugin": files}
        options = [word for key, values in flags.items() for value in values if value is not None for word in (key, value)]
        mixes = {(label, seed): attrs.evolve(config, seed=seed) for seed in runs.seeds for label, config in of_method.items()}
        return cls(grid=grid, mixes=mixes, reference=runs.reference, options=tuple(options))

    @property
    def roles(self) -> dict[str, str]:
        """What each method is in comparisons, by its label."""
        return {label: config.role for (label, _), config in self.mixes.items()}


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

    def stop(self, number: int = signal.SIGINT) -> None:
        with self.lock:
            self.stopped = True
            for child in self.running:
                child.send_signal(number)


def carry_out(contest: Contest, jobs: int, say: Callable[[str], None]) -> Outcome:
    """All mixes, ``jobs`` at a time; one that fails stops no other. What is finished needs no process.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; every mix saves what it has and ends. A second one kills them.
    """
    reports: dict[Seeded, dict[str, Any]] = {}
    failures: dict[Seeded, str] = {}
    crew = _Crew()

    def ended(mix: Seeded, how: str) -> None:
        say(f"[{len(reports) + len(failures)}/{len(contest.mixes)}] {mix[0]}, seed {mix[1]}: {how}")

    def make(mix: Seeded) -> None:
        label, seed = mix
        # -P: nothing is imported from the working directory
        command = [sys.executable, "-P", "-m", "hgms_cli", "mix", "all", str(contest.grid), "--method", label]
        began, child = time.monotonic(), crew.begin([*command, "--seed", str(seed), *contest.options, "--json"])
        if child is None:
            return
        out, complaints = child.communicate()
        crew.ended(child)
        if child.returncode == 0:
            reports[mix] = json.loads(out)
            ended(mix, f"done after {time.monotonic() - began:.1f} s")
        else:
            failures[mix] = reason(complaints, child.returncode)
            ended(mix, f"{'stopped' if crew.stopped else 'failed'}: {failures[mix]}")

    with stoppable(), concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        tasks: list[concurrent.futures.Future[None]] = []
        try:
            for mix, config in contest.mixes.items():
                if (report := hgms_mix.finished(config)) is not None:
                    reports[mix] = report
                    ended(mix, "done before")
            tasks += [pool.submit(make, mix) for mix in contest.mixes if mix not in reports]
            for task in tasks:
                task.result()
        except KeyboardInterrupt as error:
            crew.stop()
            for task in tasks:
                task.cancel()
            try:
                concurrent.futures.wait(tasks)
            finally:
                crew.stop(signal.SIGKILL)  # who is still there at a second Ctrl-C
            why = f"interrupted after {len(reports)} of {len(contest.mixes)} mixes"
            why += "\n  run the same command again to go on from there"
            raise Interrupted(why, getattr(error, "number", signal.SIGINT)) from None
    in_order = {mix: reports[mix] for mix in contest.mixes if mix in reports}
    return Outcome(reports=in_order, failures=failures, roles=contest.roles, reference=contest.reference)


def reason(complaints: str, code: int) -> str:
    """Why a process failed: its error with what to do, else the last line that it wrote.

    >>> reason("finetune: 30 rows\\nerror: the disk is full\\n  free some space\\n", 1)
    'the disk is full\\n  free some space'
    >>> reason("", -9)
    'exit code -9'
    """
    _, error, message = f"\n{complaints.strip()}".rpartition("\nerror: ")
    return message if error else message.strip().rpartition("\n")[2].strip() or f"exit code {code}"
