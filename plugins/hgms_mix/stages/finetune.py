"""The stage `finetune`: train the final model on the sampled rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from hgms.config.as_table import plain
from hgms.runs import environment
from hgms.store import replace_file
from hgms_core import ConfigError, RunInfo
from hgms_core.errors import DataError
from hgms_mix.stages.stage import Stage
from hgms_mix.stages.training import train
from hgms_mix.stages.work import read_rows

if TYPE_CHECKING:
    from hgms_mix.stages.work import Work


class Finetuning(Stage):
    """The stage `finetune`. It trains the adapter or model, and writes it with its tokenizer.

    Other programs need only this folder.
    """

    name: ClassVar[str] = "finetune"
    version: ClassVar[str] = "1"

    def packages(self, mix: Work) -> list[str]:
        return ["accelerate", *([] if mix.adapter is None else ["peft"])]

    def check(self, mix: Work) -> None:
        mix.config.finetune.trainer.check(None if mix.adapter is None else mix.adapter.targets)
        own = mix.config.finetune.model
        if own is not None:
            from hgms_mix.lm import template_for

            if own.shard:
                raise ConfigError(
                    "not-supported",
                    "shard=True requires ranks, but one process fine-tunes",
                    place=("finetune", "model", "shard"),
                    hint="remove it, or train on the exported sample (hgms mix export)",
                )
            template_for(mix.task.template, mix.tuned_tokenizer)

    def inputs(self, mix: Work) -> dict[str, Any]:
        table = plain(mix.config.finetune).items()
        model = mix.config.finetune.model
        settings = {
            key: value for key, value in table if key not in ("model", "adapter") or value != "none"
        }
        return {
            "settings": settings,
            **({} if model is None else {"model": model.digest()}),
            "seed": mix.config.seed,
        }

    def title(self, mix: Work) -> str:
        rows = f"{mix.done['sample'].facts['size']} rows"
        return rows if mix.config.finetune.epochs else "the model that learning ended with"

    def run(self, mix: Work, folder: Path) -> tuple[Iterable[Path], dict[str, Any]]:
        config = mix.config
        about = json.dumps(environment(mix.device), indent=2, default=str)
        replace_file(folder / "env.json", about.encode())
        facts = self._train(mix, folder)
        tuned = folder / facts["kind"]
        mix.tuned_tokenizer.save_pretrained(tuned)
        losses = [folder / "losses.jsonl"] if config.finetune.epochs else []
        return [*(path for path in tuned.iterdir() if path.is_file()), *losses], facts

    def _train(self, mix: Work, folder: Path) -> dict[str, Any]:
        config = mix.config
        rows: Sequence[tuple[Tensor, Tensor]] = chosen_rows(mix) if config.finetune.epochs else ()
        model = mix.base()
        adapter = None if mix.adapter is None else mix.adapter.peft_config(model)
        info = RunInfo(
            task=config.task.name, method="finetune", seed=config.seed, budget=config.budget
        )
        return train(
            config.finetune,
            model,
            rows,
            folder,
            seed=config.seed,
            adapter=adapter,
            start=start(mix),
            pad=getattr(rows, "pad", 0),
            tokenizer=mix.tuned_tokenizer,
            watch=lambda step, steps, loss: mix.view.watch(
                info, {"step": step, "lower_loss": loss}, step / steps
            ),
        )

    def summary(self, mix: Work, report: Mapping[str, Any]) -> dict[str, Any]:
        return {"finetune": dict(mix.done[self.name].facts)}


class ChosenRows(Sequence[tuple[Tensor, Tensor]]):
    """The sampled rows as (tokens, completion mask), read from the token tables on access.

    Rows that the tables do not contain are excluded.
    """

    def __init__(self, tables: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        places = {name: table.places for name, table in tables.items()}
        present = [(row["source"], places.get(row["source"], {}).get(row["row"])) for row in rows]
        self._tables = tables
        self._rows = [(name, place) for name, place in present if place is not None]
        self.pad = next((table.pad_id for table in tables.values()), 0)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        name, position = self._rows[index]
        tokens, mask = self._tables[name].row(position)
        return tokens, mask


def chosen_rows(mix: Work) -> ChosenRows:
    """Return the sampled rows, in tokens of the fine-tuned model.

    Errors: DataError if a source changed after sampling, or all rows are too long in these tokens.
    """
    from hgms_mix.lm import content

    sample = mix.done["sample"]
    for name, source in getattr(mix.task, sample.facts["of"]).items():
        if content(name, source) != sample.facts["sources"][name]:
            raise DataError(
                "data-changed",
                f"source {name!r} changed after its rows were sampled",
                place=("task", sample.facts["of"], name),
                hint="run the same command again to sample new rows",
            )
    rows = list(read_rows(sample.path / "rows.jsonl.gz"))
    chosen = ChosenRows(mix.drawn_tables(), rows)
    if len(chosen) < len(rows):
        most = mix.task.max_length
        mix.say(
            f"  {len(rows) - len(chosen)} of {len(rows)} rows have more than {most} tokens of "
            "finetune.model: left out"
        )
    if not len(chosen):
        raise DataError(
            "no-rows",
            f"0 of {len(rows)} rows to fine-tune on have at most {mix.task.max_length} tokens",
            place=("task", "max_length"),
            hint="increase max_length",
        )
    return chosen


def start(mix: Work) -> dict[str, Tensor] | None:
    """Return the final lower variables of reweighting, by their names in fine-tuning.

    None: a fresh start.
    """
    if mix.config.finetune.start == "fresh":
        return None
    lower = mix.config.method.result(mix.state)[1]
    if mix.task.adapter is None:
        return dict(lower)
    return {
        f"base_model.model.{name.removesuffix('.weight')}.default.weight": leaf
        for name, leaf in lower.items()
    }
