"""The way back by mixed-mode differentiation equals that through the graph of the path, step for
step and option for option.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, KEY, assert_same, counted, network_problem, normal, rejects

from hgms.generators.branches import Branches, Diversity, Trajectory
from hgms.generators.branches.mixed_mode import second_products
from hgms.hypergradients import Unrolled
from hgms.optim import SGD, AdamW, Clip, Cosine, Torch
from hgms_core import Problem, Tree

PROBLEM = network_problem(rows=12)
THETA = PROBLEM.theta0
ONE: dict[str, Any] = {"steps": 4, "batch_size": 5}
TWO: dict[str, Any] = {**ONE, "count": 2}
ADAMW = AdamW(lr=0.05)
PATHS: dict[str, Any] = {
    "sgd": Branches(
        **TWO, optimizer=SGD(lr=0.4, weight_decay=0.05), diversity=Diversity(noise=0.1)
    ),
    "momentum": Branches(**TWO, optimizer=SGD(lr=0.4, momentum=0.8, schedule=Cosine(floor=0.1))),
    "adamw": Branches(
        **TWO, optimizer=AdamW(lr=0.05, weight_decay=0.1), diversity=Diversity(lr_spread=(0.5, 2.0))
    ),
    "clipped": Branches(
        count=2,
        steps=4,
        optimizer=Clip(optimizer=SGD(lr=2.0), clip=0.05),
        diversity=Diversity(whole_batch_noise=0.3),
    ),
    "clipped adamw": Branches(**TWO, optimizer=Clip(optimizer=ADAMW, clip=0.1)),
    "kept": Branches(**ONE, count=1, optimizer=ADAMW, keep_path="states"),
    "trajectory": Trajectory(**ONE, optimizer=ADAMW),
    "kept trajectory": Trajectory(**ONE, optimizer=SGD(lr=0.4, momentum=0.8), keep_path="states"),
}


def ended(
    generator: Any, last: int | None, backward: Any, problem: Problem = PROBLEM
) -> tuple[Tree, Any]:
    """The hypergradient after two outer steps, so that moments and step counts have a history."""
    start = generator.init(problem, KEY)
    for step in range(2):
        candidates = generator.propose(problem, THETA, start, KEY.fold(step))
        index = torch.tensor(candidates.count - 1)
        start = generator.carry(start, candidates, index, KEY, problem)
    estimate, _ = Unrolled(last=last, backward=backward).estimate(
        problem, THETA, *candidates.branch(index).as_candidates(), KEY, {}
    )
    return {**estimate.value, "loss": estimate.upper_loss}, estimate.cost


LEARNED = evolve(
    PROBLEM, start=lambda theta: {name: leaf * theta["scale"] for name, leaf in PROBLEM.x0.items()}
)


@pytest.mark.parametrize(
    ("path", "last"),
    [*((path, None) for path in (*PATHS, "learned start")), ("momentum", 1), ("adamw", 3)],
)
def test_it_is_the_derivative_of_the_graph(path: str, last: int | None) -> None:
    generator = PATHS.get(path, PATHS["trajectory"])
    problem = LEARNED if path == "learned start" else PROBLEM
    plain = evolve(generator, keep_path="graph") if "kept" in path else generator
    expected = ended(plain, last, "graph", problem)
    value = ended(generator, last, "mixed", problem)
    assert_same(value[0], expected[0], rtol=1e-11, atol=1e-15)
    assert value[1] == expected[1]


def test_it_calls_the_loss_once_a_step_on_each_way_and_holds_no_graph() -> None:
    problem, calls = counted(PROBLEM)
    generator = Branches(count=1, steps=6, optimizer=AdamW(lr=0.05))
    candidates = generator.propose(problem, THETA, generator.init(problem, KEY), KEY)
    branch: Any = candidates.branch(torch.tensor(0))
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
    end, _ = branch.replay_mixed(leaves, None)
    nodes = set()
    waiting = [leaf.grad_fn for leaf in end.values()]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    assert len(nodes) == 1 + len(leaves)  # one node for the run, and the leaves
    calls.clear()
    # The graph of a path calls it once a step; going back costs one more call, in which ∇g has its
    # tangent.
    mixed = Unrolled(backward="mixed")
    estimate, _ = mixed.estimate(problem, THETA, *branch.as_candidates(), KEY, {})
    counts = estimate.cost.numbers()
    found = [counts[name] for name in ("lower_gradients", "products", "cross_products")]
    assert [calls["g"], *found] == [12, 6, 6, 6]
    end, cost = branch.replay_mixed(THETA, None)  # where θ needs no gradient nothing is kept
    assert_same(end, candidates.at(0), rtol=1e-12)
    assert (cost.products, end["w"].dtype, end["w"].requires_grad) == (0, F64, False)


def test_a_run_without_mixed_mode_is_an_error() -> None:
    branches = PATHS["sgd"]
    start = branches.init(PROBLEM, KEY)
    candidates = evolve(branches.propose(PROBLEM, THETA, start, KEY), replay_mixed=None)
    branch = candidates.branch(torch.tensor(0))
    with rejects("not-supported", "hypergradient", "backward"):
        Unrolled(backward="mixed").estimate(PROBLEM, THETA, *branch.as_candidates(), KEY, {})
    with rejects("conflicting-options", "keep_path"):
        Branches(optimizer=Torch(build=torch.optim.SGD), keep_path="states")


def test_products_are_those_of_double_backward() -> None:
    batch = PROBLEM.lower_data.whole
    v = {name: normal(*leaf.shape, seed=9) for name, leaf in PROBLEM.x0.items()}
    leaves, x = (
        {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
        for tree in (THETA, PROBLEM.x0)
    )
    grads = torch.autograd.grad(PROBLEM.g(leaves, x, batch), list(x.values()), create_graph=True)
    wanted = torch.autograd.grad(grads, [*leaves.values(), *x.values()], list(v.values()))
    mixed, product = second_products(PROBLEM.g, THETA, PROBLEM.x0, batch, v)
    assert_same([*mixed.values(), *product.values()], list(wanted), rtol=1e-11, atol=1e-15)
