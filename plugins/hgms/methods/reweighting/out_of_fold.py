"""The out-of-fold filter: train without lower rows that models of other rows find improbable."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field

from hgms.config import lowering
from hgms.facts import around_a_pipeline, needs_of
from hgms.methods.reweighting import base, joint_training
from hgms.rows import require_stop_rows, weighted_rows
from hgms_core import Cost, Key, Method, Problem, Record, State, Tree, component
from hgms_core.validators import at_least, not_negative, optional_positive, positive, share


@final
@component
class OutOfFoldFilter:
    """Remove lower rows by out-of-fold losses before the first outer step, then run ``method``::

        x_j = Adam on 1/n Σ_{i: k(i) ≠ j} ℓ_i(x) + r(x) + ε f(x), from a newly drawn start
        w_i = 1 where ℓ_i(x_k(i)) ≤ the q-quantile of ℓ_v(x_k(i)), else 0
            (v: the validation rows of the role `stop`)

    k(i) is the fold of row i, one of K, drawn once with the run's seed. f is on the validation rows
    of the roles ``differentiate`` and ``select``. A lower row is kept if its loss is at most the
    q-quantile of clean rows, at a network that was trained on neither. θ has the logits ±10.

    With a method that keeps θ constant (``uniform-tilted``), x is trained on the kept rows and on
    the validation rows, and no hypergradient is computed. Use as a baseline for every method that
    learns a weight per row: it is the usual preparation of data with wrong labels. Avoid with a
    method that learns θ, since the gradient of σ is small at ±10; and if g and f have different
    losses of a row, or if validation rows lack the columns of lower rows.

    Parameters
    ----------
    method
        A pipeline, or a wrapper around one; its settings have the prefix ``method.method.…``.
    folds
        K.
    steps, lr
        Adam's steps for one fold, and its rate, which decreases to 0 as a cosine.
    tilt
        ε.
    share
        q.
    batch_size, upper_batch_size
        Lower and validation rows of a step of a fold (``None``: all).

    Raises
    ------
    ConfigError
        For a problem whose θ does not weight lower rows, or without rows for ``stop``.

    Notes
    -----
    Cost: the cost of the method; and once K·``steps`` lower gradients, as many upper gradients for
    each of the two roles, and the losses of all lower rows and of the rows of ``stop`` for each
    fold.

    Source: Brodley and Friedl, *Identifying mislabeled training data*, Journal of Artificial
    Intelligence Research 11 (1999), the single filter with cross-validation; here with a threshold
    from clean rows.

    Examples
    --------
    >>> from hgms.adapters import from_losses
    >>> from hgms.generators import Branches
    >>> from hgms.hypergradients import Fixed
    >>> from hgms.outer import Sgd
    >>> from hgms.selectors import First
    >>> from hgms_core import Pipeline, Rows
    >>> rows = Rows(losses=lambda x, batch: 0.5 * (x["x"] - batch["a"]).square())
    >>> problem = from_losses(
    ...     theta0={"logits": torch.zeros(4)},
    ...     x0={"x": torch.zeros(1)},
    ...     extensions=(rows,),
    ...     lower_data={"a": torch.tensor([1.0, 0.9, -4.0, 5.0])},
    ...     upper_data={"a": torch.tensor([0.5, 1.5])},
    ...     f=lambda t, x, batch: 0.5 * (x["x"] - batch["a"]).square().mean(),
    ...     g=lambda t, x, batch: (t["logits"].sigmoid() * rows.losses(x, batch)).mean(),
    ... )
    >>> pipeline = Pipeline(
    ...     generator=Branches(), selector=First(), hypergradient=Fixed(), outer=Sgd()
    ... )
    >>> method = OutOfFoldFilter(method=pipeline, folds=2, steps=100, lr=0.1, tilt=10.0)
    >>> state, record = method.step(problem, method.init(problem, 0))
    >>> state["theta"]["logits"]
    tensor([ 10.,  10., -10., -10.])
    """

    name: ClassVar[str] = "out-of-fold-filter"

    method: Method = field(validator=around_a_pipeline)
    folds: int = field(default=5, validator=at_least(2))
    steps: int = field(default=300, validator=positive)
    lr: float = field(default=1e-2, validator=positive)
    tilt: float = field(default=1.0, validator=not_negative)
    share: float = field(default=0.9, validator=share)
    batch_size: int | None = field(default=256, validator=optional_positive)
    upper_batch_size: int | None = field(default=100, validator=optional_positive)

    memory_hints = lowering(other=["batch_size", "upper_batch_size"])

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"row-weights", "stop-rows"}) | needs_of(self.method)

    def init(self, problem: Problem, seed: int) -> State:
        weighted_rows(problem, self.name)
        require_stop_rows(problem, self.name)
        return self.method.init(problem, seed)

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        if not state["step"]:
            theta, spent = self._filter(problem, Key(state["seed"]).fold("filter"))
            cost = Cost(**state["cost"]) + spent
            state = {**state, "theta": theta, "cost": cost.numbers()}
        return self.method.step(problem, state, progress)

    def result(self, state: State) -> tuple[Tree, Tree]:
        return self.method.result(state)

    def _filter(self, problem: Problem, key: Key) -> tuple[Tree, Cost]:
        """Return the logits of the kept and the removed rows, and the cost of the filter."""
        rows = weighted_rows(problem, self.name)
        logits = problem.theta0[rows.leaf]
        size = problem.lower_data.size
        order = key.fold("folds").indices(size, size, 1)[0].to(logits.device)
        fold = order.argsort() % self.folds
        training = joint_training.Training(
            steps=self.steps,
            lr=self.lr,
            tilt=self.tilt,
            batch_size=self.batch_size,
            upper_batch_size=self.upper_batch_size,
        )
        kept = torch.zeros_like(logits, dtype=torch.bool)
        cost = Cost()
        for number in range(self.folds):
            held = fold == number
            own = key.fold("fold", number)
            theta = base.theta_of_kept(problem, rows, ~held)
            start = problem.initial(own)
            x, _, _, spent = joint_training.train(problem, self.name, theta, start, own, training)
            losses, more = base.all_losses(problem, rows, x)
            usual, last = base.usual_loss(self, problem, rows, x, self.share)
            kept |= held & (losses <= usual)
            cost += spent + more + last
        return base.theta_of_kept(problem, rows, kept), cost
