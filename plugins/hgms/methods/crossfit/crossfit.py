"""HG-MS with cross-fitted branches: every validation row is used to train and to evaluate, and
held-out losses determine the weights.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

import torch
from attrs import evolve, field
from torch import Tensor

from hgms.compiled import launch
from hgms.config import lowering
from hgms.methods.crossfit import fold_problem, weights
from hgms.methods.crossfit.folds import Folds
from hgms.methods.crossfit.lower import SharpnessAware, advance, branch, part
from hgms.rows import require_stop_rows, trained_on, weighted_rows
from hgms_core import (
    Branch,
    Candidates,
    ConfigError,
    Cost,
    HyperGradient,
    Key,
    OuterOptimizer,
    Problem,
    Record,
    Selector,
    State,
    Tree,
    component,
    norm,
    stack,
)
from hgms_core.validators import optional_positive, positive, share


@final
@component
class CrossFit:
    """Minimise F(α): α are three numbers that determine the weights of all lower rows, and F is the
    loss on held-out validation rows::

        x_j ≈ argmin_x g_j(α, x),
            g_j(α, x) = 1/n Σ_{i ∉ part j} σ(θ_i) ℓ_i(x) + r(x) + (ε/n) Σ_{v ∉ part j} f_v(x)
        s_i = log p/(1 − p),        p = exp(−ℓ_i(x_k)), k the branch that has not seen row i
        θ_i = b (s_i − c),          α = (log b, c, log ε)
        h   = 1/N Σ_j d/dα f(x_j(α)) on the validation rows of part j,        s held fixed
        α ← outer step along h;
            x = the branch of least f on the rows of the role ``stop``, of all steps

    The first outer step trains at the problem's θ0, and computes the first scores. N branches split
    lower and validation rows (of the roles ``differentiate`` and ``select``) into N parts, once in
    a run. Branch j is trained on all parts except part j, and continues from step to step. So no
    row's weight depends on a network that has learned its label, and no hypergradient uses
    validation rows that the lower level has fitted. m validation rows cannot determine n > m
    weights, but they can determine three numbers. The derivatives of α are sums over all rows, dα =
    Σ_i h_i ∂θ_i/∂α.

    A lower step is Adam with the gradient at a point slightly uphill (sharpness-aware; ρ relative
    to ‖x‖), which searches for a flat minimiser among many. x_j is the average of the last
    iterates. From the share ``finish`` of the budget on, α and θ are constant, the branches see all
    rows, and the rate decreases to a twentieth.

    Use for hyper-cleaning: wrong labels, and a few validation rows that are trusted. Avoid if a
    row's loss does not indicate whether the row helps, or if validation rows are so few that a
    part is not informative. ``optimizer.lr`` is tuned for small dense networks: convolutions need a
    smaller rate.

    Cost of an outer step: 2 N K lower and 2 N K upper gradients, a pass over all lower rows, N
    times the cost of ``hypergradient``, and N upper values. Memory: 4N lower states.

    Parameters
    ----------
    hypergradient
        The estimator of h on each branch's problem.
    outer
        The optimiser of α.
    selector
        The rule that selects x.
    count
        N.
    steps
        Lower steps of each branch in one outer step.
    warmup
        In the first outer step.
    optimizer
        The rate of a lower step, ρ, and the decay of the average (:class:`SharpnessAware`).
    batch_size, upper_batch_size
        Lower rows of a step, drawn in proportion to their weights, and validation rows.
    slope, tilt
        b and ε at the start.
    finish
        See above; 1 never finishes.

    Raises
    ------
    ConfigError
        If θ does not weight lower rows, with fewer than two validation rows per branch, and without
        rows for the role ``stop``.

    Notes
    -----
    Source: this project; HG-MS paper, Algorithm 1, with the candidates of cross-fitting
    (Chernozhukov et al. 2018), weights as a function of the loss as in Meta-Weight-Net (Shu et al.
    2019), and Foret et al. 2021 for the lower step.

    Examples
    --------
    >>> from hgms.hypergradients import OneStep
    >>> from hgms.outer import Sgd
    >>> from hgms.selectors import BestOfN
    >>> method = CrossFit(
    ...     hypergradient=OneStep(lr=0.1), outer=Sgd(lr=0.1), selector=BestOfN(), count=2
    ... )
    >>> method.count, method.slope
    (2, 2.0)
    """

    name: ClassVar[str] = "crossfit"

    hypergradient: HyperGradient
    outer: OuterOptimizer
    selector: Selector
    count: int = field(default=4, validator=positive)
    steps: int = field(default=25, validator=positive)
    warmup: int = field(default=100, validator=positive)
    optimizer: SharpnessAware = field(factory=SharpnessAware)
    batch_size: int | None = field(default=256, validator=optional_positive)
    upper_batch_size: int | None = field(default=64, validator=optional_positive)
    slope: float = field(default=2.0, validator=positive)
    tilt: float = field(default=3.0, validator=positive)
    finish: float = field(default=0.8, validator=share)

    needs: ClassVar[frozenset[str]] = frozenset({"smooth-lower", "row-weights", "stop-rows"})
    memory_hints = lowering(other=["batch_size", "upper_batch_size", "count"])

    def init(self, problem: Problem, seed: int) -> State:
        weighted_rows(problem, self.name)
        require_stop_rows(problem, self.name)
        size = trained_on(problem).size
        if size < 2 * self.count:
            raise ConfigError(
                "too-few-rows",
                f"count={self.count} requires at least {2 * self.count} validation rows in the "
                f"roles 'differentiate' and 'select', but there are {size}",
                place=("method", "count"),
                hint="decrease count, or add validation rows",
            )
        like = next(iter(problem.x0.values()))
        alpha = weights.begin(self.slope, self.tilt, like)
        starts = [problem.initial(Key(seed).fold("start", number)) for number in range(self.count)]
        return {
            "seed": seed,
            "step": 0,
            "lower_steps": 0,
            "theta": dict(problem.theta0),
            "alpha": alpha,
            "branches": stack([branch(x) for x in starts]),
            "hypergradient": {
                str(number): self.hypergradient.init(problem) for number in range(self.count)
            },
            "outer": self.outer.init(alpha),
            "best": {
                "loss": like.new_tensor(torch.inf),
                "theta": dict(problem.theta0),
                "x": dict(problem.x0),
            },
            "cost": Cost().numbers(),
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        key = Key(state["seed"]).fold("step", state["step"])
        folds = Folds.draw(problem, self.count, Key(state["seed"]).fold("folds"))
        finishing = progress >= self.finish
        branches, lower_loss, spent = self._train(problem, folds, state, key, progress, finishing)
        averages = part("a", branches)
        following = {
            **state,
            "branches": branches,
            "lower_steps": state["lower_steps"] + self._steps(state),
        }
        record: Record = {"step": state["step"] + 1, "lower_loss": lower_loss}
        if not finishing:
            changes, measured, cost = self._move(problem, folds, state, averages, key, progress)
            following = {**following, **changes}
            record = {**record, **measured}
            spent = spent + cost

        judged = evolve(
            problem, upper_data={**problem.upper_data, "select": problem.upper_data["stop"]}
        )
        candidates = Candidates(x=averages)
        selection = self.selector.select(judged, following["theta"], candidates, key.fold("select"))
        loss = selection.scores[selection.index]
        if bool(loss < state["best"]["loss"]):
            following["best"] = {
                "loss": loss,
                "theta": following["theta"],
                "x": candidates.at(selection.index),
            }
        cost = Cost(**state["cost"]) + spent + selection.cost
        following |= {"step": state["step"] + 1, "cost": cost.numbers()}
        record |= {
            "upper_loss": record.get("upper_loss", loss),
            "stop_loss": loss,
            "gap": selection.gap,
            "selected": selection.index,
        }
        record |= {f"cost_{name}": number for name, number in cost.numbers().items()} | {
            "oracle_calls": cost.calls
        }
        return following, record

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["best"]["theta"], state["best"]["x"]

    def _steps(self, state: State) -> int:
        return self.warmup if state["step"] == 0 else self.steps

    def _train(
        self,
        problem: Problem,
        folds: Folds,
        state: State,
        key: Key,
        progress: float,
        finishing: bool,
    ) -> tuple[Tree, Tensor, Cost]:
        """Return the branches after the lower steps of this outer step, the mean of their last
        objectives, and the cost.
        """
        weighted = weighted_rows(problem, self.name)
        alpha = state["alpha"]
        theta = state["theta"]
        upper = trained_on(problem)
        losses = fold_problem.losses_of(problem, folds)
        tilt = float(alpha[weights.TILT].exp()) * (upper.size if finishing else folds.kept.shape[1])
        left = (1 - progress) / (1 - self.finish) if finishing and self.finish < 1 else 1.0
        factor = max(0.05, left)
        steps = self._steps(state)
        size = problem.lower_data.size
        function = partial(advance, losses.objective)
        settings = (self.name, losses)
        ends = []
        values = []
        for number in range(self.count):
            tree = _at(state["branches"], number)
            own = key.fold("branch", number)
            kept = (
                torch.arange(upper.size, device=upper.device) if finishing else folds.kept[number]
            )
            weight = theta[weighted.leaf].sigmoid()
            weight = weight if finishing else weight * (folds.lower != number)
            below = self._below(problem, weight, own, steps)
            above = self._above(kept, own, steps)
            scales = (float(weight.sum()) / size, tilt / size)
            for lower_step in range(steps):
                batches = (
                    problem.lower_data.batch(below[lower_step]),
                    upper.batch(above[lower_step]),
                )
                count = state["lower_steps"] + lower_step + 1
                setting = self.optimizer.numbers(count, scales, factor)
                tree, loss = launch(
                    problem.compiler, settings, function, setting, tree, problem.theta0, *batches
                )
            ends.append(tree)
            values.append(loss)
        calls = 2 * self.count * steps
        rows = problem.lower_data.count(self.batch_size) + upper.count(self.upper_batch_size)
        return (
            stack(ends),
            torch.stack(values).mean(),
            Cost(lower_gradients=calls, upper_gradients=calls, rows=calls * rows),
        )

    def _below(self, problem: Problem, weight: Tensor, key: Key, steps: int) -> list[Tensor]:
        """Draw the lower rows of each step in proportion to their weights."""
        size = problem.lower_data.count(self.batch_size)
        return list(
            fold_problem.draw_rows(weight, steps * size, key.fold("lower").generator()).reshape(
                steps, size
            )
        )

    def _above(self, kept: Tensor, key: Key, steps: int) -> list[Tensor]:
        """Draw the validation rows of each step from the rows that the branch is trained on."""
        if self.upper_batch_size is None or self.upper_batch_size >= len(kept):
            return [kept] * steps
        return list(
            kept[key.fold("upper").indices(len(kept), self.upper_batch_size, steps, kept.device)]
        )

    def _move(
        self,
        problem: Problem,
        folds: Folds,
        state: State,
        averages: Tree,
        key: Key,
        progress: float,
    ) -> tuple[State, Record, Cost]:
        """Compute new scores, the hypergradient averaged over the branches, the outer step, and the
        resulting weights.
        """
        weighted = weighted_rows(problem, self.name)
        alpha = state["alpha"]
        scores, cost = self._scores(problem, folds, averages)
        estimates = []
        remembered = {}
        for number in range(self.count):
            x = _at(averages, number)
            own = fold_problem.of_branch(problem, folds, alpha, x, scores, number)
            estimate, memory = self.hypergradient.estimate(
                own,
                alpha,
                *Branch(x=x).as_candidates(),
                key.fold("hypergradient", number),
                state["hypergradient"][str(number)],
            )
            estimates.append(estimate)
            remembered[str(number)] = memory
        h = {
            name: torch.stack([estimate.value[name] for estimate in estimates]).mean(0)
            for name in alpha
        }
        moved, outer = self.outer.step(alpha, h, state["outer"], progress)
        alpha = weights.clip_weights(moved)
        leaf = problem.theta0[weighted.leaf]
        theta = problem.project(
            {**problem.theta0, weighted.leaf: weights.logits(alpha, scores).to(leaf)}
        )
        losses = torch.stack([estimate.upper_loss for estimate in estimates])
        measured: Record = {
            "upper_loss": losses.mean(),
            "hypergradient_norm": norm(h),
            "slope": alpha[weights.SLOPE].exp(),
            "threshold": alpha[weights.THRESHOLD],
            "tilt": alpha[weights.TILT].exp(),
            "outcome": torch.stack([estimate.code for estimate in estimates]).max(),
        }
        cost = sum((estimate.cost for estimate in estimates), cost)
        return (
            {"alpha": alpha, "theta": theta, "outer": outer, "hypergradient": remembered},
            measured,
            cost,
        )

    @torch.no_grad()
    def _scores(self, problem: Problem, folds: Folds, averages: Tree) -> tuple[Tensor, Cost]:
        """Return the score of each lower row from the branch that has not seen the row."""
        weighted = weighted_rows(problem, self.name)
        scores = problem.theta0[weighted.leaf].new_zeros(problem.lower_data.size)
        for number in range(self.count):
            rows = (folds.lower == number).nonzero()[:, 0]
            x = _at(averages, number)
            for some in rows.split(CHUNK):
                scores[some] = weights.score(weighted.losses(x, problem.lower_data.batch(some)))
        return scores, Cost(upper_values=self.count, rows=problem.lower_data.size)


def _at(trees: Tree, number: int) -> Tree:
    """Return the tree of branch ``number``."""
    return {name: leaf[number] for name, leaf in trees.items()}


CHUNK = 2048
"""Lower rows per chunk in the computation of losses."""
