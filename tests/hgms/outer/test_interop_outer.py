"""torch's optimisers as outer optimisers: the numbers of the optimiser kept alive, as a value
that can be written down.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import torch
from support.helpers import F64, assert_same, normal, rejects
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from hgms.config import Budget
from hgms.outer import Schedule, Sgd, TorchOptimizer
from hgms.runs import RunConfig, pack, run, unpack
from hgms.testing import Check, parametrize_with_checks
from hgms_core import Tree

pytestmark = pytest.mark.usefixtures("one_registry")
EVERY: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.1},
    "Adagrad": {"lr": 0.3, "lr_decay": 0.01},
    "Adam": {"lr": 0.1, "amsgrad": True, "betas": (0.8, 0.95)},
    "AdamW": {"lr": 0.1, "weight_decay": 0.2},
    "Adamax": {"lr": 0.1},
    "ASGD": {"lr": 0.1, "t0": 3.0},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "RMSprop": {"lr": 0.02, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.05},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}
SCHEDULES: dict[str, Any] = {
    "step": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "cycle": lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=12),
}


@pytest.mark.extended
@parametrize_with_checks(
    [
        TorchOptimizer(optimizer=name, settings={"lr": 0.1})
        for name in ("NAdam", "Adam", "RAdam", "Adagrad", "Rprop", "SGD")
    ]
)
def test_conformance(component: Any, check: Check) -> None:
    check(component)


def start(dtype: torch.dtype = F64) -> Tree:
    return {"a": normal(3, 2, seed=1).to(dtype), "b": torch.tensor(0.7, dtype=dtype)}


def slope(theta: Tree, step: int) -> Tree:
    """Of a bent loss, with noise that is the same for the same step."""
    return {
        name: leaf**3 + 0.3 * normal(*leaf.shape, seed=100 + step).to(leaf)
        for name, leaf in theta.items()
    }


@pytest.mark.parametrize(
    ("name", "schedule"),
    [*((name, None) for name in EVERY), *((n, s) for n in ("SGD", "NAdam") for s in SCHEDULES)],
)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_numbers_are_those_of_the_optimiser_kept_alive(
    name: str, schedule: str | None, dtype: torch.dtype
) -> None:
    """Each step as in another process, which reads the state from a file."""
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in start(dtype).items()}
    optimizer = getattr(torch.optim, name)(list(leaves.values()), **EVERY[name])
    more = {"schedule": SCHEDULES[schedule]} if schedule else {}
    scheduler = SCHEDULES[schedule](optimizer) if schedule else None
    outer = TorchOptimizer(optimizer=name, settings=EVERY[name], **more)
    theta = start(dtype)
    state = outer.init(theta)
    for step in range(6):
        for key, gradient in slope({k: leaf.detach() for k, leaf in leaves.items()}, step).items():
            leaves[key].grad = gradient
        optimizer.step()
        if scheduler:
            scheduler.step()
        theta, state = attrs.evolve(outer).step(theta, slope(theta, step), state, 0.0)
        structure, tensors = pack(state)
        state = unpack(json.loads(json.dumps(structure)), tensors)
        assert_same(theta, {key: leaf.detach() for key, leaf in leaves.items()})


def test_a_schedule_over_the_budget_multiplies_the_first_rate_at_every_step() -> None:
    """As that of our own optimisers."""
    cosine = Schedule(kind="cosine", final=0.1)
    ends = []
    for outer in (
        Sgd(lr=0.2, schedule=cosine),
        TorchOptimizer(optimizer="SGD", settings={"lr": 0.2}, schedule=cosine),
    ):
        theta, state = start(), outer.init(start())
        for step in range(3):
            theta, state = outer.step(theta, slope(theta, step), state, 0.3 * (step + 1))
        ends.append(theta)
    assert_same(*ends, rtol=1e-14)


class Sign(torch.optim.Optimizer):
    """θ ← θ − lr·sign(h), counting in its group: an optimiser of one's own."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for leaf in group["params"]:
                leaf.sub_(group["lr"] / group["count"] * leaf.grad.sign())


class Hoarder(Sign):
    """No file can hold its memory."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["memory"] = object()


def test_a_class_of_ones_own_from_python() -> None:
    outer = TorchOptimizer(optimizer=Sign, settings={"lr": 1.0})
    theta: Tree = {"t": torch.zeros(2)}
    state = outer.init(theta)
    for _ in range(3):
        theta, state = outer.step(theta, {"t": torch.tensor([2.0, -3.0])}, state, 0.0)
    assert_same(theta["t"], torch.tensor([-1.0, 1.0]) * (1 + 1 / 2 + 1 / 3), rtol=1e-6)
    config = read('optimizer = "SGD"')
    pipeline = attrs.evolve(config.method.method, outer=outer)
    with rejects("not-supported", "method", "outer", "optimizer"):
        attrs.evolve(config, method=pipeline).to_toml()
    outer = TorchOptimizer(optimizer=Hoarder)
    with rejects("not-supported", "optimizer"):
        outer.step(theta, theta, outer.init(theta), 0.0)


def test_what_an_optimiser_does_not_support_is_refused() -> None:
    for options, error in (
        ({"optimizer": "Muon"}, ("wrong-value", "settings")),  # takes matrices
        ({"schedule": ReduceLROnPlateau}, ("not-supported", "schedule")),  # looks at a loss
    ):
        with rejects(*error):
            TorchOptimizer(**options).init({"t": torch.zeros(3)})


def test_the_gradient_may_have_another_type() -> None:
    theta = {"t": torch.ones(2, dtype=torch.bfloat16)}
    outer = TorchOptimizer(optimizer="SGD", settings={"lr": 1.0})
    moved, _ = outer.step(theta, {"t": torch.full((2,), 0.5)}, outer.init(theta), 0.0)
    assert_same(moved, {"t": torch.full((2,), 0.5, dtype=torch.bfloat16)})


TEXT = """
seed = 3
budget = "6 steps"
task = "quadratic"
[method]
name = "hg-ms"
generator.steps = 3
[method.outer]
name = "torch"
{}
[run]
dtype = "float64"
"""


def read(fields: str) -> Any:
    return RunConfig.from_toml(TEXT.format(fields))


def test_a_table_of_settings_survives_a_file_and_runs() -> None:
    config = read('optimizer = "NAdam"\nsettings = { lr = 0.05, betas = [0.8, 0.99] }')
    settings = {"lr": 0.05, "betas": (0.8, 0.99)}
    assert config.method.method.outer == TorchOptimizer(optimizer="NAdam", settings=settings)
    assert RunConfig.from_toml(config.to_toml()) == config
    problem = config.task.problem(0, torch.device("cpu"), F64)
    assert run(config.method, problem, Budget(outer_steps=2)).records[-1]["step"] == 2


@pytest.mark.parametrize(
    ("fields", "code", "place"),
    [
        ('optimizer = "RAdm"', "unknown-optimizer", ["optimizer"]),
        ('optimizer = "LBFGS"', "not-supported", ["optimizer"]),
        ('optimizer = "Optimizer"', "unknown-optimizer", ["optimizer"]),
        ("settings = { lrr = 0.1 }", "unknown-option", ["settings", "lrr"]),
        ("settings = { lr = -1.0 }", "wrong-value", ["settings"]),
        ("settings = { lr = [1.0, 2.0] }", "wrong-value", ["settings"]),
        ("optimiser = 3", "unknown-option", ["optimiser"]),
        ("settings = 0.1", "wrong-type", ["settings"]),
    ],
)
def test_bad_fields_of_torch_optimisers_are_named(fields: str, code: str, place: list[str]) -> None:
    with rejects(code, "config.toml", "method", "outer", *place):
        read(fields)
