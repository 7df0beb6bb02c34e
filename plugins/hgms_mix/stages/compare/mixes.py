"""Carries out the mixes of a grid, each as a job of an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

import hgms.comparison
import hgms_mix.stages
from hgms.comparison import scaled
from hgms.config.json_values import finite
from hgms.config.tables import tables_of
from hgms.executors import (
    Executor,
    Needs,
    Piece,
    RemoteProgress,
    Tell,
    carried_out_together,
    to_stderr,
    unless_busy,
)
from hgms.runs import unannounced
from hgms_core import ConfigError
from hgms_core.components import evolve
from hgms_core.registry import Registry
from hgms_mix.stages import MixConfig
from hgms_mix.stages.compare.outcome import Outcome

PATIENCE = 0.5
"""Seconds to wait for a mix that another process makes: the orphan of a killed comparison ends
by itself.
"""

Seeded = tuple[str, int]
"""The label of a method, and a seed."""


@frozen(kw_only=True)
class Contest:
    """Which mixes are compared: those of a grid's methods on its one task, over seeds. All methods
    of a seed come before the next seed, so that what is there can be compared."""

    grid: Path
    mixes: Mapping[Seeded, MixConfig]
    reference: str
    options: Mapping[str, Any]
    """What every mix is made with beside its method and seed: ``out``, ``scale``, ``sets``,
    ``plugins``.
    """

    @classmethod
    def of(
        cls,
        grid: Path,
        labels: Sequence[str] | None = None,
        seeds: int | Sequence[int] | None = None,
        reference: str | None = None,
        *,
        out: str | None = None,
        scale: str | None = None,
        sets: Sequence[str] = (),
        registry: Registry | None = None,
    ) -> Contest:
        """The contest of the methods that a grid names; references which it only adds to `hgms
        compare` have no mix.

        Raises:
            ConfigError: the grid is wrong, has several tasks or no test set, or has no such method.
        """
        table = scaled(tables_of(grid, "grid"), scale, grid.name)
        if not isinstance(table.get("method"), list):
            raise ConfigError(
                "nothing-to-do",
                "a comparison requires several methods, but the file has one",
                place=(grid.name, "method"),
                hint="add [[method]] tables",
            )
        own = {
            "seeds": seeds if seeds is None or isinstance(seeds, int) else list(seeds),
            "reference": reference,
        }
        table |= {key: value for key, value in own.items() if value is not None}
        for key in ("references", "baselines"):
            table.pop(key, None)
        registry = registry or Registry.load()
        runs = hgms.comparison.load(
            table, source=grid.name, methods=labels or (), registry=registry
        )
        if len(runs.tasks) > 1:
            raise ConfigError(
                "wrong-length",
                f"a mix has one task, but the grid has {len(runs.tasks)}",
                place=(grid.name, "task"),
                hint="use one grid per task",
            )
        of_method = {
            method.label: hgms_mix.stages.load(
                grid, sets, out=out, method=method.label, scale=scale, registry=registry
            )
            for method in runs.methods
        }
        if not all(config.task.test for config in of_method.values()):  # type: ignore[attr-defined]
            raise ConfigError(
                "missing-option",
                "a comparison of models requires a test set, but the task has none",
                place=(grid.name, "task", "test"),
                hint="add a table [task.test.NAME]",
            )
        options = {
            "out": out,
            "scale": scale,
            "sets": list(sets),
            "plugins": unannounced(registry.host),
        }
        mixes = {
            (label, seed): evolve(config, seed=seed)
            for seed in runs.seeds
            for label, config in of_method.items()
        }
        return cls(grid=grid, mixes=mixes, reference=runs.reference, options=options)

    def piece(self, mix: Seeded) -> Piece:
        """A mix as a job, which does what `hgms mix GRID --method LABEL --seed N` does."""
        label, seed = mix
        config = self.mixes[mix]
        title = f"{label}, seed {seed}"
        path = hgms_mix.stages.mix_path(config)
        arguments = {
            "grid": str(self.grid.absolute()),
            "method": label,
            "seed": seed,
            **self.options,
        }
        return Piece(
            title=title,
            path=path,
            leases=hgms_mix.stages.LEASES,
            function=f"{__name__}:make",
            arguments=arguments,
            needs=Needs.of_run(config.run),
            plugins=self.options["plugins"],
            finished=lambda: hgms_mix.stages.finished(config),
            result=lambda outcome: outcome["report"],
        )

    @property
    def roles(self) -> dict[str, str]:
        """What each method is in comparisons, by its label."""
        return {label: config.role for (label, _), config in self.mixes.items()}


def carry_out(
    contest: Contest,
    executor: Executor,
    say: Callable[[str], None] = to_stderr,
    *,
    bars: bool = False,
) -> Outcome:
    """All mixes, where ``executor`` carries them out; one that fails stops no other. What is
    finished needs none.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; every mix saves what it has and ends. A second one
            kills them.
    """
    pieces = {mix: contest.piece(mix) for mix in contest.mixes}
    reports, failures = carried_out_together(
        list(pieces.values()), executor, kind="mix", bars=bars, say=say
    )
    return Outcome(
        reports={mix: reports[piece] for mix, piece in pieces.items() if piece in reports},
        failures={mix: failures[piece] for mix, piece in pieces.items() if piece in failures},
        roles=contest.roles,
        reference=contest.reference,
    )


@unless_busy
def make(arguments: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """The mix of ``arguments`` (see :meth:`Contest.piece`) as the job of an executor: its
    ``report``, as `hgms mix --json` prints it."""
    registry = Registry.load(arguments["plugins"])
    progress = RemoteProgress(tell)
    settings = {key: arguments[key] for key in ("seed", "out", "method", "scale")}
    config = hgms_mix.stages.load(
        Path(arguments["grid"]), arguments["sets"], registry=registry, **settings
    )
    return {
        "report": finite(
            hgms_mix.stages.carry_out(config, say=progress.say, view=progress, patience=PATIENCE)
        )
    }
