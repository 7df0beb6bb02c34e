"""What fits what: every promise of a built-in task is checked on its problem, the needs of methods
on tasks.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.helpers import F64, normal, rejects

from hgms.comparison.grid_file import load
from hgms.plugins import Registry
from hgms.runs import build_component
from hgms.runs import traits as compat
from hgms_core import ConfigError, Method, Problem, Ravel, Rows, Sources, Tree
from hgms_core.hypergrad import curvature, upper_gradients

REGISTRY = Registry.load()
TASKS = {item.name: item.target for item in REGISTRY.components("task")}


def small_mixture(folder: Path) -> Any:
    """The one task that has no defaults."""
    pytest.importorskip("transformers", reason="the extra llm is not installed")
    pytest.importorskip("peft", reason="the extra llm is not installed")
    from support.language_models import task_of, text_files

    from hgms_mix.lm import Lora

    still = Lora(rank=2, alpha=4.0, dropout=0.0)
    reference = {"sums": 1.0, "words": 0.0, "dots": 0.0}
    return task_of(text_files(folder), adapter=still, reference=reference)


def near(tree: Tree, seed: int) -> Tree:
    return {
        name: leaf + 0.1 * normal(*leaf.shape, seed=seed + i)
        for i, (name, leaf) in enumerate(tree.items())
    }


# --- the promises of tasks


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extended if name == "source-mixture" else ())
        for name in sorted(TASKS)
    ],
)
def test_a_task_promises_exactly_what_its_problem_has(name: str, tmp_path: Path) -> None:
    task = small_mixture(tmp_path) if name == "source-mixture" else TASKS[name]()
    problem = task.problem(0, torch.device("cpu"), F64)
    traits = task.traits
    assert traits <= set(compat.TRAITS) | {f"reference:{each}" for each in problem.references}
    theta, x = near(problem.theta0, 10), near(problem.x0, 20)

    above = problem.upper_data["differentiate"].batch(None)
    _, direct, _ = upper_gradients(lambda t, y: problem.f(t, y, above), theta, x)
    has = {
        "direct-upper": float(Ravel.of(direct).ravel(direct).norm()) > 0,
        "per-example-losses": problem.lower_data.size > 0,
        "sources": problem.find(Sources) is not None,
        "row-weights": problem.find(Rows) is not None,
        "reference:clean": "clean" in problem.references,
        "closed-form": hasattr(task, "closed_form"),
        "stop-rows": "stop" in problem.upper_data,
    }
    assert {trait: trait in traits for trait in has} == has
    assert "few-upper" not in traits or Ravel.of(problem.theta0).size <= 1000
    assert torch.isfinite(problem.f(theta, x, problem.upper_data["stop"].batch(None)))
    ensure_means(problem, theta, x)
    if "smooth-lower" in traits:
        ensure_second_derivative(problem, theta, x)


def ensure_means(problem: Problem, theta: Tree, x: Tree) -> None:
    """g on many rows is the mean of g on each; with sources, ℓ_s is the mean over the rows of
    source s, and g their mix.
    """
    if problem.find(Sources) is not None:
        whole = problem.lower_data.batch(None)
        examples = problem.find(Sources).examples(x, whole)
        sources = range(len(problem.find(Sources).names))
        means = torch.stack([examples[whole["source"] == i].mean() for i in sources])
        torch.testing.assert_close(
            problem.find(Sources).losses(x, whole), means, rtol=1e-10, atol=0
        )
        mix = problem.find(Sources).weights(theta) @ means
        torch.testing.assert_close(problem.g(theta, x, whole), mix, rtol=1e-10, atol=0)
    elif problem.lower_data.size:
        some = torch.arange(min(problem.lower_data.size, 7))
        whole, *single = (
            problem.g(theta, x, problem.lower_data.batch(rows)) for rows in (some, *some.split(1))
        )
        torch.testing.assert_close(whole, torch.stack(single).mean(), rtol=1e-10, atol=0)


def ensure_second_derivative(problem: Problem, theta: Tree, x: Tree) -> None:
    """A product with the Hessian of g is the difference of gradients."""
    rows = problem.lower_data.size
    batch = problem.lower_data.batch(None if rows == 0 else torch.arange(min(rows, 50)))
    at = curvature(lambda y: problem.g(theta, y, batch), x)
    v = normal(at.spec.size, seed=50)
    # a step so small that no unit of a ReLU network switches
    step = 1e-8
    flat = at.spec.ravel(x)
    plus, minus = (
        curvature(lambda y: problem.g(theta, y, batch), at.spec.unravel(flat + s * v)).gradient
        for s in (step, -step)
    )
    cells = (plus - minus) / (2 * step)
    assert float((at.matvec(v) - cells).norm()) <= 1e-4 * float(cells.norm())


# --- the needs of methods


def build(name: str) -> Any:
    return build_component(name, Method, [], registry=REGISTRY)


KINKED: Any = SimpleNamespace(name="kinked", traits=frozenset({"stop-rows"}))


def test_what_a_method_needs_and_a_task_lacks_is_an_error() -> None:
    methods = ("hg-implicit", "hg-baseline", "darts")
    lacking = [compat.missing_traits(build(method), KINKED) for method in methods]
    assert lacking == [{"smooth-lower": "implicit"}, {"smooth-lower": "unrolled"}, {}]
    grid = {"budget": "2 steps", "task": ["quadratic", "hyper-cleaning"]}
    with rejects("several-errors", of=ConfigError) as caught:
        load({**grid, "method": ["oracle-clean", "tpe", "uniform"]})
    wanted = {
        "oracle-clean": ("quadratic", "reference:clean"),
        "tpe": ("hyper-cleaning", "few-upper"),
    }
    for error, (name, (task, trait)) in zip(caught.value.errors, wanted.items(), strict=True):
        assert (error.code, error.place) == ("not-supported", ("method", name))
        assert all(shown in error.message for shown in (task, compat.TRAITS[trait]))
