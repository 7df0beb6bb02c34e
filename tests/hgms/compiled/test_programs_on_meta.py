"""What a GPU would be asked to do by the programs of a step, read off their graphs: no device has
to be there for that.

Tensors of the meta device hold no numbers and are not on the CPU, so a function can be traced with
them as it would be with those of a GPU, and what would wait for one, or bring numbers to it, shows
in the graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from attrs import evolve
from support.step_graphs import (
    Tracing,
    branches,
    multiplications,
    name_of,
    on_meta,
    operations,
    step_graphs,
    waiting,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from hgms.compiled.programs import _devices
from hgms.compiled.trace import trace
from hgms.tasks.cleaning import HyperCleaning
from hgms_core import Key, Problem

pytestmark = pytest.mark.extended

MULTIPLICATIONS = {
    # two layers forward; backward one for each matrix and one for what is between them
    "lower step": 5,
    "scores": 2,
    # 5 for each level's gradient; one of a zero tangent, which forward mode does not leave out
    "linearisation": 11,
    # a·V₁; h·V₂ and ḣ·W₂; δ·V₂ᵀ and δ̇·W₂ᵀ; ḣᵀδ and hᵀδ̇; aᵀδ̇₁ (docs/explanation/programs.md)
    "Hessian product": 8,
    "mixed product": 3,
    "iteration of CG": 8,
    "small solve, 4 iterations": 5 * 8,  # and one product that checks the residual
}


@cache
def digits() -> Problem:
    return HyperCleaning(dataset="digits").problem(0, torch.device("cpu"), torch.float32)


@cache
def graphs(strategy: str = "vjp") -> dict[str, tuple[GraphModule, Any]]:
    return step_graphs(digits(), "meta", strategy)


@pytest.mark.parametrize("part", MULTIPLICATIONS)
def test_nothing_waits_for_the_device_nor_comes_from_the_cpu(part: str) -> None:
    graph, leaves = graphs()[part]
    assert waiting(graph) == []
    assert {leaf.device.type for leaf in leaves} == {"meta"}, (
        "a number of the CPU among the inputs keeps it from being recorded"
    )
    assert {device.type for device in _devices(graph, leaves)} == {"meta"}


@pytest.mark.parametrize("part", MULTIPLICATIONS)
def test_so_many_products_of_matrices(part: str) -> None:
    assert multiplications(graphs()[part][0]) == MULTIPLICATIONS[part]


@pytest.mark.parametrize("strategy", ["jvp", "difference"])
def test_other_ways_to_make_a_product_do_not_wait_either(strategy: str) -> None:
    for part, (graph, leaves) in graphs(strategy).items():
        assert waiting(graph) == [], part
        assert {leaf.device.type for leaf in leaves} == {"meta"}, part
    assert multiplications(graphs("jvp")["Hessian product"][0]) <= 9


def test_several_small_lower_steps_are_one_program() -> None:
    with FakeTensorMode():
        programs = Tracing()
        problem = evolve(on_meta(digits()), compiler=programs)
        generator = branches(steps=10)
        generator.propose(problem, problem.theta0, generator.init(problem, Key(0)), Key(1))
    graph, _ = programs.graphs["branches"]
    assert multiplications(graph) == 5 * 5
    assert waiting(graph) == []


def test_what_waits_would_be_seen() -> None:
    def reads(x: Tensor) -> Tensor:
        return x[x > 0].sum()

    def brings(x: Tensor) -> Tensor:
        return x + torch.arange(3.0).to(x.device)

    def leaves(x: Tensor) -> Tensor:
        return x.cpu() + 1

    with FakeTensorMode(allow_non_fake_inputs=True):
        for function, expected in (
            (brings, "brings a tensor of the CPU"),
            (leaves, "computes on the CPU"),
        ):
            (bad, *_) = waiting(trace(function, [torch.empty(3, device="meta")]).graph)
            assert expected in bad
        with pytest.raises(Exception, match=r"nonzero|data-dependent|dynamic"):
            trace(reads, [torch.empty(3, device="meta")])


def test_a_constant_may_be_on_the_cpu_and_an_input_may_not() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, device="meta")
        constant = trace(lambda x: x * torch.ones(()), [x]).graph
        assert any(name_of(node) == "ones" for node in operations(constant))
        assert {device.type for device in _devices(constant, [x])} == {"meta"}
        number = torch.empty(())
        given = trace(lambda x, number: x * number, [x, number]).graph
        assert {device.type for device in _devices(given, [x, number])} == {"meta", "cpu"}
        back = trace(lambda x: x.sum().cpu(), [x]).graph
        assert {device.type for device in _devices(back, [x])} == {"meta", "cpu"}
