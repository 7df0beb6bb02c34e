"""Propose, select, differentiate, update: the Method made of four parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, final

import torch
from attrs import evolve, field, frozen, validators

from hgms_core.errors import ConfigError
from hgms_core.fields import choice
from hgms_core.hypergrad import check_repeats, check_used
from hgms_core.problem import Batch, Loss, Problem, without_start
from hgms_core.protocols import Branch, CandidateGenerator, HyperGradient, OuterOptimizer, Selector, State
from hgms_core.records import Cost, Record
from hgms_core.seeding import Key, global_states
from hgms_core.trees import Tree, norm, take


@final
@frozen(kw_only=True)
class Pipeline:
    """HG-MS's outer loop with replaceable parts (Algorithm 1 of the paper).

    One step: N candidates, the selected one, a hypergradient through it, an outer update and a projection onto Θ. ``reference``
    starts θ from one of the problem's named upper variables instead of ``theta0``, ``mixture`` from weights of its data sources
    by name. ``keep = "best"`` returns the state with the
    lowest upper loss on the validation rows of the role ``stop`` (held-out stopping, one more upper value a step) instead of
    the last one. ``learn_start`` makes the lower level's start one more upper variable: its leaves ``start.<name>`` join θ in
    the hypergradient and the outer update (and in their norms), and leave it again in ``result``. ``answer = "last"`` returns
    the last candidate instead of the selected one as x (the end of a trajectory, where selecting only truncates it).
    ``tilt`` = ε > 0 lets the lower level minimise g + εf, so that candidates are drawn from the minimisers of g that validation
    favours (:meth:`Problem.tilted`); the hypergradient is that of the tilted problem, and every oracle call counts for both
    losses.

    The first step refuses losses that draw random numbers (:class:`ConfigError`), and losses neither of which depends on θ.

    >>> import torch
    >>> from hgms_core import Pipeline, Problem
    >>> from hgms_branches import Branches
    >>> from hgms_solvers import CG
    >>> from hgms_hypergradients import Implicit
    >>> from hgms_outer import Sgd
    >>> from hgms_selectors import BestOfN
    >>> problem = Problem(theta0={"t": torch.zeros(1)}, x0={"x": torch.ones(1)},
    ...                   g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(), f=lambda t, x, _: ((x["x"] - 2) ** 2).sum())
    >>> method = Pipeline(generator=Branches(count=2, steps=20, lr=0.2), selector=BestOfN(),
    ...                   hypergradient=Implicit(solver=CG()), outer=Sgd(lr=0.2))
    >>> state = method.init(problem, seed=0)
    >>> for _ in range(30):
    ...     state, record = method.step(problem, state)
    >>> round(float(method.result(state)[0]["t"]), 2)
    2.0

    Source: HG-MS paper, Algorithm 1.
    """

    name: ClassVar[str] = "pipeline"

    generator: CandidateGenerator
    selector: Selector
    hypergradient: HyperGradient
    outer: OuterOptimizer
    reference: str | None = None
    mixture: Mapping[str, float] | None = field(default=None, hash=False)
    keep: Literal["last", "best"] = field(default="last", validator=choice("last", "best"))
    learn_start: bool = field(default=False)
    answer: Literal["selected", "last"] = field(default="selected", validator=choice("selected", "last"))

    tilt: float = field(default=0.0, validator=validators.ge(0))

    @learn_start.validator
    def _can_start(self, attribute: object, value: bool) -> None:
        if value and not getattr(self.generator, "can_learn_start", False):
            raise ValueError(f"'learn_start' needs a generator that starts from θ, such as trajectory: {self.generator.name!r}")

    @property
    def needs(self) -> frozenset[str]:
        """What the pipeline itself asks of a task; its parts ask for themselves (:mod:`hgms_core.traits`)."""
        reference = {f"reference:{self.reference}"} if self.reference is not None else set()
        mixture = {"sources"} if self.mixture is not None else set()
        return frozenset(reference | mixture | ({"stop-rows"} if self.keep == "best" else set()))

    def init(self, problem: Problem, seed: int) -> State:
        if self.reference is not None and self.reference not in problem.references:
            known = ", ".join(sorted(problem.references)) or "none"
            raise ConfigError(
                f"this problem has no reference upper variable {self.reference!r} (it has: {known})\n"
                "  choose a task that names it, or leave `reference` out"
            )
        if self.keep == "best" and "stop" not in problem.upper_data:
            raise ConfigError('keep = "best" needs validation rows for the role `stop`, and this task sets none apart')
        problem = self._seen(problem)
        theta = problem.theta0 if self.reference is None else problem.references[self.reference]
        if self.mixture is not None:
            theta = {**theta, **self._given(problem, self.mixture)}
        key = Key(seed)
        return {
            "seed": seed,
            "step": 0,
            "theta": dict(theta),
            "x": dict(problem.x0),
            "start": self.generator.init(problem, key.fold("init")),
            "hypergradient": self.hypergradient.init(problem),
            "outer": self.outer.init(theta),
            "cost": Cost().numbers(),
            "best": None,
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        problem = self._seen(problem)
        key = Key(state["seed"]).fold("step", state["step"])
        theta, start = state["theta"], state["start"]
        if "progress" in start:  # of a generator with a schedule over the budget
            start = {**start, "progress": progress}
        device = next(iter(state["x"].values())).device
        drawn = global_states(device) if state["step"] == 0 else None

        candidates = self.generator.propose(problem, theta, start, key.fold("propose"))
        selection = self.selector.select(problem, theta, candidates, key.fold("select"))
        x = candidates.at(selection.index)

        tell, more = getattr(self.generator, "last_step", None), getattr(self.generator, "next_step", None)
        branch = Branch(
            x=x,
            last_step=None
            if tell is None
            else functools.partial(tell, problem, theta, start, key.fold("propose"), selection.index),
            next_step=None if more is None else functools.partial(more, problem, theta, start, index=selection.index, x=x),
            aux=take(candidates.aux, selection.index),
            replay=functools.partial(candidates.replay, selection.index)
            if candidates.replay is not None
            else functools.partial(self._replay, problem, start, key.fold("propose"), selection.index),
        )
        estimate, memory = self.hypergradient.estimate(
            problem, theta, branch, key.fold("differentiate"), state["hypergradient"]
        )
        spent = candidates.cost + estimate.cost
        if drawn is not None:  # once, at the start: what is wrong with the losses themselves
            if any(not torch.equal(a, b) for a, b in zip(drawn, global_states(device), strict=True)):
                for loss in _on_a_few_rows(problem, key):
                    check_repeats(loss, theta, x)
            if theta and spent.upper_gradients and not any(bool(leaf.any()) for leaf in estimate.value.values()):
                check_used(_on_a_few_rows(problem, key), theta, x)
        updated, outer = self.outer.step(theta, estimate.value, state["outer"], progress)
        updated = problem.project(updated)

        cost = Cost(**state["cost"]) + selection.cost + (_of_both(spent) if self.tilt else spent)
        record: Record = {
            "step": state["step"] + 1,
            "upper_loss": estimate.upper_loss,
            "lower_loss": take({"loss": candidates.losses}, selection.index)["loss"] if candidates.losses is not None else None,
            "selected": selection.index,
            "gap": selection.gap,
            "scores": selection.scores,
            "finite_candidates": selection.finite,
            "hypergradient_norm": norm(estimate.value),
            "lower_gradient_norm": estimate.lower_gradient_norm,
            "update_norm": norm(_difference(updated, theta)),
            "residual": estimate.residual,
            "iterations": estimate.iterations,
            "curvature": estimate.curvature,
        }
        best = state["best"]
        if self.answer == "last":
            x = candidates.at(candidates.count - 1)
        if self.keep == "best":
            best, stop_loss, rows = self._better(problem, theta, x, best)
            record["stop_loss"] = stop_loss
            cost = cost + Cost(upper_values=1, rows=rows)
        record["outcome"] = estimate.outcome.label
        counts = cost.numbers()
        record.update({f"cost_{name}": value for name, value in counts.items()})
        record["oracle_calls"] = cost.calls
        return {
            **state,
            "step": state["step"] + 1,
            "theta": updated,
            "x": x,
            "start": self.generator.carry(start, candidates, selection.index, key.fold("carry"), problem),
            "hypergradient": memory,
            "outer": outer,
            "cost": counts,
            "best": best,
        }, record

    def result(self, state: State) -> tuple[Tree, Tree]:
        found = state["best"] if self.keep == "best" and state["best"] is not None else state
        return without_start(found["theta"]) if self.learn_start else found["theta"], found["x"]

    def _given(self, problem: Problem, mixture: Mapping[str, float]) -> Tree:
        if problem.sources is None:
            raise ConfigError("`mixture` gives weights to data sources, and this problem has none\n  leave it out")
        return problem.sources.theta(mixture)

    def _seen(self, problem: Problem) -> Problem:
        """The problem as the parts see it."""
        if self.tilt:
            problem = problem.tilted(self.tilt)
        return problem.with_learned_start() if self.learn_start else problem

    def _replay(
        self, problem: Problem, start: State, key: Key, index: torch.Tensor, theta: Tree, last: int | None
    ) -> tuple[Tree, Cost]:
        return self.generator.replay(problem, theta, start, key, index, last)

    def _better(self, problem: Problem, theta: Tree, x: Tree, best: State | None) -> tuple[State, torch.Tensor, int]:
        data = problem.upper_data["stop"]
        with torch.no_grad():
            loss = problem.f(theta, x, data.batch(None))
        if best is None or not torch.isfinite(best["loss"]) or bool(loss < best["loss"]):
            best = {"loss": loss, "theta": theta, "x": x}
        return best, loss, data.count(None)


def _on_a_few_rows(problem: Problem, key: Key) -> list[Callable[[Tree, Tree], torch.Tensor]]:
    losses: list[Callable[[Tree, Tree], torch.Tensor]] = []
    for loss, data in ((problem.f, problem.upper_data["differentiate"]), (problem.g, problem.lower_data)):
        index = data.draw(key.fold("few"), 8, 1)
        losses.append(functools.partial(_on, loss, data.batch(None if index is None else index[0])))
    return losses


def _on(loss: Loss, batch: Batch, theta: Tree, x: Tree) -> torch.Tensor:
    return loss(theta, x, batch)


def _difference(a: Tree, b: Tree) -> Tree:
    return dict(zip(b, torch._foreach_sub([a[name] for name in b], list(b.values())), strict=True)) if b else {}


def _of_both(cost: Cost) -> Cost:
    """What a call of g + εf costs, counted as the calls of g and of f that it is (their rows are in the data's count)."""
    return evolve(
        cost,
        upper_gradients=cost.upper_gradients + cost.lower_gradients,
        products=2 * cost.products,
        cross_products=2 * cost.cross_products,
    )
