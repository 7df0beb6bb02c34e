"""Stacked, looped and chunked evaluation are the same numbers, and `auto` decides from sizes
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import F64, KEY, assert_same, network_problem, normal, rejects
from torch import Tensor

from hgms_core import Tree, gradient, groups, stack, values
from hgms_core.capabilities import StacksCandidates
from hgms_core.stacking import STACK_BELOW, prefers_stack
from hgms_core.trees import take

PROBLEM = network_problem()
COUNT = 5
STATES = stack([{name: leaf + 0.1 * i for name, leaf in PROBLEM.x0.items()} for i in range(COUNT)])
modes = pytest.mark.parametrize(
    ("mode", "chunk"), [("stacked", None), ("stacked", 2), ("stacked", 1), ("loop", None)]
)


@modes
def test_values_are_those_of_each_candidate(mode: str, chunk: int | None) -> None:
    batch = PROBLEM.lower_data.whole
    found = values(PROBLEM.g, PROBLEM.theta0, STATES, batch, mode=mode, chunk=chunk)
    expected = torch.stack(
        [PROBLEM.g(PROBLEM.theta0, take(STATES, i), batch) for i in range(COUNT)]
    )
    assert_same(found, expected, rtol=1e-14)
    assert not found.requires_grad


@modes
@pytest.mark.parametrize("own_batch", [False, True])
def test_gradients_are_those_of_each_candidate(
    mode: str, chunk: int | None, own_batch: bool
) -> None:
    data = PROBLEM.lower_data
    index = torch.stack([KEY.fold(i).indices(data.size, 6, 1)[0] for i in range(COUNT)])
    found = []
    for group in groups(PROBLEM.g, STATES, own_batch=own_batch, mode=mode, chunk=chunk):
        batch = data.batch(group.rows_of(index) if own_batch else None)
        grads, losses = gradient(group.loss, PROBLEM.theta0, group.x, batch)
        alone = [
            leaf.reshape(-1, *x[0].shape) for leaf, x in zip(grads, STATES.values(), strict=True)
        ]
        found.append([*alone, losses.reshape(-1)])
    for i in range(COUNT):
        mine = data.batch(index[i] if own_batch else None)
        expected, loss = gradient(PROBLEM.g, PROBLEM.theta0, take(STATES, i), mine)
        each = [torch.cat(leaf)[i] for leaf in zip(*found, strict=True)]
        assert_same(each, [*expected, loss], rtol=1e-12, atol=1e-15)


@modes
def test_groups_cover_every_candidate_once_and_are_views(mode: str, chunk: int | None) -> None:
    x = {"x": normal(COUNT, 3)}
    found = groups(lambda theta, point, batch: point["x"].sum(), x, mode=mode, chunk=chunk)
    for group in found:
        group.x["x"].add_(10)
    assert_same(x, {"x": normal(COUNT, 3) + 10})
    assert len(found) == (COUNT if mode == "loop" or chunk == 1 else -(-COUNT // (chunk or COUNT)))
    assert found[0].rows_of(None) is None


@pytest.mark.parametrize(
    ("count", "size", "mode", "stacked"),
    [
        (4, STACK_BELOW // 100, "auto", True),
        (4, STACK_BELOW // 100 + 1, "auto", False),
        (4, 10 * STACK_BELOW, "stacked", True),
        (4, 1, "loop", False),
        (1, 1, "auto", False),
        (1, 1, "stacked", True),
    ],
)
def test_auto_stacks_several_small_candidates_and_loops_over_large_ones(
    count: int, size: int, mode: str, stacked: bool
) -> None:
    assert prefers_stack({"x": torch.zeros(count, 100)}, size, mode) is stacked


class Own:
    """½‖x − t·a‖², which counts the ways it is evaluated."""

    capabilities = frozenset({StacksCandidates})

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, theta: Tree, x: Tree, batch: Tree) -> Tensor:
        self.calls.append("alone")
        return 0.5 * (x["x"] - theta["t"] * batch["a"]).square().sum()

    def stacked_losses(self, theta: Tree, x: Tree, batch: Tree, own_batch: bool) -> Tensor:
        self.calls.append((x["x"].shape[0], own_batch))
        a = batch["a"] if own_batch else batch["a"].unsqueeze(0)
        return 0.5 * (x["x"] - theta["t"] * a).square().flatten(1).sum(1)


@pytest.mark.parametrize("own_batch", [False, True])
@pytest.mark.parametrize(
    ("mode", "chunk"), [("stacked", None), ("stacked", 2), ("loop", None), ("auto", None)]
)
def test_a_loss_with_a_stacked_form_of_its_own_is_evaluated_by_it(
    mode: str, chunk: int | None, own_batch: bool
) -> None:
    theta = {"t": torch.tensor(2.0, dtype=F64)}
    x = {"x": normal(COUNT, 3)}
    a = normal(COUNT, 3, seed=1) if own_batch else normal(3, seed=1)
    loss = Own()
    found = []
    for group in groups(loss, x, own_batch=own_batch, mode=mode, chunk=chunk):
        batch = {"a": group.rows_of(a) if own_batch else a}
        slopes, losses = gradient(group.loss, theta, group.x, batch)
        found.append(torch.cat([losses.reshape(-1, 1), slopes[0].reshape(-1, 3)], 1))
    expected = x["x"] - 2 * a
    both = torch.cat([0.5 * expected.square().sum(1, keepdim=True), expected], 1)
    assert_same(torch.cat(found), both, rtol=1e-14)
    sizes = [2, 2, 1] if chunk else [COUNT]
    # on a CPU `auto` takes them one by one
    together = [(size, own_batch) for size in sizes]
    assert loss.calls == (together if mode == "stacked" else ["alone"] * COUNT)


class Cube(torch.autograd.Function):
    """x³, as a kernel of another library: without a form for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        return 3 * ctx.saved_tensors[0].square() * slopes[0]


def filled(x: Tensor) -> Tensor:
    z = torch.zeros(3, dtype=F64)
    z[:] = x
    return z.square().sum()


def by_value(x: Tensor) -> Tensor:
    return x.square().sum() if x.square().sum() > 3 else 2 * x.square().sum()


UNSTACKABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "fill": filled,
    "if": by_value,
    "item": lambda x: x.square().sum() * x.abs().max().item(),
    "mask": lambda x: x[x > 0].square().sum() + x.sum(),
    "numpy": lambda x: x.square().sum() * float(np.abs(x.detach().numpy()).max()),
    "kernel": lambda x: Cube.apply(x).sum(),
}


@pytest.mark.parametrize("own_batch", [False, True])
@pytest.mark.parametrize("kind", UNSTACKABLE)
def test_auto_loops_over_a_loss_that_vmap_cannot_evaluate(
    kind: str, own_batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    x = {"x": normal(COUNT, 3)}
    theta = {"t": torch.tensor(0.5, dtype=F64)}
    batch = {"a": normal(COUNT, 3, seed=1) if own_batch else normal(3, seed=1)}
    calls = []

    def loss(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        calls.append(1)
        return UNSTACKABLE[kind](x["x"] - theta["t"] * batch["a"])

    for _ in range(3):
        found = groups(loss, x, own_batch=own_batch, trial=lambda: (theta, batch))
    assert [group.part for group in found] == list(range(COUNT))
    assert (len(calls), len(caplog.records)) == (2, 1), "tried once: under vmap, and without"
    if not own_batch:
        expected = torch.stack([loss(theta, take(x, i), batch) for i in range(COUNT)])
        assert torch.equal(values(loss, theta, x, batch), expected)
        with rejects("loss-not-stackable", "generator", "mode"):
            values(loss, theta, x, batch, mode="stacked")
