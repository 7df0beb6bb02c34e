"""N runs of AdamW on rows drawn by the mixture, with sums of gradients per source."""

from __future__ import annotations

from typing import ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.config import lowering
from hgms_core import (
    Batch,
    Candidates,
    Cost,
    Data,
    Key,
    Problem,
    Sources,
    State,
    Tree,
    component,
    gradient,
    repeat,
)
from hgms_core.validators import not_negative, optional_positive, positive
from hgms_mix.methods.online.gradients import directions_of
from hgms_mix.methods.online.training import mixture_rows


@final
@component
class MixtureBranches(hgms_mix.lm.AdamWSettings):
    """N branches of K AdamW updates, carried from step to step: the branches are the final
    training, not a proxy::

        B: ``batch_size`` rows, of source s with probability ω_s(θ);
            V: ``upper_batch_size`` validation rows
        y ← AdamW(y, 1/|B| Σ_{i ∈ B} ∇ℓ_i(y) + ε ∇f(y; V)),  K times;
            u_s = Σ_{i ∈ B of s} ∇ℓ_i(y), summed over the K

    The gradient has the same mean over draws as in ``branches`` with ``tilted``: the gradient of
    g(θ, ·) + εf. There, batches are even and rows are weighted by ω. Here, no row with a small
    weight is evaluated. Rows of a source are evaluated together, so u_s has no cost beyond the
    update. Dropout is off.

    For ``aligned-means``, or a custom hypergradient, ``aux`` of the candidates contains the
    following entries (for each leaf of x, with its shape […]): ``u.<leaf>`` ``[N, S, …]``, the u_s;
    ``rows`` ``[N, S]``, the number of their rows; Adam's moments ``m.<leaf>`` and ``v.<leaf>``
    ``[N, …]``; with ε > 0 ``f.<leaf>`` ``[N, …]``, the sum of the ∇f, and ``upper_loss`` ``[N]``. A
    branch has them without the axis N.

    Use to learn a mixture while the final model trains. Avoid if the derivative by θ needs a
    backward pass through the branch: it does not exist, since θ determines which rows are drawn.

    Cost of an outer step: N·K updates, each a lower gradient for every source that has rows in B
    (of |B| rows together), and with ε > 0 an upper gradient. Memory: S gradients and 3 lower states
    for each branch.

    Parameters
    ----------
    count
        N; branches differ by their rows. On ranks (``run.ranks``) every rank runs all branches: a
        branch takes one pass per source in its batch, so branches that were split across ranks
        would not stay in step.
    steps
        K.
    batch_size
        |B|.
    tilt
        ε; 0: validation rows are not used for training.
    upper_batch_size
        |V|, if ε > 0 (None: all).
    lr, betas, eps, weight_decay
        AdamW.
    schedule
        Of lr, ``constant``, or ``linear`` to 0 at the end of the budget.

    Raises
    ------
    ConfigError
        For a problem without sources.
    NumericalError
        If a loss is not finite.

    Notes
    -----
    Source: this project: HG-MS's practical generator (paper, section on the algorithm) with the
    batches of ScaleBiO's training.

    Examples
    --------
    >>> from hgms.testing.problems import mixture
    >>> problem = mixture()
    >>> generator = MixtureBranches(steps=3, batch_size=4, lr=0.1)
    >>> start = generator.init(problem, Key(0))
    >>> candidates = generator.propose(problem, problem.theta0, start, Key(1))
    >>> candidates.aux["rows"]  # of each source, of 3 · 4
    tensor([[6., 6.]], dtype=torch.float64)
    """

    name: ClassVar[str] = "mixture-branches"
    needs: ClassVar[frozenset[str]] = frozenset({"sources"})

    count: int = field(default=1, validator=positive)
    steps: int = field(default=4, validator=positive)
    batch_size: int = field(default=8, validator=positive)
    tilt: float = field(default=0.0, validator=not_negative)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)
    lr: float = field(default=2e-4, validator=positive)
    schedule: Literal["constant", "linear"] = "constant"

    memory_hints = lowering(other=["batch_size", "upper_batch_size", "count"])

    def init(self, problem: Problem, key: Key) -> State:
        hgms_mix.lm.sources_of(problem, f"generator {self.name!r} draws rows of")
        return {"train": repeat(hgms_mix.lm.adamw_start(problem.x0), 1), "updates": 0}

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        sources = hgms_mix.lm.sources_of(problem, f"generator {self.name!r} draws rows of")
        lr = self.lr * (1 - progress) if self.schedule == "linear" else self.lr
        first = {name: leaf[0] for name, leaf in start["train"].items()}
        runs = [
            self._run(problem, sources, theta, first, key.fold(member), start["updates"], lr)
            for member in range(self.count)
        ]
        trees, losses, costs = zip(*runs, strict=True)
        stacked = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
        x = hgms_mix.lm.adamw_part(stacked, "x")
        aux = {name: leaf for name, leaf in stacked.items() if not name.startswith("x.")}
        return Candidates(x=x, aux=aux, losses=torch.stack(losses), cost=sum(costs, start=Cost()))

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        row = index.reshape(1)
        moments = {
            name: leaf for name, leaf in candidates.aux.items() if name.startswith(("m.", "v."))
        }
        tree = {f"x.{name}": leaf for name, leaf in candidates.x.items()} | moments
        train = {name: leaf.index_select(0, row) for name, leaf in tree.items()}
        return {"train": train, "updates": start["updates"] + self.steps}

    def _run(
        self,
        problem: Problem,
        sources: Sources,
        theta: Tree,
        train: Tree,
        key: Key,
        done: int,
        lr: float,
    ) -> tuple[Tree, Tensor, Cost]:
        """Run one branch; return its state, the last lower loss and the cost.

        The state contains AdamW's state, u, f and the rows of each source.
        """
        data = problem.lower_data
        spent = Cost()
        loss = torch.empty(())
        weights = sources.weights(theta).detach().double().cpu()
        index = mixture_rows(data, sources, weights, key.fold("rows"), self.batch_size, self.steps)
        above = self._validation(problem, key.fold("validation"))
        step = done // self.steps + 1
        kept: dict[str, Tensor] = {}
        for update, numbers in enumerate(index):
            x = hgms_mix.lm.adamw_part(train, "x")
            u, held, loss = directions_of(sources, theta, x, data.rows(numbers.to(data.device)))
            terms = {"rows": held, **{f"u.{name}": leaf for name, leaf in u.items()}}
            total = [leaf.sum(0) / self.batch_size for leaf in u.values()]
            spent += Cost(lower_gradients=int((held > 0).sum()), rows=len(numbers))
            if above:
                grads, value = gradient(problem.f, theta, x, above[update])
                terms |= {
                    "upper_loss": value / self.steps,
                    **{f"f.{name}": leaf for name, leaf in zip(x, grads, strict=True)},
                }
                total = [leaf + self.tilt * grad for leaf, grad in zip(total, grads, strict=True)]
                loss = loss + self.tilt * value
                rows = problem.upper_data["differentiate"].count(self.upper_batch_size)
                spent += Cost(upper_gradients=1, rows=rows)
            hgms_mix.lm.check_finite(
                loss, "the training loss", step, place=("method", "generator", "lr")
            )
            kept = {name: kept[name] + leaf if kept else leaf for name, leaf in terms.items()}
            train = hgms_mix.lm.adamw_moved(total, train, self, lr=lr, count=done + update + 1)
        return {**train, **kept}, loss, spent

    def _validation(self, problem: Problem, key: Key) -> list[Batch]:
        """Return the validation rows of each update; empty if ε = 0."""
        if not self.tilt:
            return []
        hgms_mix.lm.check_role(
            problem, f"generator {self.name!r} with a tilt trains on", "differentiate"
        )
        data: Data = problem.upper_data["differentiate"]
        index = data.draw(key, self.upper_batch_size, self.steps)
        return [
            data.batch(None if index is None else index[update]) for update in range(self.steps)
        ]
