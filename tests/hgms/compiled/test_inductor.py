"""Graphs compiled by inductor without torch's autograd for compilers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from hgms.compiled import Programs
from hgms.compiled.inductor import compile_graph
from hgms.compiled.trace import mutates, without_changes_of_new_tensors

A = torch.linspace(-1, 1, 6).reshape(2, 3)


def copy_to_zeros(a: Tensor) -> list[Tensor]:
    return [torch.zeros_like(a).copy_(a).add_(a)]


def change_a_read_tensor(a: Tensor) -> list[Tensor]:
    zeros = torch.zeros_like(a)
    view = zeros.t()
    zeros.add_(a)
    return [view, zeros]


def change_a_copied_alias(a: Tensor) -> list[Tensor]:
    total = a.sum(1)
    copied = total.clone()
    total.detach().div_(copied)
    return [copied, total]


def change_a_tensor_with_an_alias(a: Tensor) -> list[Tensor]:
    total = a.sum(1, keepdim=True)
    wide = total.expand(-1, 2)
    total.detach().div_(3)
    return [wide, total]


def change_an_input(a: Tensor) -> list[Tensor]:
    return [a.mul(2), a.add_(1)]


def add_other_type(a: Tensor) -> list[Tensor]:
    return [torch.zeros_like(a).add_(a.double())]


def change_lists(a: Tensor) -> list[Tensor]:
    copies = [a.clone(), a.sum(0)]
    torch._foreach_mul_(copies, 3.0)
    return copies


def draw(a: Tensor) -> list[Tensor]:
    return [torch.nn.functional.dropout(a, 0.5, training=True) / a]


@pytest.mark.parametrize(
    ("function", "remains"),
    [
        (copy_to_zeros, False),
        (change_a_copied_alias, False),
        (change_a_read_tensor, True),
        (change_a_tensor_with_an_alias, True),
        (change_an_input, True),
        (add_other_type, True),
        (change_lists, True),
    ],
)
def test_only_changes_of_new_tensors_without_views_are_replaced(
    function: Callable[[Tensor], list[Tensor]], remains: bool
) -> None:
    graph = without_changes_of_new_tensors(make_fx(function, tracing_mode="fake")(A.clone()))
    assert mutates(graph) is remains
    expected = function(A.clone())
    for actual, wanted in zip(graph(A.clone()), expected, strict=True):
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual, wanted)


@pytest.mark.extended
@pytest.mark.parametrize("function", [copy_to_zeros, change_a_read_tensor, change_lists])
def test_a_compiled_graph_computes_the_graph(
    function: Callable[[Tensor], list[Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    run = compile_graph(make_fx(function, tracing_mode="fake")(A), [A])
    for actual, wanted in zip(run([A + 1]), function(A + 1), strict=True):
        assert torch.allclose(actual, wanted)


@pytest.mark.extended
def test_inputs_that_are_one_tensor_remain_separate_inputs() -> None:
    run = compile_graph(symbolic_trace(lambda a, b: [a - b]), [A, A])
    assert torch.equal(run([A, 2 * A])[0], -A)


@pytest.mark.extended
def test_random_draws_are_compiled() -> None:
    (kept,) = compile_graph(make_fx(draw, tracing_mode="fake")(A), [A])([A])
    assert set(kept.unique().tolist()) <= {0.0, 2.0}


@pytest.mark.parametrize("enabled", [True, False])
def test_compilation_restores_the_collection_of_garbage(enabled: bool) -> None:
    programs = Programs()
    seen: list[Any] = []
    try:
        if not enabled:
            gc.disable()
        with programs.making(), programs.making():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [False, enabled]
