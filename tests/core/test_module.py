"""`Problem.of_module`: losses of a module are functions of x, and a run does not change it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.helpers import F64, assert_same, rejects
from support.module_problems import (
    ROWS,
    Tied,
    assert_products,
    by_hand,
    loss,
    network,
    pipeline,
    problem,
    rows,
    shape_of,
    stepped,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from hgms.adapters import as_data, evaluate_metrics, fresh_parameters, from_module
from hgms.adapters.checks import global_states
from hgms.config.fingerprinting import fingerprints
from hgms_core import ROLES, Tree


def test_the_losses_by_default_are_a_weighted_mean_and_a_mean() -> None:
    model = network()
    p = problem(model)
    theta = shape_of(p)
    x = {name: leaf + 0.1 for name, leaf in p.x0.items()}
    batch = rows()
    assert_same(p.g(theta, x, batch), by_hand(model, theta["theta"], x, batch))
    assert_same(p.f(theta, x, batch), loss(lambda a: functional_call(model, x, (a,)), batch).mean())
    start, parameters = p.restore(p.theta0, p.x0)
    assert_same(start, torch.zeros(ROWS, dtype=F64))
    assert list(parameters) == [name for name, _ in model.named_parameters()]
    assert_products(
        lambda x: p.g(theta, x, batch), x, lambda x: by_hand(model, theta["theta"], x, batch)
    )


def test_losses_of_ones_own_see_theta_as_it_was_and_all_of_the_module() -> None:
    model = network()

    def lower(theta: Any, model: Any, batch: Tree) -> Tensor:
        squares = sum(leaf.square().sum() for leaf in model.parameters())  # those it computes with
        fit = model[2](model[1](model[0](batch["a"]))).square().mean()
        return fit + theta["decay"][0] * squares

    p = problem(
        model,
        theta0={"decay": [torch.tensor(0.5, dtype=F64)]},
        lower=lower,
        upper=lambda theta, model, batch: model(batch["a"]).mean(),
    )
    x = {name: leaf + 0.2 for name, leaf in p.x0.items()}
    squares = sum(leaf.square().sum() for leaf in x.values())
    out = functional_call(model, x, (rows()["a"],))
    assert_same(p.g(p.theta0, x, rows()), out.square().mean() + 0.5 * squares)
    assert_same(p.f(p.theta0, x, rows()), out.mean())


def test_an_evaluate_that_changes_the_module_in_place_changes_no_run() -> None:
    training: list[bool] = []

    def in_place(theta: Tensor, model: Any) -> dict[str, float]:
        training.append(model[1].training)
        model[0].weight.data.div_(model[0].weight.norm())
        theta.sigmoid_()
        model.train()
        return {"out": float(model(rows()["a"]).sum())}

    def ended(evaluate: Any) -> tuple[Tree, Tree]:
        p = problem(network(nn.Dropout(0.3)), evaluate=evaluate)
        method = pipeline()
        state = method.init(p, 0)
        for _ in range(3):
            state, _ = method.step(p, state)
            evaluate_metrics(p, *method.result(state))
        return method.result(state)

    assert_same(ended(in_place), ended(lambda theta, model: {}))
    assert training == [False] * 3


def test_an_evaluate_that_changes_a_frozen_parameter_is_rejected() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    p = problem(model, evaluate=lambda theta, m: {"n": float(m[0].weight.clamp_(-0.1, 0.1).sum())})
    with rejects("changed-in-place", "evaluate"):
        evaluate_metrics(p, p.theta0, p.x0)


def test_a_run_leaves_the_module_and_the_global_generators_as_they_were() -> None:
    model = network(nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU(inplace=True))
    model[0].bias.requires_grad_(False)
    model[1].weight.grad = torch.ones(6, dtype=F64)
    p = problem(
        model,
        evaluate=lambda theta, model: {"out": float(model(rows()["a"]).sum())},
        fresh=fresh_parameters(model),
    )

    def traits() -> list[Any]:
        parts = [(part.training, len(part._forward_hooks)) for part in model.modules()]
        leaves = [(leaf.requires_grad, leaf.grad is None) for leaf in model.parameters()]
        return [dict(model.state_dict()), parts, leaves, fingerprints(p)]

    before = copy.deepcopy(traits())
    generators = global_states(torch.device("cpu"))
    theta, x = stepped(p, pipeline())
    p.evaluate(theta, x)
    assert_same(traits(), before)
    assert global_states(torch.device("cpu")) == generators
    # x goes back into the module
    assert not torch.equal(x["0.weight"], model[0].weight)
    assert not model.load_state_dict(x, strict=False).unexpected_keys
    assert_same({name: model.get_parameter(name).detach() for name in x}, x)


def test_frozen_parameters_are_constants_and_shared() -> None:
    model = network()
    model[0].requires_grad_(False)
    p = problem(model)
    assert sorted(p.x0) == ["2.bias", "2.weight"]
    before = p.f(p.theta0, p.x0, rows())
    model[0].weight.data.mul_(2.0)  # no copy of a large backbone is made
    assert not torch.equal(before, p.f(p.theta0, p.x0, rows()))


def test_a_tied_weight_is_one_variable_with_the_gradient_of_both_uses() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    tokens = torch.tensor([0, 1, 2, 3, 4, 0])
    data = as_data({"in": tokens, "out": tokens.roll(1)})
    p = from_module(
        model,
        lambda m, b: functional.cross_entropy(m(b["in"]), b["out"], reduction="none"),
        data,
        dict.fromkeys(ROLES, data),
    )
    assert sorted(p.x0) == ["embed.weight", "mix.bias", "mix.weight"]
    slopes = torch.func.grad(lambda x: p.f(p.theta0, x, data.batch(None)))(p.x0)
    functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
    assert_same(slopes, {name: model.get_parameter(name).grad for name in p.x0})
