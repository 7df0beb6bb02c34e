"""A pipeline that returns its best state instead of the last one."""

from __future__ import annotations

from typing import ClassVar, Literal, final

import torch
from attrs import field

from hgms.facts import around_a_pipeline, needs_of
from hgms.rows import better_state, check_stop_rows
from hgms_core import Cost, Key, Method, Problem, Record, State, Tree, component, hookimpl


@final
@component
class KeepBest:
    """Return the state of a pipeline with the lowest upper loss (early stopping on separate rows).

    The upper loss is evaluated after each step, at the θ that the step started from and its x, on
    the validation rows of the role ``stop``. In a configuration, set the field in the table of the
    pipeline: ``keep = "best"``; ``keep = "last"`` is a pipeline without this wrapper.

    Parameters
    ----------
    method
        a pipeline, or a wrapper around one.
    keep
        "best"; the key of a configuration.

    Raises
    ------
    ConfigError
        Without rows of the role ``stop``.

    Notes
    -----
    Cost: the cost of the method, and one upper value per step. The record also contains this value,
    ``stop_loss``.

    Source: early stopping.

    Examples
    --------
    >>> from hgms.generators import Branches
    >>> from hgms.hypergradients import Unrolled
    >>> from hgms.outer import Sgd
    >>> from hgms.selectors import First
    >>> from hgms_core import Pipeline
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: ((x["x"] - 2) ** 2).sum(),
    ... )
    >>> pipeline = Pipeline(
    ...     generator=Branches(), selector=First(), hypergradient=Unrolled(), outer=Sgd(lr=1.5)
    ... )
    >>> method = KeepBest(method=pipeline)
    >>> state = method.init(problem, seed=0)
    >>> for _ in range(5):
    ...     state, record = method.step(problem, state)
    >>> bool(state["best"]["loss"] < record["stop_loss"])
    True
    """

    name: ClassVar[str] = "keep-best"

    method: Method = field(metadata={"flat": True}, validator=around_a_pipeline)
    keep: Literal["best"] = "best"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"stop-rows"}) | needs_of(self.method)

    def init(self, problem: Problem, seed: int) -> State:
        check_stop_rows(problem)
        return {**self.method.init(problem, seed), "best": None}

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        following, record = self.method.step(problem, state, progress)
        # x belongs to θ before the update
        theta, x = self.method.result({**following, "theta": state["theta"]})
        key = Key(state["seed"]).fold("step", state["step"])
        batch, rows = problem.upper_data["stop"].sample(key, None)
        with torch.no_grad():
            loss = problem.f(theta, x, batch)
        best = better_state({"loss": loss, "theta": theta, "x": x}, state["best"])
        cost = Cost(**following["cost"]) + Cost(upper_values=1, rows=rows)
        counts = cost.numbers()
        record = {
            **record,
            "stop_loss": loss,
            **{f"cost_{name}": count for name, count in counts.items()},
            "oracle_calls": cost.calls,
        }
        return {**following, "best": best, "cost": counts}, record

    def result(self, state: State) -> tuple[Tree, Tree]:
        best = state["best"]
        return self.method.result(state) if best is None else (best["theta"], best["x"])


@hookimpl
def hgms_register_methods() -> list[type]:
    return [KeepBest]
