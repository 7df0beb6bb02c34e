"""Selection of the candidate to differentiate through, out of N candidates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import form
from hgms.config import lowering
from hgms_core import (
    Candidates,
    Cost,
    Key,
    Mode,
    Problem,
    Selection,
    Tree,
    component,
    detach,
    groups,
    values,
)
from hgms_core.capabilities import Capabilities, Fixed, JoinsStep
from hgms_core.validators import optional_positive


@component
class _ByLoss:
    """Select by f of all candidates, on one shared batch of validation rows for selection."""

    capabilities: ClassVar[Capabilities] = frozenset({JoinsStep})
    highest: ClassVar[bool] = False

    batch_size: int | None = field(default=None, validator=optional_positive)
    mode: Mode = "auto"
    chunk: int | None = field(default=None, validator=optional_positive)

    memory_hints = lowering(same=["chunk"], other=["batch_size"])

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        batch, _ = problem.upper_data["select"].sample(key, self.batch_size)
        return self.compute(problem, theta, candidates, batch)

    def operands(self, problem: Problem, key: Key) -> Tree | Fixed:
        data = problem.upper_data["select"]
        batch, rows = data.sample(key, self.batch_size)
        return Fixed(batch) if rows == data.size else batch

    def compute(
        self, problem: Problem, theta: Tree, candidates: Candidates, operands: Tree
    ) -> Selection:
        rows = problem.upper_data["select"].count(self.batch_size)
        f, mode, chunk = problem.f, self.mode, self.chunk
        # decided outside the compiled function, because the decision may evaluate the loss
        first = groups(
            f,
            candidates.x,
            rows=rows,
            mode=mode,
            chunk=chunk,
            trial=lambda: (detach(theta), operands),
        )[0]
        mode = "stacked" if isinstance(first.part, slice) else "loop"

        def compute_scores(theta: Tree, x: Tree, batch: Tree) -> Tensor:
            scores = values(f, theta, x, batch, rows=rows, mode=mode, chunk=chunk)
            # A state with a non-finite number can still have a finite loss (a dead unit hides the
            # number). Such a state is not a valid candidate.
            return torch.where(Candidates(x=x).finite, scores, torch.full_like(scores, torch.nan))

        # Not the gap: two compiled functions agree only in a few digits on a small difference of
        # scores.
        score = form(problem.compiler, ("scores", f, mode, chunk), compute_scores, once=True)
        cost = Cost(upper_values=candidates.count, rows=candidates.count * rows)
        return Selection.of(
            score(detach(theta), detach(candidates.x), operands), highest=self.highest, cost=cost
        )


@final
@component
class BestOfN(_ByLoss):
    """The optimistic choice: i* = argmin_i f(θ, x_i) on one shared validation batch.

    Every candidate is scored on the same rows; otherwise sampling noise would decide. Ties go to
    the lowest index, and a candidate that is not finite is never selected.

    Parameters
    ----------
    batch_size
        Validation rows per score (all rows of the role ``select`` if ``None``).
    mode, chunk
        Stacked or looped evaluation, and the number of stacked candidates at a time. ``auto``
        selects by size, and loops over a loss that torch.func.vmap does not support.

    Notes
    -----
    Cost: N upper values.

    Source: HG-MS paper, Algorithm 1, line 3.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> chosen = BestOfN().select(
    ...     problem, {}, Candidates(x={"x": torch.tensor([[3.0], [1.0], [torch.nan]])}), Key(0)
    ... )
    >>> int(chosen.index), float(chosen.gap), int(chosen.finite)
    (1, 2.0, 2)
    """

    name: ClassVar[str] = "best-of-n"


@final
@component
class Worst(_ByLoss):
    """The pessimistic choice: i* = argmax_i f(θ, x_i) on one shared validation batch.

    Over the iterates of one trajectory, this is the truncation of IAPTT-GM. Arguments, ties and
    cost are the same as for ``best-of-n``.

    Notes
    -----
    Source: Liu et al., *Towards gradient-based bilevel optimization with non-convex followers and
    beyond* (2021).

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> int(
    ...     Worst()
    ...     .select(
    ...         problem, {}, Candidates(x={"x": torch.tensor([[3.0], [1.0], [torch.nan]])}), Key(0)
    ...     )
    ...     .index
    ... )
    0
    """

    name: ClassVar[str] = "worst"
    highest: ClassVar[bool] = True


@final
@component
class First:
    """No choice: the first candidate that is finite. There are no scores and no cost.

    Use for generators that propose one candidate, and as the ablation without selection.

    Notes
    -----
    Source: the one-candidate special case of Algorithm 1 of the HG-MS paper.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> int(
    ...     First()
    ...     .select(
    ...         problem, {}, Candidates(x={"x": torch.tensor([[torch.nan], [5.0], [1.0]])}), Key(0)
    ...     )
    ...     .index
    ... )
    1
    """

    name: ClassVar[str] = "first"
    testing_failures: ClassVar[Mapping[str, str]] = {"permutation": "it chooses by position"}

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        sound = candidates.finite
        if candidates.count == 1:
            index = torch.zeros((), dtype=torch.int64, device=sound.device)
        else:
            positions = torch.arange(candidates.count, device=sound.device)
            index = torch.where(sound, positions, candidates.count - 1).min()
        like = next(iter(candidates.x.values()))
        scores = like.new_full(sound.shape, torch.nan)
        gap = like.new_full((), torch.inf)
        return Selection(index=index, scores=scores, gap=gap, finite=sound.sum())
