"""Parts of third parties that return something else in the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from hgms.generators.branches import Branches
from hgms.hypergradients import OneStep, Unrolled
from hgms.optim import SGD
from hgms.outer import Adam
from hgms.plugins import Host
from hgms.runs import RunFolder, run
from hgms.runs.loop import FIRST_STEP
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


PROPOSED: dict[str, Any] = {
    "a dictionary": lambda x: {"x": x},
    "nothing": lambda x: None,
    "one candidate": lambda x: Candidates(x={"x": x["x"][0]}),
    "another shape": lambda x: Candidates(x={"x": x["x"][:, :2]}),
    "no tensor": lambda x: Candidates(x={"x": x["x"].tolist()}),
    "another name": lambda x: Candidates(x={"y": x["x"]}),
    "losses in a list": lambda x: Candidates(x=x, losses=[0.0, 0.0]),  # type: ignore[arg-type]
}

STEPPED: dict[str, Any] = {
    "θ alone": lambda theta, state: theta,
    "three things": lambda theta, state: (theta, state, 1),
    "nothing": lambda theta, state: None,
    "another shape": lambda theta, state: ({"theta": theta["theta"][:2]}, state),
    "a stretched shape": lambda theta, state: ({"theta": theta["theta"][:1]}, state),
    "another name": lambda theta, state: ({"t": theta["theta"]}, state),
}


def wrong(**parts: Any) -> Pipeline:
    usual = {
        "generator": Branches(steps=2, optimizer=SGD(lr=0.1)),
        "selector": First(),
        "hypergradient": Unrolled(),
        "outer": Adam(),
    }
    return Pipeline(**{**usual, **parts})


@pytest.mark.parametrize("how", PROPOSED.values(), ids=PROPOSED)
def test_candidates_of_another_form_end_the_first_step(tmp_path: Path, how: Any) -> None:
    """A note on the error of the first step names the conformance kit."""
    method = wrong(generator=Proposes(how=how), hypergradient=OneStep())
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run(method, quadratic(), "2 steps", folder=folder, watch=Host())
    error = caught.value
    if isinstance(error, ConfigError):
        assert (error.code, error.place[:2]) == ("wrong-result", ("method", "result"))
        assert (folder.read_summary() or {})["status"] == "failed"
    else:
        assert error.__notes__ == [FIRST_STEP]
        assert folder.read_summary() is None


@pytest.mark.parametrize("how", STEPPED.values(), ids=STEPPED)
def test_an_outer_step_to_something_else_is_rejected(tmp_path: Path, how: Any) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        run(wrong(outer=Steps(how=how)), quadratic(), "2 steps", folder=folder, watch=Host())
    assert (caught.value.code, caught.value.place[:2]) == ("wrong-result", ("Steps", "step"))
    assert (folder.read_summary() or {})["status"] == "failed"
