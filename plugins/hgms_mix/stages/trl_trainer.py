"""Fine-tuning by TRL's SFTTrainer, on the rows and loss masks that the task made."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

from attrs import field, validators
from torch import Tensor

from hgms_core import ConfigError, component
from hgms_core.errors import MissingExtra, closest
from hgms_mix.stages.batches import IGNORED
from hgms_mix.stages.trainers import Job, by_length, on_one_device

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

PLACE = ("finetune", "trainer", "sft")
OURS: Mapping[str, str] = {
    "seed": "finetune.seed",
    "num_train_epochs": "finetune.epochs",
    "per_device_train_batch_size": "finetune.micro_batch",
    "gradient_accumulation_steps": "finetune.accumulation",
    "learning_rate": "finetune.lr",
    "weight_decay": "finetune.weight_decay",
    "lr_scheduler_type": "finetune.schedule",
    "warmup_steps": "finetune.warmup",
    "max_grad_norm": "finetune.clip",
    "save_steps": "finetune.save_every",
    "gradient_checkpointing": "finetune.checkpointing",
    "activation_checkpointing": "finetune.checkpointing",
    "packing": "finetune.trainer.packing",
    "padding_free": "finetune.trainer.padding_free",
    "completion_only_loss": "finetune.trainer.completion_only_loss",
    "output_dir": "run.out",
    "use_cpu": "run.device",
}
"""Fields of SFTConfig that a mix file has a name of its own for."""
RESERVED = (
    "logging_steps",
    "logging_strategy",
    "logging_nan_inf_filter",
    "save_strategy",
    "save_total_limit",
    "save_only_model",
    "report_to",
    "disable_tqdm",
    "remove_unused_columns",
    "resume_from_checkpoint",
    "push_to_hub",
    "do_eval",
    "eval_strategy",
    "load_best_model_at_end",
    "dataset_text_field",
    "dataset_kwargs",
    "eos_token",
    "pad_token",
    "chat_template_path",
    "assistant_only_loss",
    "truncation_mode",
    "model_init_kwargs",
    "trust_remote_code",
    "full_determinism",
)
"""Fields that rest on something the mix does itself: checkpoints, losses, and rows that are
tokens already.
"""


@final
@component
class Trl:
    """The SFTTrainer of TRL. Rows, their order, loss masks, checkpoints and resumption are those of
    ``transformers``; without packing so are the losses.

    Use when: rows differ much in length and the model runs flash attention (``packing``,
    ``padding_free``), or an option of SFTConfig is wanted. Avoid on a CPU, where nothing of it is
    faster; and with an adapter on ``lm_head``, which TRL refuses.

    Arguments:
        packing: rows are laid one after the other into blocks (best fit, decreasing) of
            ``sft.max_length`` tokens, by default those of the longest row. A micro-batch then
            counts blocks, so an optimiser step sees more rows.
        padding_free: the rows of a micro-batch as one sequence without padding (packing implies
            it).
        completion_only_loss: False: prompts are learned, too.
        sft: further fields of TRL's SFTConfig (and transformers' TrainingArguments), passed on as
            they are.

    Cost: as ``transformers``, less what was padding.

    >>> Trl(packing=True, sft={"packing_strategy": "bfd"}).packing
    True

    Source: https://huggingface.co/docs/trl/sft_trainer (1.16).
    """

    name: ClassVar[str] = "trl"
    on_ranks: ClassVar[bool] = False

    packing: bool = False
    padding_free: bool = False
    completion_only_loss: bool = True
    sft: dict[str, bool | int | float | str] = field(
        factory=dict, validator=validators.instance_of(dict)
    )

    def check(self, targets: Sequence[str] | None) -> None:
        if importlib.util.find_spec("trl") is None:
            raise MissingExtra(
                "missing-package",
                'trainer="trl" requires trl, which is not installed',
                place=("finetune", "trainer"),
                install="pip install 'hgms[trl]'",
            )
        if "lm_head" in (targets or ()):
            raise ConfigError(
                "not-supported",
                "TRL does not support an adapter on 'lm_head'",
                place=("task", "adapter", "targets"),
                hint='remove it, or set finetune.trainer = "transformers"',
            )
        from trl import SFTConfig

        known = [
            part.name
            for part in dataclasses.fields(SFTConfig)
            if part.init and part.name not in RESERVED
        ]
        for key in self.sft:
            if key in OURS:
                raise ConfigError(
                    "conflicting-options",
                    f"{key!r} has another name in a mix file",
                    place=(*PLACE, key),
                    hint=f"set {OURS[key]} instead",
                )
            if key in RESERVED:
                raise ConfigError(
                    "conflicting-options",
                    f"{key!r} cannot be set, because hgms mix sets it",
                    place=(*PLACE, key),
                    hint="remove it",
                )
            if key not in known:
                near = closest(key, [name for name in known if name not in OURS])
                raise ConfigError(
                    "unknown-option",
                    f"SFTConfig has no field {key!r}",
                    place=(*PLACE, key),
                    hint=None if near else "see https://huggingface.co/docs/trl/sft_trainer",
                    did_you_mean=(near,) if near else (),
                )
        if "max_length" in self.sft and not self.packing:
            raise ConfigError(
                "conflicting-options",
                "'max_length' is the length of a packed block, but packing=False",
                place=(*PLACE, "max_length"),
                hint="set task.max_length to exclude longer rows, or finetune.trainer.packing = "
                "true",
            )
        self._configuration({"output_dir": "unused", "use_cpu": True, "bf16": False}, None)

    def build(self, job: Job) -> Trainer:
        from transformers import PrinterCallback
        from trl import SFTTrainer

        longest = max(len(tokens) for tokens, _ in job.rows)
        block = int(self.sft.get("max_length", longest))
        if self.packing and block < longest:
            raise ConfigError(
                "out-of-range",
                f"max_length={block} must be at least {longest}, the length of the longest row",
                place=(*PLACE, "max_length"),
                hint=f"increase it, or set task.max_length = {block}",
            )
        # SFTConfig's default is True; where it is asked for, it is on already
        switched = {"gradient_checkpointing": False}
        arguments = self._configuration(job.arguments() | switched, block if self.packing else None)
        with _quiet():
            # without padding there is nothing to sort; packed sequences are other ones than the
            # rows
            trainer = (
                SFTTrainer if self.packing or self.padding_free else by_length(SFTTrainer, job)
            )(
                model=job.model,
                args=on_one_device(arguments),
                train_dataset=_dataset(job.rows, self.completion_only_loss),
                # SFTTrainer may give it another padding token
                processing_class=copy.deepcopy(job.tokenizer),
                callbacks=[job.callback],
            )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def facts(self, trainer: Trainer) -> dict[str, Any]:
        return {"trainer": self.name, "sequences": len(trainer.train_dataset)}

    def _configuration(self, arguments: Mapping[str, Any], block: int | None) -> Any:
        """The SFTConfig.

        Raises:
            ConfigError: a value that it does not take.
        """
        from trl import SFTConfig

        own = {
            "packing": self.packing,
            "padding_free": self.padding_free,
            "completion_only_loss": self.completion_only_loss,
        }
        try:
            return SFTConfig(**{**arguments, **self.sft, **own, "max_length": block})
        except (ValueError, TypeError, ImportError) as error:
            why = " ".join(str(error).split())[:300]
            raise ConfigError(
                "wrong-value", f"SFTConfig rejects these settings: {why}", place=PLACE
            ) from None


def _dataset(rows: Sequence[tuple[Tensor, Tensor]], completion_only: bool) -> Dataset:
    """Tokens and labels in memory. The labels are made here, and not by TRL from a completion mask:
    the first token of a row is never predicted, but would be counted in the mean where it is
    learned.
    """
    from datasets import Dataset

    labels = []
    for tokens, mask in rows:
        learned = tokens.where(mask, IGNORED) if completion_only else tokens.clone()
        learned[:1] = IGNORED
        labels.append(learned.numpy())
    return Dataset.from_dict(
        {"input_ids": [tokens.numpy() for tokens, _ in rows], "labels": labels}
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of datasets, which would be written across ours."""
    from datasets.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()
