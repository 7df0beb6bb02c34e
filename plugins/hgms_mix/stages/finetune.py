"""The stage `finetune`: train the final model on the sampled rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hgms.arguments import require
from hgms.runs import environment
from hgms.store import Folder
from hgms_core.errors import DataError
from hgms_mix.stages.graph import Facts, Log, Stage
from hgms_mix.stages.reweight import Learned
from hgms_mix.stages.sample import COUNTS, ROWS, SAMPLE
from hgms_mix.stages.settings import Finetune
from hgms_mix.stages.training import CHECKPOINTS, LOSSES, TUNED, Watch, train
from hgms_mix.stages.tuned_model import TunedModel, read_rows

if TYPE_CHECKING:
    from hgms_mix.stages.config import MixConfig


def ensure_supported(config: MixConfig) -> None:
    """Raise ConfigError or MissingExtra for settings of ``[finetune]`` that cannot be used."""
    model = TunedModel.of(config)
    settings = config.finetune
    if settings.model is None:
        return
    require(
        not settings.model.shard,
        "not-supported",
        "shard=True requires ranks, but one process fine-tunes",
        place=("finetune", "model", "shard"),
        hint="remove it, or train on the exported sample (hgms mix export)",
    )
    from hgms_mix.lm import template_for

    template_for(model.task.template, model.tokenizer)


def fine_tune(
    work: Folder,
    rows: Path,
    counts: Path,
    *,
    learned: Learned,
    model: TunedModel,
    finetune: Finetune,
    watch: Watch,
    log: Log,
) -> Facts:
    """Train the adapter or model, and write it with its tokenizer.

    Other programs need only the folder ``tuned``.
    """
    from hgms_mix.lm import check_fits

    work.write("env.json", json.dumps(environment(model.device), indent=2, default=str).encode())
    sample = json.loads(counts.read_bytes())
    tables = model.sampled_tables(rows, sample["of"])
    chosen: Sequence[tuple[Tensor, Tensor]] = ()
    if finetune.epochs:
        chosen = chosen_rows(model, sample, rows, tables, log)
        log(f"  {len(chosen)} rows")
    base = model.load()
    check_fits(base, {"sample": tables, "test": model.test_tables})
    facts = train(
        finetune.with_seed(learned.seed),
        base,
        chosen,
        work,
        adapter=None if model.adapter is None else model.adapter.peft_config(base),
        start=start(learned) if finetune.start == "reweighted" else None,
        tokenizer=model.tokenizer,
        watch=watch,
    )
    model.tokenizer.save_pretrained(work.path / TUNED)
    return facts


FINETUNE = Stage(
    name="finetune",
    version="2",
    function=fine_tune,
    reads={"rows": SAMPLE.output(ROWS), "counts": SAMPLE.output(COUNTS)},
    writes=(TUNED, LOSSES),
    scratch=(CHECKPOINTS,),
)


def chosen_rows(
    model: TunedModel, sample: Facts, rows: Path, tables: Mapping[str, Any], log: Log
) -> list[tuple[Tensor, Tensor]]:
    """Return the sampled rows as (tokens, completion mask), in tokens of the fine-tuned model.

    Rows that are too long in these tokens are excluded.

    Raises
    ------
    DataError
        If a source changed after sampling, or all rows are too long in these tokens.
    """
    from hgms_mix.lm import content

    for name, source in getattr(model.task, sample["of"]).items():
        require(
            content(name, source) == sample["sources"][name],
            "data-changed",
            f"source {name!r} changed after its rows were sampled",
            place=("task", sample["of"], name),
            hint="run hgms mix sample to draw new rows",
            error=DataError,
        )
    listed = list(read_rows(rows))
    places = {name: table.places for name, table in tables.items()}
    chosen = []
    for row in listed:
        place = places.get(row["source"], {}).get(row["row"])
        if place is not None:
            chosen.append(tables[row["source"]].row(place))
    most = model.task.max_length
    if len(chosen) < len(listed):
        log(
            f"  {len(listed) - len(chosen)} of {len(listed)} rows have more than {most} tokens of "
            "finetune.model: excluded"
        )
    require(
        chosen,
        "no-rows",
        f"0 of {len(listed)} rows to fine-tune on have at most {most} tokens",
        place=("task", "max_length"),
        hint="increase max_length",
        error=DataError,
    )
    return chosen


def start(learned: Learned) -> dict[str, Tensor]:
    """Return the final lower variables of reweighting, by their names in fine-tuning."""
    lower = learned.config.method.result(learned.state())[1]
    if learned.task.adapter is None:
        return dict(lower)
    return {
        f"base_model.model.{name.removesuffix('.weight')}.default.weight": leaf
        for name, leaf in lower.items()
    }
