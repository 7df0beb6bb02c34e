"""The two losses of source reweighting, and their batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import functional

from hgms.arguments import require
from hgms_core import Batch, Data, Tree
from hgms_core.capabilities import (
    Capabilities,
    GivesRepresentations,
    HasOutputs,
    NotStackable,
    StacksCandidates,
)
from hgms_mix.lm.language import LanguageModel
from hgms_mix.lm.table import TokenTable

Average = Literal["example", "token", "all-tokens"]


@frozen(eq=False)
class Rows:
    """The loss of each row of a batch.

    It is the mean over the row's completion tokens. For an average over tokens, it is their sum
    divided by a mean number of completion tokens (``lengths``, by source). With the mean number of
    each source, the mean over a source's rows is the mean over its tokens. With the mean number of
    all sources, the mean over a batch is the mean over its tokens, up to a factor that is the same
    for every batch.
    """

    model: LanguageModel
    average: Average
    lengths: Tensor

    def __call__(
        self,
        x: Tree,
        batch: Batch,
        *,
        dropout: bool = False,
        stacked: bool = False,
        own: bool = True,
    ) -> Tensor:
        tokens = batch["tokens"]
        mask = batch["mask"]
        count = next(iter(x.values())).shape[0]
        if stacked and not own:
            tokens, mask = (leaf.expand(count, *leaf.shape) for leaf in (tokens, mask))
        seeds = self._seeds(batch, dropout)
        if seeds is not None and stacked and not own:
            seeds = seeds * count  # all candidates use the mask of a single candidate
        return self._mean_losses(*self.model.nll(x, tokens, mask, seeds), batch)

    def logits(self, x: Tree, batch: Batch) -> Tensor:
        """Return the logits of the scored tokens, ``[n, V]``, with the batch's dropout."""
        return self.model.logits(x, batch["tokens"], batch["mask"], self._seeds(batch, True))

    def of_logits(self, z: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each row from its logits."""
        wanted = batch["mask"][:, 1:]
        target = batch["tokens"][:, 1:]
        losses = functional.cross_entropy(z, target[wanted], reduction="none")
        row = wanted.nonzero(as_tuple=True)[0]
        summed = torch.zeros(len(wanted), dtype=losses.dtype, device=losses.device).index_add(
            0, row, losses
        )
        return self._mean_losses(summed, wanted.sum(-1), batch)

    def _mean_losses(self, summed: Tensor, number: Tensor, batch: Batch) -> Tensor:
        if self.average == "example":
            return summed / number.clamp_min(1)
        return summed / self.lengths.to(summed.dtype)[batch["source"]]

    def _seeds(self, batch: Batch, dropout: bool) -> tuple[int, ...] | None:
        if (
            not dropout
            or "seed" not in batch
            or self.model.adapters is None
            or not self.model.adapters.spec.dropout
        ):
            return None
        require(
            not torch._C._functorch.is_batchedtensor(batch["seed"]),
            "not-supported",
            f"dropout={self.model.adapters.spec.dropout:g} is not supported under vmap: the "
            "loss is wrapped, for example by a tilt",
            place=("task", "adapter", "dropout"),
            hint='set dropout = 0, or mode = "loop" in the generator',
        )
        return tuple(int(seed) for seed in batch["seed"].reshape(-1))


class HasSizes(Protocol):
    """A capability of ``Sources.examples``: knows the numbers of rows in the sources' files."""

    sizes: Mapping[str, int]


@frozen(eq=False)
class Examples:
    """``Sources.examples`` of language models: the loss of each row, its mean over completion
    tokens.

    ``sizes`` are the numbers of rows in the sources' files; the pool may contain fewer.
    ``representations(x, batch)`` is a vector for each row, ``[B, width]``: the mean of its last
    hidden states with weights 1, 2, … by position (SGPT's), from its first token to the last
    learned token.

    Notes
    -----
    Source: Muennighoff, *SGPT: GPT sentence embeddings for semantic search*, 2022 (arXiv
    2202.08904).
    """

    capabilities: ClassVar[Capabilities] = frozenset({GivesRepresentations, HasSizes})

    rows: Rows
    sizes: Mapping[str, int]

    def __call__(self, x: Tree, batch: Batch) -> Tensor:
        return self.rows(x, batch)

    def representations(self, x: Tree, batch: Batch) -> Tensor:
        states = self.rows.model.hidden_states(x, batch["tokens"])
        mask = batch["mask"]
        # bfloat16 cannot represent all integers up to 512.
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        place = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
        weights = (place * (place <= (place * mask).amax(-1, keepdim=True))).to(states)
        return (weights[..., None] * states).sum(-2) / weights.sum(-1, keepdim=True)


@frozen(eq=False)
class MixtureLoss:
    """g(θ, x; B) = Σ_s ω_s ℓ_s(x; B), ω = softmax(θ), ℓ_s the mean over the rows of source s in B.

    The weight of a source is ω_s for any number of its rows in a batch, since the mean is within
    the source. If a batch contains rows of only k < S sources, drawn evenly, the sum over them is
    multiplied by S/k. This keeps it unbiased.
    """

    rows: Rows
    count: int

    def __call__(self, theta: Tree, x: Tree, batch: Batch) -> Tensor:
        return self._mix(theta, self.rows(x, batch, dropout=True), batch["source"])

    @property
    def capabilities(self) -> Capabilities:
        return _stacking(self.rows) | {HasOutputs}

    def stacked_losses(self, theta: Tree, x: Tree, batch: Batch, own_batch: bool) -> Tensor:
        losses = self.rows(x, batch, dropout=True, stacked=True, own=own_batch)
        return self._mix(theta, losses, batch["source"].expand(losses.shape))

    def outputs(self, x: Tree, batch: Batch) -> Tensor:
        """Return the logits of scored tokens.

        A Gauss–Newton matrix is defined by these outputs and ``criterion``.
        """
        return self.rows.logits(x, batch)

    def criterion(self, theta: Tree, x: Tree, z: Tensor, batch: Batch) -> Tensor:
        return self._mix(theta, self.rows.of_logits(z, batch), batch["source"])

    def sources(self, x: Tree, batch: Batch) -> Tensor:
        """Return ℓ_s(x; B), ``[S]``, each with the factor that makes Σ ω_s ℓ_s unbiased."""
        return self._means(self.rows(x, batch, dropout=True), batch["source"])

    def _mix(self, theta: Tree, losses: Tensor, source: Tensor) -> Tensor:
        means = self._means(losses, source)
        return (weights(theta).to(means.dtype) * means).sum(-1)

    def _means(self, losses: Tensor, source: Tensor) -> Tensor:
        member = functional.one_hot(source, self.count).to(losses.dtype)
        held = member.sum(-2)
        means = (member * losses.unsqueeze(-1)).sum(-2) / held.clamp_min(1)
        return means * (self.count / (held > 0).sum(-1, keepdim=True))


@frozen(eq=False)
class UpperLoss:
    """The mean loss of B's rows, without dropout, independent of θ.

    It is f on validation rows, and plain training on lower rows.
    """

    rows: Rows

    def __call__(self, theta: Tree, x: Tree, batch: Batch) -> Tensor:
        return self.rows(x, batch).mean(-1)

    @property
    def capabilities(self) -> Capabilities:
        return _stacking(self.rows)

    def stacked_losses(self, theta: Tree, x: Tree, batch: Batch, own_batch: bool) -> Tensor:
        return self.rows(x, batch, stacked=True, own=own_batch).mean(-1)


def _stacking(rows: Rows) -> Capabilities:
    return frozenset({NotStackable if rows.model.adapters is None else StacksCandidates})


def weights(theta: Tree) -> Tensor:
    """Return ω = softmax(θ)."""
    return theta["logits"].softmax(-1)


@frozen(eq=False)
class Batches:
    """Batches of token tables, as :class:`hgms_core.Data`.

    Rows are gathered on the device of the tables (in memory or mapped from disk), and only a batch
    is copied to the device.
    """

    tables: tuple[TokenTable, ...]
    device: torch.device
    dropout: bool = False
    _first: Tensor = field(init=False)

    @_first.default
    def _starts(self) -> Tensor:
        return torch.tensor([0, *(table.size for table in self.tables)]).cumsum(0)

    @property
    def size(self) -> int:
        return int(self._first[-1])

    def rows(self, index: Tensor) -> Batch:
        """Return the rows with these numbers; the axes of the numbers lead every leaf."""
        index = index.cpu()
        source = torch.bucketize(index.contiguous(), self._first[1:], right=True)
        tokens, mask = self._gather(index, source)
        batch = {"tokens": tokens, "mask": mask, "source": source, "index": index}
        if self.device.type != "cpu":
            batch = {
                name: leaf.pin_memory().to(self.device, non_blocking=True)
                for name, leaf in batch.items()
            }
        if self.dropout:
            # Keep this on the CPU: it seeds generators. It is one number per batch, computed from
            # its rows.
            order = torch.arange(1, index.shape[-1] + 1)
            batch["seed"] = ((index + 1) * order * 2_654_435_761 % 2**31).sum(-1) % 2**31
        return batch

    def data(self, names: tuple[str, ...] | None = None) -> Data:
        """Return all rows; with ``names`` of the tables, drawn evenly from each."""
        sizes = [table.size for table in self.tables]
        strata = None if names is None else tuple(zip(names, sizes, strict=True))
        return Data(self.size, {}, self.rows, torch.device("cpu"), strata=strata)

    def share(self, numbers: Tensor) -> Data:
        """Return some of the rows as separate data."""
        return Data(
            len(numbers), {}, lambda index: self.rows(numbers[index.cpu()]), torch.device("cpu")
        )

    def _gather(self, index: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.tables) == 1:
            return self.tables[0].gather(index)
        flat = index.reshape(-1)
        of = source.reshape(-1)
        places = {number: (of == number).nonzero().squeeze(1) for number in of.unique().tolist()}
        pieces = {
            number: self.tables[number].gather(flat[at] - self._first[number])
            for number, at in places.items()
        }
        longest = max(tokens.shape[-1] for tokens, _ in pieces.values())
        tokens = torch.full((len(flat), longest), self.tables[0].pad_id, dtype=torch.int64)
        mask = torch.zeros(len(flat), longest, dtype=torch.bool)
        for number, (row, scored) in pieces.items():
            tokens[places[number], : row.shape[-1]], mask[places[number], : row.shape[-1]] = (
                row,
                scored,
            )
        return tokens.reshape(*index.shape, longest), mask.reshape(*index.shape, longest)


def mean_lengths(
    batches: Batches, device: torch.device, dtype: torch.dtype, average: Average = "token"
) -> Tensor:
    """Return the mean number of scored tokens per row, for each table.

    Scored tokens are all marked tokens except a first token, which has no prediction. For the
    average over ``all-tokens``, return the mean of these numbers for every table.
    """
    counts = [
        (table.mask.sum() - table.mask[table.offsets[:-1]].sum()).double() / table.size
        for table in batches.tables
    ]
    lengths = torch.stack(counts).to(device, dtype)
    return lengths.mean().expand_as(lengths).clone() if average == "all-tokens" else lengths


@torch.no_grad()
def token_loss(
    model: LanguageModel, x: Tree, batches: Batches, numbers: Tensor, rows: int = 64
) -> float:
    """Return the mean −log p over all completion tokens of some rows.

    ``rows`` rows of similar length are evaluated at a time.
    """
    lengths = torch.cat([table.lengths for table in batches.tables])[numbers]
    order = numbers[lengths.argsort(stable=True)]
    total = 0.0
    count = 0
    for first in range(0, len(order), rows):
        batch = batches.rows(order[first : first + rows])
        summed, scored = model.nll(x, batch["tokens"], batch["mask"])
        total = total + float(summed.double().sum())
        count = count + int(scored.sum())
    return total / max(count, 1)
