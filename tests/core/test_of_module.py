"""`Problem.of_module`: a module's losses are functions of x, equal to those of the module
itself, and a run leaves it alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, normal, rejects
from torch import Tensor, nn
from torch.func import functional_call, replace_all_batch_norm_modules_
from torch.nn import functional
from torch.nn.utils import parametrizations

from hgms.config.fingerprinting import fingerprints
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit, Unrolled
from hgms.outer import Sgd
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import (
    ROLES,
    ConfigError,
    Data,
    Key,
    Pipeline,
    Problem,
    Tree,
    check_losses,
    curvature,
    fresh_parameters,
    groups,
    hypergradient,
    values,
)
from hgms_core.seeding import global_states

ROWS = 12
FEATURES = 3
TRAIN = Data.of({"a": normal(ROWS, FEATURES), "y": normal(ROWS, seed=1)})
UPPER = dict.fromkeys(ROLES, Data.of({"a": normal(8, FEATURES, seed=2), "y": normal(8, seed=3)}))


def loss(model: Any, batch: Tree) -> Tensor:
    """A squared error a row, with a bend so that curvature depends on x."""
    return functional.softplus(batch["y"] * model(batch["a"]).squeeze(1))


def network(*middle: nn.Module, features: int = FEATURES) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(features, 6), *middle, nn.Tanh(), nn.Linear(6, 1)).double()


def problem(model: nn.Module, **more: Any) -> Problem:
    return Problem.of_module(model, loss, TRAIN, UPPER, **more)


def rows(numbers: range = range(6), data: Data = TRAIN) -> Tree:
    return data.batch(torch.tensor(list(numbers)))


def shape_of(p: Problem) -> Tree:
    return {name: 0.3 * normal(*leaf.shape, seed=7) for name, leaf in p.theta0.items()}


def by_hand(model: nn.Module, theta: Tensor, x: Tree, batch: Tree) -> Tensor:
    """g of a model without state, from functional_call alone."""
    losses = loss(lambda a: functional_call(model, x, (a,)), batch)
    return (theta[batch["index"]].sigmoid() * losses).mean()


def products(g: Callable[[Tree], Tensor], x: Tree) -> dict[str, Tensor]:
    """A Hessian product at x, by every strategy."""
    v = normal(sum(leaf.numel() for leaf in x.values()), seed=9).to(next(iter(x.values())).dtype)
    return {
        strategy: curvature(g, x, strategy).matvec(v) for strategy in ("vjp", "jvp", "difference")
    }  # type: ignore[arg-type]


def assert_products(
    g: Callable[[Tree], Tensor], x: Tree, expected: Callable[[Tree], Tensor]
) -> None:
    """Products with g are those with an independent loss, by all strategies."""
    want = products(expected, x)["vjp"]
    assert float(want.norm()) > 1e-3
    have = products(g, x)
    assert_same(have["vjp"], want, rtol=1e-9, atol=1e-12)
    assert_same(have["jvp"], want, rtol=1e-9, atol=1e-12)
    assert_same(have["difference"], want, rtol=1e-5, atol=1e-7)


def pipeline(**parts: Any) -> Pipeline:
    usual = {
        "generator": Branches(count=2, steps=3, lr=0.1, batch_size=5),
        "selector": BestOfN(),
        "hypergradient": Implicit(solver=CG(ridge=1.0)),
        "outer": Sgd(lr=0.5),
    }
    return Pipeline(**{**usual, **parts})


def stepped(p: Problem, method: Pipeline, steps: int = 2) -> tuple[Tree, Tree]:
    state = method.init(p, 0)
    for _ in range(steps):
        state, _ = method.step(p, state)
    return method.result(state)


# --- the two losses


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
    assert {
        name: leaf.data_ptr() for name, leaf in model.named_parameters()
    }.keys() == parameters.keys()  # type: ignore[union-attr]
    assert_products(
        lambda x: p.g(theta, x, batch), x, lambda x: by_hand(model, theta["theta"], x, batch)
    )


def test_losses_of_ones_own_see_theta_as_it_was_and_all_of_the_module() -> None:
    model = network()
    theta0 = {"decay": [torch.tensor(0.5, dtype=F64)]}

    def lower(theta: Any, model: Any, batch: Tree) -> Tensor:
        squares = sum(leaf.square().sum() for leaf in model.parameters())  # those it computes with
        return (
            model[2](model[1](model[0](batch["a"]))).square().mean() + theta["decay"][0] * squares
        )

    p = problem(
        model,
        theta0=theta0,
        lower=lower,
        upper=lambda theta, model, batch: model(batch["a"]).mean(),
    )
    x = {name: leaf + 0.2 for name, leaf in p.x0.items()}
    squares = sum(leaf.square().sum() for leaf in x.values())
    assert_same(
        p.g(p.theta0, x, rows()),
        functional_call(model, x, (rows()["a"],)).square().mean() + 0.5 * squares,
    )
    assert_same(p.f(p.theta0, x, rows()), functional_call(model, x, (rows()["a"],)).mean())


def test_a_loss_that_is_not_of_rows_needs_a_lower_loss() -> None:
    p = Problem.of_module(network(), lambda model, batch: model(batch["a"]).mean(), TRAIN, UPPER)
    with rejects("wrong-shape", "loss", of=ConfigError) as caught:
        p.g(p.theta0, p.x0, rows())
    assert "[] for 6 rows" in caught.value.message


def test_x_goes_back_into_the_module() -> None:
    model = network(nn.BatchNorm1d(6))
    _, x = stepped(problem(model), pipeline())
    assert not torch.equal(x["0.weight"], model[0].weight)
    missing = model.load_state_dict(x, strict=False)
    assert not missing.unexpected_keys
    assert_same({name: leaf.detach() for name, leaf in model.named_parameters()}, x)


def test_an_evaluate_that_changes_the_module_in_place_changes_no_run() -> None:
    def in_place(theta: Tensor, model: Any) -> dict[str, float]:
        model[0].weight.data.div_(model[0].weight.norm())
        theta.sigmoid_()
        model.train()
        return {"out": float(model(rows()["a"]).sum())}

    def plain(theta: Tensor, model: Any) -> dict[str, float]:
        return {"out": float(model(rows()["a"]).sum())}

    def ended(evaluate: Any) -> tuple[Tree, Tree]:
        p = problem(network(nn.Dropout(0.3)), evaluate=evaluate)
        method = pipeline()
        state = method.init(p, 0)
        for _ in range(3):
            state, _ = method.step(p, state)
            p.metrics(*method.result(state))
        return method.result(state)

    assert_same(ended(in_place), ended(plain))
    training: list[bool] = []

    def switching(theta: Tensor, model: Any) -> dict[str, float]:
        training.append(model[1].training)
        model.train()
        return {}

    p = problem(network(nn.Dropout(0.3)), evaluate=switching)
    for _ in range(2):
        p.metrics(p.theta0, p.x0)
    assert training == [False, False]


def test_an_evaluate_that_changes_a_frozen_parameter_is_rejected() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    p = problem(model, evaluate=lambda theta, m: {"n": float(m[0].weight.clamp_(-0.1, 0.1).sum())})
    with rejects("changed-in-place", "evaluate"):
        p.metrics(p.theta0, p.x0)


def test_a_run_leaves_the_module_and_the_global_generators_as_they_were() -> None:
    model = network(nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU(inplace=True))
    model[0].bias.requires_grad_(False)
    model[1].weight.grad = torch.ones(6, dtype=F64)
    before = copy.deepcopy(model)
    generators = global_states(torch.device("cpu"))
    p = problem(
        model,
        evaluate=lambda theta, model: {"out": float(model(rows()["a"]).sum())},
        fresh=fresh_parameters(model),
    )
    known = fingerprints(p)
    theta, x = stepped(p, pipeline())
    p.evaluate(theta, x)
    assert fingerprints(p) == known
    assert_same(dict(model.state_dict()), dict(before.state_dict()))
    assert [part.training for part in model.modules()] == [True] * len(list(model.modules()))
    assert [leaf.requires_grad for leaf in model.parameters()] == [
        leaf.requires_grad for leaf in before.parameters()
    ]
    assert model[1].weight.grad is not None
    assert not any(part._forward_hooks for part in model.modules())
    assert all(
        torch.equal(a, b)
        for a, b in zip(generators, global_states(torch.device("cpu")), strict=True)
    )


def test_what_uses_the_copy_without_x_fails_and_does_not_compute_with_the_weights_of_before() -> (
    None
):
    kept: list[Any] = []

    def keeps(theta: Any, model: Any, batch: Tree) -> Tensor:
        kept.append(model)
        return model(batch["a"]).mean()

    p = problem(network(), upper=keeps)
    p.f(p.theta0, p.x0, rows())
    assert kept[0](torch.zeros(1, FEATURES, dtype=F64, device="meta")).device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        kept[0](rows()["a"])


# --- frozen, tied


def test_frozen_parameters_are_constants_and_shared() -> None:
    model = network()
    model[0].requires_grad_(False)
    p = problem(model)
    assert sorted(p.x0) == ["2.bias", "2.weight"]
    before = p.f(p.theta0, p.x0, rows())
    with torch.no_grad():
        model[0].weight.mul_(2.0)  # no copy of a large backbone is made
    assert not torch.equal(before, p.f(p.theta0, p.x0, rows()))


class Tied(nn.Module):
    """Its output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.tanh(self.mix(self.embed(tokens))))
        return logits


def test_a_tied_weight_is_one_variable_with_the_gradient_of_both_uses() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    tokens = torch.tensor([0, 1, 2, 3, 4, 0])
    data = Data.of({"in": tokens, "out": tokens.roll(1)})
    p = Problem.of_module(
        model,
        lambda m, b: functional.cross_entropy(m(b["in"]), b["out"], reduction="none"),
        data,
        dict.fromkeys(ROLES, data),
    )
    assert sorted(p.x0) == ["embed.weight", "mix.bias", "mix.weight"]
    x = {name: leaf.clone().requires_grad_() for name, leaf in p.x0.items()}
    slopes = torch.autograd.grad(p.f(p.theta0, x, data.batch(None)), list(x.values()))
    functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
    want = [dict(model.named_parameters())[name].grad for name in x]
    assert_same(list(slopes), want)


# --- normalisation


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


def test_batch_normalisation_in_evaluation_mode_uses_its_running_statistics() -> None:
    model = network(nn.BatchNorm1d(6), nn.BatchNorm1d(6))
    model(normal(20, FEATURES, seed=4))  # moves the running statistics
    for layers in ((1, 2), (1,)):
        for layer in layers:
            model[layer].eval()
        still = copy.deepcopy(model)
        if layers == (1,):
            model[2].train()
            still[2] = replace_all_batch_norm_modules_(nn.Sequential(copy.deepcopy(model[2])))[0]
        p = problem(model)
        assert_products(
            lambda x, p=p: p.g(p.theta0, x, rows()),
            p.x0,
            lambda x, p=p, still=still: by_hand(still, p.theta0["theta"], x, rows()),
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


def test_statistics_of_many_rows_are_the_mean_over_batches_in_drawn_order() -> None:
    # sorted rows: consecutive batches have no spread
    order = torch.cat([torch.zeros(300, 1), torch.ones(300, 1)]).double()
    data = Data.of({"a": order + 0.01 * normal(600, 1), "y": normal(600)})
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).double()
    seen: list[Any] = []
    p = Problem.of_module(
        model,
        loss,
        data,
        dict.fromkeys(ROLES, data),
        evaluate=lambda theta, m: (
            seen.append((float(m[1].running_mean), float(m[1].running_var))) or {}
        ),
    )
    p.evaluate(
        p.theta0,
        {**p.x0, "0.weight": torch.ones(1, 1, dtype=F64), "0.bias": torch.zeros(1, dtype=F64)},
    )
    assert seen[0] == pytest.approx((0.5, 0.25), abs=0.02)


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


def test_a_normalisation_of_instances_that_tracks_statistics_has_none() -> None:
    def model(**settings: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv1d(1, 2, 2),
            nn.InstanceNorm1d(2, **settings),
            nn.Flatten(),
            nn.Tanh(),
            nn.Linear(4, 1),
        ).double()

    tracking = model(track_running_stats=True)
    p = Problem.of_module(tracking, lambda m, b: loss(lambda a: m(a[:, None]), b), TRAIN, UPPER)
    without = model()
    for value in (p.g, p.f):
        want = loss(lambda a: functional_call(without, p.x0, (a[:, None],)), rows()).mean()
        assert_same(value(p.theta0, p.x0, rows()), want * (0.5 if value is p.g else 1.0))


# --- dropout


def masks(rate: float, layer: Any, shape: tuple[int, ...], numbers: range) -> Tensor:
    """What dropout makes of ones, in the pass of a batch with these rows."""
    seen: list[Tensor] = []

    def lower(theta: Any, model: Any, batch: Tree) -> Tensor:
        seen.append(model[0](torch.ones(shape, dtype=F64)))
        return model[1](batch["a"]).mean()

    model = nn.Sequential(layer(rate), nn.Linear(FEATURES, 1)).double()
    p = problem(model, lower=lower)
    p.g(p.theta0, p.x0, rows(numbers))
    return seen[0]


def test_masks_of_dropout_are_a_function_of_the_rows_and_look_drawn() -> None:
    shape = (100, 1000)
    first, again = (masks(0.3, nn.Dropout, shape, range(6)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first.unique(), torch.tensor([0.0, 1 / 0.7], dtype=F64))
    count = first.numel()
    spread = (0.7 * 0.3 / count) ** 0.5
    assert abs(float((first > 0).double().mean()) - 0.7) < 5 * spread
    # no column is favoured
    assert float(((first > 0).double().mean(0) - 0.7).abs().max()) < 5 * (0.7 * 0.3 / 100) ** 0.5
    for other in (
        masks(0.3, nn.Dropout, shape, range(1, 7)),
        first.roll(1, 0),
        first.roll(1, 1),
        first.roll(8, 1),
    ):
        together = float(((first > 0) & (other > 0)).double().mean())
        assert abs(together - 0.49) < 5 * (0.49 * 0.51 / count) ** 0.5


def test_two_layers_of_dropout_and_two_calls_of_one_have_masks_of_their_own() -> None:
    seen: list[Tensor] = []

    def lower(theta: Any, model: Any, batch: Tree) -> Tensor:
        seen.extend(model[i](torch.ones(10_000, dtype=F64)) > 0 for i in (0, 1, 1))
        return model(batch["a"]).mean()

    shared = nn.Dropout(0.5)
    p = problem(
        nn.Sequential(nn.Dropout(0.5), shared, nn.Linear(FEATURES, 1)).double(), lower=lower
    )
    p.g(p.theta0, p.x0, rows())
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((seen[a] & seen[b]).double().mean()) - 0.25) < 0.025


def test_dropout_of_channels_drops_whole_ones_and_all_where_the_rate_is_one() -> None:
    for layer, shape in (
        (nn.Dropout1d, (20, 30, 4)),
        (nn.Dropout2d, (20, 30, 4, 5)),
        (nn.Dropout3d, (20, 30, 2, 2, 2)),
    ):
        dropped = masks(0.5, layer, shape, range(6)).flatten(2)
        assert torch.equal(dropped, dropped[..., :1].expand_as(dropped))
        assert abs(float((dropped[..., 0] > 0).double().mean()) - 0.5) < 0.1
    assert not masks(1.0, nn.Dropout, (4, 4), range(6)).any()


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


def test_dropout_by_a_function_of_torch_is_refused_in_the_first_step() -> None:
    class Own(nn.Linear):
        def forward(self, a: Tensor) -> Tensor:
            return functional.dropout(super().forward(a), 0.5, self.training)

    p = problem(Own(FEATURES, 1).double())
    with rejects("random-loss", "loss", of=ConfigError):
        stepped(p, pipeline())


class Attention(nn.Linear):
    """Layers as those of transformers, which hand a rate to a kernel."""

    def __init__(self, rate: float, config: Any = None) -> None:
        super().__init__(FEATURES, 1)
        self.inner = nn.Dropout(rate)
        self.outer = nn.Dropout(0.3)
        self.attention_dropout = rate
        self.config = config

    def forward(self, a: Tensor) -> Tensor:
        hidden = functional.dropout(super().forward(a), self.attention_dropout, self.training)
        hidden = functional.dropout(hidden, self.inner.p, self.training)
        return self.outer(hidden)


class OddConfig:
    def __init__(self) -> None:
        self.attention_dropout = 0.2
        self.dropout = 0.3

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def test_dropout_that_no_mask_replaces_is_named_with_the_setting_of_its_config() -> None:
    p = problem(nn.Sequential(Attention(0.2, OddConfig())).double())
    with rejects("random-loss", "loss", of=ConfigError) as caught:
        check_losses(p, p.theta0, p.x0, Key(0))
    hint = str(caught.value.hint)
    assert "0 (Attention): attention_dropout=0.2" in hint
    assert "0.inner (Dropout): p=0.2" in hint
    assert "0.outer" not in hint, "whose masks are those of the rows"
    p = problem(Attention(0.2, OddConfig()).double())
    with rejects("random-loss", "loss", of=ConfigError) as caught:
        check_losses(p, p.theta0, p.x0, Key(0))
    assert "OddConfig(attention_dropout=0.0)" in str(caught.value.hint)
    p = problem(Attention(0.0).double())
    check_losses(p, p.theta0, p.x0, Key(0))


def test_a_random_loss_is_found_where_it_barely_matters() -> None:
    class Tiny(nn.Linear):
        def forward(self, a: Tensor) -> Tensor:
            out: Tensor = super().forward(a)
            return out + 1e-5 * functional.dropout(torch.ones_like(out), 0.5, self.training)

    p = problem(Tiny(FEATURES, 1).double())
    with rejects("random-loss", "loss", of=ConfigError):
        check_losses(p, p.theta0, p.x0, Key(0))


def test_dropout_on_all_rows_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    p = problem(network(nn.Dropout(0.4)))
    with caplog.at_level("WARNING", "hgms"):
        p.g(p.theta0, p.x0, p.lower_data.batch(torch.arange(p.lower_data.size - 1)))
        p.f(p.theta0, p.x0, p.upper_data["differentiate"].batch(None))
        assert not caplog.records
        for _ in range(2):
            before = fingerprints(p)
            p.g(p.theta0, p.x0, p.lower_data.batch(None))
            assert fingerprints(p) == before
    assert len(caplog.records) == 1
    assert "batch_size" in caplog.text


def test_dropout_without_numbers_of_rows_says_where_they_come_from() -> None:
    p = problem(network(nn.Dropout()))
    batch = {name: leaf for name, leaf in rows().items() if name != "index"}
    with rejects("missing-column", "batch", "index", of=ConfigError):
        problem(network(nn.Dropout()), lower=lambda t, m, b: m(b["a"]).mean()).g(
            p.theta0, p.x0, batch
        )


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


# --- stacked candidates and programs


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm1d(6),
    lambda: nn.Dropout(0.4),
    lambda: nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.2)),
    lambda: nn.LayerNorm(6),
    lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
]


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
    for value in (p.g, p.f):
        together, alone = (
            values(value, p.theta0, x, rows(), mode=mode) for mode in ("stacked", "loop")
        )
        assert_same(together, alone, rtol=1e-12)
    own = {name: torch.stack([leaf[:6], leaf[6:12]]) for name, leaf in TRAIN.whole.items()}
    (group,) = groups(p.g, x, own_batch=True, mode="stacked")
    want = [
        p.g(
            p.theta0, {n: leaf[i] for n, leaf in x.items()}, {n: leaf[i] for n, leaf in own.items()}
        )
        for i in range(2)
    ]
    assert_same(group.loss(p.theta0, group.x, own), torch.stack(want), rtol=1e-12)


def test_steps_of_norms_and_dropout_are_traced_with_new_masks_for_each_batch() -> None:
    from hgms.compiled.trace import flatten, trace

    p = problem(network(nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.4)))

    def slope(x: Tree, batch: Tree) -> Tree:
        return torch.func.grad(lambda x: p.g(p.theta0, x, batch))(x)

    traced = trace(slope, (p.x0, rows()))
    for batch in (rows(), rows(range(3, 9))):
        flatten((p.x0, batch), leaves := [])
        flatten(slope(p.x0, batch), want := [])
        assert_same(list(traced.graph(*leaves, *traced.constants)), want)
    # nothing of the trace is left
    assert_same(p.g(p.theta0, p.x0, rows()), p.g(p.theta0, p.x0, rows()))


def test_a_replay_gives_the_branch_and_unrolling_the_slope_of_the_whole_run() -> None:
    """∇F of two steps with batch normalisation and dropout, against central differences of F
    itself.
    """
    p = problem(network(nn.BatchNorm1d(6), nn.Dropout(0.3)))
    branches = Branches(count=1, steps=3, lr=0.2, batch_size=5)
    theta = shape_of(p)

    def run(theta: Tree) -> Any:
        return branches.propose(p, theta, branches.init(p, Key(0)), Key(1)).branch(torch.tensor(0))

    branch = run(theta)
    estimate, _ = Unrolled().estimate(p, theta, branch, Key(2), None)
    batch = UPPER["differentiate"].batch(None)
    direction = normal(ROWS, seed=11)
    step = 1e-5
    above, below = (
        p.f(theta, run({"theta": theta["theta"] + sign * step * direction}).x, batch)
        for sign in (1.0, -1.0)
    )
    assert float((estimate.value["theta"] * direction).sum()) == pytest.approx(
        float(above - below) / (2 * step), rel=1e-6
    )
    assert float(estimate.value["theta"].norm()) > 1e-6


# --- other modules


def at_rows(p: Problem) -> tuple[Any, Any]:
    return (lambda theta, x: p.f(theta, x, rows()), lambda theta, x: p.g(theta, x, rows()))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.out = kind(1, 4, num_layers=2, batch_first=True), nn.Linear(4, 1)

    def forward(self, a: Tensor) -> Tensor:
        out: Tensor = self.out(self.cell(a[..., None])[0][:, -1])
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_products_and_are_evaluated_one_after_the_other(
    kind: type[nn.RNNBase],
) -> None:
    torch.manual_seed(0)
    p = problem(Recurrent(kind).double())
    have = products(lambda x: p.g(p.theta0, x, rows()), p.x0)
    assert float(have["vjp"].norm()) > 1e-3
    assert_same(have["vjp"], have["difference"], rtol=1e-5, atol=1e-7)
    assert_same(have["jvp"], have["vjp"], rtol=1e-9, atol=1e-12)
    x = {name: torch.stack([leaf, leaf + 0.1]) for name, leaf in p.x0.items()}
    assert len(groups(p.g, x)) == len(groups(p.f, x)) == 2
    with rejects("loss-not-stackable", "generator", "mode", of=ConfigError):
        values(p.g, p.theta0, x, rows(), mode="stacked")
    single = Recurrent(kind)  # float32, for which there are kernels without a forward mode
    p = Problem.of_module(
        single, loss, *[Data.of({"a": torch.randn(4, 3), "y": torch.ones(4)})] * 2
    )
    assert (
        products(lambda x: p.g(p.theta0, x, p.lower_data.batch(None)), p.x0)["jvp"].isfinite().all()
    )


def test_parametrised_layers_work_if_torch_differentiates_them_else_an_error() -> None:
    model = network(parametrizations.orthogonal(nn.Linear(6, 6)))
    p = problem(model)
    assert "1.parametrizations.weight.original" in p.x0
    assert_products(
        lambda x: p.g(p.theta0, x, rows()),
        p.x0,
        lambda x: by_hand(model, p.theta0["theta"], x, rows()),
    )

    loop = Branches(count=1, steps=3)
    normed = problem(network(parametrizations.weight_norm(nn.Linear(6, 6))))
    with rejects("no-second-derivative", "hypergradient", "strategy", of=ConfigError):
        hypergradient(*at_rows(normed), normed.theta0, normed.x0, solver=CG())
    stepped(
        normed,
        pipeline(
            generator=loop, hypergradient=Implicit(solver=CG(ridge=1.0), strategy="difference")
        ),
    )

    with pytest.warns(FutureWarning, match="weight_norm"):
        older = network(nn.utils.weight_norm(nn.Linear(6, 6)))  # type: ignore[attr-defined]
    older(rows()["a"])  # has a weight that is no leaf
    stepped(
        problem(older),
        pipeline(
            generator=loop, hypergradient=Implicit(solver=CG(ridge=1.0), strategy="difference")
        ),
    )


def test_a_buffer_that_every_pass_changes_is_named() -> None:
    model = network(parametrizations.spectral_norm(nn.Linear(6, 6)))
    p = problem(model)
    with rejects("loss-with-state", "model", of=ConfigError) as caught:
        p.g(p.theta0, p.x0, rows())
    assert "buffer 1.parametrizations.weight.0._u" in caught.value.message
    model[1].eval()
    still = problem(model)
    assert_products(
        lambda x: still.g(still.theta0, x, rows()),
        still.x0,
        lambda x: by_hand(model, still.theta0["theta"], x, rows()),
    )


class Half(nn.Module):
    """Part of it is under torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = torch.compile(nn.Linear(FEATURES, 6), backend="aot_eager")
        self.head = nn.Linear(6, 1)

    def forward(self, a: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.enc(a)))
        return out


def test_wrappers_are_taken_off_and_x_keeps_the_names_of_what_was_given() -> None:
    plain = network()
    want = problem(plain)
    inside = network()
    inside.compile(backend="aot_eager")
    for model in (
        torch.compile(network(), backend="aot_eager"),
        nn.DataParallel(network()),
        inside,
    ):
        p = problem(model)  # type: ignore[arg-type]
        parameters = dict(model.named_parameters())  # type: ignore[attr-defined]
        assert list(p.x0) == list(parameters)
        x = dict(zip(p.x0, want.x0.values(), strict=True))
        have = products(lambda x: p.g(p.theta0, x, rows()), x)["vjp"]  # noqa: B023
        assert_same(have, products(lambda x: want.g(want.theta0, x, rows()), want.x0)["vjp"])
        above = {name: leaf + 1 for name, leaf in x.items()}
        keys = model.load_state_dict(above, strict=False)  # type: ignore[attr-defined]
        assert not keys.unexpected_keys
        assert not keys.missing_keys
        x = fresh_parameters(model)(Key(0))  # type: ignore[arg-type]
        assert_same(list(x.values()), list(fresh_parameters(plain)(Key(0)).values()))
    torch.manual_seed(0)
    half = Half().double()
    p = problem(half)
    assert "enc._orig_mod.weight" in p.x0
    products(lambda x: p.g(p.theta0, x, rows()), p.x0)  # compiled code has no second backward pass


def test_parameters_in_bfloat16_are_float32_in_x_and_their_solves_are_near_those_of_float32() -> (
    None
):
    fine = network().float()
    with torch.no_grad():
        for leaf in fine.parameters():
            leaf.copy_(leaf.bfloat16())
    coarse = copy.deepcopy(fine).bfloat16()
    table = {name: leaf.float() for name, leaf in TRAIN.whole.items() if name != "index"}
    data = Data.of({**table, "a": table["a"].bfloat16().float()})

    def rounded(model: Any, batch: Tree) -> Tensor:
        kind = model[0].weight.dtype
        return functional.softplus(batch["y"] * model(batch["a"].to(kind)).squeeze(1).float())

    exact, near = (
        Problem.of_module(model, rounded, data, dict.fromkeys(ROLES, data))
        for model in (fine, coarse)
    )
    assert {leaf.dtype for leaf in near.x0.values()} == {torch.float32}
    assert near.precision == torch.bfloat16
    assert near.theta0["theta"].dtype == torch.float32
    assert exact.precision is None
    for strategy in ("vjp", "jvp", "difference"):
        method = Implicit(solver=CG(ridge=0.3, rtol=1e-2, max_steps=10), strategy=strategy)
        a, b = (slope(p, method) for p in (exact, near))
        assert float((a - b).norm() / a.norm()) < 0.02, strategy
    coarse.load_state_dict(near.x0, strict=False)
    assert_same(coarse[0].weight.float(), fine[0].weight.detach())


def slope(p: Problem, method: Implicit) -> Tensor:
    branch = Branches(count=1, steps=1, lr=1e-9).propose(
        p, p.theta0, Branches(count=1).init(p, Key(0)), Key(0)
    )
    return method.estimate(p, p.theta0, branch.branch(torch.tensor(0)), Key(0), None)[0].value[
        "theta"
    ]


def test_the_precision_is_the_coarsest_that_the_module_computes_in() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4, dtype=torch.bfloat16), nn.Linear(4, 1, dtype=torch.float32)
    )
    model[0].requires_grad_(False)
    p = problem(model)
    assert p.precision == torch.bfloat16
    assert p.x0["1.weight"].dtype == torch.float32
    mixed = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1, dtype=F64))
    assert {leaf.dtype for leaf in problem(mixed).x0.values()} == {F64}
    assert problem(mixed).precision == torch.float32


class Locked(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a lock is in it")


class Checkpointed(nn.Linear):
    gradient_checkpointing = True


def scripted() -> Any:
    return torch.jit.script(nn.Linear(3, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "code", "shown"),
    [
        (lambda: lambda a: a, "wrong-type", "Problem(theta0="),
        (lambda: nn.Linear, "wrong-type", "the class Linear"),
        (lambda: nn.Linear(3, 1).requires_grad_(False), "frozen-parameter", "requires_grad_(True)"),
        (lambda: nn.ReLU(), "frozen-parameter", "requires_grad_(True)"),
        (lambda: nn.LazyLinear(1), "wrong-value", "lazy"),
        (lambda: nn.Linear(3, 1, device="meta"), "wrong-value", "to_empty"),
        (scripted, "not-supported", "torch.jit"),
        (lambda: Checkpointed(3, 1), "not-supported", "gradient_checkpointing_disable"),
        (lambda: Locked(3, 1), "not-supported", "a lock is in it"),
    ],
)
def test_modules_that_cannot_be_taken_are_refused_with_the_way_out(
    model: Any, code: str, shown: str
) -> None:
    with rejects(code, "model", of=ConfigError) as caught:
        problem(model())
    assert shown in str(caught.value)


def of(loss: Any = loss, **more: Any) -> Any:
    return lambda: stepped(Problem.of_module(network(), loss, TRAIN, UPPER, **more), pipeline())


@pytest.mark.parametrize(
    "row",
    [
        (of(nn.MSELoss()), "wrong-type", ("loss",), "MSELoss", "lambda model, batch"),
        (of(None), "wrong-type", ("loss",), "(model, batch)", "None"),
        (of(lower=1.0), "wrong-type", ("lower",), "(theta, model, batch)", "a float"),
        (of(upper=loss), "wrong-signature", ("upper",), "(theta, model, batch)", " (model, batch)"),
        (of(evaluate=nn.Linear), "wrong-type", ("evaluate",), "(theta, model)", "class Linear"),
        (of(lambda model, batch: None), "wrong-result", ("loss",), "None", "[B]"),
        (of(lambda model, batch: (loss(model, batch), 1)), "wrong-result", ("loss",), "a tuple"),
        (of(lambda model, batch: loss(model, batch).mean()), "wrong-shape", ("loss",), "[]"),
        (of(lambda model, batch: loss(model, batch)[:2]), "wrong-shape", ("loss",), "[2]"),
        (of(lambda model, batch: model(batch["a"])), "wrong-shape", ("loss",), "1]", ".squeeze(1)"),
        (of(lambda model, batch: loss(model, batch).detach()), "no-gradient", ("f",)),
        (of(lambda model, batch: model(batch["b"])), "missing-column", ("g",), "'b'"),
        (
            of(lower=lambda theta, model, batch: loss(model, batch).mean()),
            "theta-unused",
            ("theta0",),
            "theta",
        ),
        (of(lower=lambda theta, model, batch: None), "not-scalar", ("g",), "None"),
        (of(theta0=torch.zeros(3, dtype=F64)), "wrong-size", ("theta0",), f"{ROWS} entries"),
        (of(theta0=torch.zeros(ROWS, 1, dtype=F64)), "wrong-size", ("theta0",), f"{ROWS} entries"),
        (
            of(lambda batch, model: loss(model, batch)),
            "wrong-signature",
            ("loss",),
            "(batch, model)",
        ),
        (of(lambda b, m: loss(m, b)), "loss-failed", ("g",), "TypeError", "(theta, model, batch)"),
        (lambda: Problem.of_module(network(), loss, {"a": []}, UPPER), "no-rows", ("train",)),
        (lambda: Problem.of_module(network(), loss, TRAIN, {}), "no-rows", ("upper_data",)),
        (
            of(theta0=torch.zeros(ROWS, dtype=torch.long)),
            "wrong-dtype",
            ("theta0", "theta"),
            "int64",
        ),
        (of(upper_loss=loss), "unknown-option", ("upper_loss",), "'upper'?"),
        (of(g=loss), "unknown-option", ("g",)),
    ],
    ids=lambda row: f"{row[1]} {row[2]}",
)
def test_what_is_wrong_with_the_arguments_is_said(row: tuple[Any, ...]) -> None:
    call, code, place, *shown = row
    with rejects(code, *place, of=ConfigError) as caught:
        call()
    assert all(part in str(caught.value) for part in shown)


def test_a_batch_of_one_row_has_no_statistics() -> None:
    p = problem(network(nn.BatchNorm1d(6)))
    with rejects("too-few-rows", "model", of=ConfigError):
        p.g(p.theta0, p.x0, rows(range(1)))


# --- another start


def test_fresh_parameters_are_those_of_the_layers_own_way_by_a_key() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4), nn.Linear(4, 1)
    ).double()
    model[0].bias.requires_grad_(False)
    frozen = nn.Linear(4, 4)
    model.append(frozen.requires_grad_(False))
    before = copy.deepcopy(dict(model.state_dict()))
    generators = global_states(torch.device("cpu"))
    draw = fresh_parameters(model)
    first = draw(Key(0))
    again = draw(Key(0))
    other = draw(Key(0).fold("other"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(generators, global_states(torch.device("cpu")), strict=True)
    )
    assert_same(dict(model.state_dict()), before)
    assert_same(first, again)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    assert sorted(first) == sorted(
        name for name, leaf in model.named_parameters() if leaf.requires_grad
    )
    assert_same(first["2.weight"], torch.ones(4, dtype=F64))
    assert_same(first["1.out_proj.bias"], torch.zeros(4, dtype=F64))  # as attention itself has it
    torch.manual_seed(Key(5).derive())
    assert_same(
        fresh_parameters(frozen.requires_grad_(True))(Key(5))["weight"],
        nn.Linear(4, 4).weight.detach(),
    )


def test_fresh_parameters_need_a_way_to_be_drawn() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with rejects("not-supported", "model", of=ConfigError) as caught:
        fresh_parameters(nn.Sequential(Own(), nn.Linear(1, 1)))
    assert "0 (Own)" in caught.value.message


def test_candidates_start_apart_with_fresh_parameters() -> None:
    model = network()
    p = problem(model, fresh=fresh_parameters(model))
    assert_same(p.initial(Key(3)), fresh_parameters(model)(Key(3)))
    assert_same(problem(model).initial(Key(3)), p.x0)


@pytest.mark.parametrize(
    ("option", "code"),
    [({"max_norm": 1.0}, "loss-with-state"), ({"sparse": True}, "sparse-gradient")],
)
def test_embeddings_that_change_their_weight_or_have_sparse_gradients_are_rejected(
    option: dict[str, Any], code: str
) -> None:
    with rejects(code, "model"):
        problem(nn.Sequential(nn.Embedding(5, 2, **option), nn.Linear(2, 1)))
