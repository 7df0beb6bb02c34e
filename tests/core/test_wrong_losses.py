"""Mistakes in the losses: each is one error with a code and a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import rejects
from support.weighted_rows import MODULE, A, Y, by_hand, f, g, h, problem, started
from torch import nn

from hgms.adapters import trainable
from hgms.integrations.lower_solution import lower_solution
from hgms.solvers import CG
from hgms_core import ConfigError, Key

pytestmark = pytest.mark.plugins


def no_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    def inner(theta: Any, x: Any, batch: Any) -> Any:
        with torch.no_grad():
            return loss(theta, x, batch)

    return inner


def on_module(theta: Any, x: Any, batch: Any) -> Any:
    return (theta["t"] * MODULE(batch["a"]).squeeze(1)).mean()


def as_tuple(theta: Any, x: Any, batch: Any) -> Any:
    a, y = batch
    return (a @ x["w"] - y).square().mean()


def squares(theta: Any, x: Any) -> Any:
    return (x["w"] - theta["t"].sum()).square().sum()


HYPERGRADIENT: dict[str, tuple[Any, ...]] = {
    "a strategy": (lambda: h(strategy="vpj"), "unknown-choice", ("strategy",)),
    "a solver's name": (lambda: h(solver="cg"), "wrong-part", ("solver",)),
    "a solver's class": (lambda: h(solver=CG), "wrong-part", ("solver",)),
    "a leaf that is not there": (
        lambda: h(x={"a": Y}, f=lambda t, x: x["A"].sum()),
        "missing-column",
        ("f",),
    ),
    "v0 of another size": (lambda: h(v0=torch.zeros(3)), "wrong-shape", ("v0",)),
    "no solver": (lambda: h(solver=None), "wrong-part", ("solver",)),
    "a solver of b": (lambda: h(solver=lambda b: b), "wrong-signature", ("solver",)),
    "a solver like SciPy's": (
        lambda: h(solver=lambda matvec, b: (b, 0)),
        "wrong-result",
        ("solver",),
    ),
    "a solver's shape": (lambda: h(solver=lambda matvec, b: b[:1]), "wrong-result", ("solver",)),
    "x a module": (lambda: h(x=MODULE), "wrong-type", ("x",)),
    "x a state_dict": (
        lambda: h(x=nn.BatchNorm1d(2).state_dict()),
        "wrong-dtype",
        ("x", "num_batches_tracked"),
    ),
    "x empty": (lambda: h(x={}), "wrong-value", ("x",)),
    "θ empty": (lambda: h(theta=[]), "wrong-value", ("theta",)),
    "θ a number": (lambda: h(theta=0.5), "wrong-type", ("theta",)),
    "a loss with a batch": (lambda: h(f=f), "wrong-signature", ("f",)),
    "the value of a loss": (lambda: h(g=Y.sum()), "wrong-type", ("g",)),
    "losses of rows": (lambda: h(g=lambda t, x: (x - t) ** 2), "not-scalar", ("g",)),
    "a number of Python": (lambda: h(f=lambda t, x: x.sum().item()), "not-scalar", ("f",)),
    "no return": (lambda: h(g=lambda t, x: None), "not-scalar", ("g",)),
    "f without a gradient": (
        lambda: h(f=lambda t, x: x.detach().sum(), g=lambda t, x: ((x - t) ** 2).sum()),
        "no-gradient",
        ("f",),
    ),
    "no θ": (lambda: h(g=lambda t, x: (x**2).sum()), "theta-unused", ("theta",)),
    "θ detached": (
        lambda: h(g=lambda t, x: (x * t.detach()).square().sum()),
        "theta-unused",
        ("theta",),
    ),
    "a lower solution's solver": (
        lambda: (
            lower_solution(
                lambda t, x: (x - t).square().sum(), Y.clone().requires_grad_(), Y, solver="cg"
            )
            .sum()
            .backward()
        ),
        "wrong-part",
        ("solver",),
    ),
    "a lower solution's loss": (
        lambda: lower_solution(f, Y.clone().requires_grad_(), Y, solver=CG()),
        "wrong-signature",
        ("g",),
    ),
}


LOSSES: dict[str, tuple[Any, ...]] = {
    "losses of rows": (
        lambda: started(f=lambda t, x, b: (b["a"] @ x["w"] - b["y"]).square()),
        "not-scalar",
        ("f",),
    ),
    "g of rows": (
        lambda: started(g=lambda t, x, b: b["a"] @ x["w"] * t["t"]),
        "not-scalar",
        ("g",),
    ),
    "no return": (lambda: started(f=lambda t, x, b: None), "not-scalar", ("f",)),
    "two values": (lambda: started(g=lambda t, x, b: (g(t, x, b), 1)), "not-scalar", ("g",)),
    "a number of Python": (
        lambda: started(f=lambda t, x, b: f(t, x, b).item()),
        "not-scalar",
        ("f",),
    ),
    "an array": (
        lambda: started(f=lambda t, x, b: f(t, x, b).detach().numpy()),
        "not-scalar",
        ("f",),
    ),
    "a count": (
        lambda: started(f=lambda t, x, b: (b["a"] @ x["w"] > 0).sum()),
        "wrong-dtype",
        ("f",),
    ),
    "no_grad in f": (lambda: started(f=no_gradient(f)), "no-gradient", ("f",)),
    "no_grad in g": (lambda: started(g=no_gradient(g)), "theta-unused", ("theta0",)),
    "x detached": (
        lambda: started(g=lambda t, x, b: g(t, {"w": x["w"].detach()}, b)),
        "no-gradient",
        ("g",),
    ),
    "a row that the first check does not see": (
        lambda: started(
            g=lambda t, x, b: squares(t, x) + Y[b["late"]].sum(),
            lower_data={"late": [0] * 499 + [500]},
        ),
        "loss-failed",
        ("g",),
    ),
    "θ shorter than the rows": (
        lambda: started(
            g=lambda t, x, b: (t["t"][b["index"]].sigmoid() * (b["a"] @ x["w"] - 1)).mean(),
            lower_data={"a": torch.ones(80, 2)},
        ),
        "loss-failed",
        ("g",),
    ),
    "labels with an axis": (
        lambda: started(
            f=lambda t, x, b: nn.functional.cross_entropy((b["a"] @ x["w"])[:, None], b["c"]),
            upper_data={"a": A, "c": torch.zeros(6, 1, dtype=torch.int64)},
        ),
        "loss-failed",
        ("f",),
    ),
    "a batch as a tuple": (lambda: started(f=as_tuple, upper_data=(A, Y)), "loss-failed", ("f",)),
    "a batch by numbers": (
        lambda: started(f=lambda t, x, b: (b[0] @ x["w"] - b[1]).sum(), upper_data=(A, Y)),
        "missing-column",
        ("f",),
    ),
    "a batch of one column as a tuple": (
        lambda: started(f=as_tuple, upper_data=(A,)),
        "loss-failed",
        ("f",),
    ),
    "θ not used": (lambda: started(g=f), "theta-unused", ("theta0",)),
    "the module's own parameters": (
        lambda: started(x0=trainable(MODULE), g=on_module, f=on_module),
        "no-gradient",
        ("g",),
    ),
    "a column that is not there": (
        lambda: started(f=lambda t, x, b: (b["A"] @ x["w"]).sum()),
        "missing-column",
        ("f",),
    ),
    "a leaf that is not there": (
        lambda: started(g=lambda t, x, b: x["weight"].sum()),
        "missing-column",
        ("g",),
    ),
    "shapes": (
        lambda: started(f=lambda t, x, b: (b["a"] @ x["w"][:1]).sum()),
        "loss-failed",
        ("f",),
    ),
    "types": (lambda: started(lower_data={"a": A.double(), "y": Y}), "loss-failed", ("g",)),
    "a method that is not there": (
        lambda: started(f=lambda t, x, b: x["w"].summ()),
        "loss-failed",
        ("f",),
    ),
    "dropout": (
        lambda: started(g=lambda t, x, b: g(t, {"w": nn.functional.dropout(x["w"] + 1)}, b)),
        "random-loss",
        ("loss",),
    ),
    "numbers of numpy": (
        lambda: started(g=lambda t, x, b: g(t, x, b) + np.random.rand()),  # noqa: NPY002
        "random-loss",
        ("loss",),
    ),
    "rows changed in place": (
        lambda: started(f=lambda t, x, b: f(t, {"w": x["w"] + 1}, {**b, "y": b["y"].add_(1)})),
        "random-loss",
        ("loss",),
    ),
    "project without return": (
        lambda: started(project=lambda t: t.update(t=torch.zeros(6))),
        "wrong-result",
        ("project",),
    ),
    "project to other leaves": (
        lambda: started(project=lambda t: {"s": t["t"]}),
        "wrong-result",
        ("project",),
    ),
    "fresh of another size": (
        lambda: problem(fresh=lambda key: {"w": torch.zeros(3)}).initial(Key(0)),
        "wrong-result",
        ("fresh",),
    ),
    "evaluate of one number": (
        lambda: started(evaluate=lambda t, x: 0.5),
        "wrong-metric",
        ("evaluate",),
    ),
    "evaluate without return": (
        lambda: started(evaluate=lambda t, x: None),
        "wrong-metric",
        ("evaluate",),
    ),
    "evaluate of vectors": (
        lambda: started(evaluate=lambda t, x: {"w": x["w"]}),
        "wrong-metric",
        ("evaluate", "w"),
    ),
    "evaluate of text": (
        lambda: started(evaluate=lambda t, x: {"w": "good"}),
        "wrong-metric",
        ("evaluate", "w"),
    ),
    "by hand: a column": (
        lambda: by_hand(g=lambda t, x, b: (b["A"] @ x["w"]).sum()),
        "missing-column",
        ("g",),
    ),
    "by hand: losses of rows": (
        lambda: by_hand(f=lambda t, x, b: b["a"] @ x["w"]),
        "not-scalar",
        ("f",),
    ),
    "by hand: no θ": (lambda: by_hand(g=f), "theta-unused", ("theta0",)),
    "by hand: dropout": (
        lambda: by_hand(g=lambda t, x, b: g(t, {"w": nn.functional.dropout(x["w"] + 1)}, b)),
        "random-loss",
        ("loss",),
    ),
    "by hand: no_grad": (lambda: by_hand(g=no_gradient(g)), "theta-unused", ("theta0",)),
}


def cases(*tables: dict[str, tuple[Any, ...]]) -> Any:
    return pytest.mark.parametrize(
        ("wrong", "code", "place"),
        [pytest.param(*row, id=label) for table in tables for label, row in table.items()],
    )


@cases(HYPERGRADIENT, LOSSES)
def test_wrong_losses(wrong: Any, code: str, place: tuple[Any, ...]) -> None:
    with rejects(code, of=ConfigError) as caught:
        wrong()
    assert caught.value.place == place


def test_a_column_is_shown_as_it_is_to_be_written() -> None:
    for label, shown in (
        ("labels with an axis", "c [6, 1]"),
        ("a batch as a tuple", "batch['0'], batch['1']"),
    ):
        with rejects(LOSSES[label][1], *LOSSES[label][2], of=ConfigError) as caught:
            LOSSES[label][0]()
        assert shown in str(caught.value.hint)
