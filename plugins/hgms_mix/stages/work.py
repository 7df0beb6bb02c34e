"""The objects that the stages of a mix share: its configuration, data, models, finished stages."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from hgms.runs import Progress, RunFolder, View, device_called
from hgms_mix.stages.config import MixConfig
from hgms_mix.stages.stage_folder import Done


@define(eq=False)
class Work:
    """What a stage works on: one mix in one folder, the folder of its run.

    ``say`` receives a line per stage, ``view`` shows progress, and ``done`` contains the finished
    stages, ``reweight`` first.
    """

    config: MixConfig
    folder: Path
    say: Callable[[str], None] = lambda line: None
    view: View = field(factory=lambda: Progress(enabled=False))
    done: dict[str, Done] = field(init=False, factory=dict)

    @property
    def task(self) -> Any:
        return self.config.task

    @property
    def device(self) -> torch.device:
        return device_called(self.config.run.device)

    @functools.cached_property
    def data(self) -> Mapping[str, Any]:
        """Data fingerprint of the task's problem: digests of its files and of the model's files."""
        contents: Mapping[str, Any] = self.task.made_of()
        return contents

    @property
    def state(self) -> Any:
        """Final state of reweighting."""
        stored = RunFolder(self.done["reweight"].path).load(self.device)
        assert stored is not None  # a finished run has a checkpoint
        return stored[0]

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the model that learns the mixture."""
        return self.task.model.load_tokenizer()

    @functools.cache  # noqa: B019 - a mix lives as long as its command
    def tables(self, which: str) -> dict[str, Any]:
        """Return the token tables of the task's ``sources``, ``validation`` or ``test`` sets."""
        tables: dict[str, Any] = self.task.tables(self.tokenizer, which)
        return tables

    @functools.cached_property
    def pool(self) -> dict[str, Any]:
        """Rows on which the mixture is learned."""
        pool: dict[str, Any] = self.task.pool(self.tokenizer, self.config.seed)
        return pool

    @property
    def adapter(self) -> Any:
        """Adapter that is fine-tuned, or None for all parameters."""
        own = self.config.finetune.adapter
        return self.task.adapter if own is None else own

    @functools.cached_property
    def tuned_tokenizer(self) -> Any:
        """Tokenizer of the fine-tuned model."""
        model = self.config.finetune.model
        return self.tokenizer if model is None else model.load_tokenizer()

    @functools.cache  # noqa: B019
    def tuned_tables(self, which: str) -> dict[str, Any]:
        """Return the sets in tokens of the fine-tuned model."""
        if self.config.finetune.model is None:
            return self.tables(which)
        tables: dict[str, Any] = self.task.tables(self.tuned_tokenizer, which)
        return tables

    def base(self) -> Any:
        """Load the whole model to fine-tune, in its state before fine-tuning."""
        from hgms_mix.lm import check_fits

        base = self.config.finetune.model or self.task.model
        model = base.load(self.device, torch.float32, len(self.tuned_tokenizer))
        check_fits(model, {"sample": self.drawn_tables(), "test": self.tuned_tables("test")})
        return model

    def drawn_tables(self) -> dict[str, Any]:
        """Return the sampled rows of each source in tokens of the fine-tuned model.

        If the sample is from validation sets, the rows are by validation set.
        """
        sample = self.done["sample"]
        numbers = dict[str, list[int]]()
        for row in read_rows(sample.path / "rows.jsonl.gz"):
            numbers.setdefault(row["source"], []).append(row["row"])
        of = {name: torch.tensor(sorted(rows)) for name, rows in numbers.items()}
        tables: dict[str, Any] = self.task.picked(self.tuned_tokenizer, sample.facts["of"], of)
        return tables


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a sample."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)
