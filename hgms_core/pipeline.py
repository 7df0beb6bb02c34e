"""One outer step of HG-MS: propose, select, differentiate, update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from attrs import Attribute, field

from hgms_core.arguments import check_function, kind_of, methods_of
from hgms_core.components import component
from hgms_core.errors import ConfigError
from hgms_core.problem import Problem
from hgms_core.protocols import CandidateGenerator, HyperGradient, OuterOptimizer, Selector, State
from hgms_core.records import Candidates, Cost, Estimate, Record, Selection
from hgms_core.seeding import Key
from hgms_core.trees import Tree, check_alike, norm, take


def _signatures(protocol: type) -> Callable[[object, Attribute[Any], object], None]:
    """Require the parameters of the protocol, which the step passes by position."""

    def check(pipeline: object, attribute: Attribute[Any], value: object) -> None:
        for method in methods_of(protocol):
            arguments = list(inspect.signature(getattr(protocol, method)).parameters)[1:]
            check_function(f"{attribute.name}.{method}", getattr(value, method), *arguments)

    return check


def _check_result(part: object, method: str, outcome: Any, kind: Any, theta: Tree) -> Any:
    """Require (Estimate or θ, state) with the shapes of θ: others would be broadcast in silence."""
    what = f"{type(part).__name__}.{method}"
    items = outcome if isinstance(outcome, tuple) else (outcome,)
    if len(items) != 2 or not isinstance(items[0], kind) or not isinstance(items[1], Mapping):
        raise ConfigError(
            "wrong-result",
            f"{what} returns {' and '.join(map(kind_of, items))}, but must return "
            f"({'theta' if kind is Mapping else 'Estimate'}, state)",
            place=tuple(what.split(".")),
        )
    name = "theta" if kind is Mapping else "value"
    value = items[0] if kind is Mapping else items[0].value
    check_alike(f"{what}.{name}", value, theta, "is")
    return items


@final
@component
class Pipeline:
    """HG-MS's outer loop with replaceable parts (Algorithm 1 of the paper).

    One step: N candidates, the selected one, a hypergradient through it, an outer update and a
    projection onto Θ. ``answer = "last"`` returns the last candidate as x (the end of a trajectory,
    where selecting only truncates it). Wrappers change the problem, the first θ or the result
    (``hgms.methods.KeepBest``).

    Raises
    ------
    ConfigError
        For a part of another kind, and for an empty x0. In the first step, also for losses that
        draw random numbers, and if no loss depends on θ, provided that the problem has a ``guard``.
        ``hgms.run`` checks all problems.

    Notes
    -----
    Source: HG-MS paper, Algorithm 1.

    Examples
    --------
    >>> from hgms.generators.branches import Branches
    >>> from hgms.hypergradients import Unrolled
    >>> from hgms.outer import Sgd
    >>> from hgms.selectors import BestOfN
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: ((x["x"] - 2) ** 2).sum(),
    ... )
    >>> method = Pipeline(
    ...     generator=Branches(count=2, steps=20),
    ...     selector=BestOfN(),
    ...     hypergradient=Unrolled(),
    ...     outer=Sgd(lr=0.2),
    ... )
    >>> state = method.init(problem, seed=0)
    >>> for _ in range(30):
    ...     state, record = method.step(problem, state)
    >>> round(float(method.result(state)[0]["t"]), 2)
    2.0
    """

    name: ClassVar[str] = "pipeline"

    generator: CandidateGenerator = field(validator=_signatures(CandidateGenerator))
    selector: Selector = field(validator=_signatures(Selector))
    hypergradient: HyperGradient = field(validator=_signatures(HyperGradient))
    outer: OuterOptimizer = field(validator=_signatures(OuterOptimizer))
    answer: Literal["selected", "last"] = "selected"

    def init(self, problem: Problem, seed: int) -> State:
        if not problem.x0:
            raise ConfigError(
                "wrong-value", "x0 contains no tensor, so there is no lower level", place=("x0",)
            )
        return {
            "seed": seed,
            "step": 0,
            "theta": dict(problem.theta0),
            "x": dict(problem.x0),
            "start": self.generator.init(problem, Key(seed).fold("init")),
            "hypergradient": self.hypergradient.init(problem),
            "outer": self.outer.init(problem.theta0),
            "cost": Cost().numbers(),
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        """Run one outer step; ``state`` is not changed. The problem guards the first step."""
        if state["step"] or problem.guard is None:
            return self._step(problem, state, progress)
        step = partial(self._step, problem, state, progress)
        guarded: tuple[State, Record] = problem.guard(problem, state, step)
        return guarded

    def _step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        if problem.compiler is not None:
            joined: tuple[State, Record] | None
            joined = problem.compiler.step(self, problem, state, progress)
            if joined is not None:
                return joined
        key = Key(state["seed"]).fold("step", state["step"])
        theta = state["theta"]
        start = state["start"]

        candidates = self.generator.propose(problem, theta, start, key.fold("propose"), progress)
        selection = self.selector.select(problem, theta, candidates, key.fold("select"))
        found = self.hypergradient.estimate(
            problem, theta, candidates, selection, key.fold("differentiate"), state["hypergradient"]
        )
        estimate, memory = _check_result(self.hypergradient, "estimate", found, Estimate, theta)
        moved = self.outer.step(theta, estimate.value, state["outer"], progress)
        proposed, outer = _check_result(self.outer, "step", moved, Mapping, theta)
        updated = problem.project(proposed)
        index = selection.index
        start = self.generator.carry(start, candidates, index, key.fold("carry"), problem)

        last = self.answer == "last"
        x = candidates.at(candidates.count - 1) if last else candidates.at(index)
        spent = selection.cost + candidates.cost + estimate.cost
        cost = Cost(**state["cost"]) + spent
        advanced = {
            **state,
            "step": state["step"] + 1,
            "theta": updated,
            "x": x,
            "start": start,
            "hypergradient": memory,
            "outer": outer,
            "cost": cost.numbers(),
        }
        return advanced, step_record(advanced, theta, candidates, selection, estimate, cost)

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], state["x"]


def step_record(
    state: State,
    theta: Tree,
    candidates: Candidates,
    selection: Selection,
    estimate: Estimate,
    cost: Cost,
) -> Record:
    """Return the record of a step that led from ``theta`` to ``state``."""
    losses = candidates.losses
    solution = estimate.solution
    record: Record = {
        "step": state["step"],
        "upper_loss": estimate.upper_loss,
        "lower_loss": None if losses is None else take({"loss": losses}, selection.index)["loss"],
        "selected": selection.index,
        "gap": selection.gap,
        "scores": selection.scores,
        "finite_candidates": selection.finite,
        "hypergradient_norm": norm(estimate.value),
        "lower_gradient_norm": estimate.lower_gradient_norm,
        "update_norm": norm({name: state["theta"][name] - leaf for name, leaf in theta.items()}),
        "residual": None if solution is None else solution.residual,
        "iterations": None if solution is None else solution.iterations,
        "curvature": None if solution is None else solution.curvature,
        "outcome": estimate.code,
    }
    if len(theta) > 1:  # in the order of θ
        leaves = [estimate.value[name] for name in theta]
        record["hypergradient_norms"] = torch.stack(torch._foreach_norm(leaves))
    return {
        **record,
        **{f"cost_{name}": n for name, n in cost.numbers().items()},
        "oracle_calls": cost.calls,
    }
