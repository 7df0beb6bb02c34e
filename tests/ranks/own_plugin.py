"""A task whose lower loss is a sum over rows, no mean; a generator that proposes all or nothing."""

from __future__ import annotations

import torch
from attrs import frozen

from hgms_core import Candidates, Composition, Data, Key, Problem, hookimpl, repeat


@frozen(kw_only=True)
class SumOfRows:
    """Least squares, summed over rows, with a number for each."""

    name = "sum-of-rows"
    version = "1"
    metrics = {"distance": False}  # noqa: RUF012

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        draw = Key(seed).generator()
        rows = {"a": torch.randn((16, 3), generator=draw, dtype=torch.float64).to(dtype)}
        rows["y"] = rows["a"].sum(1)
        return Problem(
            theta0={"t": torch.zeros(16, dtype=dtype)},
            x0={"w": torch.zeros(3, dtype=dtype)},
            g=lambda theta, x, b: (
                0.05 * (theta["t"][b["index"]].exp() * (b["a"] @ x["w"] - b["y"]).square()).sum()
            ),
            f=lambda theta, x, b: (b["a"] @ x["w"] - b["y"]).square().mean(),
            lower_data=Data.of(rows),
            upper_data=Data.of(rows),
            evaluate=lambda theta, x: {"distance": float((x["w"] - 1).norm())},
        )


@frozen(kw_only=True)
class Around:
    """Three points around the last one, all at once."""

    name = "around"

    def init(self, problem, key):
        return {"x": dict(problem.x0)}

    def propose(self, problem, theta, start, key, progress):
        w = repeat(start["x"], 3)["w"]
        noise = torch.randn(w.shape, generator=key.generator(), dtype=w.dtype)
        return Candidates(x={"w": w + 0.1 * noise})

    def carry(self, start, candidates, index, key, problem):
        return {"x": candidates.at(index)}


@hookimpl
def hgms_register_tasks():
    return [SumOfRows]


@hookimpl
def hgms_register_generators():
    return [Around]


@hookimpl
def hgms_register_methods():
    parts = {
        "generator": {"name": "around"},
        "selector": {"name": "best-of-n"},
        "hypergradient": {"name": "implicit", "solver": {"name": "cg", "ridge": 0.1}},
        "outer": {"name": "sgd"},
    }
    return [
        Composition(name="hg-around", summary="By points around.", source="a test", parts=parts)
    ]
