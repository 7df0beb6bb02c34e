"""`Problem.of_module`: kinds of modules, precisions, wrong arguments, fresh parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, rejects
from support.module_problems import (
    ROWS,
    TRAIN,
    UPPER,
    Checkpointed,
    Locked,
    Recurrent,
    assert_products,
    at_rows,
    by_hand,
    loss,
    network,
    of,
    problem,
    products,
    rows,
    scripted,
    slope,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from hgms.adapters import as_data, fresh_parameters, from_module, hypergradient
from hgms.adapters.checks import global_states
from hgms.hypergradients import Implicit
from hgms.solvers import CG
from hgms_core import ROLES, ConfigError, Key, Tree, groups, values


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


def test_parametrised_layers_work_if_torch_differentiates_them_else_an_error() -> None:
    model = network(parametrizations.orthogonal(nn.Linear(6, 6)))
    p = problem(model)
    assert "1.parametrizations.weight.original" in p.x0
    assert_products(
        lambda x: p.g(p.theta0, x, rows()),
        p.x0,
        lambda x: by_hand(model, p.theta0["theta"], x, rows()),
    )
    normed = problem(network(parametrizations.weight_norm(nn.Linear(6, 6))))
    with rejects("no-second-derivative", "hypergradient", "strategy", of=ConfigError):
        hypergradient(*at_rows(normed), normed.theta0, normed.x0, solver=CG())


def test_a_buffer_that_every_pass_changes_is_named() -> None:
    model = network(parametrizations.spectral_norm(nn.Linear(6, 6)))
    p = problem(model)
    with rejects("loss-with-state", "model", of=ConfigError) as caught:
        p.g(p.theta0, p.x0, rows())
    assert "buffer 1.parametrizations.weight.0._u" in caught.value.message


@pytest.mark.parametrize(
    "model",
    [lambda: torch.compile(network(), backend="aot_eager"), lambda: nn.DataParallel(network())],
    ids=["compiled", "data-parallel"],
)
def test_wrappers_are_taken_off_and_x_keeps_the_names_of_what_was_given(model: Any) -> None:
    wrapped = model()
    want, p = problem(network()), problem(wrapped)
    assert list(p.x0) == [name for name, _ in wrapped.named_parameters()]
    have = products(lambda x: p.g(p.theta0, x, rows()), p.x0)["vjp"]
    assert_same(have, products(lambda x: want.g(want.theta0, x, rows()), want.x0)["vjp"])


def test_parameters_in_bfloat16_are_float32_in_x_and_their_solves_are_near_those_of_float32() -> (
    None
):
    coarse = network().bfloat16()
    fine = copy.deepcopy(coarse).float()
    table = {name: leaf.float() for name, leaf in TRAIN.whole.items() if name != "index"}
    data = as_data({**table, "a": table["a"].bfloat16().float()})

    def rounded(model: Any, batch: Tree) -> Tensor:
        kind = model[0].weight.dtype
        return functional.softplus(batch["y"] * model(batch["a"].to(kind)).squeeze(1).float())

    exact, near = (
        from_module(model, rounded, data, dict.fromkeys(ROLES, data)) for model in (fine, coarse)
    )
    assert {leaf.dtype for leaf in (*near.x0.values(), *near.theta0.values())} == {torch.float32}
    assert (near.precision, exact.precision) == (torch.bfloat16, None)
    for strategy in ("vjp", "jvp", "difference"):
        method = Implicit(solver=CG(ridge=0.3, rtol=1e-2, max_steps=10), strategy=strategy)
        a, b = (slope(p, method) for p in (exact, near))
        assert float((a - b).norm() / a.norm()) < 0.02, strategy


def embedding(**option: Any) -> Any:
    return lambda: nn.Sequential(nn.Embedding(5, 2, **option), nn.Linear(2, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "code"),
    [
        (lambda: lambda a: a, "wrong-type"),
        (lambda: nn.Linear, "wrong-type"),
        (lambda: nn.Linear(3, 1).requires_grad_(False), "frozen-parameter"),
        (lambda: nn.ReLU(), "frozen-parameter"),
        (lambda: nn.LazyLinear(1), "wrong-value"),
        (lambda: nn.Linear(3, 1, device="meta"), "wrong-value"),
        (scripted, "not-supported"),
        (lambda: Checkpointed(3, 1), "not-supported"),
        (lambda: Locked(3, 1), "not-supported"),
        (embedding(max_norm=1.0), "loss-with-state"),
        (embedding(sparse=True), "sparse-gradient"),
    ],
)
def test_modules_that_cannot_be_used_are_rejected(model: Any, code: str) -> None:
    with rejects(code, "model", of=ConfigError):
        problem(model())


@pytest.mark.parametrize(
    "row",
    [
        (of(nn.MSELoss()), "wrong-type", ("loss",)),
        (of(None), "wrong-type", ("loss",)),
        (of(lower=1.0), "wrong-type", ("lower",)),
        (of(upper=loss), "wrong-signature", ("upper",)),
        (of(evaluate=nn.Linear), "wrong-type", ("evaluate",)),
        (of(lambda model, batch: None), "wrong-result", ("loss",)),
        (of(lambda model, batch: (loss(model, batch), 1)), "wrong-result", ("loss",)),
        (of(lambda model, batch: loss(model, batch).mean()), "wrong-shape", ("loss",)),
        (of(lambda model, batch: loss(model, batch)[:2]), "wrong-shape", ("loss",)),
        (of(lambda model, batch: model(batch["a"])), "wrong-shape", ("loss",)),
        (of(lambda model, batch: loss(model, batch).detach()), "no-gradient", ("f",)),
        (of(lambda model, batch: model(batch["b"])), "missing-column", ("g",)),
        (
            of(lower=lambda theta, model, batch: loss(model, batch).mean()),
            "theta-unused",
            ("theta0",),
        ),
        (of(lower=lambda theta, model, batch: None), "not-scalar", ("g",)),
        (of(theta0=torch.zeros(3, dtype=F64)), "wrong-size", ("theta0",)),
        (of(theta0=torch.zeros(ROWS, 1, dtype=F64)), "wrong-size", ("theta0",)),
        (of(lambda batch, model: loss(model, batch)), "wrong-signature", ("loss",)),
        (of(lambda b, m: loss(m, b)), "loss-failed", ("g",)),
        (lambda: from_module(network(), loss, {"a": []}, UPPER), "no-rows", ("train",)),
        (lambda: from_module(network(), loss, TRAIN, {}), "no-rows", ("upper_data",)),
        (of(theta0=torch.zeros(ROWS, dtype=torch.long)), "wrong-dtype", ("theta0", "theta")),
        (of(upper_loss=loss), "unknown-option", ("upper_loss",)),
        (of(g=loss), "unknown-option", ("g",)),
    ],
    ids=lambda row: f"{row[1]} {row[2]}",
)
def test_wrong_arguments_are_rejected(row: tuple[Any, str, tuple[str, ...]]) -> None:
    call, code, place = row
    with rejects(code, *place, of=ConfigError):
        call()


def test_fresh_parameters_are_those_of_the_layers_own_way_by_a_key() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4), nn.Linear(4, 1)
    ).double()
    model[3].requires_grad_(False)
    generators = global_states(torch.device("cpu"))
    before = copy.deepcopy(dict(model.state_dict()))
    draw = fresh_parameters(model)
    first = draw(Key(0))
    assert_same(draw(Key(0)), first)
    assert not torch.equal(first["0.weight"], draw(Key(0).fold("other"))["0.weight"])
    assert global_states(torch.device("cpu")) == generators
    assert_same(dict(model.state_dict()), before)
    assert list(first) == [name for name, leaf in model.named_parameters() if leaf.requires_grad]
    assert_same(first["2.weight"], torch.ones(4, dtype=F64))
    assert_same(first["1.out_proj.bias"], torch.zeros(4, dtype=F64))  # as attention itself has it
    layer = nn.Linear(3, 1)
    drawn = problem(layer, fresh=fresh_parameters(layer)).initial(Key(5))
    torch.manual_seed(Key(5).derive())
    assert_same(drawn["weight"], nn.Linear(3, 1).weight.detach())
