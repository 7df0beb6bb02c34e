"""A mix file: a run configuration with three more tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import field, frozen

from hgms_core import ConfigError
from hgms_core.registry import Registry
from hgms_evaluation import Evaluate
from hgms_mix.finetune import Finetune
from hgms_mix.folder import digest
from hgms_mix.grids import mix_of
from hgms_mix.sample import Sample
from hgms_run import UNCOMPARED, RunConfig, RunSettings, lay_options, tables_of


@frozen(kw_only=True)
class MixConfig(RunConfig):
    """What a mix file says: the run that learns the mixture (schema, seed, budget, task, method, run), and what comes after."""

    sample: Sample
    finetune: Finetune = Finetune()
    evaluate: Evaluate = Evaluate()
    runs: tuple[str, ...] = field(default=(), metadata={"toml": False})
    """Where `hgms compare` and `hgms run` put the runs of the same file."""

    @property
    def reweight(self) -> RunConfig:
        """The run alone, as ``hgms run`` takes it."""
        return RunConfig(**{part.name: getattr(self, part.name) for part in attrs.fields(RunConfig)})


def load(
    path: Path,
    sets: Sequence[str] = (),
    *,
    seed: int | None = None,
    out: str | None = None,
    device: str | None = None,
    method: str | None = None,
    scale: str | None = None,
    registry: Registry | None = None,
) -> MixConfig:
    """The configuration in a mix file (or one ``method`` of a grid), with what the command line lays over it."""
    table = mix_of(tables_of(path, "configuration"), method, scale, path.name)
    own = table.get("run", {}).get("out") if isinstance(table.get("run"), dict) else None
    places = lay_options(table, sets, seed, out=out, device=device)
    config = read(table, path.name, places, registry)
    before = own if isinstance(own, str) and own else RunSettings().out
    return attrs.evolve(config, runs=tuple(dict.fromkeys([config.run.out, before])))


def read(
    table: Mapping[str, Any], source: str, places: Iterable[tuple[str | int, ...]] = (), registry: Registry | None = None
) -> MixConfig:
    """The configuration that a mix file's table describes; ``source`` is its name in messages."""
    task, evaluate = table.get("task"), table.get("evaluate", {})
    if isinstance(task, Mapping) and isinstance(evaluate, Mapping) and "template" in task:
        # Questions are asked the way the model was trained, unless the file says otherwise.
        table = {**table, "evaluate": {"template": task["template"], **evaluate}}
    config = cast("MixConfig", MixConfig.from_dict(table, source=source, sets=places, registry=registry))
    # A mix is of sources: any other task has nothing to sample.
    if not (hasattr(config.task, "sources") and hasattr(config.task, "tables")):
        raise ConfigError(
            f"the task {config.task.name!r} has no data sources to mix @ task.name\n"
            '  write name = "source-mixture", or use hgms run'
        )
    if config.run.device.partition(":")[2] not in ("", "0"):
        raise ConfigError(
            f"fine-tuning runs on the first GPU it sees, not on {config.run.device!r} @ run.device\n"
            f'  write device = "cuda" and set the environment variable CUDA_VISIBLE_DEVICES={config.run.device[5:]}'
        )
    return config


def held(config: RunConfig) -> dict[str, Any]:
    """What a run's result depends on: everything but where it is put and what it is called."""
    table = config.resolved()
    for key in UNCOMPARED:
        table["run"].pop(key, None)
    return table


def comparable(config: MixConfig) -> str:
    """The same for mixes that differ in their method and seed only."""
    table = held(config)
    del table["method"], table["seed"]
    return digest(table)
