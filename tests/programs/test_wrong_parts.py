"""What a third party's part returns in a first step, said with the part's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from hgms.generators.branches import Branches
from hgms.hypergradients import OneStep, Unrolled
from hgms.methods import Tilted
from hgms.outer import Adam
from hgms.runs import run
from hgms.selectors import First
from hgms_core import Candidates, ConfigError, Pipeline, Problem

pytestmark = pytest.mark.plugins


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


F = r"\{x \[N, 3\] float64\}"
THETA = r"\{theta \[3\] float64\}"

PROPOSED: dict[str, tuple[Any, str]] = {
    "a dictionary": (
        lambda x: {"x": x},
        r"propose must return Candidates, and it returns \{x dict\}",
    ),
    "nothing": (lambda x: None, "propose must return Candidates, and it returns None"),
    "one candidate": (
        lambda x: Candidates(x={name: leaf[0] for name, leaf in x.items()}),
        (
            rf"the x of the Candidates that propose returns must be {F}, and it is \{{x \[3\] "
            r"float64\}"
        ),
    ),
    "another shape": (
        lambda x: Candidates(x={"x": x["x"][:, :2]}),
        rf"must be {F}, and it is \{{x \[2, 2\] float64\}}",
    ),
    "no tensor": (
        lambda x: Candidates(x={"x": x["x"].tolist()}),
        rf"must be {F}, and it is \{{x list\}}",
    ),
    "another name": (
        lambda x: Candidates(x={"y": x["x"]}),
        rf"must be {F}, and it is \{{y \[2, 3\] float64\}}",
    ),
    "losses that are no tensor": (
        lambda x: Candidates(x=x, losses=[0.0, 0.0]),  # type: ignore[arg-type]
        r"the losses .* must be \[2\], and they are a list of 2",
    ),
}

STEPPED: dict[str, tuple[Any, str]] = {
    "θ alone": (
        lambda theta, state: theta,
        rf"must return \(θ, state\), two dictionaries, and it returns {THETA}",
    ),
    "three things": (
        lambda theta, state: (theta, state, 1),
        rf"returns {THETA} and \{{\}} and a value of the type int",
    ),
    "nothing": (
        lambda theta, state: None,
        r"step must return \(θ, state\), two dictionaries, and it returns None",
    ),
    "another shape": (
        lambda theta, state: ({"theta": theta["theta"][:2]}, state),
        rf"the θ that step returns must be {THETA}, and it is \{{theta \[2\] float64\}}",
    ),
    "a shape that is stretched": (
        lambda theta, state: ({"theta": theta["theta"][:1]}, state),
        rf"must be {THETA}, and it is",
    ),
    "another name": (
        lambda theta, state: ({"t": theta["theta"]}, state),
        r"and it is \{t \[3\] float64\}",
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
    how, message = PROPOSED[name]
    method = wrong(generator=Proposes(how=how), hypergradient=OneStep())
    whose = rf"^generator 'proposes' \({__name__}:Proposes\): "
    with pytest.raises(ConfigError, match=whose + ".*" + message):
        run(
            Tilted(method=method, tilt=0.5) if wrapped else method,
            quadratic(),
            "2 steps",
            folder=tmp_path / "run",
        )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("name", STEPPED)
def test_what_an_outer_optimiser_returns_is_said_with_its_name(name: str) -> None:
    how, message = STEPPED[name]
    with pytest.raises(
        ConfigError, match=rf"^outer optimiser 'steps' \({__name__}:Steps\): .*{message}"
    ):
        run(wrong(outer=Steps(how=how)), quadratic(), "2 steps")


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
