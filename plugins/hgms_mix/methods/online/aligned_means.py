"""Agreement of the mean direction of each source with validation: cosines of means, not means of
cosines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.config import lowering
from hgms.rows import mixture_slope
from hgms_core import (
    Branch,
    Candidates,
    Cost,
    Estimate,
    Key,
    Problem,
    Selection,
    State,
    Tree,
    component,
    upper_gradients,
)
from hgms_core.validators import decay_rate, optional_positive, positive
from hgms_mix.methods.online.gradients import directions_of


@final
@component
class AlignedMeans:
    """Cosines, in Adam's metric, of running means of gradients that the training computes anyway::

        U_s ← βU_s + u_s,   N_s ← βN_s + n_s,   Q_s ← βQ_s + ‖u_s‖²_D,   F ← βF + ∇f
        a_s = ⟨U_s, F⟩_D / (√(N_s Q_s) ‖F‖_D),  ⟨a, b⟩_D = Σ_j D_j a_j b_j,
            D_j = √(mean v) / (√v_j + eps)
        h = −∇_θ Σ_s ω_s(θ) a_s
            (the derivative of f after one step that takes each source's rows at the same length)

    u_s is the sum of the gradients of n_s rows of source s. ``mixture-branches`` provides it (the
    sum over all candidates) and, if it trains on validation rows, ∇f. v are the second moments of
    the selected branch. With another generator, u_s is computed from fresh rows, equally many of
    each source, at the selected candidate; without Adam's moments D = 1.

    Gradients of a few rows are mostly noise. In the mean of n cosines, the product of two noises
    has a standard deviation that falls as 1/√n. In the product of two means, all n² pairs of
    batches enter, and it falls as 1/n. The gradient of a row has length √(Q_s/N_s), so a_s is the
    average cosine of one row, independent of the number of rows of the source. With ‖U_s‖ as the
    divisor, a source with more drawn rows would appear more useful and gain even more weight. All
    candidates enter with equal weight, including the selected candidate, so that the chance in its
    selection has no effect. A source without rows so far has the mean value of the others, so its
    weight stays.

    Use for the weights of data sources while a model trains, with ``dual-averaging``. Avoid if x
    moves far within 1/(1 − β) steps: the means contain gradients at earlier states.

    Parameters
    ----------
    decay
        β in [0, 1).
    eps
        Of Adam's second moments.
    batch_size, upper_batch_size
        Fresh lower and validation rows, if the generator provides no u, or no ∇f (None: all).

    Raises
    ------
    ConfigError
        For a problem without sources.

    Notes
    -----
    Cost: none if the generator provides both, else S lower gradients of ``batch_size`` rows
    together, and 1 upper gradient.

    Memory: S + 1 gradients.

    Source: this project; cosines in Adam's metric as in LESS (Xia et al. 2024, arXiv 2402.04333),
    products of means of gradients instead of the products of single gradients in DoGE (Fan et al.
    2024).

    Examples
    --------
    >>> from hgms_mix.methods.online import MixtureBranches
    >>> from hgms.testing.problems import mixture
    >>> problem, generator, estimator = mixture(), MixtureBranches(lr=0.1), AlignedMeans()
    >>> candidates = generator.propose(
    ...     problem, problem.theta0, generator.init(problem, Key(0)), Key(1)
    ... )
    >>> selection = Selection.of(torch.zeros(1))
    >>> h = estimator.estimate(
    ...     problem, problem.theta0, candidates, selection, Key(2), estimator.init(problem)
    ... )[0].value
    >>> bool(next(iter(h.values()))[0] < 0)  # more of what is near
    True
    """

    name: ClassVar[str] = "aligned-means"
    needs: ClassVar[frozenset[str]] = frozenset({"sources"})
    testing_failures: ClassVar[Mapping[str, str]] = {
        "closed-form-sources": (
            "lengths of gradients are divided out: h is a direction, whatever ∇F's length is"
        )
    }
    decay: float = field(default=0.95, validator=decay_rate)
    eps: float = field(default=1e-8, validator=positive)
    batch_size: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)

    memory_hints = lowering(other=["batch_size", "upper_batch_size"])

    def init(self, problem: Problem) -> State:
        count = len(hgms_mix.lm.sources_of(problem, f"hypergradient {self.name!r} compares").names)
        zeros = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
        return {
            "sources": {name: leaf.new_zeros(count, *leaf.shape) for name, leaf in zeros.items()},
            "rows": next(iter(zeros.values())).new_zeros(count),
            "squares": next(iter(zeros.values())).new_zeros(count),
            "upper": zeros,
        }

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        branch = candidates.branch(selection.index)
        directions, rows, below = self._directions(problem, candidates, branch, key)
        loss, slope, above = self._slope(problem, theta, candidates, branch, key)
        metric = self._metric(branch)
        memory = {
            "sources": {
                name: self.decay * leaf + directions[name]
                for name, leaf in state["sources"].items()
            },
            "rows": self.decay * state["rows"] + rows,
            "squares": self.decay * state["squares"] + product(directions, directions, metric),
            "upper": {
                name: self.decay * leaf + slope[name] for name, leaf in state["upper"].items()
            },
        }
        sources = hgms_mix.lm.sources_of(problem, f"hypergradient {self.name!r} compares")
        value = mixture_slope(
            sources, theta, alignments(memory, metric), memory["rows"] > 0, redrawn=False
        )
        return Estimate(value=value, upper_loss=loss, cost=below + above), memory

    def _directions(
        self, problem: Problem, candidates: Candidates, branch: Branch, key: Key
    ) -> tuple[Tree, Tensor, Cost]:
        """Return (u, n, the cost): from the candidates, or from fresh rows at the selected
        candidate.
        """
        if all(f"u.{name}" in candidates.aux for name in branch.x):
            return (
                {name: candidates.aux[f"u.{name}"].sum(0) for name in branch.x},
                candidates.aux["rows"].sum(0),
                Cost(),
            )
        sources = hgms_mix.lm.sources_of(problem, f"hypergradient {self.name!r} compares")
        batch, count = problem.lower_data.sample(key.fold("lower"), self.batch_size)
        u, held, _ = directions_of(sources, problem.theta0, branch.x, batch)
        return u, held, Cost(lower_gradients=int((held > 0).sum()), rows=count)

    def _slope(
        self, problem: Problem, theta: Tree, candidates: Candidates, branch: Branch, key: Key
    ) -> tuple[Tensor, Tree, Cost]:
        """Return (f, ∇f, the cost): from the candidates, or from fresh rows at the selected
        candidate.
        """
        if all(f"f.{name}" in candidates.aux for name in branch.x):
            return (
                branch.aux["upper_loss"],
                {name: candidates.aux[f"f.{name}"].sum(0) for name in branch.x},
                Cost(),
            )
        batch, rows = problem.upper_data["differentiate"].sample(
            key.fold("upper"), self.upper_batch_size
        )
        loss, _, slope = upper_gradients(
            lambda theta, x: problem.f(theta, x, batch), theta, branch.x
        )
        return loss, slope, Cost(upper_gradients=1, rows=rows)

    def _metric(self, branch: Branch) -> Tree:
        """Return D; 1 without moments.

        Its scale is the scale of v, so that lengths of different steps can be added.
        """
        moments = {name: branch.aux[f"v.{name}"] for name in branch.x if f"v.{name}" in branch.aux}
        if len(moments) < len(branch.x):
            return {name: torch.ones_like(leaf) for name, leaf in branch.x.items()}
        mean = torch.stack([leaf.sum() for leaf in moments.values()]).sum() / sum(
            leaf.numel() for leaf in moments.values()
        )
        return {name: mean.sqrt() / (leaf.sqrt() + self.eps) for name, leaf in moments.items()}


def product(a: Tree, b: Tree, metric: Tree) -> Tensor:
    """Return ⟨a_s, b_s⟩_D of stacked vectors, ``[S]``.

    Examples
    --------
    >>> product(
    ...     {"x": torch.tensor([[1.0, 2.0]])},
    ...     {"x": torch.tensor([[1.0, 1.0]])},
    ...     {"x": torch.tensor([1.0, 0.5])},
    ... )
    tensor([2.])
    """
    return torch.stack(
        [(a[name] * b[name] * leaf).flatten(1).sum(1) for name, leaf in metric.items()]
    ).sum(0)


def alignments(memory: State, metric: Tree) -> Tensor:
    """Return a, ``[S]``; 0 for a source without rows or with a zero gradient, and 0 if ∇f is 0."""
    target = {name: leaf[None] for name, leaf in memory["upper"].items()}
    lengths = (memory["rows"] * memory["squares"]).sqrt() * product(target, target, metric).sqrt()
    return product(memory["sources"], target, metric) / lengths.clamp_min(
        torch.finfo(lengths.dtype).tiny
    )
