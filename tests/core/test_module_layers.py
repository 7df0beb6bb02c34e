"""`Problem.of_module`: normalisation layers, frozen and tied parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from support.helpers import assert_same, normal
from support.module_problems import (
    FEATURES,
    TRAIN,
    UPPER,
    assert_products,
    by_hand,
    loss,
    network,
    problem,
    rows,
    shape_of,
)
from torch import Tensor, nn
from torch.func import functional_call, replace_all_batch_norm_modules_


def test_batch_normalisation_in_training_mode_has_the_statistics_of_its_batch() -> None:
    model = network(nn.BatchNorm1d(6))
    p = problem(model)
    without = replace_all_batch_norm_modules_(copy.deepcopy(model))
    theta = shape_of(p)
    batch = rows()
    x = {name: leaf + 0.1 for name, leaf in p.x0.items()}
    assert_products(
        lambda x: p.g(theta, x, batch), x, lambda x: by_hand(without, theta["theta"], x, batch)
    )
    upper = rows(range(8), UPPER["select"])
    assert_same(
        p.f(theta, x, upper), loss(lambda a: functional_call(without, x, (a,)), upper).mean()
    )


@pytest.mark.parametrize("at_rest", [(1, 2), (1,)])
def test_batch_normalisation_in_evaluation_mode_uses_its_running_statistics(
    at_rest: tuple[int, ...],
) -> None:
    model = network(nn.BatchNorm1d(6), nn.BatchNorm1d(6))
    model(normal(20, FEATURES, seed=4))  # moves the running statistics
    for layer in at_rest:
        model[layer].eval()
    still = copy.deepcopy(model)
    if at_rest == (1,):
        still[2] = replace_all_batch_norm_modules_(nn.Sequential(still[2]))[0]
    p = problem(model)
    assert_products(
        lambda x: p.g(p.theta0, x, rows()),
        p.x0,
        lambda x: by_hand(still, p.theta0["theta"], x, rows()),
    )


def test_batch_normalisation_is_evaluated_with_the_statistics_of_the_training_rows_at_x() -> None:
    model = network(nn.BatchNorm1d(6), nn.Dropout(0.5))
    points = normal(9, FEATURES, seed=5)
    seen: list[Tensor] = []
    p = problem(
        model,
        evaluate=lambda theta, model: (
            seen.append(model(points)) or {"training": float(model.training)}
        ),
    )
    x = {name: leaf + 0.1 * normal(*leaf.shape, seed=8) for name, leaf in p.x0.items()}
    assert [p.evaluate(p.theta0, x) for _ in range(2)] == [{"training": 0.0}] * 2
    assert torch.equal(seen[0], seen[1])
    model.load_state_dict(x, strict=False)
    torch.optim.swa_utils.update_bn([(TRAIN.whole["a"],)], model)
    model.eval()
    assert_same(seen[0], model(points).detach())
    p.evaluate(p.theta0, p.x0)
    assert not torch.allclose(seen[2], seen[0])


@pytest.mark.parametrize(
    "layer",
    [
        nn.GroupNorm(2, 6),
        nn.LayerNorm(6),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.RMSNorm(6),
    ],
    ids=lambda m: type(m).__name__,
)
def test_normalisation_without_state_just_works(layer: nn.Module) -> None:
    model = network(layer)
    p = problem(model)
    assert_products(
        lambda x: p.g(p.theta0, x, rows()),
        p.x0,
        lambda x: by_hand(model, p.theta0["theta"], x, rows()),
    )
