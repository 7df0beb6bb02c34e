"""Cosines between source gradients and the validation gradient.

They measure how much a small step on each source helps validation, independent of its gradient's
length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.config import lowering
from hgms.rows import mixture_slope
from hgms_core import (
    Branch,
    Candidates,
    ConfigError,
    Cost,
    Estimate,
    Key,
    Problem,
    Selection,
    Sources,
    State,
    Tree,
    component,
    norm,
    slopes,
    upper_gradients,
)
from hgms_core.trees import require_grad
from hgms_core.validators import at_least, decay_rate, optional, optional_positive, positive


@final
@component
class Aligned:
    """∇_θ of f after a step that takes every source's direction at the same length::

        x⁺ = x̂ − η Σ_s ω_s(θ) u_s/‖u_s‖,  u_s = D_s ∇ℓ_s(x̂; B_s),
            D_s = 1/(√(βv + (1 − β)(∇ℓ_s)²) + ε)
        a_s = ⟨∇f(x̂; V), u_s⟩ / (‖∇f(x̂; V)‖ ‖u_s‖)
        h = −∇_θ Σ_s ω_s(θ) a_s      (the derivative of f(x⁺) at η → 0, in units of η‖∇f‖)

    v are Adam's second moments of the branch, if the generator provides them (``branches`` with
    ``optimizer = "adamw"``); without them D = 1. B and V are drawn freshly with the step's key,
    independently of the selection.

    The plain derivative −η⟨∇f, ∇ℓ_s⟩ grows with ‖∇ℓ_s‖. Answers of one or two tokens have the
    longest gradients, so it prefers sources of junk (docs/explanation/language-models.md has the
    figures). A cosine lies between −1 and 1 and depends only on the source's direction. Noise
    shortens it: with a batch of few rows, |a_s| is too small, but the sign is the same. If B misses
    sources, h is scaled so that its mean over batches is correct.

    Use for the weights of data sources of a language model, with ``dual-averaging``. Avoid when
    gradient lengths are informative: a source that is nearly learned has a short gradient, and this
    estimator ignores the length.

    Parameters
    ----------
    batch_size
        Fresh lower rows, equally many per source, at least 2: a source is compared with the other
        sources of its batch.
    upper_batch_size
        Validation rows (None: all).
    beta, eps
        β and ε of Adam's second moments.

    Raises
    ------
    ConfigError
        From a problem without sources.

    Notes
    -----
    Cost: S lower gradients, of ``batch_size`` rows together, and 1 upper gradient. Memory: two
    gradients.

    Source: this project; the cosines of LESS (Xia et al. 2024, arXiv 2402.04333), whose gradients
    are in Adam's metric, as the hypergradient of one step of the HG-MS paper's source reweighting.

    Examples
    --------
    >>> import torch
    >>> from hgms_core import Data, Sources
    >>> rows = Data.of(
    ...     {"a": torch.tensor([[3.0, 0.0], [0.0, 0.1]]), "source": torch.tensor([0, 1])}
    ... )
    >>> def losses(x, batch):  # ∇ℓ_s = −a_s at x = 0
    ...     values = -(batch["a"] @ x["x"])
    ...     return torch.stack([values[batch["source"] == number].sum() for number in range(2)])
    >>> weights = lambda theta: theta["t"].softmax(0)
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(2)},
    ...     x0={"x": torch.zeros(2)},
    ...     lower_data=rows,
    ...     g=lambda theta, x, batch: weights(theta) @ losses(x, batch),
    ...     f=lambda theta, x, _: -x["x"][0],
    ...     extensions=(
    ...         Sources(
    ...             names=("a", "b"), weights=weights, theta=dict, losses=losses, examples=losses
    ...         ),
    ...     ),
    ... )
    >>> only = Branch(x=problem.x0).as_candidates()
    >>> Aligned().estimate(problem, problem.theta0, *only, Key(0), {})[0].value["t"]  # a = (1, 0)
    tensor([-0.2500,  0.2500])
    """

    name: ClassVar[str] = "aligned"
    needs: ClassVar[frozenset[str]] = frozenset({"sources"})
    testing_failures: ClassVar[Mapping[str, str]] = {
        "closed-form-sources": (
            "lengths of gradients are divided out: h is a direction, whatever ∇F's length is"
        )
    }
    batch_size: int | None = field(default=None, validator=optional(at_least(2)))
    upper_batch_size: int | None = field(default=None, validator=optional_positive)
    beta: float = field(default=0.999, validator=decay_rate)
    eps: float = field(default=1e-8, validator=positive)

    memory_hints = lowering(other=["batch_size"])

    def init(self, problem: Problem) -> State:
        return {}

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
        sources = problem.find(Sources)
        if sources is None:
            raise ConfigError(
                "not-supported",
                f"hypergradient {self.name!r} requires a lower loss that mixes named sources, but "
                "the problem has no sources",
                place=("hypergradient",),
            )
        below, rows = problem.lower_data.sample(key.fold("lower"), self.batch_size)
        above, upper_rows = problem.upper_data["differentiate"].sample(
            key.fold("upper"), self.upper_batch_size
        )
        loss, _, slope = upper_gradients(
            lambda theta, x: problem.f(theta, x, above), theta, branch.x
        )
        alignments, present = self.alignments(problem, branch, below, slope)
        value = mixture_slope(sources, theta, alignments, present, redrawn=True)
        count = int(present.sum())
        cost = Cost(lower_gradients=count, upper_gradients=1, rows=rows + upper_rows)
        return Estimate(value=value, upper_loss=loss, cost=cost), state

    def alignments(
        self, problem: Problem, branch: Branch, below: Tree, slope: Tree
    ) -> tuple[Tensor, Tensor]:
        """Return (a, whether B has rows of the source), both ``[S]``, for ``slope`` = ∇f.

        Each source takes one backward pass, through its rows only.
        """
        sources = problem.find(Sources)
        assert sources is not None
        number = len(sources.names)
        moments = {
            name: leaf for name in branch.x if (leaf := branch.aux.get(f"v.{name}")) is not None
        }
        cosines = [next(iter(slope.values())).new_zeros(()) for _ in range(number)]
        present = torch.zeros(number, dtype=torch.bool)
        for source in below["source"].unique().tolist():
            batch = _rows_of(below, source)
            leaves = require_grad(branch.x)
            with torch.enable_grad():
                losses = sources.losses(leaves, batch)
            grads = dict(zip(leaves, slopes(losses[source], list(leaves.values())), strict=True))
            u = grads if len(moments) < len(grads) else self._precondition(grads, moments)
            cosines[source], present[source] = _cosine(slope, u), True
        return torch.stack(cosines), present

    def _precondition(self, grads: Tree, moments: Tree) -> Tree:
        """Return D_s ∇ℓ_s.

        The second moment includes the square of this gradient. Coordinates that never had a
        gradient are therefore not divided by ε.
        """
        second = {
            name: torch.addcmul(self.beta * moments[name], grad, grad, value=1 - self.beta)
            for name, grad in grads.items()
        }
        return {name: grad / (second[name].sqrt() + self.eps) for name, grad in grads.items()}


def _rows_of(batch: Tree, source: int) -> Tree:
    """Return the batch's rows of one source; entries without a row axis (a seed) stay unchanged."""
    count = batch["source"].shape[0]
    where = (batch["source"] == source).nonzero()[:, 0]
    return {
        name: leaf.index_select(0, where) if leaf.dim() and leaf.shape[0] == count else leaf
        for name, leaf in batch.items()
    }


def _cosine(a: Tree, b: Tree) -> Tensor:
    """Return ⟨a, b⟩/(‖a‖‖b‖), or 0 if a or b is 0.

    A gradient that is not finite gives NaN, which ends the run.
    """
    product = torch.stack([(leaf * b[name]).sum() for name, leaf in a.items()]).sum()
    lengths = norm(a) * norm(b)
    return torch.where(lengths == 0, torch.zeros_like(product), product / lengths)
