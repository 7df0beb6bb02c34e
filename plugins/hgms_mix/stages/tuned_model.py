"""The model that is fine-tuned: its weights, tokenizer and adapter, and the rows in its tokens."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import define

from hgms.config.as_table import plain
from hgms.runs import device_called
from hgms_mix.lm import BaseModel, Lora
from hgms_mix.stages.graph import Value

if TYPE_CHECKING:
    from hgms_mix.stages.config import MixConfig


@define(kw_only=True, eq=False, slots=False)
class TunedModel(Value):
    """The model to fine-tune on rows of ``task``, and its adapter (None: all parameters)."""

    task: Any
    model: BaseModel
    adapter: Lora | None
    device: torch.device

    @classmethod
    def of(cls, config: MixConfig) -> TunedModel:
        """Return the model and adapter of ``[finetune]``; their default is the task's."""
        task: Any = config.task
        own = config.finetune
        return cls(
            task=task,
            model=own.model or task.model,
            adapter=own.adapter or task.adapter,
            device=device_called(config.run.device),
        )

    def fingerprint(self) -> list[Any]:
        return [plain(self.model), self.model.digest(), plain(self.adapter)]

    @functools.cached_property
    def tokenizer(self) -> Any:
        return self.model.load_tokenizer()

    @functools.cached_property
    def test_tables(self) -> dict[str, Any]:
        """The test sets in tokens of this model."""
        return self.task.tables(self.tokenizer, "test")

    def sampled_tables(self, rows: Path, of: str) -> dict[str, Any]:
        """Return the sampled rows of each source in tokens of this model.

        ``of``: whether the rows are from ``sources`` or from ``validation`` sets.
        """
        numbers = dict[str, list[int]]()
        for row in read_rows(rows):
            numbers.setdefault(row["source"], []).append(row["row"])
        index = {name: torch.tensor(sorted(own)) for name, own in numbers.items()}
        return self.task.tables_at(self.tokenizer, of, index)

    def load(self) -> Any:
        """Load the whole model in its state before fine-tuning."""
        return self.model.load(self.device, torch.float32, len(self.tokenizer))

    def load_tuned(self, folder: Path) -> Any:
        """Load the fine-tuned model from its folder."""
        if (folder / "adapter_config.json").is_file():
            from peft import PeftModel

            from hgms_mix.stages.training import without_peft_warnings

            with without_peft_warnings():
                return PeftModel.from_pretrained(self.load(), folder).eval()
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.to(self.device).eval()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a sample."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)
