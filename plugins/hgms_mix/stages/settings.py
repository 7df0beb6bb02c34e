"""The tables ``[sample]``, ``[uncertainty]`` and ``[finetune]`` of a mix file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms.arguments import require
from hgms_core import Key, component
from hgms_core.components import evolve
from hgms_core.validators import at_least, greater_than, not_empty, not_negative, optional, positive
from hgms_mix.lm import BaseModel, Lora, highest
from hgms_mix.stages.apportion import apportion


@final
@component
class Sample:
    """Table ``[sample]``: the number of rows of the fine-tuning set, and how they are drawn.

    Each source provides a whole number of rows by its learned weight
    (:func:`hgms_mix.stages.apportion.apportion`: largest remainders, within capacity). Rows are
    drawn without replacement by a separate stream per source, from ``seed`` and the source's
    *name*. The order of sources therefore has no effect, and a larger sample of a source contains
    the smaller samples. For a method that ranks rows (``less``, ``rho-loss``, ``rds``), no rows are
    drawn: its ``size`` best rows are selected. The set is then shuffled.

    Parameters
    ----------
    size
        Total number of rows.
    seed
        None: the seed of the mix.
    of
        ``sources``; or ``validation``: rows of the validation sets, evenly over all their rows,
        independent of the learned weights. This is the reference for training on these rows only.

    Examples
    --------
    >>> Sample(size=20_000).of
    'sources'
    """

    size: int = field(validator=at_least(1))
    seed: int | None = field(default=None, validator=optional(at_least(0)))
    of: Literal["sources", "validation"] = "sources"

    def draw(
        self, weights: Mapping[str, float], capacity: Mapping[str, int], *, seed: int
    ) -> dict[str, Tensor]:
        """Return the drawn row positions of each source, ascending."""
        counts = apportion(weights, capacity, self.size)
        key = self.key(seed)
        drawn = {}
        for name, count in counts.items():
            order = torch.randperm(capacity[name], generator=key.fold("source", name).generator())
            drawn[name] = order[:count].sort().values
        return drawn

    def top(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the positions of the ``size`` rows with the highest scores, ascending, by source.

        NaN is never selected. Ties go to the source that sorts first, then to the earlier row.
        """
        names = sorted(scores)
        flat = torch.cat([scores[name].double().cpu() for name in names])
        ranked = (~flat.isnan()).nonzero().flatten()
        pool = ", ".join(f"{name} {int((~scores[name].isnan()).sum())}" for name in names)
        require(
            self.size <= len(ranked),
            "too-few-rows",
            f"size={self.size} exceeds the {len(ranked)} rows that the method ranked ({pool})",
            place=("sample", "size"),
            hint="increase task.cache (rows per source that are kept for reweighting), or decrease "
            f"size to {len(ranked)} or less",
        )
        taken = torch.zeros(len(flat), dtype=torch.bool)
        taken[ranked[highest(flat[ranked], self.size)]] = True
        parts = taken.split([len(scores[name]) for name in names])
        rows = {name: part.nonzero().flatten() for name, part in zip(names, parts, strict=True)}
        return {name: rows[name] for name in scores}

    def order(self, count: int, *, seed: int) -> Tensor:
        """Return the order of the drawn rows."""
        return torch.randperm(count, generator=self.key(seed).fold("order").generator())

    def key(self, seed: int) -> Key:
        """Return the key of the draw; ``seed`` is the seed of the mix."""
        return Key(seed if self.seed is None else self.seed).fold("sample")


@final
@component
class Resampling:
    """Table ``[uncertainty]``: how to measure and resample the direction of the mixture.

    The stage multiplies gradients of blocks of validation rows by gradients of rows of each source,
    at the states of x named by ``at`` (:func:`hgms.uncertainty.alignments`). It then resamples the
    blocks (:func:`hgms.uncertainty.over_rows`).

    Parameters
    ----------
    validation_blocks, source_blocks
        Largest number of blocks of validation rows, and of blocks of rows of each source.
    rows
        Rows per block, if there are enough.
    at
        States of the run: ``start`` and ``end``; results are means over both.
    resamples
        Number of bootstrap resamples.

    Notes
    -----
    Cost: (validation_blocks + S · source_blocks) gradients of ``rows`` rows for each entry of
    ``at``.

    Examples
    --------
    >>> Resampling(rows=8).at
    ('start', 'end')
    """

    validation_blocks: int = field(default=24, validator=at_least(4))
    source_blocks: int = field(default=8, validator=at_least(4))
    rows: int = field(default=4, validator=at_least(1))
    at: tuple[Literal["start", "end"], ...] = field(default=("start", "end"), validator=not_empty)
    resamples: int = field(default=4000, validator=at_least(100))


@component
class Training:
    """The settings of the optimiser, as in transformers; ``Finetune`` explains them."""

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


@final
@component
class Finetune(Training):
    """Table ``[finetune]``: how the final model is trained on the sampled rows.

    The loss of an optimiser step is the mean cross-entropy over all completion tokens of its
    ``micro_batch · accumulation`` rows. (The lower level of reweighting averages within a row
    first.) Each epoch uses a new seeded order of the rows.

    Defaults are from the paper (which accumulates 64 for instructions).

    Parameters
    ----------
    lr
        Learning rate of AdamW (betas 0.9 and 0.999, eps 1e-8).
    epochs
        Passes over the sample. 0, with ``start = "reweighted"``: no training; the result is the
        final model of reweighting (``hg-ms-online`` and other methods that train it on the
        mixture).
    micro_batch
        Rows per pass on the device.
    accumulation
        Micro-batches per optimiser step, split across the ranks (``run.ranks``).
    weight_decay
        Decoupled; biases and normalisation layers are excluded, as in transformers.
    schedule
        Of the learning rate, after ``warmup`` (below 1: a share of all steps; from 1: a number of
        steps).
    clip
        Largest gradient norm; None: not clipped.
    seed
        Of the order of the rows, the fresh adapter and dropout; None: the seed of the mix.
    start
        ``fresh``: new parameters of the adapter (without adapter: the parameters of the base
        model).
    reweighted
        The final lower variables of reweighting.
    save_every
        Optimiser steps between checkpoints.
    checkpointing
        Gradient checkpointing, less memory for more time.
    model, adapter
        The tuned model and adapter, if the mixture was learned with another model (a small proxy);
        None: the task's. Rows are tokenised for the tuned model.

    Examples
    --------
    >>> Finetune().lr
    8e-06
    """

    model: BaseModel | None = None
    adapter: Lora | None = None

    def with_seed(self, seed: int) -> Finetune:
        """Return these settings with the ``seed`` of the mix, unless they have a separate seed."""
        return self if self.seed is not None else evolve(self, seed=seed)

    def __attrs_post_init__(self) -> None:
        require(
            self.epochs != 0 or self.start == "reweighted",
            "conflicting-options",
            f'epochs=0 requires start="reweighted", not {self.start!r}',
            place=("epochs",),
            hint='set start = "reweighted" to keep the model at the end of learning, or epochs '
            "= 1 or more",
        )
        require(
            self.start != "reweighted" or (self.model is None and self.adapter is None),
            "conflicting-options",
            f"start={self.start!r} uses the model and the adapter of the task",
            place=("start",),
            hint="remove model and adapter",
        )
