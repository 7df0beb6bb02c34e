"""Self-selection: train on validation rows, select the lower rows that the network agrees with,
train on both, repeat.
"""

from __future__ import annotations

from typing import ClassVar, Literal, final

import torch
from attrs import field

from hgms.config import lowering
from hgms.methods.reweighting import base, joint_training
from hgms.rows import weighted_rows
from hgms_core import Key, Problem, Record, State, Tree, component
from hgms_core.capabilities import Capabilities, HasTestingInstance
from hgms_core.validators import not_negative, optional_positive, positive, share


@final
@component
class Agreement:
    """Train from scratch in rounds, on validation rows and on the lower rows that agree with the
    last round's network::

        w⁰ = 0,      x_k = Adam on 1/n Σ_i w_iᵏ ℓ_i(x) + r(x) + ε f(x), from a newly drawn start
        w_iᵏ⁺¹ = 1 where ℓ_i(x_k) ≤ the q-quantile of ℓ_j(x_k), else 0
            (j: the validation rows of the role `stop`)

    f is on the validation rows of the roles ``differentiate`` and ``select``. A lower row is
    selected if its loss is at most the q-quantile of clean rows that the network was not trained
    on. No hypergradient is computed and no θ is learned; θ reports the last selection, as logits
    ±10.

    Use as a baseline for every method that learns weights: it measures the gain from a few clean
    rows without bilevel optimisation. Avoid if g and f have different losses of a row, or if
    validation rows lack the columns of lower rows.

    Cost of a round: ``steps`` lower gradients and as many upper gradients for each of the two
    roles, every lower row's loss, and the losses of the rows of ``stop``.

    Parameters
    ----------
    steps, lr
        Adam's steps in one round (an outer step), and its rate, which decreases to 0 as a cosine
        within the round.
    tilt
        ε.
    share
        q.
    batch_size, upper_batch_size
        Lower and validation rows of a step (``None``: all).
    keep
        ``best`` returns the round of the lowest upper loss on rows of the role ``stop``; ``last``
        returns the last.

    Raises
    ------
    ConfigError
        For a problem whose θ does not weight lower rows, or without rows for ``stop``.

    Notes
    -----
    Source: self-training as of Scudder, *Probability of error of some adaptive pattern-recognition
    machines*, IEEE Transactions on Information Theory 11 (1965), with labels that are kept or
    dropped; this project.

    Examples
    --------
    >>> from hgms.adapters import from_losses
    >>> from hgms_core import Rows
    >>> rows = Rows(losses=lambda x, batch: 0.5 * (x["x"] - batch["a"]).square())
    >>> problem = from_losses(
    ...     theta0={"logits": torch.zeros(4)},
    ...     x0={"x": torch.zeros(1)},
    ...     extensions=(rows,),
    ...     lower_data={"a": torch.tensor([1.0, 0.9, -1.0, 5.0])},
    ...     upper_data={"a": torch.tensor([0.8, 1.2])},
    ...     f=lambda t, x, batch: 0.5 * (x["x"] - batch["a"]).square().mean(),
    ...     g=lambda t, x, batch: (t["logits"].sigmoid() * rows.losses(x, batch)).mean(),
    ... )
    >>> method = Agreement(steps=50, lr=0.1)
    >>> state, record = method.step(problem, method.init(problem, 0), 0.0)
    >>> state["theta"]["logits"]
    tensor([ 10.,  10., -10., -10.])
    """

    name: ClassVar[str] = "agreement"
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance})
    needs: ClassVar[frozenset[str]] = frozenset({"row-weights", "stop-rows"})

    steps: int = field(default=300, validator=positive)
    lr: float = field(default=1e-2, validator=positive)
    tilt: float = field(default=1.0, validator=not_negative)
    share: float = field(default=0.9, validator=share)
    batch_size: int | None = field(default=256, validator=optional_positive)
    upper_batch_size: int | None = field(default=100, validator=optional_positive)
    keep: Literal["last", "best"] = "best"

    memory_hints = lowering(other=["batch_size", "upper_batch_size"])

    @classmethod
    def testing_instance(cls) -> Agreement:
        return cls(steps=20, lr=0.1)  # for problems of size 1

    def init(self, problem: Problem, seed: int) -> State:
        return base.begin(self, problem, seed)

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        rows = weighted_rows(problem, self.name)
        key = Key(state["seed"]).fold("round", state["step"])
        theta = state["theta"]
        x = problem.initial(key)
        if not state["step"]:  # the first network is not trained: no lower row is selected
            x = problem.x0
            none = torch.zeros_like(theta[rows.leaf], dtype=torch.bool)
            theta = base.theta_of_kept(problem, rows, none)
        training = joint_training.Training(
            steps=self.steps,
            lr=self.lr,
            tilt=self.tilt,
            batch_size=self.batch_size,
            upper_batch_size=self.upper_batch_size,
        )
        x, lower, upper, cost = joint_training.train(problem, self.name, theta, x, key, training)
        losses, spent = base.all_losses(problem, rows, x)
        usual, more = base.usual_loss(self, problem, rows, x, self.share)
        fits = losses <= usual
        record: Record = {"upper_loss": upper, "lower_loss": lower, "kept": fits.double().mean()}
        changes = {"x": x, "theta": base.theta_of_kept(problem, rows, fits)}
        return base.end_step(self, problem, state, changes, [x], cost + spent + more, record)

    def result(self, state: State) -> tuple[Tree, Tree]:
        return base.answer(self, state)
