"""`Problem.of_module`: masks of dropout, and random losses that no mask replaces."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, normal, rejects
from support.module_problems import (
    FEATURES,
    LAYERS,
    ROWS,
    TRAIN,
    UPPER,
    Attention,
    OddConfig,
    assert_products,
    loss,
    masks,
    network,
    problem,
    rows,
    shape_of,
)
from torch import Tensor, nn
from torch.nn import functional

from hgms.adapters import check_losses
from hgms.generators.branches import Branches
from hgms.hypergradients import Unrolled
from hgms.optim import SGD
from hgms_core import ConfigError, Key, Tree, groups, values
from hgms_core.trees import take


def test_masks_of_dropout_are_a_function_of_the_rows_and_look_drawn() -> None:
    shape = (100, 1000)
    first, again = (masks(0.3, nn.Dropout, shape, range(6)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first.unique(), torch.tensor([0.0, 1 / 0.7], dtype=F64))
    kept = (first > 0).double()
    count = first.numel()
    assert abs(float(kept.mean()) - 0.7) < 5 * (0.7 * 0.3 / count) ** 0.5
    # no column is favoured
    assert float((kept.mean(0) - 0.7).abs().max()) < 5 * (0.7 * 0.3 / 100) ** 0.5
    others = [masks(0.3, nn.Dropout, shape, range(1, 7)) > 0]
    others += [kept.roll(*by) > 0 for by in ((1, 0), (1, 1), (8, 1))]
    together = [float((kept * other).mean()) for other in others]
    assert together == pytest.approx([0.49] * 4, abs=5 * (0.49 * 0.51 / count) ** 0.5)


def test_two_layers_of_dropout_and_two_calls_of_one_have_masks_of_their_own() -> None:
    seen: list[Tensor] = []

    def lower(theta: Any, model: Any, batch: Tree) -> Tensor:
        seen.extend(model[i](torch.ones(10_000, dtype=F64)) > 0 for i in (0, 1, 1))
        return model(batch["a"]).mean()

    layers = nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(FEATURES, 1)
    p = problem(nn.Sequential(*layers).double(), lower=lower)
    p.g(p.theta0, p.x0, rows())
    shared = [float((seen[a] & seen[b]).double().mean()) for a, b in ((0, 1), (0, 2), (1, 2))]
    assert shared == pytest.approx([0.25] * 3, abs=0.025)


def test_dropout_is_in_g_alone_and_its_products_are_those_of_the_masks() -> None:
    model = network(nn.Dropout(0.4))
    p = problem(model, evaluate=lambda theta, model: {"out": float(model(rows()["a"]).sum())})
    plain = problem(network())
    assert_same(
        p.f(p.theta0, p.x0, rows()),
        plain.f(p.theta0, {name.replace("3", "2"): leaf for name, leaf in p.x0.items()}, rows()),
    )
    batch = rows()
    kept = masks(0.4, nn.Dropout, (6, 6), range(6))  # the first mask of that batch

    def masked(x: Tree) -> Tensor:
        hidden = functional.linear(batch["a"], x["0.weight"], x["0.bias"]) * kept
        losses = loss(
            lambda _: functional.linear(torch.tanh(hidden), x["3.weight"], x["3.bias"]), batch
        )
        return 0.5 * losses.mean()

    assert_products(lambda x: p.g(p.theta0, x, batch), p.x0, masked)
    assert p.evaluate(p.theta0, p.x0)["out"] == pytest.approx(
        float(copy.deepcopy(model).eval()(batch["a"]).detach().sum())
    )


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (
            lambda: nn.Sequential(Attention(0.2, OddConfig())),
            ["0 (Attention): attention_dropout=0.2", "0.inner (Dropout): p=0.2"],
        ),
        (lambda: Attention(0.2, OddConfig()), ["OddConfig(attention_dropout=0.0)"]),
        (lambda: Attention(0.0), []),
    ],
    ids=["inside", "alone", "no rate"],
)
def test_dropout_that_no_mask_replaces_is_named_with_the_setting_of_its_config(
    model: Any, shown: list[str]
) -> None:
    p = problem(model().double())
    with rejects("random-loss", "loss") if shown else contextlib.nullcontext() as caught:
        check_losses(p, p.theta0, p.x0, Key(0))
    hint = str(caught.value.hint) if caught else ""
    assert all(part in hint for part in shown)
    assert "outer" not in hint, "whose masks are those of the rows"


def test_dropout_on_all_rows_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    p = problem(network(nn.Dropout(0.4)))
    p.g(p.theta0, p.x0, p.lower_data.batch(torch.arange(p.lower_data.size - 1)))
    p.f(p.theta0, p.x0, p.upper_data["differentiate"].batch(None))
    assert not caplog.records
    for _ in range(2):
        p.g(p.theta0, p.x0, p.lower_data.batch(None))
    (record,) = caplog.records
    assert "batch_size" in record.getMessage()


@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.LSTM(4, 4, num_layers=2, dropout=0.1),
        nn.TransformerEncoderLayer(4, 2, 8),
    ],
    ids=lambda m: type(m).__name__,
)
def test_dropout_inside_a_kernel_is_refused_with_the_way_out(layer: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), layer)
    with rejects("random-loss", "model", of=ConfigError) as caught:
        problem(model)
    assert "dropout=0.1" in caught.value.message
    problem(model.eval())
    (layer.self_attn if hasattr(layer, "self_attn") else layer).dropout = 0.0
    problem(model.train())


@pytest.mark.parametrize(
    "layer", LAYERS, ids=["norm", "dropout", "all", "layer-norm", "orthogonal"]
)
def test_stacked_candidates_have_the_losses_that_each_has_alone(
    layer: Callable[[], nn.Module],
) -> None:
    p = problem(network(layer()))
    x = {
        name: torch.stack([leaf, leaf + 0.1 * normal(*leaf.shape, seed=6)])
        for name, leaf in p.x0.items()
    }
    together, alone = (
        [values(value, p.theta0, x, rows(), mode=mode) for value in (p.g, p.f)]
        for mode in ("stacked", "loop")
    )
    assert_same(together, alone, rtol=1e-12)
    own = {name: torch.stack([leaf[:6], leaf[6:12]]) for name, leaf in TRAIN.whole.items()}
    (group,) = groups(p.g, x, own_batch=True, mode="stacked")
    want = [p.g(p.theta0, take(x, i), take(own, i)) for i in range(2)]
    assert_same(group.loss(p.theta0, group.x, own), torch.stack(want), rtol=1e-12)


def test_a_replay_gives_the_branch_and_unrolling_the_slope_of_the_whole_run() -> None:
    """∇F of two steps with batch normalisation and dropout, against central differences of F
    itself.
    """
    p = problem(network(nn.BatchNorm1d(6), nn.Dropout(0.3)))
    branches = Branches(count=1, steps=3, optimizer=SGD(lr=0.2), batch_size=5)
    theta = shape_of(p)

    def run(theta: Tree) -> Any:
        return branches.propose(p, theta, branches.init(p, Key(0)), Key(1)).branch(torch.tensor(0))

    branch = run(theta)
    estimate, _ = Unrolled().estimate(p, theta, *branch.as_candidates(), Key(2), None)
    batch = UPPER["differentiate"].batch(None)
    direction = normal(ROWS, seed=11)
    step = 1e-5
    above, below = (
        p.f(theta, run({"theta": theta["theta"] + by * direction}).x, batch) for by in (step, -step)
    )
    assert float((estimate.value["theta"] * direction).sum()) == pytest.approx(
        float(above - below) / (2 * step), rel=1e-6
    )
    assert float(estimate.value["theta"].norm()) > 1e-6
