"""The derivative of the path: backpropagation through the selected branch's optimiser steps."""

from __future__ import annotations

from typing import ClassVar, Literal, final

import torch
from attrs import field

from hgms_core import (
    Candidates,
    ConfigError,
    Cost,
    Estimate,
    Key,
    Problem,
    Selection,
    State,
    Tree,
    component,
    detach,
    slopes,
)
from hgms_core.trees import require_grad
from hgms_core.validators import optional_positive


@final
@component
class Unrolled:
    """∇_θ f(θ, y_K(θ)), with y_K(θ) the selected branch replayed under autograd.

    The start of the branch is a constant. The derivative goes through its last ``last`` steps of
    SGD or AdamW (all by default). Only the selected branch is replayed, so memory does not depend
    on N.

    Use when the lower level takes few steps. Avoid for long runs: memory and time grow with the
    steps.

    Parameters
    ----------
    last
        How many of the last steps to differentiate through; by default all (full unrolling).
    upper_batch_size
        Validation rows of the role ``differentiate`` for f; by default all.
    backward
        The backward pass through the run: through the ``graph`` of all its steps, or ``mixed``.
        ``mixed`` goes step by step from the end, each step from the state before it, with
        reverse-over-forward products (MixFlow-MG). It gives the same derivative, with K states in
        memory instead of K graphs. It requires losses with forward-mode derivatives, and the lower
        optimiser ``sgd`` or ``adamw``. A run that the generator keeps (``keep_path``) has the
        backward pass of ``keep_path``.

    Raises
    ------
    ConfigError
        From a generator without a path (``Candidates.replay`` is None), and without a backward pass
        in mixed mode if it is requested.

    Notes
    -----
    Cost: K lower gradients (the replay), one Hessian and one cross product per differentiated step,
    1 upper gradient.

    Source: HG-MS paper, appendix (HG-baseline: differentiable AdamW unroll); Franceschi et al.
    2017; truncation: Shaban et al. 2019.

    Examples
    --------
    >>> def replay(theta, last):  # one SGD step of size 1/4 on g = (x − θ)² from x = 3
    ...     return {"x": 3.0 - 0.25 * 2 * (3.0 - theta["t"])}, Cost(lower_gradients=1)
    >>> problem = Problem(
    ...     theta0={"t": torch.tensor([1.0])},
    ...     x0={"x": torch.tensor([3.0])},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] ** 2).sum(),
    ... )
    >>> from hgms_core import Branch
    >>> branch = Branch(x={"x": torch.tensor([2.0])}, replay=replay)
    >>> estimate, _ = Unrolled().estimate(
    ...     problem, problem.theta0, *branch.as_candidates(), Key(0), {}
    ... )
    >>> estimate.value["t"]  # 2 · 2 · ½
    tensor([2.])
    """

    name: ClassVar[str] = "unrolled"
    needs: ClassVar[frozenset[str]] = frozenset({"smooth-lower"})
    last: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)
    backward: Literal["graph", "mixed"] = "graph"

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
        replay = branch.replay if self.backward == "graph" else branch.replay_mixed
        if branch.replay is not None and replay is None:
            raise ConfigError(
                "not-supported",
                "backward='mixed' requires a generator with steps in mixed mode",
                place=("hypergradient", "backward"),
                hint="use 'branches' or 'trajectory' with the optimizer 'sgd' or 'adamw', or set "
                'backward = "graph"',
            )
        if replay is None:
            raise ConfigError(
                "not-supported",
                "hypergradient 'unrolled' differentiates the steps of a branch, but the candidates "
                "of this generator have no steps to differentiate",
                place=("hypergradient",),
                hint="use 'carried' if the generator computes an upper gradient, or 'implicit', "
                "'one-step' or 'fixed'",
            )
        batch, rows = problem.upper_data["differentiate"].sample(
            key.fold("upper"), self.upper_batch_size
        )
        leaves = require_grad(theta)
        x, cost = replay(leaves, self.last)
        with torch.enable_grad():
            value = problem.f(leaves, x, batch)
            grads = slopes(value, list(leaves.values()))
        gradient = detach(dict(zip(leaves, grads, strict=True)))
        return Estimate(
            value=gradient,
            upper_loss=value.detach(),
            cost=cost + Cost(upper_gradients=1, rows=rows),
        ), state
