"""Training by transformers' Trainer: AdamW, a LoRA adapter in peft's format, exact resumption."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import shutil
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hgms_core import Key, OutOfMemory, out_of_memory
from hgms_mix.checkpoints import LossLog, Watch, newest_checkpoint, remove, seal
from hgms_run import DiskError, Interrupted, Interrupts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

    from hgms_mix.finetune import Finetune

IGNORED = -100
"""The label of a token that is not learned from (what transformers uses)."""


def train(
    settings: Finetune,
    model: PreTrainedModel,
    rows: Sequence[tuple[Tensor, Tensor]],
    folder: Path,
    *,
    seed: int,
    adapter: Any = None,
    start: Mapping[str, Tensor] | None = None,
    pad: int = 0,
    watch: Watch = lambda step, steps, loss: None,
) -> dict[str, Any]:
    """Trains ``model`` (or the peft ``adapter`` on it) on ``rows`` of (tokens, completion mask), from a checkpoint if
    ``folder`` holds one, and writes ``adapter/`` (or ``model/``) there. ``start`` gives parameters by their names.

    Raises:
        NumericalError: the loss of a step is not finite; checkpoints from before are kept.
        OutOfMemory: with what to lower.
        DiskError: a checkpoint cannot be written; those from before are kept.
        CheckpointError: a checkpoint or losses.jsonl is damaged; nothing is changed.
        Interrupted: Ctrl-C; what is done is saved.
    """
    key = Key(seed if settings.seed is None else settings.seed).fold("finetune")
    number, checkpoints = key.derive() % 2**32, folder / "checkpoints"
    kind = "model" if adapter is None else "adapter"
    with borrowed(number), _failures(settings, folder), without_peft_warnings(), Interrupts() as interrupts:
        trained = _trainable(model, adapter, start)
        if settings.checkpointing:
            _checkpoint(model)
        log = LossLog(folder / "losses.jsonl", watch, interrupts)
        trainer = _trainer(settings, trained, rows, checkpoints, number, pad, log)
        last = newest_checkpoint(checkpoints)
        log.rewind(last)
        with tied_are_there(trained):
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if step < steps:
        why = f"interrupted after {step} of {steps} optimiser steps; they are saved in {folder}"
        raise Interrupted(why, interrupts.number or signal.SIGINT)
    losses = [row["loss"] for row in log.rows()]
    with _failures(settings, folder):
        _save(trained, folder / kind)
    remove(checkpoints.glob("checkpoint-*"))
    shutil.rmtree(checkpoints, ignore_errors=True)
    return {
        "kind": kind,
        "rows": len(rows),
        "optimizer_steps": steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "parameters": sum(leaf.numel() for leaf in trained.parameters() if leaf.requires_grad),
    }


def completion_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Cross-entropy over the completion tokens (labels that are not −100, shifted by one): its sum divided by ``count``, or its
    mean. Computed in float32 whatever the logits are.

    >>> labels = torch.tensor([[-100, 1, 0]])
    >>> round(float(completion_loss(torch.zeros(1, 3, 4), labels)), 4)    # log 4 at each of the two tokens
    1.3863
    """
    flat, target = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    total = F.cross_entropy(flat, target, ignore_index=IGNORED, reduction="sum")
    return total / (count if count is not None else (target != IGNORED).sum().clamp(min=1))


def collate(rows: Sequence[tuple[Tensor, Tensor]], pad: int) -> dict[str, Tensor]:
    """Rows padded on the right to the longest. Labels are the tokens themselves where they are completion, else −100; the first
    token of a row is never predicted, so it is never a label.

    >>> batch = collate([(torch.tensor([5, 6, 7]), torch.tensor([False, True, True])),
    ...                  (torch.tensor([8, 9]), torch.tensor([False, True]))], pad=0)
    >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6, 7], [8, 9, 0]], [[-100, 6, 7], [-100, 9, -100]], [[1, 1, 1], [1, 1, 0]])
    """
    ids = pad_sequence([tokens.long() for tokens, _ in rows], batch_first=True, padding_value=pad)
    learned = pad_sequence([mask for _, mask in rows], batch_first=True)
    present = pad_sequence([torch.ones_like(mask) for _, mask in rows], batch_first=True)
    labels = ids.where(learned, IGNORED)
    labels[:, 0] = IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": present.long()}


def _trainable(model: PreTrainedModel, adapter: Any, start: Mapping[str, Tensor] | None) -> Any:
    """What is trained: peft's adapter around the frozen model, or all of the model, in float32."""
    if adapter is None:
        trained: Any = model.float().requires_grad_(True)
    else:
        import peft

        trained = peft.get_peft_model(model, adapter)
    if start is not None:
        own = {name: p for name, p in trained.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, leaf in start.items():
                own[name].copy_(leaf)
    return trained


def _checkpoint(model: PreTrainedModel) -> None:
    newer = getattr(model, "activation_checkpointing_enable", None)  # the name since transformers 5.20; the older one warns
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.enable_input_require_grads()  # a frozen embedding's output has no gradient for the checkpoints to pass on


def _save(model: Any, target: Path) -> None:
    """Written aside, then renamed: a folder of this name is whole."""
    aside = target.with_name(target.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    # Whether embeddings were resized would be asked of the Hub; they are not trained here.
    model.save_pretrained(aside, **({"save_embedding_layers": False} if hasattr(model, "peft_config") else {}))
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def _trainer(settings: Finetune, model: Any, rows: Sequence[Any], folder: Path, seed: int, pad: int, log: LossLog) -> Trainer:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    device = next(model.parameters()).device

    class Follow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if log.interrupts.number is not None:
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seal(folder / f"checkpoint-{state.global_step}", log)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                row = {"step": state.global_step, "loss": logs["loss"], "lr": logs["learning_rate"]}
                size = {"gradient_norm": logs["grad_norm"]} if "grad_norm" in logs else {}
                log.append(row | size, state.max_steps)

    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    arguments = TrainingArguments(
        output_dir=str(folder), seed=seed, num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.micro_batch, gradient_accumulation_steps=settings.accumulation,
        optim="adamw_torch", learning_rate=settings.lr, weight_decay=settings.weight_decay,
        lr_scheduler_type="constant_with_warmup" if settings.schedule == "constant" and settings.warmup else settings.schedule,
        warmup_steps=settings.warmup, max_grad_norm=settings.clip or 0.0, bf16=bf16, use_cpu=device.type == "cpu",
        logging_steps=1, logging_nan_inf_filter=False, save_steps=settings.save_every,
        remove_unused_columns=False, report_to="none", disable_tqdm=True, dataloader_pin_memory=device.type == "cuda",
    )  # fmt: skip
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # several visible GPUs would be used at once, each with a micro-batch of its own
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=lambda batch: collate(batch, pad),
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: completion_loss(
            outputs["logits"], labels, num_items_in_batch
        ),
        callbacks=[Follow()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


@contextlib.contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Without the warnings that peft earns by calling transformers by names it has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*checkpointing.* is deprecated and will be removed in v6", FutureWarning)
        yield


@contextlib.contextmanager
def tied_are_there(model: Any) -> Iterator[None]:
    """Without Trainer's warning that a checkpoint lacks keys, where those are other names of tensors that it has."""
    places: dict[int, list[str]] = {}
    for name, leaf in model.state_dict().items():
        places.setdefault(leaf.data_ptr(), []).append(name)
    tied = {name for names in places.values() if len(names) > 1 for name in names}

    def matters(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (text.startswith("There were missing keys") and set(re.findall("'([^']+)'", text)) <= tied)

    logger = logging.getLogger("transformers.trainer")
    logger.addFilter(matters)
    try:
        yield
    finally:
        logger.removeFilter(matters)


@contextlib.contextmanager
def _failures(settings: Finetune, folder: Path) -> Iterator[None]:
    """Memory that runs out, and what each library says when it cannot write, as errors with what to do."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        if out_of_memory(error):
            fewer = "lower task.max_length"
            if settings.micro_batch > 1:
                now = settings.micro_batch
                fewer = f"lower finetune.micro_batch (now {now}) and raise finetune.accumulation by the same factor"
            more = "" if settings.checkpointing else ", or set finetune.checkpointing = true"
            raise OutOfMemory(f"fine-tuning ran out of memory: {why}\n  {fewer}{more}") from error
        # OSErrors without a number are no failed system calls: libraries take them for other things too
        writing = error.errno is not None if isinstance(error, OSError) else isinstance(error, SafetensorError)
        if not writing and "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        raise DiskError(
            f"cannot write {folder}: {getattr(error, 'strerror', None) or why}\n"
            "  what was saved before is kept; free some space, then run the same command again"
        ) from error


@contextlib.contextmanager
def borrowed(seed: int) -> Iterator[None]:
    """The global generators of Python, numpy and torch (GPUs too), seeded inside and restored after.

    >>> before = torch.get_rng_state()
    >>> with borrowed(1):
    ...     _ = torch.randn(3)
    >>> torch.get_rng_state().equal(before)
    True
    """
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state of the global one is what is kept
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002
