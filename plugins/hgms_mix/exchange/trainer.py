"""The interface of trainers in the hand-over, and shared parts of exporters.

The shared parts are files of rows, YAML, and settings of the training.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from attrs import frozen

from hgms.config import expand
from hgms.store import replace_file
from hgms_core import ConfigError
from hgms_core.errors import MissingExtra, Place
from hgms_mix.exchange.sample import Part, Sampled

UNNAMED = "MODEL"
"""The placeholder for a base model without a name.

A network with random weights is created separately in every program.
"""


@final
@frozen(kw_only=True)
class Trainer:
    """A trainer: the meaning of its weights, and its writer for samples.

    ``whole`` returns the entry per source for drawing from all of its rows instead of the sample.
    """

    name: str
    files: tuple[str, ...]
    meaning: str
    command: str
    write: Callable[[Sampled, Path], Sequence[str]]
    whole: Callable[[Sampled], Mapping[str, str]]


def write_rows(folder: Path, part: Part, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write the rows to a file, and return its path relative to ``folder``."""
    lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path = folder / "rows" / f"{part.stem}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lines.encode())
    return path.relative_to(folder).as_posix()


def write_yaml(path: Path, table: Mapping[str, Any], head: str) -> None:
    text = yaml().safe_dump(dict(table), sort_keys=False, allow_unicode=True, width=120)
    replace_file(path, f"# {head}\n{text}".encode())


def yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "missing-package",
            "configurations of trainers require pyyaml, which is not installed",
            install="pip install 'hgms[llm]'",
        ) from error


def model_name(sample: Sampled) -> str:
    """Return the base model as other programs find it from the export's folder.

    This is its path, or its name on the Hub.
    """
    if sample.model.path is None:
        return UNNAMED
    folder = expand(sample.model.path, ("task", "model", "path"))
    return str(folder.resolve()) if folder.is_dir() else str(sample.model.path)


def normalise(weights: Mapping[str, float], place: Place = ()) -> dict[str, float]:
    """Normalise weights to the sum one.

    ``place`` is the place of the weights, for the error if all are zero.

    >>> normalise({"a": 3, "b": 1})
    {'a': 0.75, 'b': 0.25}
    """
    total = sum(weights.values())
    if total <= 0:
        raise ConfigError(
            "out-of-range",
            f"all {len(weights)} data sets have the weight 0, but one must be greater than 0",
            place=place,
        )
    return {name: weight / total for name, weight in weights.items()}


def epochs(sample: Sampled) -> int:
    """Return the number of passes over the sample.

    A trainer makes at least one; :func:`differences` reports if the mix makes fewer.
    """
    return max(1, int(sample.config.finetune.epochs))


def differences(sample: Sampled) -> list[str]:
    """Return the differences between the exported training and ``hgms mix``, for any trainer.

    Sources without a row are also listed.
    """
    own = sample.config.finetune
    notes = [
        f"No row is from `{name}`: its weight {weight:.2g} is too small for {sample.size} rows."
        for name, weight in sample.without_rows.items()
        if not sample.ranked
    ]
    if own.epochs == 0:
        notes.append(
            "With `[finetune] epochs = 0`, `hgms mix` does not train on these rows: its model is "
            "the model at the end of learning. The training here starts from the base model, and "
            "takes one epoch over the rows."
        )
    elif own.start == "reweighted":
        notes.append(
            "`hgms mix` starts from the parameters at the end of learning (`[finetune] start = "
            '"reweighted"`). The training here starts from the base model.'
        )
    return notes


def schedule(sample: Sampled) -> str:
    """Return transformers' name of the learning rate's schedule."""
    own = sample.config.finetune
    return (
        "constant_with_warmup" if own.schedule == "constant" and own.warmup else str(own.schedule)
    )


def settings(sample: Sampled) -> dict[str, Any]:
    """Return ``[finetune]`` as transformers' TrainingArguments."""
    own = sample.config.finetune
    return {
        "learning_rate": own.lr,
        "num_train_epochs": epochs(sample),
        "per_device_train_batch_size": own.micro_batch,
        "gradient_accumulation_steps": own.accumulation,
        "weight_decay": own.weight_decay,
        "lr_scheduler_type": schedule(sample),
        "max_grad_norm": own.clip or 0.0,
        "save_steps": own.save_every,
        "seed": sample.seed,
    }


def lora_alpha(lora: Any) -> int:
    """Return LoRA's alpha.

    Trainers accept only whole numbers; raise ConfigError for another value.
    """
    if lora.alpha != int(lora.alpha):
        raise ConfigError(
            "not-supported",
            f"alpha={lora.alpha:g} must be a whole number for this trainer",
            place=("adapter", "alpha"),
            hint="set finetune.adapter to an adapter with a whole alpha; the drawn rows do not "
            "depend on it",
        )
    return int(lora.alpha)
