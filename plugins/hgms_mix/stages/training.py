"""Training: AdamW, a LoRA adapter in peft's format, exact resumption; which library does it is
``Finetune.trainer``.
"""

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
from torch import Tensor

from hgms.runs import DiskError, Interrupted, Interrupts
from hgms_core import ConfigError, Key
from hgms_core.errors import OutOfMemory
from hgms_core.torch_errors import first_line, is_failed_write, is_unused_parameter, out_of_memory
from hgms_mix.stages.checkpoints import LossLog, Watch, newest_checkpoint, remove, seal
from hgms_mix.stages.trainers import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback

    from hgms.distributed import Ranks
    from hgms_mix.stages.finetune import Finetune


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
    tokenizer: Any = None,
    ranks: Ranks | None = None,
    watch: Watch = lambda step, steps, loss: None,
) -> dict[str, Any]:
    """Trains ``model`` (or the peft ``adapter`` on it) on ``rows`` of (tokens, completion mask),
    from a checkpoint if ``folder`` holds one, and writes ``adapter/`` (or ``model/``) there.
    ``start`` gives parameters by their names; ``tokenizer`` is for trainers that ask for one. With
    ``epochs = 0`` the start is written as it is. All ``ranks`` call this with the same arguments,
    and share out the rows of every optimiser step; rank 0 writes.

    Raises:
        NumericalError: the loss of a step is not finite; checkpoints from before are kept.
        OutOfMemory: with what to lower.
        DiskError: a checkpoint cannot be written; those from before are kept.
        CheckpointError: a checkpoint or losses.jsonl is damaged; nothing is changed.
        Interrupted: Ctrl-C; what is done is saved.
    """
    key = Key(seed if settings.seed is None else settings.seed).fold("finetune")
    number = key.derive() % 2**32
    checkpoints = folder / "checkpoints"
    kind = "model" if adapter is None else "adapter"
    first = ranks is None or ranks.rank == 0
    with (
        borrowed(number),
        _failures(settings, folder),
        without_peft_warnings(),
        Interrupts() as interrupts,
    ):
        trained = _trainable(model, adapter, start)
        if not settings.epochs:
            _save(trained, folder / kind)
            return {"kind": kind, "rows": 0, "optimizer_steps": 0, "parameters": _count(trained)}
        if settings.checkpointing:
            _checkpoint(model)
        log = LossLog(folder / "losses.jsonl", watch, interrupts, written=first)
        job = Job(
            settings=settings,
            model=trained,
            rows=rows,
            folder=checkpoints,
            seed=number,
            pad=pad,
            tokenizer=tokenizer,
            callback=_follow(checkpoints, log, ranks, number),
            ranks=ranks,
        )
        trainer = settings.trainer.build(job)
        last = _begin(checkpoints, log, ranks)
        with tied_are_there(trained):
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    step = trainer.state.global_step
    steps = trainer.state.max_steps
    if step < steps:
        why = f"interrupted after {step} of {steps} optimiser steps; they are saved in {folder}"
        raise Interrupted(why, interrupts.number or signal.SIGINT)
    if not first:
        return {"kind": kind}
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
        "parameters": _count(trained),
        **settings.trainer.facts(trainer),
    }


def _begin(checkpoints: Path, log: LossLog, ranks: Ranks | None) -> Path | None:
    """The checkpoint that training goes on from, on all ranks the one that rank 0 finds; the
    losses go back to it.
    """
    if ranks is None or ranks.rank == 0:
        last = newest_checkpoint(checkpoints)
        log.rewind(last)
        if ranks is not None:
            ranks.say({"last": None if last is None else str(last)})
        return last
    beginning = ranks.say(None)
    assert beginning is not None
    return None if beginning["last"] is None else Path(beginning["last"])


def _count(model: Any) -> int:
    return sum(leaf.numel() for leaf in model.parameters() if leaf.requires_grad)


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
    # the name since transformers 5.20; the older one warns
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    # a frozen embedding's output has no gradient for the checkpoints to pass on
    model.enable_input_require_grads()


def _save(model: Any, target: Path) -> None:
    """Written aside, then renamed: a folder of this name is whole."""
    aside = target.with_name(target.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    # Whether embeddings were resized would be asked of the Hub; they are not trained here.
    model.save_pretrained(
        aside, **({"save_embedding_layers": False} if hasattr(model, "peft_config") else {})
    )
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def _follow(folder: Path, log: LossLog, ranks: Ranks | None, seed: int) -> TrainerCallback:
    """Seals checkpoints, keeps the losses, and stops after the running step on Ctrl-C."""
    from transformers import TrainerCallback

    class Follow(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # dropout of its own on each rank, unless a checkpoint of as many ranks says which
            if ranks is not None:
                torch.manual_seed(
                    Key(seed).fold("rank", ranks.rank, ranks.count, state.global_step).derive()
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            stop = log.interrupts.number is not None
            if stop if ranks is None else ranks.any(stop):
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if ranks is not None:
                ranks.any(False)  # each has written its state of random numbers
            if log.written:
                seal(folder / f"checkpoint-{state.global_step}", log)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
        ) -> None:
            if logs and "loss" in logs:
                row = {"step": state.global_step, "loss": logs["loss"], "lr": logs["learning_rate"]}
                size = {"gradient_norm": logs["grad_norm"]} if "grad_norm" in logs else {}
                log.append(row | size, state.max_steps)

    return Follow()


@contextlib.contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Without the warnings that peft earns by calling transformers by names it has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r".*checkpointing.* is deprecated and will be removed in v6", FutureWarning
        )
        yield


@contextlib.contextmanager
def tied_are_there(model: Any) -> Iterator[None]:
    """Without Trainer's warning that a checkpoint lacks keys, where those are other names of
    tensors that it has.
    """
    places: dict[int, list[str]] = {}
    for name, leaf in model.state_dict().items():
        places.setdefault(leaf.data_ptr(), []).append(name)
    tied = {name for names in places.values() if len(names) > 1 for name in names}

    def matters(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (
            text.startswith("There were missing keys")
            and set(re.findall("'([^']+)'", text)) <= tied
        )

    logger = logging.getLogger("transformers.trainer")
    logger.addFilter(matters)
    try:
        yield
    finally:
        logger.removeFilter(matters)


@contextlib.contextmanager
def _failures(settings: Finetune, folder: Path) -> Iterator[None]:
    """Memory that runs out, and what each library says when it cannot write, as errors with what
    to do.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
        why = first_line(error)
        if out_of_memory(error):
            place = ("task", "max_length")
            fewer = "decrease task.max_length"
            if settings.micro_batch > 1:
                now = settings.micro_batch
                place = ("finetune", "micro_batch")
                fewer = (
                    f"decrease micro_batch (now {now}) and increase accumulation by the same factor"
                )
            more = "" if settings.checkpointing else ", or set finetune.checkpointing = true"
            raise OutOfMemory(
                "out-of-memory",
                f"fine-tuning ran out of memory: {why}",
                place=place,
                hint=fewer + more,
            ) from error
        if is_unused_parameter(error):
            raise ConfigError(
                "not-supported",
                "a parameter has no gradient in an optimiser step, but ranks average the gradients "
                "of all parameters",
                place=("run", "ranks"),
                hint="set ranks = 1 for a model that uses a part of its parameters per row, such "
                "as a mixture of experts",
            ) from error
        # OSErrors without a number are no failed system calls: libraries take them for other things
        # too
        writing = (
            error.errno is not None
            if isinstance(error, OSError)
            else isinstance(error, SafetensorError)
        )
        if not writing and not is_failed_write(error):
            raise
        raise DiskError(
            "cannot-write",
            f"fine-tuning cannot write: {getattr(error, 'strerror', None) or why}",
            place=(str(folder),),
            hint="free disk space, then run the same command again to resume from the last "
            "checkpoint",
        ) from error


@contextlib.contextmanager
def borrowed(seed: int) -> Iterator[None]:
    """The global generators of Python, numpy and torch (GPUs too), seeded inside and restored
    after.

    >>> before = torch.get_rng_state()
    >>> with borrowed(1):
    ...     _ = torch.randn(3)
    >>> torch.get_rng_state().equal(before)
    True
    """

    python = random.getstate()
    arrays = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002
