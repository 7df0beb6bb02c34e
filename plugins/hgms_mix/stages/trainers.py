"""The training library, a component of fine-tuning.

The default is transformers' Trainer; :mod:`hgms_mix.stages.trl_trainer` uses the trainer of TRL.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from attrs import field
from attrs import frozen as plain_frozen

from hgms_core import component
from hgms_core.validators import at_least, greater_than, not_negative, optional, positive
from hgms_mix.stages.batches import ByLength, collate, completion_loss

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


@component
class Training:
    """The settings of ``[finetune]`` that a trainer reads; ``Finetune`` explains them."""

    lr: float = field(default=8e-6, validator=positive)
    epochs: int = field(default=1, validator=at_least(0))
    micro_batch: int = field(default=1, validator=at_least(1))
    accumulation: int = field(default=32, validator=at_least(1))
    weight_decay: float = field(default=0.01, validator=not_negative)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: float = field(default=0.0, validator=at_least(0))
    clip: float | None = field(default=None, validator=optional(greater_than(0)))
    seed: int | None = field(default=None, validator=optional(at_least(0)))
    start: Literal["fresh", "reweighted"] = "fresh"
    save_every: int = field(default=50, validator=at_least(1))
    checkpointing: bool = False


@plain_frozen(kw_only=True, eq=False)
class Job:
    """The inputs of a trainer.

    These are the ``model`` (or peft's adapter on it), ``rows`` of (tokens, completion mask), and
    the ``folder`` of its checkpoints. The ``callback`` records checkpoints and losses.
    """

    settings: Training
    model: Any
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]]
    folder: Path
    seed: int
    pad: int
    tokenizer: Any
    callback: TrainerCallback

    def arguments(self) -> dict[str, Any]:
        """Return the fields of transformers' TrainingArguments, which TRL extends."""
        settings = self.settings
        device = next(self.model.parameters()).device
        constant = settings.schedule == "constant" and settings.warmup
        return {
            "output_dir": str(self.folder),
            "seed": self.seed,
            "num_train_epochs": settings.epochs,
            "per_device_train_batch_size": settings.micro_batch,
            "gradient_accumulation_steps": settings.accumulation,
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
        }


@final
@component
class Transformers:
    """The Trainer of transformers. It sorts the rows of an optimiser step by length, and pads each
    row to the longest row of its micro-batch.

    Use when: there is no reason for another trainer. Avoid when an optimiser step has few rows of
    very different lengths, in micro-batches of several rows: ``trl`` packs them.

    Cost: one forward and one backward pass over every row per epoch.

    >>> Transformers().name
    'transformers'
    """

    name: ClassVar[str] = "transformers"

    def check(self, targets: Sequence[str] | None) -> None:
        """Check that the library is installed and supports the settings.

        ``targets`` are the targets of an adapter (None: all parameters are trained).

        Raises:
            MissingExtra, ConfigError: before the first stage.
        """

    def build(self, job: Job) -> Trainer:
        """Return the trainer, ready for ``train``."""
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
        """Return the library's part of the report, in addition to the losses."""
        return {}


def by_length(trainer: Any, job: Job) -> Any:
    """Return a subclass of a trainer that sorts the rows of an optimiser step by length."""

    class Sorted(trainer):
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            lengths = torch.tensor([len(job.rows[number][0]) for number in range(len(job.rows))])
            together = job.settings.micro_batch * job.settings.accumulation
            loader.batch_sampler.sampler = ByLength(loader.batch_sampler.sampler, lengths, together)
            return loader

    return Sorted


def on_one_device(arguments: Any) -> Any:
    """Restrict training to one GPU.

    Otherwise the Trainer uses all visible GPUs, each with a separate micro-batch.
    """
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments
