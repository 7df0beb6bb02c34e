"""Carries out the mixes of a grid, each as a job of an executor."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import Factory, define, frozen

import hgms_compare
import hgms_mix
from hgms_cli import finite
from hgms_compare import scaled
from hgms_core import ConfigError
from hgms_core.registry import Registry
from hgms_executors import Executor, Job, Needs, Tell, code_of, tried_again, unannounced
from hgms_mix import MixConfig
from hgms_mix_compare.outcome import Outcome
from hgms_run import FolderInUse, Interrupted, stoppable, tables_of

POLL = 2.0
"""Seconds between two looks at mixes that other processes make."""

Seeded = tuple[str, int]
"""The label of a method, and a seed."""


@frozen(kw_only=True)
class Contest:
    """Which mixes are compared: those of a grid's methods on its one task, over seeds. All methods of a seed come before the
    next seed, so that what is there can be compared."""

    grid: Path
    mixes: Mapping[Seeded, MixConfig]
    reference: str
    options: Mapping[str, Any]
    """What every mix is made with beside its method and seed: ``out``, ``scale``, ``sets``, ``plugins``."""

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
        options = {"out": out, "scale": scale, "sets": list(sets), "plugins": unannounced(registry.host)}
        mixes = {(label, seed): attrs.evolve(config, seed=seed) for seed in runs.seeds for label, config in of_method.items()}
        return cls(grid=grid, mixes=mixes, reference=runs.reference, options=options)

    def job(self, mix: Seeded) -> Job:
        """A mix as a job, which does what `hgms mix GRID --method LABEL --seed N` does."""
        label, seed = mix
        config = self.mixes[mix]
        arguments = {"grid": str(self.grid.absolute()), "method": label, "seed": seed, **self.options}
        needs = Needs.of_run(config.run)
        code = code_of(self.options["plugins"])
        return Job(title=f"{label}, seed {seed}", function=f"{__name__}:make", arguments=arguments, needs=needs, code=code)

    @property
    def roles(self) -> dict[str, str]:
        """What each method is in comparisons, by its label."""
        return {label: config.role for (label, _), config in self.mixes.items()}


def carry_out(contest: Contest, executor: Executor, say: Callable[[str], None]) -> Outcome:
    """All mixes, where ``executor`` carries them out; one that fails stops no other. What is finished needs none.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; every mix saves what it has and ends. A second one kills them.
    """
    making = _Making(contest, say)
    try:
        with stoppable(), contextlib.closing(executor):
            making.look()
            while making.left():
                making.carry_out(executor)
    except KeyboardInterrupt as error:
        why = f"interrupted after {len(making.reports)} of {len(contest.mixes)} mixes"
        why += "\n  run the same command again to go on from there"
        raise Interrupted(why, getattr(error, "number", signal.SIGINT)) from None
    in_order = {mix: making.reports[mix] for mix in contest.mixes if mix in making.reports}
    return Outcome(reports=in_order, failures=making.failures, roles=contest.roles, reference=contest.reference)


@define
class _Making:
    """What came of the mixes so far."""

    contest: Contest
    say: Callable[[str], None]
    reports: dict[Seeded, dict[str, Any]] = Factory(dict)
    failures: dict[Seeded, str] = Factory(dict)
    began: dict[Job, float] = Factory(dict)

    def left(self) -> list[Seeded]:
        return [mix for mix in self.contest.mixes if mix not in self.reports and mix not in self.failures]

    def look(self) -> None:
        """Takes the reports of mixes that are finished, whoever made them."""
        for mix in self.left():
            if (report := hgms_mix.finished(self.contest.mixes[mix])) is not None:
                self.reports[mix] = report
                self.tell(mix, "done before")

    def carry_out(self, executor: Executor) -> None:
        """The mixes that are left, but for those that another process makes: these are left still."""
        elsewhere = 0
        for ending in tried_again(executor, self.jobs(), say=self.say):
            mix = ending.job.arguments["method"], ending.job.arguments["seed"]
            if ending.outcome is None:
                self.failures[mix] = ending.error or ending.lost
                self.tell(mix, f"failed: {self.failures[mix]}")
            elif ending.outcome["report"] is None:
                elsewhere += 1
            else:
                self.reports[mix] = ending.outcome["report"]
                self.tell(mix, f"done after {time.monotonic() - self.began[ending.job]:.1f} s")
        if elsewhere:
            self.say(f"waiting for {elsewhere} mix{'es' * (elsewhere > 1)} that another process makes")
            time.sleep(POLL)
            self.look()

    def jobs(self) -> Iterator[Job]:
        for mix in self.left():
            job = self.contest.job(mix)
            self.began[job] = time.monotonic()
            yield job

    def tell(self, mix: Seeded, how: str) -> None:
        count = len(self.reports) + len(self.failures)
        self.say(f"[{count}/{len(self.contest.mixes)}] {mix[0]}, seed {mix[1]}: {how}")


def make(arguments: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """The mix of ``arguments`` (see :meth:`Contest.job`) as the job of an executor: its ``report``, as `hgms mix --json` prints
    it; None where another process makes it."""
    registry = Registry.load(arguments["plugins"])
    settings = {key: arguments[key] for key in ("seed", "out", "method", "scale")}
    config = hgms_mix.load(Path(arguments["grid"]), arguments["sets"], registry=registry, **settings)
    try:
        return {"report": finite(hgms_mix.carry_out(config))}
    except FolderInUse:
        return {"report": None}
