"""Fine-tuning by the Trainer of transformers, with exact resumption."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms.arguments import require
from hgms.runs import Interrupted, Interrupts
from hgms.store import DiskError, Folder
from hgms.torch_errors import is_failed_write
from hgms_core import Key, NumericalError
from hgms_core.errors import OutOfMemory
from hgms_core.torch_errors import first_line, out_of_memory
from hgms_mix.stages.batches import ByLength, collate, completion_loss
from hgms_mix.stages.graph import files_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback

    from hgms_mix.stages.settings import Finetune

Watch = Callable[[int, int, float], None]
"""``watch(optimiser step, total steps, loss of the step)``."""
CHECKPOINTS = "checkpoints"
LOSSES = "losses.jsonl"
"""One line per optimiser step."""
TUNED = "tuned"
"""The folder of the adapter or model, in the format of peft or transformers."""


def train(
    settings: Finetune,
    model: PreTrainedModel,
    rows: Sequence[tuple[Tensor, Tensor]],
    work: Folder,
    *,
    adapter: Any = None,
    start: Mapping[str, Tensor] | None = None,
    tokenizer: Any = None,
    watch: Watch = lambda step, steps, loss: None,
) -> dict[str, Any]:
    """Train ``model`` (or the peft ``adapter`` on it) on ``rows`` of (tokens, completion mask).

    If ``work`` contains a checkpoint, training resumes from it. The result is written to the folder
    ``tuned``. ``start`` contains initial parameters by name; the ``tokenizer`` gives the padding
    token (default: 0). With ``epochs = 0``, the start is written without training.

    Raises
    ------
    NumericalError
        The loss of a step is not finite; earlier checkpoints are kept.
    OutOfMemory
        The message names the settings to decrease.
    DiskError
        a checkpoint cannot be written; earlier checkpoints are kept.
    CheckpointError
        a checkpoint or losses.jsonl is damaged; no file is changed.
    Interrupted
        Ctrl-C; finished work is saved.
    """
    number = Key(settings.seed or 0).fold("finetune").derive() % 2**32
    kind = "model" if adapter is None else "adapter"
    with (
        borrow_generators(number),
        _failures(work.path),
        without_peft_warnings(),
        Interrupts() as interrupts,
    ):
        last = resume_point(work)
        trained = _trainable(model, adapter, start)
        if not settings.epochs:
            work.write(LOSSES, b"")
            _save(trained, work.path / TUNED, kind)
            return {"kind": kind, "rows": 0, "optimizer_steps": 0, "parameters": _count(trained)}
        if settings.checkpointing:
            _checkpoint(model)
        progress = TrainingProgress(work=work, watch=watch, interrupts=interrupts)
        trainer = _trainer(
            trained,
            rows,
            arguments=_arguments(settings, trained, work.path / CHECKPOINTS, number),
            pad=0 if tokenizer is None else tokenizer.pad_token_id,
            callback=_follow(progress),
        )
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    step = trainer.state.global_step
    steps = trainer.state.max_steps
    if step < steps:
        why = f"interrupted after {step} of {steps} optimiser steps; they are saved in {work.path}"
        raise Interrupted(why, interrupts.number or signal.SIGINT)
    with _failures(work.path):
        _save(trained, work.path / TUNED, kind)
    lines = (work.path / LOSSES).read_bytes().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    return {
        "kind": kind,
        "rows": len(rows),
        "optimizer_steps": steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "parameters": _count(trained),
    }


def _arguments(settings: Finetune, model: Any, folder: Path, seed: int) -> Any:
    """Return the TrainingArguments of transformers."""
    from transformers import TrainingArguments

    device = next(model.parameters()).device
    constant = settings.schedule == "constant" and settings.warmup
    arguments: Any = TrainingArguments(
        output_dir=str(folder),
        seed=seed,
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.accumulation,
        optim="adamw_torch",
        learning_rate=settings.lr,
        weight_decay=settings.weight_decay,
        lr_scheduler_type="constant_with_warmup" if constant else settings.schedule,
        warmup_steps=settings.warmup,
        max_grad_norm=settings.clip or 0.0,
        bf16=device.type == "cuda" and torch.cuda.is_bf16_supported(),
        use_cpu=device.type == "cpu",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=settings.save_every,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=device.type == "cuda",
    )
    # Otherwise the Trainer uses all visible GPUs, each with a separate micro-batch.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments


def _trainer(
    model: Any,
    rows: Sequence[tuple[Tensor, Tensor]],
    *,
    arguments: Any,
    pad: int,
    callback: TrainerCallback,
) -> Any:
    """Return a Trainer that sorts the rows of an optimiser step by length."""
    from transformers import PrinterCallback, Trainer

    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    together = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps

    class SortingTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            loader: Any = super().get_train_dataloader()
            loader.batch_sampler.sampler = ByLength(loader.batch_sampler.sampler, lengths, together)
            return loader

    trainer = SortingTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=lambda batch: collate(batch, pad),
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: completion_loss(
            outputs["logits"], labels, num_items_in_batch
        ),
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def resume_point(work: Folder) -> Path | None:
    """Return the checkpoint that the manifest records, or None; cut the losses back to it.

    Raises
    ------
    CheckpointError
        If one of its files, or losses.jsonl, is damaged.
    """
    manifest = work.manifest()
    for name in manifest.files:
        if name != LOSSES:
            work.verified_path(name)
    work.rewind(LOSSES)
    checkpoint = manifest.facts.get("checkpoint")
    return None if checkpoint is None else work.path / CHECKPOINTS / checkpoint


@frozen(eq=False)
class TrainingProgress:
    """What training has done so far, in the manifest and the losses of its work folder."""

    work: Folder
    watch: Watch
    interrupts: Interrupts

    def append(self, row: Mapping[str, Any], steps: int) -> None:
        """Append the loss of an optimiser step."""
        require(
            math.isfinite(row["loss"]),
            "not-finite",
            f"the loss of fine-tuning step {row['step']} is {row['loss']}; earlier checkpoints are "
            "saved",
            place=("finetune", "lr"),
            hint="decrease lr, or set clip = 1.0",
            error=NumericalError,
        )
        self.work.append({LOSSES: json.dumps(row).encode() + b"\n"})
        self.watch(row["step"], steps, row["loss"])

    def commit(self, checkpoint: str) -> None:
        """Record a checkpoint and the losses so far, and remove all earlier checkpoints."""
        files = files_of(self.work.path, f"{CHECKPOINTS}/{checkpoint}")
        self.work.commit([LOSSES, *files], facts={"checkpoint": checkpoint})
        for other in (self.work.path / CHECKPOINTS).iterdir():
            if other.name != checkpoint:
                shutil.rmtree(other, ignore_errors=True)


def _count(model: Any) -> int:
    return sum(leaf.numel() for leaf in model.parameters() if leaf.requires_grad)


def _trainable(model: PreTrainedModel, adapter: Any, start: Mapping[str, Tensor] | None) -> Any:
    """Return the module to train.

    It is peft's adapter around the frozen model, or the whole model in float32.
    """
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
    # the name since transformers 5.20; the older name causes a warning
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    # checkpoints require a gradient, but the output of a frozen embedding has none
    model.enable_input_require_grads()


def _save(model: Any, target: Path, kind: str) -> None:
    """Save a model in place of earlier files; the manifest of the stage then records its files."""
    shutil.rmtree(target, ignore_errors=True)
    # Without this option, peft requests the Hub to detect resized embeddings; these are not
    # trained.
    options = {"save_embedding_layers": False} if kind == "adapter" else {}
    model.save_pretrained(target, **options)


def _follow(progress: TrainingProgress) -> TrainerCallback:
    """Return a callback that records losses and checkpoints, and stops on Ctrl-C.

    It stops after the current step.
    """
    from transformers import TrainerCallback

    class Follow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if progress.interrupts.number is not None:
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.commit(f"checkpoint-{state.global_step}")

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
        ) -> None:
            if logs and "loss" in logs:
                row = {"step": state.global_step, "loss": logs["loss"], "lr": logs["learning_rate"]}
                size = {"gradient_norm": logs["grad_norm"]} if "grad_norm" in logs else {}
                progress.append(row | size, state.max_steps)

    return Follow()


@contextlib.contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Suppress the warnings about old names of transformers functions that peft calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r".*checkpointing.* is deprecated and will be removed in v6", FutureWarning
        )
        yield


@contextlib.contextmanager
def _failures(folder: Path) -> Iterator[None]:
    """Convert exhausted memory and each library's write errors to errors with instructions."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
        why = first_line(error)
        if out_of_memory(error):
            raise OutOfMemory(
                "out-of-memory",
                f"fine-tuning ran out of memory: {why}",
                place=("finetune",),
                hint="set checkpointing = true, decrease micro_batch and increase accumulation by "
                "the same factor, or decrease task.max_length",
            ) from error
        # Libraries also raise OSErrors without a number; these are not failed system calls.
        writing = (
            error.errno is not None
            if isinstance(error, OSError)
            else isinstance(error, SafetensorError)
        )
        if not writing and not is_failed_write(error):
            raise
        raise DiskError(
            "cannot-write",
            f"fine-tuning cannot write: {(isinstance(error, OSError) and error.strerror) or why}",
            place=(str(folder),),
            hint="free disk space, then run the same command again to resume from the last "
            "checkpoint",
        ) from error


@contextlib.contextmanager
def borrow_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch, and restore them afterwards.

    This includes the generators of GPUs.

    Examples
    --------
    >>> before = torch.get_rng_state()
    >>> with borrow_generators(1):
    ...     _ = torch.randn(3)
    >>> torch.get_rng_state().equal(before)
    True
    """
    from transformers import set_seed

    python = random.getstate()
    arrays = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002
