"""Which library trains: a part of fine-tuning. The default is transformers' Trainer;
:mod:`hgms_mix.stages.trl_trainer` is TRL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, final

import torch
from attrs import frozen as plain_frozen

from hgms_core import component
from hgms_mix.lm import is_in_parts
from hgms_mix.stages.batches import collate, completion_loss
from hgms_mix.stages.lengths import ByLength
from hgms_mix.stages.rank_batches import Dealt, Unlearned
from hgms_mix.stages.replicas import of_replicas

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from hgms.distributed import Ranks
    from hgms_mix.stages.finetune import Finetune


@plain_frozen(kw_only=True, eq=False)
class Job:
    """What a trainer is built from: the ``model`` (or peft's adapter on it), ``rows`` of (tokens,
    completion mask), the ``folder`` of its checkpoints, the ``callback`` that seals them and keeps
    the losses, and the ``ranks`` that train together."""

    settings: Finetune
    model: Any
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]]
    folder: Path
    seed: int
    pad: int
    tokenizer: Any
    callback: TrainerCallback
    ranks: Ranks | None = None

    def arguments(self) -> dict[str, Any]:
        """The fields of transformers' TrainingArguments, which those of TRL extend."""
        settings = self.settings
        device = next(self.model.parameters()).device
        accumulation = -(-settings.accumulation // (1 if self.ranks is None else self.ranks.count))
        constant = settings.schedule == "constant" and settings.warmup
        return {
            "output_dir": str(self.folder),
            "seed": self.seed,
            "num_train_epochs": settings.epochs,
            "per_device_train_batch_size": settings.micro_batch,
            "gradient_accumulation_steps": accumulation,
            "optim": "adamw_torch",
            "learning_rate": settings.lr,
            "weight_decay": settings.weight_decay,
            "lr_scheduler_type": "constant_with_warmup" if constant else settings.schedule,
            "warmup_steps": settings.warmup,
            "max_grad_norm": settings.clip or 0.0,
            "bf16": device.type == "cuda" and torch.cuda.is_bf16_supported(),
            "use_cpu": device.type == "cpu",
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "save_steps": settings.save_every,
            "remove_unused_columns": False,
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": device.type == "cuda",
            # of ranks: a loss is a sum over the tokens of all of them, and every parameter has a
            # gradient
            "average_tokens_across_devices": True,
            "ddp_find_unused_parameters": False,
        }


class TrainerPart(Protocol):
    """A library that trains. What it builds is a ``transformers.Trainer``, so checkpoints and
    losses are the same.
    """

    name: ClassVar[str]
    on_ranks: ClassVar[bool]
    """Whether it trains on all ranks of a mix; else one process does."""

    def check(self, targets: Sequence[str] | None) -> None:
        """Whether it is installed and takes these settings and an adapter on ``targets`` (None: all
        parameters are trained).

        Raises:
            MissingExtra, ConfigError: before the first stage begins.
        """

    def build(self, job: Job) -> Trainer:
        """The trainer, ready for ``train``."""

    def facts(self, trainer: Trainer) -> dict[str, Any]:
        """What the report says of it, beside the losses."""


@final
@component
class Transformers:
    """The Trainer of transformers. The rows of an optimiser step are sorted by length, and padded
    to the longest of their micro-batch.

    Use when: there is no reason for another. Avoid when an optimiser step has few rows of very
    different lengths, in micro-batches of several: ``trl`` packs them.

    Cost: a forward and a backward pass over every row, an epoch.

    >>> Transformers().name
    'transformers'
    """

    name: ClassVar[str] = "transformers"
    on_ranks: ClassVar[bool] = True

    def check(self, targets: Sequence[str] | None) -> None:
        return

    def build(self, job: Job) -> Trainer:
        from transformers import PrinterCallback, Trainer, TrainingArguments

        trainer = by_length(Trainer, job)(
            model=job.model,
            args=on_one_device(TrainingArguments(**job.arguments())),
            train_dataset=job.rows,
            data_collator=lambda batch: collate(batch, job.pad),
            compute_loss_func=lambda outputs, labels, num_items_in_batch=None: completion_loss(
                outputs["logits"], labels, num_items_in_batch
            ),
            callbacks=[job.callback],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def facts(self, trainer: Trainer) -> dict[str, Any]:
        return {}


def by_length(trainer: Any, job: Job) -> Any:
    """The class of a trainer that sorts the rows of an optimiser step by their lengths, and
    shares them out among ranks.
    """
    from accelerate.data_loader import DataLoaderShard  # type: ignore[import-untyped]

    if job.ranks is not None and is_in_parts(job.model):
        trainer = of_replicas(trainer)

    class Sorted(trainer):
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            lengths = torch.tensor([len(job.rows[number][0]) for number in range(len(job.rows))])
            together = job.settings.micro_batch * job.settings.accumulation
            if job.ranks is None:
                loader.batch_sampler.sampler = ByLength(
                    loader.batch_sampler.sampler, lengths, together
                )
                return loader
            # accelerate's own parts repeat rows where they do not come out even
            order = ByLength(loader.batch_sampler.batch_sampler.sampler, lengths, together)
            dealt = Dealt(
                order,
                together,
                self.args.gradient_accumulation_steps,
                job.ranks.rank,
                job.ranks.count,
            )
            return DataLoaderShard(
                Unlearned(job.rows),
                batch_sampler=dealt,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
            )

    return Sorted


def on_one_device(arguments: Any) -> Any:
    """Several visible GPUs would be used at once, each with a micro-batch of its own."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments
