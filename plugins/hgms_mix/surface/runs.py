"""The runs of a design: the stages of `hgms mix` sample, fine-tune and evaluate each run once."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import define, field, frozen

from hgms.arguments import require
from hgms.executors import RemoteProgress
from hgms.store import Folder, finite, json_digest
from hgms_core import NumericalError
from hgms_core.components import evolve
from hgms_core.errors import CheckpointError
from hgms_mix.stages import (
    STAGES,
    Learned,
    MixConfig,
    Runner,
    TunedModel,
    ensure_runnable,
    runner_of,
)
from hgms_mix.surface.design import Point
from hgms_mix.surface.process import sklearn
from hgms_mix.surface.tables import REPORTED, Runs

DECIDES = "validation_"
VERSION = "1"
"""Version of the record of a run."""


@frozen(kw_only=True)
class Outcome:
    """A finished run: its mixture, losses and cost.

    ``mixture`` contains the shares of the sources in the drawn rows. ``metrics`` contains the
    losses by metric, as means over tokens.
    """

    key: str
    point: Point
    mixture: tuple[float, ...]
    metrics: Mapping[str, float]
    tokens: int

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(loss) for loss in self.metrics.values())


class GivenMixture(Learned):
    """The mixture of a point, which no method learned: its rows are drawn by the weights."""

    def ranking(self) -> None:
        return None


@define(kw_only=True, eq=False)
class DesignRuns:
    """Run the points of a design in ``folder``; reuse finished runs with the same settings and
    data.

    The weights are the weights of the point, as for the method ``fixed``. No weights are learned,
    so the stages before ``sample`` are skipped. The last stage evaluates both validation and test
    sets. The tuned model is deleted.
    """

    config: MixConfig
    folder: Path
    given: MixConfig = field(init=False)
    """The configuration before :func:`evaluated` replaced its test sets."""
    _model: TunedModel = field(init=False)
    view: RemoteProgress | None = field(init=False, default=None)
    """Shows the steps of a run, and receives the lines of its stages."""

    def __attrs_post_init__(self) -> None:
        self.given, self.config = self.config, with_evaluated_sets(self.config)
        self._model = TunedModel.of(self.config)  # tokenises the test sets once

    def check(self) -> None:
        """Raise ConfigError or MissingExtra for failures detectable before the first run."""
        sklearn()
        ensure_runnable(self.config, "evaluate")

    def limits(self) -> list[str]:
        """Return a line for each source with fewer rows than a mixture may require."""
        size = self.config.sample.size
        return [
            (
                f"source {name!r} has {count} of {size} rows: no run has more than "
                f"{count / size:.2f} of it"
            )
            for name, count in self.rows().items()
            if count < size
        ]

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.config.task.sources)  # type: ignore[attr-defined]

    @property
    def deciding(self) -> list[str]:
        """The metrics that decide."""
        names = self.config.task.test  # type: ignore[attr-defined]
        return [name for name in names if name.startswith(DECIDES)]

    def rows(self) -> dict[str, int]:
        """Return the number of rows with an answer, by source."""
        return {name: index.size for name, index in self._model.task.rows().items()}

    def find_outcome(self, point: Point) -> Outcome | None:
        """Return the outcome of a point, or None if it has not been run."""
        folder = self.folder_of(point)
        with contextlib.suppress(CheckpointError):  # damaged: run it again
            manifest = folder.manifest()
            if manifest.status == "done":
                facts = manifest.facts
                return Outcome(
                    key=folder.key,
                    point=point,
                    mixture=tuple(facts["mixture"]),
                    metrics={
                        name: math.nan if loss is None else loss
                        for name, loss in facts["metrics"].items()
                    },
                    tokens=facts["tokens"],
                )
        return None

    def run(self, point: Point) -> Outcome:
        """Sample, fine-tune and evaluate a point, or resume this work.

        If the loss of fine-tuning becomes non-finite, all losses of the run are NaN. A repeated run
        would diverge too, and the other runs do not depend on it.

        Raises
        ------
        Interrupted
            Ctrl-C; finished work is saved.
        """
        folder = self.folder_of(point)
        folder.path.mkdir(parents=True, exist_ok=True)
        runner = self._runner(point, folder.path)
        try:
            tests = runner.run(STAGES["evaluate"]).facts["test"]
            metrics = {name: row["token_loss"]["value"] for name, row in tests.items()}
        except NumericalError:
            metrics = dict.fromkeys(self.config.task.test, math.nan)  # type: ignore[attr-defined]
        sample = runner.finished[STAGES["sample"]]
        counts = np.array([sample.facts["counts"][name] for name in self.sources], dtype=float)
        tables = self._model.sampled_tables(sample.path / "rows.jsonl.gz", "sources")
        tokens = sum(int(table.lengths.sum()) for table in tables.values())
        outcome = Outcome(
            key=folder.key,
            point=point,
            mixture=tuple((counts / counts.sum()).tolist()),
            metrics=metrics,
            tokens=tokens * self.config.finetune.epochs,
        )
        weights = dict(zip(self.sources, point.weights, strict=True))
        folder.commit([], facts=finite({"weights": weights, **attrs.asdict(outcome)}), done=True)
        for name in ("tuned", "checkpoints"):
            for tuned in folder.path.glob(f"finetune-*/{name}"):
                shutil.rmtree(tuned, ignore_errors=True)
        return outcome

    def folder_of(self, point: Point) -> Folder:
        """Return the folder of a point; its key covers everything that determines the result."""
        runner = self._runner(point, self.folder)
        stages = [
            [stage.name, stage.version, runner.inputs(stage)]
            for stage in STAGES["evaluate"].with_earlier()
        ]
        key = json_digest([VERSION, stages])
        return Folder(self.folder / "runs" / key[:12], key)

    def _runner(self, point: Point, folder: Path) -> Runner:
        """Return the runner of the stages of a point in its ``folder``."""
        weights = dict(zip(self.sources, point.weights, strict=True))
        start = json_digest({"weights": weights, **self.task_inputs})
        config = evolve(self.config, seed=point.seed)
        given = GivenMixture(
            config=config, path=folder, key=start, digest=start, facts={"weights": weights}
        )
        say = (lambda line: None) if self.view is None else self.view.say
        return runner_of(config, given, say, self.view, model=self._model)

    @functools.cached_property
    def task_inputs(self) -> dict[str, Any]:
        """Settings, version and data fingerprint of the task, which all points share."""
        task = self._model.task
        settings = self.config.as_dict()["task"]
        return {"task": settings, "task_version": task.version, **task.data_fingerprint()}


def with_evaluated_sets(config: MixConfig) -> MixConfig:
    """Return the configuration with validation sets as additional test sets.

    Raises
    ------
    ConfigError
        The configuration fixes a seed for all runs, or the start requires a learned mixture.
    """
    for table, option, needed in (
        ("sample", "seed", None),
        ("finetune", "seed", None),
        ("sample", "of", "sources"),
        ("finetune", "start", "fresh"),
    ):
        value = getattr(getattr(config, table), option)
        require(
            value == needed,
            "not-supported",
            f"{option}={value!r} is not supported: the runs of a surface have different seeds, "
            "sample from the sources, and do not learn a mixture",
            place=(table, option),
            hint="remove it",
        )
    task: Any = config.task
    sets = {f"{DECIDES}{name}": source for name, source in task.validation.items()}
    sets |= {f"{REPORTED}{name}": source for name, source in task.test.items()}
    return evolve(config, task=attrs.evolve(task, test=sets))


def table_of(outcomes: list[Outcome], sources: tuple[str, ...]) -> Runs:
    """Return the outcomes in the form of tables."""
    return Runs(
        names=tuple(outcome.key[:12] for outcome in outcomes),
        sources=sources,
        mixtures=np.array([outcome.mixture for outcome in outcomes]),
        metrics={
            name: np.array([outcome.metrics[name] for outcome in outcomes])
            for name in outcomes[0].metrics
        },
    )
