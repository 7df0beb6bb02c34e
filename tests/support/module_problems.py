"""Small modules, their rows and their products, for `Problem.of_module`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations

from hgms.adapters import from_module
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.optim import SGD
from hgms.outer import Sgd
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import ROLES, Data, Key, Pipeline, Problem, Tree, curvature
from support.helpers import F64, assert_same, normal

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
    return from_module(model, loss, TRAIN, UPPER, **more)


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
        "generator": Branches(count=2, steps=3, optimizer=SGD(lr=0.1), batch_size=5),
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


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm1d(6),
    lambda: nn.Dropout(0.4),
    lambda: nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.2)),
    lambda: nn.LayerNorm(6),
    lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
]


def at_rows(p: Problem) -> tuple[Any, Any]:
    return (lambda theta, x: p.f(theta, x, rows()), lambda theta, x: p.g(theta, x, rows()))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.out = kind(1, 4, num_layers=2, batch_first=True), nn.Linear(4, 1)

    def forward(self, a: Tensor) -> Tensor:
        out: Tensor = self.out(self.cell(a[..., None])[0][:, -1])
        return out


def slope(p: Problem, method: Implicit) -> Tensor:
    branch = Branches(count=1, steps=1, optimizer=SGD(lr=1e-9)).propose(
        p, p.theta0, Branches(count=1).init(p, Key(0)), Key(0)
    )
    return method.estimate(
        p, p.theta0, *branch.branch(torch.tensor(0)).as_candidates(), Key(0), None
    )[0].value["theta"]


class Locked(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a lock is in it")


class Checkpointed(nn.Linear):
    gradient_checkpointing = True


def scripted() -> Any:
    return torch.jit.script(nn.Linear(3, 1))


def of(loss: Any = loss, **more: Any) -> Any:
    return lambda: stepped(from_module(network(), loss, TRAIN, UPPER, **more), pipeline())
