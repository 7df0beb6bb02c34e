"""``hgms.tune``: hypergradients, the safeguard, budgets, resume, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hgms
from hgms.tuning.candidate import Candidate, choose, cross_fitted, scores
from hgms.tuning.implicit import REWEIGHTED, SHIFTS, Implicit, Scanned, _surest, conjugate_gradients
from hgms.tuning.meter import Meter, NotConvex, Stages
from hgms.tuning.online import Adam, Online, Trained
from hgms.tuning.problem import build
from hgms_core import ConfigError, HgmsError

F64 = torch.float64
DECAY = {"decay": hgms.hyper.PerLayer()}


def squares(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return (model(batch["a"]) - batch["y"]).square().squeeze(1)


def entropies(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["a"]), batch["y"], reduction="none")


def sparse_rows(rows: int = 80, features: int = 20, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, features, generator=draw)
    return {"a": a, "y": a[:, :2].sum(1, keepdim=True) + torch.randn(rows, 1, generator=draw)}


def linear(features: int = 20, dtype: torch.dtype = torch.float32) -> nn.Linear:
    model = nn.Linear(features, 1, dtype=dtype)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def class_rows(rows: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, 4, generator=draw)
    return {"a": a, "y": (a[:, 0] + a[:, 1] > 0).long()}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


# --- hypergradients


def ridge_problem() -> Any:
    """Least squares in float64 with one penalty per feature and one weight per row."""
    draw = torch.Generator().manual_seed(1)
    rows = {
        "a": torch.randn(12, 3, generator=draw, dtype=F64),
        "y": torch.randn(12, 1, generator=draw, dtype=F64),
    }
    learn = {"decay": hgms.hyper.PerInput(init=0.3), "rows": hgms.hyper.PerRow()}
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False, dtype=F64)
    return build(model, squares, rows, None, learn, 3, 0).problem


def closed_form(problem: Any, u: Tensor, model: int) -> Tensor:
    """The lower solution of one model: weighted ridge regression."""
    fit = problem.masks.fit[model]
    a, y = problem.rows["a"], problem.rows["y"]
    weight = fit * problem.space.row_weights(u, problem.rows) / fit.sum()
    decay = problem.space.decay(u, 3)
    left = 2 * a.T @ (weight[:, None] * a) + torch.diag(decay)
    return torch.linalg.solve(left, 2 * a.T @ (weight[:, None] * y))[:, 0]


def test_the_implicit_engine_solves_and_differentiates_ridge_regression() -> None:
    problem = ridge_problem()
    engine = Implicit(problem, Meter(hgms.Budget("1000 steps"), 1))
    engine.scale = 1.0
    masks = problem.masks
    u = problem.space.start.expand(masks.folds + 1, -1).clone()
    w = engine.solve(problem.w0.expand(len(masks.group), -1), u[masks.group], masks.fit, 1e-13)
    exact = [closed_form(problem, row, k) for k, row in enumerate(u[masks.group])]
    torch.testing.assert_close(w, torch.stack(exact), rtol=1e-9, atol=1e-11)

    def upper(u: Tensor) -> Tensor:
        total = u.new_zeros(())
        for model, group in enumerate(masks.group.tolist()):
            outer = masks.outer[model]
            if not bool(outer.any()):
                continue
            errors = problem.rows["y"][:, 0] - problem.rows["a"] @ closed_form(
                problem, u[group], model
            )
            total = total + (outer * errors.square()).sum() / masks.count[group]
        return total

    leaf = u.clone().requires_grad_()
    (exact_slope,) = torch.autograd.grad(upper(leaf), leaf)
    slope, _ = engine.hypergradient(w, u, None)
    torch.testing.assert_close(slope, exact_slope, rtol=0.05, atol=1e-3)


def test_the_online_engine_differentiates_one_look_ahead_step() -> None:
    problem = ridge_problem()
    engine = Online(problem, Meter(hgms.Budget("1000 steps"), 1))
    masks = problem.masks
    w = problem.w0.expand(len(masks.group), -1)
    u = problem.space.start.expand(len(w), -1) + 0.1
    scale = torch.full_like(w, 0.05)
    batches = ([(masks.fit, problem.rows)], (masks.outer, problem.rows))
    leaf = u.clone().requires_grad_()
    (slope,) = torch.autograd.grad(engine.ahead(leaf, w, scale, *batches).sum(), leaf)
    step = 1e-6
    for entry in range(u.shape[1]):
        shift = torch.zeros_like(u)
        shift[:, entry] = step
        above = engine.ahead(u + shift, w, scale, *batches)
        below = engine.ahead(u - shift, w, scale, *batches)
        torch.testing.assert_close(slope[:, entry], (above - below) / (2 * step), atol=1e-7, rtol=0)


def test_batches_without_unused_rows_have_the_gradients_and_losses_of_all_rows() -> None:
    """Validation rows are excluded from lower steps, and training rows from judging."""
    draw = torch.Generator().manual_seed(3)
    tables = [
        {
            "a": torch.randn(count, 3, generator=draw, dtype=F64),
            "y": torch.randn(count, 1, generator=draw, dtype=F64),
        }
        for count in (9, 6)
    ]
    learn = {"rows": hgms.hyper.PerRow(), "decay": hgms.hyper.PerInput(init=0.2)}
    model = nn.Linear(3, 1, dtype=F64)
    problem = build(model, squares, *tables, learn, 2, 0).problem
    engine = Online(problem, Meter(hgms.Budget("1000 steps"), 1))
    masks = problem.masks
    w = torch.randn(3, 4, generator=draw, dtype=F64)
    u = 0.3 * torch.randn(3, 12, generator=draw, dtype=F64)
    fit, batch = engine.batches(masks.fit, engine.key, 1)(0)
    assert batch["index"].tolist() == list(range(9))
    whole = problem.slope(w, u, masks.fit, problem.rows)
    torch.testing.assert_close(problem.slope(w, u, fit, batch), whole, rtol=1e-12, atol=1e-14)
    each = torch.stack([problem.row_losses(one, u[0], problem.rows, False) for one in w])
    expected = (masks.held * each).sum(0)[9:]
    torch.testing.assert_close(problem.held_out(w), expected, rtol=1e-12, atol=1e-14)


def central_difference(function: Any, u: Tensor, entry: int, step: float = 1e-5) -> Tensor:
    shift = torch.zeros_like(u)
    shift[..., entry] = step
    difference: Tensor = (function(u + shift) - function(u - shift)) / (2 * step)
    return difference


def started_problem() -> Any:
    """Least squares in float64 with penalties, factors of the rate, and a learned start."""
    draw = torch.Generator().manual_seed(1)
    rows = {
        "a": torch.randn(12, 3, generator=draw, dtype=F64),
        "y": torch.randn(12, 1, generator=draw, dtype=F64),
    }
    learn = {
        "decay": hgms.hyper.PerInput(init=0.3),
        "rate": hgms.hyper.LearningRate(),
        "start": hgms.hyper.Initialisation(strength=0.7, width=0.2),
    }
    torch.manual_seed(0)
    return build(nn.Linear(3, 1, dtype=F64), squares, rows, None, learn, 3, 0).problem


def with_bias(problem: Any) -> Tensor:
    a = problem.rows["a"]
    return torch.cat([a, torch.ones_like(a[:, :1])], 1)


def by_hand(problem: Any, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The penalty, the rate and the start of the four parameters, from the numbers u."""
    decay = torch.cat([u[:3].exp(), torch.zeros(1, dtype=F64)])
    rate = torch.cat([u[3].exp().expand(3), u[4:5].exp()])
    return decay, rate, problem.w0 + 0.2 * u[5:]


def test_the_online_engine_differentiates_rates_and_starts_through_several_steps() -> None:
    problem = started_problem()
    engine = Online(problem, Meter(hgms.Budget("1000 steps"), 1))
    masks = problem.masks
    a, y = with_bias(problem), problem.rows["y"][:, 0]
    draw = torch.Generator().manual_seed(2)
    start = torch.randn(len(masks.group), 4, generator=draw, dtype=F64)
    u = 0.3 * torch.randn(len(masks.group), 9, generator=draw, dtype=F64)
    scale = torch.full_like(start, 0.05)

    def unrolled(u: Tensor) -> Tensor:
        totals = []
        for model in range(len(u)):
            fit, outer = masks.fit[model], masks.outer[model]
            decay, rate, centre = by_hand(problem, u[model])
            w = start[model]
            for _ in range(5):
                slope = 2 * a.T @ (fit * (a @ w - y)) / fit.sum()
                w = w - 0.05 * rate * (slope + decay * w + 0.7 * (w - centre))
            totals.append((outer * (a @ w - y).square()).sum() / outer.sum().clamp_min(1))
        return torch.stack(totals)

    batches = ([(masks.fit, problem.rows)] * 5, (masks.outer, problem.rows))
    torch.testing.assert_close(engine.ahead(u, start, scale, *batches), unrolled(u))
    leaf = u.clone().requires_grad_()
    (slope,) = torch.autograd.grad(engine.ahead(leaf, start, scale, *batches).sum(), leaf)
    for entry in range(9):
        expected = central_difference(unrolled, u, entry)
        torch.testing.assert_close(slope[:, entry], expected, atol=1e-8, rtol=1e-6)
    is_used = masks.outer.any(1)
    assert bool((slope[is_used][:, 3:] != 0).all())


def test_the_implicit_engine_differentiates_a_learned_start() -> None:
    problem = started_problem()
    engine = Implicit(problem, Meter(hgms.Budget("1000 steps"), 1))
    engine.scale = 1.0
    masks = problem.masks
    a, y = with_bias(problem), problem.rows["y"][:, 0]
    draw = torch.Generator().manual_seed(2)
    u = 0.3 * torch.randn(masks.folds + 1, 9, generator=draw, dtype=F64)

    def hessian(u: Tensor, model: int) -> Tensor:
        fit = masks.fit[model]
        decay = by_hand(problem, u)[0]
        return 2 * a.T @ (fit[:, None] * a) / fit.sum() + torch.diag(decay + 0.7)

    def solution(u: Tensor, model: int) -> Tensor:
        fit = masks.fit[model]
        right = 2 * a.T @ (fit * y) / fit.sum() + 0.7 * by_hand(problem, u)[2]
        return torch.linalg.solve(hessian(u, model), right)

    def upper(u: Tensor) -> Tensor:
        totals = torch.zeros(masks.folds + 1, dtype=F64)
        for model, group in enumerate(masks.group.tolist()):
            errors = y - a @ solution(u[group], model)
            totals[group] += (masks.outer[model] * errors.square()).sum() / masks.count[group]
        return totals

    each = u[masks.group]
    w = engine.solve(problem.w0.expand(len(each), -1), each, masks.fit, 1e-13)
    exact = torch.stack([solution(row, k) for k, row in enumerate(each)])
    torch.testing.assert_close(w, exact, rtol=1e-9, atol=1e-11)
    v = []
    for model, group in enumerate(masks.group.tolist()):
        slope = 2 * a.T @ (masks.outer[model] * (a @ w[model] - y)) / masks.count[group]
        v.append(torch.linalg.solve(hessian(each[model], model), slope))
    slope, _ = engine.hypergradient(w, u, torch.stack(v))  # exact v: the solver has no error
    for entry in range(9):
        expected = central_difference(upper, u, entry)
        torch.testing.assert_close(slope[:, entry], expected, atol=1e-7, rtol=1e-5)


class TwoLayers(nn.Module):
    """A layer for two relevant features, and a layer for 100 irrelevant features."""

    def __init__(self) -> None:
        super().__init__()
        self.signal = nn.Linear(2, 1)
        self.noise = nn.Linear(100, 1, bias=False)

    def forward(self, a: Tensor) -> Tensor:
        out: Tensor = self.signal(a[:, :2]) + self.noise(a[:, 2:])
        return out


def test_the_rate_of_a_layer_of_noise_falls() -> None:
    draw = torch.Generator().manual_seed(1)
    a = torch.randn(160, 102, generator=draw)
    y = a[:, :2].sum(1, keepdim=True) + 0.3 * torch.randn(160, 1, generator=draw)
    torch.manual_seed(0)
    result = hgms.tune(
        TwoLayers(),
        squares,
        {"a": a[:60], "y": y[:60]},
        {"a": a[60:], "y": y[60:]},
        learn={"rate": hgms.hyper.LearningRate()},
        budget="600 steps",
    )
    assert result.engine == "online"
    assert result.is_learned
    signal, _, noise = result.values["rate"].tolist()
    assert noise < 0.7 < 1.0 < signal


def shifted_rows(rows: int, shift: float, seed: int) -> dict[str, Tensor]:
    """Rows of a linear model; ``shift`` is added to two of its 20 coefficients."""
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, 20, generator=draw)
    weights = torch.linspace(1, -1, 20)
    weights[:2] += shift
    noise = 0.5 * torch.randn(rows, 1, generator=draw)
    return {"a": a, "y": (a @ weights)[:, None] + noise}


def test_a_start_is_learned_if_validation_rows_differ() -> None:
    result = hgms.tune(
        linear(),
        squares,
        shifted_rows(100, 0.0, 0),
        shifted_rows(60, 2.0, 1),
        learn={"start": hgms.hyper.Initialisation(width=1.0)},
        budget="300 steps",
        test=shifted_rows(500, 2.0, 2),
    )
    assert result.engine == "implicit"
    assert result.is_learned
    baselines = [row.test_loss for row in result.table if row.is_baseline]
    assert result.test_loss is not None
    assert result.test_loss < 0.5 * min(baselines)
    start = result.values["start"]
    assert start[:20].abs().topk(2).indices.sort().values.tolist() == [0, 1]


def test_rates_require_the_online_engine() -> None:
    with pytest.raises(ConfigError, match="no learning rate") as caught:
        hgms.tune(
            linear(),
            squares,
            sparse_rows(),
            learn={"rate": hgms.hyper.LearningRate()},
            budget="20 steps",
            engine="implicit",
        )
    assert (caught.value.code, caught.value.place) == ("not-supported", ("learn",))
    assert caught.value.hint == 'use engine="online"'


def test_adam_equals_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(5, generator=draw, dtype=F64)
    leaf = w.clone().requires_grad_()
    other = torch.optim.Adam([leaf], lr=0.1, betas=(0.9, 0.99), eps=1e-6)
    adam = Adam.of(w, 0.1)
    for _ in range(7):
        other.zero_grad()
        leaf.square().sum().backward()
        other.step()
        adam.observe(2 * w)
        w = adam.move(w)
    torch.testing.assert_close(w, leaf.detach())


def test_only_curvature_beyond_rounding_is_negative() -> None:
    """The Hessian of a softmax is flat along equal shifts of all logits, up to rounding."""
    share = torch.full((1, 8), 0.125) * (1 + 1e-6)  # a sum above 1, as after rounding

    def product(v: Tensor, shift: float = 0.0) -> Tensor:
        return share * v - share * (share * v).sum() + shift * v

    flat = torch.ones(1, 8)
    assert float((flat * product(flat)).sum()) < 0
    assert bool(conjugate_gradients(product, flat, share, 1e-4, 20).isfinite().all())
    with pytest.raises(NotConvex):
        conjugate_gradients(partial(product, shift=-1e-3), flat, share, 1e-4, 20)


@pytest.mark.parametrize(("noise", "init"), [(0.1, 0.01), (0.1, 0.027), (3.0, 0.01)])
def test_the_shared_level_has_the_largest_gain_minus_the_doubt(noise: float, init: float) -> None:
    rows = sparse_rows()
    rows["y"] = rows["y"] + noise * torch.randn(
        rows["y"].shape, generator=torch.Generator().manual_seed(7)
    )
    learn = {"decay": hgms.hyper.PerInput(init=init)}
    problem = build(linear(), squares, rows, None, learn, 4, 0).problem
    engine = Implicit(problem, Meter(hgms.Budget("10000 steps"), 1))
    engine.scale = 1.0
    masks = problem.masks
    own = masks.group == masks.folds

    def outer_losses(u: Tensor) -> Tensor:
        w = engine.solve(problem.w0.expand(len(masks.group), -1), u[masks.group], masks.fit)
        return problem.losses_under(w[own], masks.outer[own])

    start = problem.space.start.expand(masks.folds + 1, -1)
    u = engine.scan()["u"]
    levels = [start + shift for shift in SHIFTS if shift] + [u, u + 1, u - 1]
    losses = [outer_losses(level) for level in (start, *levels)]
    lowest = min(float(rows.mean()) for rows in losses)

    def cost(rows: Tensor) -> float:
        change = rows - losses[0]
        error = float(change.std()) / len(change) ** 0.5
        return float(change.mean()) + min(error, 0.05 * lowest)

    costs = [0.0 if torch.equal(level, start) else cost(outer_losses(level)) for level in levels]
    here = costs[len(SHIFTS) - 1]
    for level, other in zip(levels, costs, strict=True):
        assert torch.equal(level, u) or torch.equal(level, start) or other > here
    assert here <= 0


def test_a_small_uncertain_gain_does_not_move_the_shared_level() -> None:
    start = scanned(0, [1.0, 1.0, 1.0])
    likely = scanned(2, [0.7, 0.8, 0.9])
    uncertain = scanned(4, [0.2, 1.9, 0.87])  # a gain of 0.01 ± 0.49
    assert _surest([uncertain, start], start) is start
    assert _surest([uncertain, likely, start], start) is likely


def test_a_large_gain_of_few_rows_moves_the_shared_level() -> None:
    start = scanned(0, [5.0, 1.0, 0.1])
    smaller = scanned(2, [1.1, 1.0, 0.9])  # a gain of 1.0 ± 1.5
    assert _surest([smaller, start], start) is smaller


def scanned(value: float, rows: list[float]) -> Scanned:
    return Scanned(value, torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor(rows))


# --- roles of the rows


@pytest.mark.parametrize("validation", [None, 30])
def test_judged_rows_are_used_by_no_other_role(validation: int | None) -> None:
    upper = None if validation is None else sparse_rows(validation, seed=1)
    learn = {"decay": hgms.hyper.PerInput()}
    problem = build(linear(), squares, sparse_rows(), upper, learn, 3, 0).problem
    masks = problem.masks
    assert not bool((masks.fit * masks.outer).any())
    for k in range(masks.folds):
        own = masks.group == k
        used = (masks.fit[own] + masks.outer[own]).sum(0)
        assert not bool((used * masks.held[own].sum(0)).any())
    judged = masks.held.sum(0)
    first = 0 if validation is None else problem.train_size
    assert judged.tolist() == [0.0] * first + [1.0] * (problem.total - first)


def test_the_filter_of_a_replica_does_not_use_the_rows_that_judge_it() -> None:
    train, upper = sparse_rows(60, 4), sparse_rows(30, 4, seed=1)
    train["y"][::4] *= -3
    learn = {"rows": hgms.hyper.PerRow()}

    def kept(validation: dict[str, Tensor]) -> Tensor:
        problem = build(linear(4), squares, train, validation, learn, 3, 0).problem
        engine = Implicit(problem, Meter(hgms.Budget("1000 steps"), 1))
        engine.scale = 1.0
        return engine.filter_rows()["keep"]

    first = build(linear(4), squares, train, upper, learn, 3, 0).problem.masks.held[0]
    changed = {name: column.clone() for name, column in upper.items()}
    changed["y"][first[60:] > 0] += 20.0
    keep, after = kept(upper), kept(changed)
    assert keep.shape == (4, 60)
    assert int(keep[-1, ::4].sum()) < 3
    assert torch.equal(after[0], keep[0])
    assert not torch.equal(after[1:], keep[1:])


@pytest.mark.parametrize(("cost", "filters"), [(0.01, 4), (0.2, 1)])
def test_a_filter_per_replica_must_fit_into_the_budget(cost: float, filters: int) -> None:
    learn = {"rows": hgms.hyper.PerRow()}
    problem = build(network(), entropies, class_rows(60), class_rows(30, 1), learn, 3, 0).problem
    engine = Online(problem, Meter(hgms.Budget("1000 steps"), 4))
    engine.rate, engine.best_step, engine.best_cost = 0.01, 5, cost
    assert engine.filter_rows()["keep"].shape == (filters, 60)


# --- results


def test_sparse_regression_learns_larger_penalties_for_irrelevant_features() -> None:
    result = hgms.tune(
        linear(),
        squares,
        sparse_rows(),
        learn={"decay": hgms.hyper.PerInput(init=0.01)},
        budget="200 steps",
        test=sparse_rows(500, seed=2),
    )
    decay = result.values["decay"]
    assert result.engine == "implicit"
    assert result.selected not in ("start", "shared level")
    assert float(decay[:2].max()) < float(decay[2:].median())
    rows = {row.name: row for row in result.table}
    assert {"start", "shared level"} == {row.name for row in result.table if row.is_baseline}
    assert rows["reweighted"].test_loss < 0.95 * rows["start"].test_loss
    assert rows["reweighted"].test_loss < 0.97 * rows["shared level"].test_loss
    assert rows["reweighted, squared"].loss < 0.97 * rows["reweighted"].loss
    assert result.test_loss is not None
    assert result.test_loss < 0.95 * rows["shared level"].test_loss
    loss = squares(result.model, sparse_rows(500, seed=2)).mean()
    assert float(loss.detach()) == pytest.approx(result.test_loss, rel=1e-5)


def test_wrong_labels_get_small_weights_or_are_removed() -> None:
    train = class_rows(80)
    wrong = torch.arange(80) % 4 == 0
    train["y"] = torch.where(wrong, 1 - train["y"], train["y"])
    result = hgms.tune(
        network(),
        entropies,
        train,
        class_rows(60, seed=1),
        learn={"rows": hgms.hyper.PerRow()},
        budget="400 steps",
    )
    assert result.engine == "online"
    names = {row.name for row in result.table}
    assert {"validation rows only", "out-of-fold filter", "learned during training"} <= names
    learned = min((row for row in result.table if not row.is_baseline), key=lambda row: row.loss)
    start = min(
        (row for row in result.table if row.name.startswith("start, r")), key=lambda r: r.loss
    )
    assert learned.loss < start.loss


def test_batch_normalisation_and_dropout_are_trained_in_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
    )
    before = {name: leaf.clone() for name, leaf in model.state_dict().items()}
    result = hgms.tune(
        model,
        entropies,
        class_rows(90),
        class_rows(60, seed=1),
        learn={"decay": hgms.hyper.PerLayer(init=1e-3)},
        budget="160 steps",
        batch_size=32,
    )
    assert result.engine == "online"
    for name, leaf in model.state_dict().items():
        assert torch.equal(leaf, before[name]), name
    test = class_rows(300, seed=2)
    outputs = result.model.eval()(test["a"])
    assert float((outputs.argmax(1) == test["y"]).float().mean()) > 0.85


def test_values_for_the_loss_are_neutral_in_validation() -> None:
    seen: list[float] = []

    def loss(model: Any, batch: Mapping[str, Tensor], hyper: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["a"]).log_softmax(-1)
        smooth = hyper["smoothing"]
        if not torch._C._functorch.is_functorch_wrapped_tensor(smooth):
            seen.append(float(smooth.detach()))
        own = -logits.gather(1, batch["y"][:, None]).squeeze(1)
        return (1 - smooth) * own - smooth * logits.mean(1)

    result = hgms.tune(
        network(),
        loss,
        class_rows(40),
        class_rows(40, seed=1),
        learn={"smoothing": hgms.hyper.Scalar(0.3, low=0.0, high=0.5, neutral=0.0)},
        budget="200 steps",
        test=class_rows(20, seed=2),
    )
    assert seen[-1] == 0.0
    assert 0.0 <= float(result.values["smoothing"]) <= 0.5
    assert float(result.starts["smoothing"]) == pytest.approx(0.3)


# --- the safeguard


def judged(name: str, rows: list[float], is_baseline: bool) -> Candidate:
    values = torch.tensor(rows)
    return Candidate(name=name, is_baseline=is_baseline, judged=values, u=torch.zeros(1))


FOLD = torch.arange(12) % 3


@pytest.mark.parametrize("power", REWEIGHTED.values())
def test_reweighted_penalties_are_those_of_a_group_penalty(power: int) -> None:
    """At a fixed point of the reweighting, the gradient is that of Σ ℓ + c Σ_g √n_g ‖w_g‖ for
    power 1, and of Σ ℓ + c Σ_g n_g log ‖w_g‖ for power 2, up to the smallest size.
    """
    groups = (0, 0, 0, 1, 1, 2, 2, 2, 2, 2)
    rows = {name: column.double() for name, column in sparse_rows(60, 10).items()}
    learn = {"decay": hgms.hyper.PerInput(init=0.1, groups=groups)}
    problem = build(linear(10, F64), squares, rows, None, learn, None, 0).problem
    engine = Implicit(problem, Meter(hgms.Budget("10000 steps"), len(problem.masks.group)))
    units = engine.units()
    engine.curvature = units["curvature"]
    engine.scale = float(units["scale"])
    fit = torch.ones_like(problem.masks.fit)
    start = problem.space.start
    w = problem.w0.expand(len(fit), -1)
    for _ in range(60):
        u = (start - power * engine._log_sizes(w)).expand(problem.masks.folds + 1, -1)
        w = engine.solve(w, u[problem.masks.group], fit, 1e-9)
    own = w[0].clone().requires_grad_()
    zero = torch.full_like(start, -60.0)
    value = problem.train_loss(own, zero, fit[0], problem.rows)
    (slope,) = torch.autograd.grad(value, own)
    index = problem.space.blocks["decay"].index
    size = torch.stack([w[0][index == g].square().mean().sqrt() for g in range(3)])
    mean = size.square().mean().sqrt()
    for g in range(3):
        inside = index == g
        expected = 0.1 * w[0][inside] / (size[g] / mean + 0.01) ** power
        torch.testing.assert_close(-slope[inside], expected, rtol=1e-4, atol=1e-7)


def test_penalties_for_squared_sizes_continue_from_those_of_an_l1_penalty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have the same shared level; the strengths for squared sizes are larger by one."""
    tried: list[tuple[list[float], torch.Tensor]] = []

    def train(engine: Implicit, values: list[float], u_of: Any, w: torch.Tensor) -> list[Scanned]:
        u = u_of(values[0], w)
        tried.append((values, u))
        return [Scanned(values[0], u, w, torch.zeros(2))]

    monkeypatch.setattr(Implicit, "_train", train)
    learn = {"decay": hgms.hyper.PerInput(init=0.1)}
    problem = build(linear(10), squares, sparse_rows(60, 10), None, learn, None, 0).problem
    engine = Implicit(problem, Meter(hgms.Budget("10000 steps"), len(problem.masks.group)))
    u = problem.space.start.expand(problem.masks.folds + 1, -1)
    w = torch.linspace(0.5, 2.0, len(problem.w0)).expand(len(problem.masks.group), -1)
    first = engine.reweight(1, {"u": u, "w": w})
    engine.reweight(2, first)
    sizes = engine._log_sizes(w)
    torch.testing.assert_close(tried[0][1], u - sizes)
    torch.testing.assert_close(tried[1][1], u + 1 - 2 * sizes)
    assert [sorted(set(values)) for values, _ in tried] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_a_learned_candidate_must_gain_more_than_the_noise() -> None:
    base = judged("base", [1.0] * 12, True)
    noisy = judged("noisy", [0.0, 2.0, 0.0, 1.9] * 3, False)
    clear = judged("clear", [0.9, 0.95, 0.92, 0.9] * 3, False)
    few = judged("few", [0.5] + [0.99] * 11, False)
    assert choose([base, noisy], FOLD)[0] is base
    assert choose([base, noisy, clear], FOLD)[0] is clear
    assert choose([base, judged("nan", [float("nan")] * 12, False)], FOLD)[0] is base
    assert choose([base, few], FOLD)[0] is base  # most of the gain is in one row


def test_the_selection_among_learned_candidates_is_judged_by_cross_fitting() -> None:
    """Each candidate is good on one fold only: the other folds select another one."""
    base = judged("base", [1.0] * 12, True)
    learned = []
    for k in range(3):
        rows = torch.where(FOLD.eq(k), 0.2, 1.1)
        learned.append(judged(f"fold {k}", rows.tolist(), False))
    rows = cross_fitted(learned, base, FOLD)
    torch.testing.assert_close(rows, torch.full((12,), 1.1))
    assert choose([base, *learned], FOLD)[0] is base


def test_checkpoints_of_a_replica_are_selected_by_the_other_folds() -> None:
    torch.manual_seed(0)
    train, validation = class_rows(40), class_rows(30, seed=1)
    problem = build(network(), entropies, train, validation, DECAY, 3, 0).problem
    masks = problem.masks
    draw = torch.Generator().manual_seed(0)
    checks = torch.rand(5, len(masks.fold), generator=draw)
    best = None
    for step, rows in enumerate(checks):
        found = Trained(
            w=torch.full((4, 2), float(step)),
            u=torch.full((4, 1), float(step)),
            judged=rows,
            scores=scores(rows, masks.fold),
            step=step,
        )
        best = found if best is None else best.merge(found, masks)
    assert best is not None
    for k in range(3):
        other = checks[:, masks.fold != k].mean(1).argmin()
        assert float(best.w[k, 0]) == float(other)
        torch.testing.assert_close(best.judged[masks.fold == k], checks[other][masks.fold == k])
    assert best.step == float(best.w[3, 0]) == float(checks.mean(1).argmin())


# --- budgets and resume


def test_a_budget_in_steps_is_met() -> None:
    for budget in (40, 80):
        result = hgms.tune(
            network(),
            entropies,
            class_rows(40),
            class_rows(30, seed=1),
            learn={"decay": hgms.hyper.PerLayer(init=1e-3)},
            budget=f"{budget} steps",
        )
        assert result.spent["steps"] <= budget


@pytest.mark.parametrize("engine", ["implicit", "online"])
def test_an_interrupted_call_resumes_with_equal_numbers(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(folder: Path) -> Any:
        return hgms.tune(
            linear(4),
            squares,
            sparse_rows(40, 4),
            sparse_rows(20, 4, seed=1),
            learn={"decay": hgms.hyper.PerInput(init=0.01)},
            budget="60 steps",
            engine=engine,
            folder=folder,
        )

    whole = call(tmp_path / "whole")
    compute = Stages._compute
    count = 0

    def interrupted(self: Stages, name: str, function: Any) -> Any:
        nonlocal count
        if self.left:
            count += 1
        if count == 4:
            raise KeyboardInterrupt
        return compute(self, name, function)

    monkeypatch.setattr(Stages, "_compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path / "parts")
    monkeypatch.setattr(Stages, "_compute", compute)
    assert len(list((tmp_path / "parts").glob("*.pt"))) == 3
    resumed = call(tmp_path / "parts")
    assert [row.loss for row in resumed.table] == [row.loss for row in whole.table]
    assert torch.equal(resumed.values["decay"], whole.values["decay"])
    assert torch.equal(resumed.model.weight, whole.model.weight)
    with pytest.raises(HgmsError) as caught:
        hgms.tune(
            linear(4),
            squares,
            sparse_rows(40, 4, seed=3),
            sparse_rows(20, 4, seed=1),
            learn={"decay": hgms.hyper.PerInput(init=0.01)},
            budget="60 steps",
            engine=engine,
            folder=tmp_path / "whole",
        )
    assert caught.value.code == "other-settings"


def test_stages_of_two_engines_in_one_folder_are_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The implicit engine fails after its baselines, and the online engine has the same names."""

    def fails(self: Implicit) -> Any:
        raise NotConvex

    monkeypatch.setattr(Implicit, "scan", fails)

    def call(folder: Path | None) -> Any:
        return hgms.tune(
            linear(4),
            squares,
            sparse_rows(40, 4),
            sparse_rows(20, 4, seed=1),
            learn={"decay": hgms.hyper.PerInput(init=0.01)},
            budget="60 steps",
            folder=folder,
        )

    stored, again, plain = call(tmp_path / "work"), call(tmp_path / "work"), call(None)
    assert stored.engine == again.engine == plain.engine == "online"
    tables = [[(row.name, row.loss) for row in each.table] for each in (stored, again, plain)]
    assert tables[0] == tables[1] == tables[2]


def test_a_result_is_printed_drawn_and_saved(tmp_path: Path) -> None:
    result = hgms.tune(
        linear(4),
        squares,
        sparse_rows(40, 4),
        learn={"decay": hgms.hyper.PerInput(init=0.01)},
        budget="60 steps",
    )
    text = str(result)
    assert all(row.name in text for row in result.table)
    folder = result.save(tmp_path / "saved")
    assert torch.equal(torch.load(folder / "values.pt")["decay"], result.values["decay"])
    figure = result.plot()
    assert len(figure.axes) == 2


# --- errors


def ignoring(model: Any, batch: Mapping[str, Tensor], hyper: Mapping[str, Tensor]) -> Tensor:
    return squares(model, batch)


def detached(model: Any, batch: Mapping[str, Tensor], hyper: Mapping[str, Tensor]) -> Tensor:
    return squares(model, batch) * hyper["scale"].detach()


SCALE = {"scale": hgms.hyper.Scalar(1.0)}


@pytest.mark.parametrize(
    ("loss", "learn", "code", "place"),
    [
        (squares, {}, "wrong-type", ("learn",)),
        (squares, {"scale": hgms.hyper.Scalar}, "wrong-part", ("learn", "scale")),
        (squares, SCALE, "loss-ignores-hyper", ("learn", "scale")),
        (ignoring, SCALE, "no-effect", ("learn", "scale")),
        (detached, SCALE, "no-effect", ("learn", "scale")),
        (
            lambda m, b: squares(m, b).sum(),
            {"decay": hgms.hyper.PerInput()},
            "wrong-shape",
            ("loss",),
        ),
        (
            squares,
            {"class": hgms.hyper.PerClass("z")},
            "missing-column",
            ("learn", "class", "column"),
        ),
        (
            squares,
            {"class": hgms.hyper.PerClass("y")},
            "wrong-column",
            ("learn", "class", "column"),
        ),
        (
            squares,
            {"decay": hgms.hyper.PerInput(groups=(0, 1))},
            "wrong-length",
            ("learn", "decay", "groups"),
        ),
    ],
)
def test_wrong_arguments_are_errors(loss: Any, learn: Any, code: str, place: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        hgms.tune(linear(), loss, sparse_rows(), learn=learn, budget="10 steps")
    assert (caught.value.code, caught.value.place) == (code, place)


def test_the_implicit_engine_rejects_networks() -> None:
    with pytest.raises(ConfigError) as caught:
        hgms.tune(
            network(),
            entropies,
            class_rows(40),
            learn={"decay": hgms.hyper.PerLayer(init=1e-6)},
            budget="200 steps",
            engine="implicit",
        )
    assert caught.value.code == "not-convex"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (lambda: hgms.hyper.Scalar(2.0, high=1.0), "out-of-range"),
        (lambda: hgms.hyper.Scalar("a"), "wrong-type"),
        (lambda: hgms.hyper.PerLayer(init=0.0), "out-of-range"),
        (lambda: hgms.hyper.PerLayer(init=1e-9), "out-of-range"),
        (lambda: hgms.hyper.Values([1.0]), "wrong-type"),
        (lambda: hgms.hyper.Values(torch.tensor([2.0]), transform="logit"), "out-of-range"),
    ],
)
def test_wrong_kinds_are_errors(kind: Any, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind()
    assert caught.value.code == code
