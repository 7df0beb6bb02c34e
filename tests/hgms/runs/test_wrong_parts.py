"""What a third party's part returns in a first step, said with the part's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.helpers import rejects

from hgms.generators.branches import Branches
from hgms.hypergradients import OneStep, Unrolled
from hgms.methods import Tilted
from hgms.outer import Adam
from hgms.runs import run
from hgms.selectors import First
from hgms_core import Candidates, ConfigError, Pipeline, Problem


def quadratic() -> Problem:
    start = torch.zeros(3, dtype=torch.float64)
    return Problem(
        theta0={"theta": start},
        x0={"x": start},
        g=lambda theta, x, batch: (x["x"] - theta["theta"]).square().sum(),
        f=lambda theta, x, batch: (x["x"] - 1).square().sum(),
    )


@attrs.frozen(kw_only=True)
class Proposes:
    """What a third party's generator may return; ``how`` says which."""

    name = "proposes"
    how: Any = attrs.field(default=None, eq=False)

    def init(self, problem: Problem, key: Any) -> dict[str, Any]:
        return {"x": problem.x0}

    def propose(self, problem: Problem, theta: Any, start: Any, key: Any) -> Any:
        return self.how(
            {name: leaf.expand(2, *leaf.shape).clone() for name, leaf in start["x"].items()}
        )

    def carry(
        self, start: Any, candidates: Any, index: Any, key: Any, problem: Problem
    ) -> dict[str, Any]:
        return {"x": candidates.at(index)}


@attrs.frozen(kw_only=True)
class Steps:
    """What a third party's outer optimiser may return."""

    name = "steps"
    how: Any = attrs.field(default=None, eq=False)

    def init(self, theta: Any) -> dict[str, Any]:
        return {}

    def step(self, theta: Any, gradient: Any, state: Any, progress: float) -> Any:
        return self.how(theta, state)


F = "{x [N, 3] float64}"
THETA = "{theta [3] float64}"

# what a part returns, the end of the place, and what the message shows of the returned and the
# required value
PROPOSED: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "a dictionary": (lambda x: {"x": x}, (), ("{x dict}", "Candidates")),
    "nothing": (lambda x: None, (), ("None", "Candidates")),
    "one candidate": (
        lambda x: Candidates(x={name: leaf[0] for name, leaf in x.items()}),
        ("x",),
        ("{x [3] float64}", F),
    ),
    "another shape": (
        lambda x: Candidates(x={"x": x["x"][:, :2]}),
        ("x",),
        ("{x [2, 2] float64}", F),
    ),
    "no tensor": (lambda x: Candidates(x={"x": x["x"].tolist()}), ("x",), ("{x list}", F)),
    "another name": (lambda x: Candidates(x={"y": x["x"]}), ("x",), ("{y [2, 3] float64}", F)),
    "losses that are no tensor": (
        lambda x: Candidates(x=x, losses=[0.0, 0.0]),  # type: ignore[arg-type]
        ("losses",),
        ("a list of 2", "[2]"),
    ),
}

STEPPED: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "θ alone": (lambda theta, state: theta, (), (THETA,)),
    "three things": (
        lambda theta, state: (theta, state, 1),
        (),
        (f"{THETA} and {{}} and a value of the type int",),
    ),
    "nothing": (lambda theta, state: None, (), ("None",)),
    "another shape": (
        lambda theta, state: ({"theta": theta["theta"][:2]}, state),
        ("theta",),
        ("{theta [2] float64}", THETA),
    ),
    "a shape that is stretched": (
        lambda theta, state: ({"theta": theta["theta"][:1]}, state),
        ("theta",),
        ("{theta [1] float64}", THETA),
    ),
    "another name": (
        lambda theta, state: ({"t": theta["theta"]}, state),
        ("theta",),
        ("{t [3] float64}", THETA),
    ),
}


def wrong(**parts: Any) -> Pipeline:
    usual = {
        "generator": Branches(steps=2, lr=0.1),
        "selector": First(),
        "hypergradient": Unrolled(),
        "outer": Adam(),
    }
    return Pipeline(**{**usual, **parts})


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", PROPOSED)
def test_what_a_generator_returns_is_said_with_its_name(
    tmp_path: Path, name: str, wrapped: bool
) -> None:
    how, place, shown = PROPOSED[name]
    method = wrong(generator=Proposes(how=how), hypergradient=OneStep())
    place = ("method", "generator", "propose", *place)
    with rejects("wrong-result", *place, of=ConfigError) as caught:
        run(
            Tilted(method=method, tilt=0.5) if wrapped else method,
            quadratic(),
            "2 steps",
            folder=tmp_path / "run",
        )
    for part in (f"{__name__}:Proposes", *shown):
        assert part in caught.value.message
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("name", STEPPED)
def test_what_an_outer_optimiser_returns_is_said_with_its_name(name: str) -> None:
    how, place, shown = STEPPED[name]
    with rejects("wrong-result", "method", "outer", "step", *place, of=ConfigError) as caught:
        run(wrong(outer=Steps(how=how)), quadratic(), "2 steps")
    for part in (f"{__name__}:Steps", *shown):
        assert part in caught.value.message


def test_a_part_that_is_right_is_not_blamed() -> None:
    """What fails is the generator itself, not what it returns; and a step that goes well is
    taken once.
    """

    def breaks(x: Any) -> Any:
        raise ZeroDivisionError("of its own")

    with pytest.raises(ZeroDivisionError, match="of its own"):
        run(wrong(generator=Proposes(how=breaks), hypergradient=OneStep()), quadratic(), "2 steps")
    calls = []

    def counts(theta: Any, state: Any) -> Any:
        calls.append(1)
        return theta, state

    run(wrong(outer=Steps(how=counts)), quadratic(), "2 steps")
    assert len(calls) == 2
