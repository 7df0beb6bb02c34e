"""The bilevel problem of one branch: an upper variable α, training rows, and held-out rows.

α is three numbers (:mod:`hgms.methods.crossfit.weights`). All branches share the same two
functions, so that a compiled run compiles them once. The batches of a branch determine the rows
that it sees.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from hgms.compiled import Numbers
from hgms.methods.crossfit import weights
from hgms.methods.crossfit.folds import Folds
from hgms.rows import trained_on, weighted_rows
from hgms_core import ROLES, Batch, Data, Problem, Tree

UPPER = "crossfit.upper."
KEPT = "crossfit.kept"
SCORE = "crossfit.score"


@frozen(eq=False)
class Losses:
    """The losses of all branches. ``ratio`` is m/n: m validation rows count like m lower rows."""

    problem: Problem
    ratio: float

    def lower(self, alpha: Tree, x: Tree, batch: Batch) -> Tensor:
        """g_j(α, x) = mean_i k_i σ(θ_i(α)) ℓ_i(x) + r(x) + ε(α) (m_j/n) f(x), with k_i = 0 on
        the rows of part j.
        """
        above = {
            name.removeprefix(UPPER): leaf for name, leaf in batch.items() if name.startswith(UPPER)
        }
        below = {name: leaf for name, leaf in batch.items() if not name.startswith("crossfit.")}
        rows = weighted_rows(self.problem, "crossfit")
        theta = self.problem.theta0
        weight = batch[KEPT] * weights.logits(alpha, batch[SCORE]).sigmoid()
        fit = (weight * rows.losses(x, below)).mean() + rows.regulariser(theta, x, below)
        return fit + alpha[weights.TILT].exp() * self.ratio * self.problem.f(theta, x, above)

    def upper(self, alpha: Tree, x: Tree, batch: Batch) -> Tensor:
        """f on the rows that the branch has not seen."""
        return self.problem.f(self.problem.theta0, x, batch)

    def objective(
        self, scales: Numbers, theta: Tree, x: Tree, below: Batch, above: Batch
    ) -> Tensor:
        """Return the same g_j for one lower step, with rows drawn in proportion to their weights.

        Their mean loss times W/n (``scales[0]``) is unbiased, and no step uses rows of weight 0.
        """
        rows = weighted_rows(self.problem, "crossfit")
        fit = scales[0] * rows.losses(x, below).mean() + rows.regulariser(theta, x, below)
        return fit + scales[1] * self.problem.f(theta, x, above)


def losses_of(problem: Problem, folds: Folds) -> Losses:
    """Return the losses of this problem's branches, the same at every step: compiled functions are
    cached by their losses.
    """
    key = ("crossfit", problem.g, problem.f, folds.kept.shape[1])
    if key not in problem.kept:
        # use a copy without `kept`, to avoid a reference cycle
        problem.kept[key] = Losses(evolve(problem), folds.kept.shape[1] / problem.lower_data.size)
    return problem.kept[key]


def of_branch(
    problem: Problem, folds: Folds, alpha: Tree, x: Tree, scores: Tensor, branch: int
) -> Problem:
    """min_α f on the part that branch ``branch`` has not seen, over x ∈ argmin g_j(α, ·)."""
    losses = losses_of(problem, folds)
    upper = trained_on(problem)
    kept = {UPPER + name: leaf for name, leaf in upper.rows(folds.kept[branch]).items()}
    seen = (folds.lower != branch).to(scores)
    lower = problem.lower_data

    def rows(index: Tensor) -> Batch:
        return {**lower.rows(index), KEPT: seen[index], SCORE: scores[index], **kept}

    data = Data(lower.size, {}, rows, lower.device, lower.strata)
    held = upper.rows(folds.held[branch])
    judging = Data(
        folds.held.shape[1], held, lambda index: {name: leaf[index] for name, leaf in held.items()}
    )
    return evolve(
        problem,
        theta0=alpha,
        x0=x,
        g=losses.lower,
        f=losses.upper,
        lower_data=data,
        upper_data=dict.fromkeys(ROLES, judging),
        references={},
        extensions=(),
        start=None,
        fresh=None,
        project=weights.clip_weights,
        evaluate=_nothing,
    )


def _nothing(theta: Tree, x: Tree) -> dict[str, float]:
    return {}


def draw_rows(weight: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` row numbers, each with a probability in proportion to its weight."""
    edges = weight.double().cumsum(0).cpu()
    where = torch.rand(count, generator=generator, dtype=torch.float64) * edges[-1]
    return torch.searchsorted(edges, where).clamp_max(len(edges) - 1).to(weight.device)
