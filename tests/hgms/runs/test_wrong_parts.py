"""What a third party's part returns in a first step, said with the part's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.helpers import rejects

from hgms.generators.branches import Branches
from hgms.hypergradients import OneStep, Unrolled
from hgms.optim import SGD
from hgms.outer import Adam
from hgms.plugins import Host
from hgms.runs import RunFolder, run
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

    def propose(
        self, problem: Problem, theta: Any, start: Any, key: Any, progress: float = 0.0
    ) -> Any:
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


# what a part returns, and the end of the place
PROPOSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a dictionary": (lambda x: {"x": x}, ()),
    "nothing": (lambda x: None, ()),
    "one candidate": (lambda x: Candidates(x={"x": x["x"][0]}), ("x",)),
    "another shape": (lambda x: Candidates(x={"x": x["x"][:, :2]}), ("x",)),
    "no tensor": (lambda x: Candidates(x={"x": x["x"].tolist()}), ("x",)),
    "another name": (lambda x: Candidates(x={"y": x["x"]}), ("x",)),
    "losses in a list": (lambda x: Candidates(x=x, losses=[0.0, 0.0]), ("losses",)),  # type: ignore[arg-type]
}

STEPPED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "θ alone": (lambda theta, state: theta, ()),
    "three things": (lambda theta, state: (theta, state, 1), ()),
    "nothing": (lambda theta, state: None, ()),
    "another shape": (lambda theta, state: ({"theta": theta["theta"][:2]}, state), ("theta",)),
    "a stretched shape": (lambda theta, state: ({"theta": theta["theta"][:1]}, state), ("theta",)),
    "another name": (lambda theta, state: ({"t": theta["theta"]}, state), ("theta",)),
}


def wrong(**parts: Any) -> Pipeline:
    usual = {
        "generator": Branches(steps=2, optimizer=SGD(lr=0.1)),
        "selector": First(),
        "hypergradient": Unrolled(),
        "outer": Adam(),
    }
    return Pipeline(**{**usual, **parts})


@pytest.mark.parametrize(("how", "place"), PROPOSED.values(), ids=PROPOSED)
def test_what_a_generator_returns_is_rejected_with_its_name(
    how: Any, place: tuple[str, ...]
) -> None:
    method = wrong(generator=Proposes(how=how), hypergradient=OneStep())
    with rejects(
        "wrong-result", "method", "generator", "propose", *place, of=ConfigError
    ) as caught:
        run(method, quadratic(), "2 steps", host=Host())
    assert f"{__name__}:Proposes" in caught.value.message


@pytest.mark.parametrize(("how", "place"), STEPPED.values(), ids=STEPPED)
def test_what_an_outer_optimiser_returns_is_rejected_with_its_name(
    tmp_path: Path, how: Any, place: tuple[str, ...]
) -> None:
    folder = RunFolder(tmp_path / "run")
    with rejects("wrong-result", "method", "outer", "step", *place, of=ConfigError) as caught:
        run(wrong(outer=Steps(how=how)), quadratic(), "2 steps", folder=folder, host=Host())
    assert f"{__name__}:Steps" in caught.value.message
    assert (folder.read_summary() or {})["status"] == "failed"
