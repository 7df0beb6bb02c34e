"""A mix file: a run configuration with three more tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import frozen

from hgms.arguments import require, require_known
from hgms.comparison import apply_scale
from hgms.config.tables import merge_options, overlay_tables, tables_of
from hgms.plugins import Registry
from hgms.runs import RunConfig
from hgms_core import ConfigError
from hgms_mix.lm import SourceMixture
from hgms_mix.stages.settings import Finetune, Resampling, Sample


@frozen(kw_only=True)
class MixConfig(RunConfig):
    """The content of a mix file: the run that learns the mixture, and the later stages.

    The run has schema, seed, budget, task, method and run.
    """

    sample: Sample
    uncertainty: Resampling = Resampling()
    finetune: Finetune = Finetune()

    @property
    def reweight(self) -> RunConfig:
        """The run without the later stages, in the form that ``hgms run`` accepts."""
        return RunConfig(
            **{part.name: getattr(self, part.name) for part in attrs.fields(cast(Any, RunConfig))}
        )


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
    """Load the configuration in a mix file (or one ``method`` of a grid).

    Options of the command line override values of the file.
    """
    table = mix_of(tables_of(path, "configuration"), method, scale, path.name)
    places = merge_options(table, sets, seed, out=out, device=device)
    return read(table, path.name, places, registry)


def read(
    table: Mapping[str, Any],
    source: str,
    places: Iterable[tuple[str, ...]] = (),
    registry: Registry | None = None,
) -> MixConfig:
    """Return the configuration in a mix file's table; messages use ``source`` as its name."""
    reject_benchmarks(table, source)
    config = cast(
        "MixConfig", MixConfig.from_dict(table, source=source, sets=places, registry=registry)
    )
    # A mix requires sources: other tasks have no rows to sample.
    require(
        isinstance(config.task, SourceMixture),
        "not-supported",
        f"the task {config.task.name!r} has no data sources to mix",
        place=("task", "name"),
        hint='set name = "source-mixture", or use hgms run',
    )
    require(
        config.run.device.partition(":")[2] in ("", "0"),
        "not-supported",
        f"device={config.run.device!r} is not supported: fine-tuning uses the first visible GPU",
        place=("run", "device"),
        hint=f'set device = "cuda" and CUDA_VISIBLE_DEVICES={config.run.device[5:]}',
    )
    return config


def reject_benchmarks(table: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for the table [evaluate], which selected benchmarks before 0.9.0."""
    own = table.get("evaluate", ())
    place = ("evaluate", *(list(own)[:1] if isinstance(own, Mapping) else ()))
    require(
        "evaluate" not in table,
        "unknown-option",
        f"{'.'.join(place)} is not an option: hgms mix evaluates the losses of test sets only",
        place=(source, *place),
        hint="remove the table [evaluate], and give the tuned model to the lm-eval harness: "
        "lm_eval --model hf --model_args pretrained=BASE,peft=FOLDER/finetune-KEY/tuned "
        "--tasks gsm8k\n"
        "for the paper's scores, use benchmarks/llm/evaluate.py in the repository of HGMS",
    )


OF_GRIDS = ("seeds", "metric", "reference", "baselines", "scale")
"""Keys of a file that only `hgms compare` uses."""


def mix_of(
    table: Mapping[str, Any], method: str | None, scale: str | None, source: str
) -> dict[str, Any]:
    """Return the table of one mix: the grid's single task, and the method labelled ``method``.

    The table of a mix is returned unchanged.

    Examples
    --------
    >>> grid = {
    ...     "seeds": [7],
    ...     "task": {"name": "t", "label": "a"},
    ...     "method": ["x", {"name": "y", "label": "z", "lr": 1}],
    ... }
    >>> table = mix_of(grid, "z", None, "grid.toml")
    >>> table["task"], table["method"], table["seed"], table["run"]
    ({'name': 't'}, {'name': 'y', 'lr': 1}, 7, {'task_label': 'a', 'label': 'z'})
    """
    if not isinstance(table.get("method"), list):
        require(
            method is None and scale is None,
            "not-supported",
            f"{'--scale' if method is None else '--method'} requires a grid, but the file has "
            "one method",
            place=(source, "method"),
            hint="use --set method.name=NAME",
        )
        require(
            "for" not in table,
            "not-supported",
            "[for] requires a grid, but the file has one method",
            place=(source, "for"),
            hint="move its values into the other tables",
        )
        return _move_labels(table, table.get("task"), table.get("method"))
    table = apply_scale(table, scale, source)
    task_label, task = _choose_entry(table.get("task"), None, "task", source)
    label, chosen = _choose_entry(table["method"], method, "method", source)
    table = _for(label, table, source)
    special = chosen.pop("on", {}).get(task_label, {})
    seeds = table.get("seeds", 1)
    seed = seeds[0] if isinstance(seeds, Sequence) and seeds else 0
    kept = {key: value for key, value in table.items() if key not in OF_GRIDS}
    return _move_labels({**kept, "seed": seed}, task, overlay_tables(chosen, special))


OWN = ("budget", "sample", "finetune")
"""Tables that [for.LABEL] may override: the budget of a method (a method that does not learn
needs one step), and the later stages.
"""


def _for(label: str, table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Apply the overrides in [for.LABEL], and remove these tables.

    They override the budget and the later stages.
    """
    rest = {key: value for key, value in table.items() if key != "for"}
    tables = table.get("for", {})
    entries = [
        entry if isinstance(entry, Mapping) else {"name": entry} for entry in table["method"]
    ]
    labels = [str(entry.get("label", entry.get("name"))) for entry in entries]
    for name, own in tables.items() if isinstance(tables, Mapping) else [("", tables)]:
        place = (source, "for", name) if name else (source, "for")
        require_known("method", name, labels, place)
        for key in own if isinstance(own, Mapping) else [own]:
            require_known("option", str(key), OWN, (source, "for", name, str(key)))
    return overlay_tables(rest, tables.get(label, {}))


def _move_labels(table: Mapping[str, Any], task: Any, method: Any) -> dict[str, Any]:
    """Return the table with this task and method; their labels become settings of the run."""
    run = table.get("run", {})
    labels = {}
    for key, part in (("task_label", task), ("label", method)):
        if isinstance(part, dict) and "label" in part:
            labels[key] = part.pop("label")
    parts = {key: part for key, part in (("task", task), ("method", method)) if part is not None}
    return {
        **table,
        **parts,
        **({"run": {**run, **labels}} if labels and isinstance(run, Mapping) else {}),
    }


def _choose_entry(
    part: Any, label: str | None, kind: str, source: str
) -> tuple[str, dict[str, Any]]:
    """Return label and table of the entry called ``label``, or of the only entry."""
    listed = [
        {"name": entry} if isinstance(entry, str) else entry
        for entry in (part if isinstance(part, list) else [part])
    ]
    tables = [dict(entry) for entry in listed if isinstance(entry, Mapping)]
    by_label = {str(entry.get("label", entry.get("name"))): entry for entry in tables}
    if label is None and len(by_label) == 1:
        return next(iter(by_label.items()))
    if label is None:
        raise ConfigError(
            "wrong-length",
            f"a mix has one {kind}, but the grid has {len(by_label)} ({', '.join(by_label)})",
            place=(source, kind),
            hint="add --method LABEL" if kind == "method" else "keep one task",
        )
    require_known(kind, label, by_label, (source, kind))
    return label, by_label[label]
