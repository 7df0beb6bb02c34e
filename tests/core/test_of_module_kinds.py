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
    Half,
    Locked,
    Recurrent,
    assert_products,
    at_rows,
    by_hand,
    loss,
    network,
    of,
    pipeline,
    problem,
    products,
    rows,
    scripted,
    slope,
    stepped,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.solvers import CG
from hgms_core import (
    ROLES,
    ConfigError,
    Data,
    Key,
    Problem,
    Tree,
    fresh_parameters,
    groups,
    hypergradient,
    values,
)
from hgms_core.seeding import global_states


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
        (lambda: Problem.of_module(network(), loss, {"a": []}, UPPER), "no-rows", ("train",)),
        (lambda: Problem.of_module(network(), loss, TRAIN, {}), "no-rows", ("upper_data",)),
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


def test_a_batch_of_one_row_has_no_statistics() -> None:
    p = problem(network(nn.BatchNorm1d(6)))
    with rejects("too-few-rows", "model", of=ConfigError):
        p.g(p.theta0, p.x0, rows(range(1)))


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
