"""What is to be said of a finished run in words: signs that its mixture was learned from a model that did not learn."""

from __future__ import annotations

import math

import torch

from hgms_core import Data, Problem, Tree, norm

UNMOVED = 0.01
"""The share of the validation loss at the start by which it has at least to change for x to count as trained."""


def validation_loss(problem: Problem, theta: Tree, x: Tree) -> float:
    """f on the validation rows of role ``stop`` (of ``differentiate`` where there are none): what settings may be chosen by,
    since it sees no test row."""
    parts = [problem.upper_data.get(role, Data.none()) for role in ("stop", "differentiate")]
    rows = next((part for part in parts if part.size), parts[-1])
    with torch.no_grad():
        return float(problem.f(theta, x, rows.batch(None)))


def remarks(problem: Problem, x: Tree, loss: float) -> list[str]:
    """Of a run on data sources that ended at ``x`` with the validation loss ``loss``: that this rose, or hardly changed.

    Weights of sources are learned from gradients at the x of the run. Where x stayed at the start, or training made it worse,
    they say little. Cost: 1 upper value.

    >>> still = Problem(theta0={}, x0={"x": torch.ones(2)}, g=lambda t, x, _: x["x"].sum(), f=lambda t, x, _: x["x"].sum())
    >>> remarks(still, still.x0, 2.0)                       # no sources: nothing is said
    []
    """
    if problem.sources is None:
        return []
    start = validation_loss(problem, problem.theta0, problem.x0)
    away = {name: leaf - problem.x0[name] for name, leaf in x.items()}
    length = float(norm(problem.x0))
    moved = f"x moved by {float(norm(away)) / length:.2g} of its length" if length else f"x moved by {float(norm(away)):.2g}"
    change = loss - start
    if not math.isfinite(loss) or change > 1e-3 * abs(start):
        return [
            f"the validation loss rose from {start:.4g} to {loss:.4g} ({moved}): the lower level diverged, or learned what is "
            "of no use for validation; do not trust the weights (lower the generator's lr, or look at the heaviest source)"
        ]
    if abs(change) < UNMOVED * abs(start):
        return [
            f"the validation loss hardly changed, from {start:.4g} to {loss:.4g} ({moved}): the weights were learned at the "
            "gradients of an untrained x; raise the generator's lr, or give more steps"
        ]
    return []
