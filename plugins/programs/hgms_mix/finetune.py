"""Fine-tuning on the sampled rows: AdamW by transformers' Trainer, a LoRA adapter in peft's format, exact resumption."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from attrs import field, frozen, validators
from torch import Tensor

from hgms_core import CheckpointError, Key, NumericalError, OutOfMemory, out_of_memory
from hgms_llm import BaseModel, Lora
from hgms_mix.randomness import borrowed
from hgms_mix.stages import file_digest
from hgms_run import DiskError, Interrupted, Interrupts, appending, replace_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

IGNORED = -100
"""The label of a token that is not learned from (what transformers uses)."""

SEAL = "sha256.json"
"""In a checkpoint's folder, written last: the digests of the other files, and of the losses so far."""

Watch = Callable[[int, int, float], None]
"""``watch(optimiser step, steps in all, loss of the step)``."""


@final
@frozen(kw_only=True)
class Finetune:
    """Table ``[finetune]``: how the final model is trained on the sampled rows.

    The loss of an optimiser step is the mean cross-entropy over all completion tokens of its ``micro_batch · accumulation``
    rows: a long completion counts for more than a short one, and no padding counts at all. (The lower level of reweighting
    averages within a row first.) Rows come in a new seeded order every epoch.

    Arguments:
        lr: learning rate of AdamW (betas 0.9 and 0.999, eps 1e-8).
        epochs: passes over the sample.
        micro_batch: rows at a time on the device. ``accumulation``: micro-batches in an optimiser step.
        weight_decay: decoupled; biases and normalisation layers are left out, as transformers does it.
        schedule: of the learning rate, after ``warmup`` (a share of all steps below 1, a number of steps from 1 on).
        clip: largest gradient norm; None: not clipped.
        seed: of the order of the rows, the fresh adapter and dropout; None: the mix's own.
        start: ``fresh``: new parameters of the adapter (or the base model's own, without one); ``reweighted``: the lower
            variables that reweighting ended with.
        save_every: optimiser steps between checkpoints. ``checkpointing``: gradient checkpointing, less memory for more time.
        model, adapter: what is tuned, where it is another model than the one that the mixture was learned with (a small proxy);
            None: the task's. Rows are written in its own tokens.

    Defaults are the paper's: AdamW at 8e-6, constant, one epoch, no clipping, micro-batches of 1, accumulation 32 (64 for
    instructions).

    >>> Finetune().lr
    8e-06
    """

    version: ClassVar[str] = "1"

    lr: float = field(default=8e-6, validator=validators.gt(0))
    epochs: int = field(default=1, validator=validators.ge(1))
    micro_batch: int = field(default=1, validator=validators.ge(1))
    accumulation: int = field(default=32, validator=validators.ge(1))
    weight_decay: float = field(default=0.01, validator=validators.ge(0))
    schedule: Literal["constant", "linear", "cosine"] = field(
        default="constant", validator=validators.in_(["constant", "linear", "cosine"])
    )
    warmup: float = field(default=0.0, validator=validators.ge(0))
    clip: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    seed: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    start: Literal["fresh", "reweighted"] = field(default="fresh", validator=validators.in_(["fresh", "reweighted"]))
    save_every: int = field(default=50, validator=validators.ge(1))
    checkpointing: bool = False
    model: BaseModel | None = None
    adapter: Lora | None = None

    def __attrs_post_init__(self) -> None:
        if self.start == "reweighted" and (self.model is not None or self.adapter is not None):
            raise ValueError(
                "start = \"reweighted\" goes on with the task's own model and adapter: leave out 'model' and 'adapter'"
            )

    def train(
        self,
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
        key = Key(seed if self.seed is None else self.seed).fold("finetune")
        with borrowed(key.derive() % 2**32), _memory(self), _disk(folder), peft_behind(), Interrupts() as interrupts:
            trained = _trainable(model, adapter, start)
            if self.checkpointing:
                _checkpoint(model)
            log = _Log(folder / "losses.jsonl", watch, interrupts)
            trainer = _trainer(self, trained, rows, folder / "checkpoints", key.derive() % 2**32, pad, log)
            last = newest_checkpoint(folder / "checkpoints")
            log.rewind(_step_of(last), None if last is None else json.loads((last / SEAL).read_bytes())["losses"])
            with tied_are_there(trained):
                trainer.train(resume_from_checkpoint=None if last is None else str(last))
            step, steps = trainer.state.global_step, trainer.state.max_steps
        if step < steps:
            told = f"interrupted after {step} of {steps} optimiser steps; they are saved in {folder}"
            raise Interrupted(told, interrupts.number or signal.SIGINT)
        losses = log.losses()
        kind = "model" if adapter is None else "adapter"
        with _disk(folder):
            _save(trained, folder / kind)
        _remove((folder / "checkpoints").glob("checkpoint-*"))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return {
            "kind": kind,
            "rows": len(rows),
            "optimizer_steps": steps,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "parameters": sum(one.numel() for one in trained.parameters() if one.requires_grad),
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
    longest = max(len(tokens) for tokens, _ in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.int64)
    labels, present = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for i, (tokens, mask) in enumerate(rows):
        ids[i, : len(tokens)] = tokens.long()
        labels[i, : len(tokens)] = torch.where(mask, tokens.long(), IGNORED)
        present[i, : len(tokens)] = 1
    labels[:, 0] = IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": present}


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint: one without a seal is half a checkpoint.

    Errors: CheckpointError for a file that is not what was sealed.
    """
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=_step_of, reverse=True) if folder.is_dir() else []:
        if not (checkpoint / SEAL).exists():
            continue
        try:
            seal = json.loads((checkpoint / SEAL).read_bytes())
            whole = seal["files"] == _digests(checkpoint) and {"bytes", "sha256"} == set(seal["losses"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            whole = False
        if not whole:
            raise CheckpointError(
                f"damaged checkpoint {checkpoint}: its files do not match the sha256 in {SEAL}\n"
                "  remove it; fine-tuning then goes on from an earlier one, or from its beginning"
            )
        return checkpoint
    return None


def _remove(checkpoints: Iterable[Path]) -> None:
    """Each loses its seal first, so that one which a kill leaves half removed is none."""
    for checkpoint in sorted(checkpoints, key=_step_of):
        (checkpoint / SEAL).unlink(missing_ok=True)
        shutil.rmtree(checkpoint, ignore_errors=True)


def _digests(checkpoint: Path) -> dict[str, str]:
    """Of every file but the seal, whole or as a kill left it half-written."""
    files = (path for path in sorted(checkpoint.iterdir()) if path.is_file() and not path.name.startswith(SEAL))
    return {path.name: file_digest(path) for path in files}


def _step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])


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


class _Log:
    """``losses.jsonl``: one line per optimiser step."""

    def __init__(self, path: Path, watch: Watch, interrupts: Interrupts) -> None:
        self.path, self.watch, self.interrupts = path, watch, interrupts

    def rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        found = []
        for number, line in enumerate(self.path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
                found.append({**row, "step": int(row["step"]), "loss": float(row["loss"])})
            except (ValueError, TypeError, KeyError, RecursionError):
                raise CheckpointError(
                    f"damaged file {self.path}: line {number} is no step's loss\n"
                    f"  remove the folder {self.path.parent}; that stage is then made again"
                ) from None
        return found

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows()]

    def seal(self) -> dict[str, Any]:
        data = self.path.read_bytes() if self.path.exists() else b""
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def rewind(self, step: int, seal: Mapping[str, Any] | None) -> None:
        """Drops what came after ``step``; what came before has to be what the checkpoint's seal says."""
        data = self.path.read_bytes() if self.path.exists() else b""
        if seal is not None and hashlib.sha256(data[: seal["bytes"]]).hexdigest() != seal["sha256"]:
            raise CheckpointError(
                f"damaged file {self.path}: it is not what it was at step {step}\n"
                f"  remove the folder {self.path.parent}; that stage is then made again"
            )
        kept = [row for row in self.rows() if row["step"] <= step]
        replace_file(self.path, b"".join(json.dumps(row).encode() + b"\n" for row in kept))

    def append(self, row: Mapping[str, Any], steps: int) -> None:
        if not math.isfinite(row["loss"]):
            raise NumericalError(
                f"fine-tuning step {row['step']}: the loss is {row['loss']}\n"
                "  checkpoints from before are kept; lower finetune.lr, or set finetune.clip (1.0, say)"
            )
        with appending(self.path) as stream:
            stream.write(json.dumps(row).encode() + b"\n")
        self.watch(row["step"], steps, row["loss"])


def _trainer(settings: Finetune, model: Any, rows: Sequence[Any], folder: Path, seed: int, pad: int, log: _Log) -> Trainer:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    device = next(model.parameters()).device

    class Follow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if log.interrupts.number is not None:
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            checkpoint = folder / f"checkpoint-{state.global_step}"
            seal = {"files": _digests(checkpoint), "losses": log.seal()}
            replace_file(checkpoint / SEAL, json.dumps(seal, indent=1).encode())
            _remove(old for old in folder.glob("checkpoint-*") if _step_of(old) < state.global_step)

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
def peft_behind() -> Iterator[None]:
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
def _disk(folder: Path) -> Iterator[None]:
    """What each library says when it cannot write, as one error."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        if isinstance(error, OSError) and error.errno is None:
            raise  # no system call failed: libraries take OSError for other things too
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DiskError(
            f"cannot write {folder}: {why}\n  what was saved before is kept; free some space, then run the same command again"
        ) from error


@contextlib.contextmanager
def _memory(settings: Finetune) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        fewer = (
            f"lower finetune.micro_batch (now {settings.micro_batch}) and raise finetune.accumulation by the same factor"
            if settings.micro_batch > 1
            else "lower task.max_length"
        )
        more = "" if settings.checkpointing else ", or set finetune.checkpointing = true"
        raise OutOfMemory(
            f"fine-tuning ran out of memory: {(str(error) or type(error).__name__).splitlines()[0]}\n  {fewer}{more}"
        ) from error
