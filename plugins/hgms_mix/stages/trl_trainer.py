"""Fine-tuning by TRL's SFTTrainer, on the rows and loss masks of the task."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
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
"""Fields of SFTConfig that have another name in a mix file."""
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
"""Fields that depend on the work of the mix: checkpoints, losses, and tokenised rows."""


@final
@component
class Trl:
    """The SFTTrainer of TRL. Rows, their order, loss masks, checkpoints and resumption are the same
    as for ``transformers``; without packing, losses are the same too.

    Use when: row lengths differ much and the model uses flash attention (``packing``,
    ``padding_free``), or you need an option of SFTConfig. Avoid on a CPU, where it is not faster,
    and with an adapter on ``lm_head``, which TRL rejects.

    Arguments:
        packing: rows are concatenated into blocks (best fit, decreasing) of ``sft.max_length``
            tokens; default: the length of the longest row. A micro-batch then counts blocks, so an
            optimiser step contains more rows.
        padding_free: the rows of a micro-batch form one sequence without padding (packing implies
            it).
        completion_only_loss: False: prompts are learned, too.
        sft: further fields of TRL's SFTConfig (and transformers' TrainingArguments), passed on
            unchanged.

    Cost: as ``transformers``, without the padding.

    >>> Trl(packing=True, sft={"packing_strategy": "bfd"}).packing
    True

    Source: https://huggingface.co/docs/trl/sft_trainer (1.16).
    """

    name: ClassVar[str] = "trl"

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
        from datasets.utils import disable_progress_bars
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
        # SFTConfig's default is True; `train` enables checkpointing if it is requested
        switched = {"gradient_checkpointing": False}
        arguments = self._configuration(job.arguments() | switched, block if self.packing else None)
        disable_progress_bars()
        # Without padding, sorting has no benefit; packed sequences are not the rows.
        trainer = (SFTTrainer if self.packing or self.padding_free else by_length(SFTTrainer, job))(
            model=job.model,
            args=on_one_device(arguments),
            train_dataset=_dataset(job.rows, self.completion_only_loss),
            # SFTTrainer may change its padding token
            processing_class=copy.deepcopy(job.tokenizer),
            callbacks=[job.callback],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def facts(self, trainer: Trainer) -> dict[str, Any]:
        return {"trainer": self.name, "sequences": len(trainer.train_dataset)}

    def _configuration(self, arguments: Mapping[str, Any], block: int | None) -> Any:
        """Return the SFTConfig.

        Raises:
            ConfigError: SFTConfig rejects a value.
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
    """Return tokens and labels in memory.

    TRL's labels from a completion mask would differ. The first token of a row is never predicted,
    but TRL would count it in the mean if it is learned.
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
