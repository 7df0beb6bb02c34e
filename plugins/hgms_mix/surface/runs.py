"""The runs of a design: the stages of `hgms mix` sample, fine-tune and evaluate each run once."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import define, field, frozen

from hgms.runs import View, counting
from hgms.store import finite, json_digest, replace_file
from hgms_core import ConfigError, Key, NumericalError
from hgms_core.components import evolve
from hgms_mix.stages import STAGES, Done, Mix, MixConfig
from hgms_mix.surface.design import Point
from hgms_mix.surface.process import sklearn
from hgms_mix.surface.tables import REPORTED, Runs

DECIDES = "validation_"
LOOKED = 256
"""Rows of each source that are tokenised to estimate the tokens of a run."""
VERSION = "1"
"""Version of the record of a run."""


@frozen(kw_only=True)
class Outcome:
    """A finished run: its mixture, losses and cost.

    ``mixture`` contains the shares of the sources in the drawn rows. ``metrics`` contains the
    losses by metric, as means over tokens. ``seconds`` is None if the run was interrupted and
    resumed.
    """

    key: str
    point: Point
    mixture: tuple[float, ...]
    metrics: Mapping[str, float]
    seconds: float | None
    tokens: int

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(loss) for loss in self.metrics.values())


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
    _mix: Mix = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.given, self.config = self.config, evaluated(self.config)
        self._mix = Mix(self.config, self.folder)  # tokenises the test sets once

    def check(self) -> None:
        """Raise ConfigError or MissingExtra for failures detectable before the first run."""
        sklearn()
        self._mix.check("evaluate")

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
        return {name: index.size for name, index in self._mix.task.rows().items()}

    def tokens(self) -> dict[str, float]:
        """Return the mean row length of each source, in tokens of the tuned model.

        The mean is over ``LOOKED`` rows of each source.
        """
        counts = dict.fromkeys(self.sources, LOOKED)
        tables = self._mix.task.draw(
            self._mix.tuned_tokenizer, counts, lambda name: Key(0).fold("lengths", name)
        )
        return {name: float(table.lengths.double().mean()) for name, table in tables.items()}

    def shortened(self, config: MixConfig, folder: Path) -> DesignRuns:
        """Return a copy with other settings for sample and fine-tuning, in another folder.

        The copy shares loaded data.
        """
        short = copy.copy(self)
        short.config = config
        short.folder = folder
        return short

    def finished(self, point: Point) -> Outcome | None:
        """Return the outcome of a point, or None if it has not been run."""
        key = self._ready(point)
        try:
            record = json.loads((self._folder(key) / "run.json").read_bytes())
            if record["key"] != key or record["version"] != VERSION:
                return None
            return Outcome(
                key=key,
                point=point,
                mixture=tuple(record["mixture"]),
                metrics={
                    name: math.nan if loss is None else loss
                    for name, loss in record["metrics"].items()
                },
                seconds=record["seconds"],
                tokens=record["tokens"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # missing or damaged: run it again

    def run(self, point: Point) -> Outcome:
        """Sample, fine-tune and evaluate a point, or resume this work.

        If the loss of fine-tuning becomes non-finite, all losses of the run are NaN. A repeated run
        would diverge too, and the other runs do not depend on it.

        Raises:
            Interrupted: Ctrl-C; finished work is saved.
        """
        key = self._ready(point)
        mix = self._mix
        mix.folder = self._folder(key)
        mix.folder.mkdir(parents=True, exist_ok=True)
        seconds = counting(any(path.is_dir() for path in mix.folder.iterdir()), time.perf_counter)
        try:
            metrics = {
                name: row["token_loss"]["value"]
                for name, row in mix.run("evaluate").facts["test"].items()
            }
        except NumericalError:
            metrics = dict.fromkeys(self.config.task.test, math.nan)  # type: ignore[attr-defined]
        counts = np.array(
            [mix.done["sample"].facts["counts"][name] for name in self.sources], dtype=float
        )
        tokens = sum(int(table.lengths.sum()) for table in mix.drawn_tables().values())
        outcome = Outcome(
            key=key,
            point=point,
            mixture=tuple((counts / counts.sum()).tolist()),
            metrics=metrics,
            seconds=seconds(),
            tokens=tokens * self.config.finetune.epochs,
        )
        record = {
            "version": VERSION,
            "weights": dict(zip(self.sources, point.weights, strict=True)),
            **attrs.asdict(outcome),
        }
        replace_file(
            mix.folder / "run.json",
            json.dumps(finite(record), indent=2, ensure_ascii=False).encode(),
        )
        for tuned in ("adapter", "model", "checkpoints"):
            shutil.rmtree(mix.folder / "finetune" / tuned, ignore_errors=True)
        return outcome

    def place(self, point: Point) -> Path:
        """Return the folder of a point."""
        return self._folder(self._ready(point))

    def show(self, view: View, say: Callable[[str], None]) -> None:
        """Show stages and steps in ``view``, and their lines through ``say``."""
        self._mix.view = view
        self._mix.say = say

    def _folder(self, key: str) -> Path:
        return self.folder / "runs" / key[:12]

    def _ready(self, point: Point) -> str:
        """Set the mix to ``point``, and return its key.

        The key is the sha256 of everything that determines the result.
        """
        mix = self._mix
        mix.config = evolve(self.config, seed=point.seed)
        weights = dict(zip(self.sources, point.weights, strict=True))
        task = self.config.task
        inputs = {"weights": weights, "task": self._task, "task_version": task.version, **mix.data}
        start = json_digest(inputs)
        known = Done(path=self.folder, key=start, facts={"weights": weights}, digest=start)
        names = [stage.name for stage in STAGES]
        learning = names.index("sample")
        mix.done = dict.fromkeys(("reweight", *names[:learning]), known)
        return json_digest(
            [
                start,
                *([stage.name, stage.version, stage.inputs(mix)] for stage in STAGES[learning:]),
            ]
        )

    @property
    def _task(self) -> Any:
        return self.config.resolved()["task"]


def evaluated(config: MixConfig) -> MixConfig:
    """Return the configuration with validation sets as additional test sets.

    It has no benchmarks.

    Raises:
        ConfigError: a seed is the same for every run, or the start requires a learned mixture.
    """
    for table in ("sample", "finetune"):
        if (seed := getattr(config, table).seed) is not None:
            raise ConfigError(
                "not-supported",
                f"seed={seed} is not supported: the runs of a surface have different seeds",
                place=(table, "seed"),
                hint="remove it",
            )
    if config.sample.of != "sources":
        raise ConfigError(
            "not-supported",
            f"of={config.sample.of!r} is not supported: runs of a surface sample from the sources",
            place=("sample", "of"),
            hint='set of = "sources"',
        )
    if config.finetune.start == "reweighted":
        raise ConfigError(
            "not-supported",
            "start='reweighted' is not supported: runs of a surface do not learn a mixture",
            place=("finetune", "start"),
            hint='set start = "fresh"',
        )
    task: Any = config.task
    sets = {f"{DECIDES}{name}": source for name, source in task.validation.items()}
    sets |= {f"{REPORTED}{name}": source for name, source in task.test.items()}
    return evolve(
        config, task=attrs.evolve(task, test=sets), evaluate=evolve(config.evaluate, benchmarks=())
    )


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
