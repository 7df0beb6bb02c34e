"""RDS+: select rows that are similar to validation rows in the model's representation, in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.arguments import require
from hgms.config import lowering
from hgms_core import Cost, Data, Key, Problem, Record, State, component
from hgms_core.capabilities import GivesRepresentations, find
from hgms_core.validators import positive


@final
@component
class Rds(hgms_mix.lm.RowSelection):
    """Representation-based data selection: rows are ordered by the turns in which validation rows
    select them::

        u(z) = Σ_i i·h_i(z) / Σ_i i    h_i: last hidden state at place i = 1, 2, …, at x0
        cos(z′, z) = ⟨u(z′), u(z)⟩ / ‖u(z′)‖‖u(z)‖
        in turn, each validation row z′ takes the row z most like it of those it has not taken yet

    A row that two validation rows take counts once, at its first turn. The number of the first turn
    orders all rows. The order of equal rows is random. There is no training and no gradient. θ has
    the sources' shares of the rows kept.

    Use when validation rows look like the task: the cost is one forward pass over all rows. Avoid
    if sources differ in the correctness of their answers: wrong and right answers have similar
    representations.

    Parameters
    ----------
    turns
        ``rows``: every validation row takes turns.
    sets
        Every validation set takes turns, by the largest cos to any of its rows: for several tasks
        of different size.
    chunk
        Rows that go through the model at a time.
    keep
        Share of all rows to keep, or ``size``: their number.
    lr, weight_decay, betas, eps, batch_size
        AdamW on the kept rows.
    train_steps
        Updates of a fresh x on the kept rows; 0: x does not change; None: until the budget is
        spent.

    Raises
    ------
    ConfigError
        For a problem without sources, representations or validation rows, and a ``size`` beyond the
        pool.
    NumericalError
        For representations and losses that are not finite.

    Notes
    -----
    Cost: 1 upper value for each ``chunk`` of rows: a forward pass, also of validation rows of the
    role ``differentiate``. Memory: a number for each pair of a validation row (set) and a row.

    Source: Ivison, Zhang, Brahman, Koh, Dasigi, *Large-scale data selection for instruction
    tuning*, 2025 (arXiv 2503.01807).

    Examples
    --------
    >>> Rds(turns="sets").keep
    0.05
    """

    name: ClassVar[str] = "rds"
    placeholder: ClassVar[str] = "x is where it starts"
    needs: ClassVar[frozenset[str]] = frozenset({"sources", "representations"})

    turns: Literal["rows", "sets"] = "rows"
    lr: float = field(default=2e-5, validator=positive)

    memory_hints = lowering(same=["chunk"], other=["batch_size"])

    def init(self, problem: Problem, seed: int) -> State:
        sources = self.sources(problem)
        require(
            find(sources.examples, GivesRepresentations) is not None,
            "not-supported",
            "method 'rds' requires representations of rows, but the problem has none",
            place=("method",),
            hint="let `examples` of the sources declare GivesRepresentations: "
            "representations(x, batch) returns one vector per row",
        )
        hgms_mix.lm.check_role(problem, "method 'rds' compares with", "differentiate")
        empty = torch.empty(0, dtype=torch.int64)
        return self.start(
            problem, seed, "validation", target=torch.empty(0), part=empty, cosines=[]
        )

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {"validation": self._validate, "pool": self._compare, "train": self.train}

    def _validate(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Compute the directions of some validation rows."""
        data = problem.upper_data["differentiate"]
        directions, batch, spent = self._directions(problem, state, data)
        at = state["at"] + len(directions)
        over = at == data.size
        changes: State = {
            "target": torch.cat([state["target"].to(directions), directions]),
            "part": torch.cat([state["part"].cpu(), batch["source"].reshape(-1).cpu()]),
            "at": 0 if over else at,
            "phase": "pool" if over else "validation",
        }
        return changes, {}, spent

    def _compare(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Compute the cosines of some rows with all validation rows.

        After the last rows, compute the order of selection and the selected rows.
        """
        pool = problem.lower_data
        directions, _, spent = self._directions(problem, state, pool)
        # on the device after a resume
        target = state["target"].cpu()
        parts = state["part"].cpu()
        cosines = target @ directions.T
        if self.turns == "sets":
            cosines = torch.stack([cosines[parts == part].amax(0) for part in parts.unique()])
        # Concatenated once, at the end: appending to a tensor would copy it in every step.
        pieces = [*state["cosines"], cosines]
        at = state["at"] + len(directions)
        changes: State = {"cosines": pieces, "at": at}
        if at == pool.size:
            # on the device after a resume
            likeness = torch.cat([piece.cpu() for piece in pieces], dim=1)
            # Equally similar rows have a random order, not their order in the pool: a copy in
            # another source is as good.
            order = torch.randperm(pool.size, generator=Key(state["seed"]).fold("ties").generator())
            turns = torch.empty_like(order).index_copy_(0, order, first_turns(likeness[:, order]))
            changes |= {**self.selection(problem, -turns.double()), "phase": "train"}
            changes |= {"target": torch.empty(0), "part": state["part"][:0], "cosines": []}
        return changes, {"cosine": cosines.amax(0).mean()}, spent

    def _directions(self, problem: Problem, state: State, data: Data) -> tuple[Tensor, Any, Cost]:
        """Return the representations of the next ``chunk`` rows at x0, their batch and the cost.

        The representations have length 1 and are on the CPU.
        """
        index = torch.arange(state["at"], min(state["at"] + self.chunk, data.size))
        batch = data.rows(index.to(data.device))
        examples: Any = self.sources(problem).examples
        with torch.no_grad():
            vectors = examples.representations(problem.x0, batch)
        hgms_mix.lm.check_finite(
            vectors,
            "the representation of a row",
            state["step"] + 1,
            place=("representations",),
            hint="check the model and the rows",
        )
        vectors = vectors.to("cpu", torch.promote_types(vectors.dtype, torch.float32))
        return (
            torch.nn.functional.normalize(vectors, dim=1),
            batch,
            Cost(upper_values=1, rows=len(index)),
        )


def first_turns(likeness: Tensor) -> Tensor:
    """Return the first turn of each of n rows, for T takers with the preferences ``[T, n]``.

    In turn, each taker takes the row that it prefers of those it has not taken. Taker t takes its
    (k + 1)-th best row at turn k·T + t, so the first turn of a row is the minimum of these.

    Examples
    --------
    >>> first_turns(
    ...     torch.tensor([[0.9, 0.8, 0.1], [0.7, 0.2, 0.6]])
    ... )  # both take row 0; then row 1, then row 2
    tensor([0, 2, 3])
    """
    takers, count = likeness.shape
    first = torch.full((count,), takers * count, dtype=torch.int64)
    for taker, likes in enumerate(likeness):
        order = likes.sort(descending=True, stable=True).indices
        turns = torch.empty(count, dtype=torch.int64).index_copy_(
            0, order, torch.arange(count) * takers + taker
        )
        first = torch.minimum(first, turns)
    return first
