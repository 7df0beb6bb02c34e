"""Another first θ: a named reference of the problem, or a mixture of its sources."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen
from support.helpers import F64, assert_same, network_problem, rejects
from support.source_problems import convex_sources

from hgms.methods import StartingAt
from hgms_core import Pipeline, State

PROBLEM = convex_sources({"a": 0.5, "b": 0.3, "c": 0.2}, rows=10)
NETWORK = network_problem()


@frozen(kw_only=True)
class Still:
    """A part of a pipeline that does nothing."""

    name = "still"

    def init(self, *_: Any) -> State:
        return {}

    propose = carry = select = estimate = step = init


def starting_at(
    mixture: dict[str, float] | None = None, reference: str | None = None
) -> StartingAt:
    still: Any = Still()
    method = Pipeline(generator=still, selector=still, hypergradient=still, outer=still)
    return StartingAt(method=method, mixture=mixture, reference=reference)


def test_a_mixture_is_where_theta_starts() -> None:
    theta = starting_at({"c": 3.0, "a": 1.0}).init(PROBLEM, 0)["theta"]
    assert PROBLEM.sources is not None
    torch.testing.assert_close(
        PROBLEM.sources.weights(theta),
        torch.tensor([0.25, 0.0, 0.75], dtype=F64),
        rtol=0,
        atol=1e-9,
    )
    beside = evolve(PROBLEM, theta0={**PROBLEM.theta0, "scale": torch.ones(1, dtype=F64)})
    assert_same(
        starting_at({"c": 3.0, "a": 1.0}).init(beside, 0)["theta"],
        {**theta, "scale": torch.ones(1, dtype=F64)},
    )
    assert_same(starting_at().init(PROBLEM, 0)["theta"], PROBLEM.theta0)
    assert starting_at({"c": 1.0}).needs == {"sources"}
    assert starting_at().needs == frozenset()


def test_a_mixture_of_a_problem_without_sources_or_of_unknown_ones_is_refused() -> None:
    with rejects("not-supported", "method", "mixture"):
        starting_at({"a": 1.0}).init(evolve(PROBLEM, sources=None), 0)
    with rejects("wrong-value", "mixture"):
        starting_at({"a": 0.5, "bees": 0.5}).init(PROBLEM, 0)
    with rejects("wrong-value", "mixture"):
        starting_at({}).init(PROBLEM, 0)


def test_a_reference_starts_theta_there() -> None:
    state = starting_at(reference="even").init(NETWORK, 0)
    assert_same(state["theta"], NETWORK.references["even"])


def test_an_unknown_reference_names_what_there_is() -> None:
    with rejects("unknown-reference", "method", "reference"):
        starting_at(reference="clean").init(NETWORK, 0)
    with rejects("unknown-reference", "method", "reference"):
        starting_at(reference="clean").init(evolve(NETWORK, references={}), 0)
