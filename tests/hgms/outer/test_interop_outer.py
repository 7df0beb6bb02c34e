"""torch's optimisers as outer optimisers: the numbers of the optimiser kept alive, as a value
that can be written down.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from support.helpers import F64, assert_same, normal, rejects
from torch import Tensor

from hgms.cli import main
from hgms.outer import Schedule, Sgd, TorchOptimizer
from hgms.runs import RunConfig, pack, run, unpack
from hgms.testing import Check, parametrize_with_checks
from hgms_core import Budget, Tree

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
every_class = pytest.mark.parametrize("name", EVERY)


@parametrize_with_checks(
    [
        TorchOptimizer(optimizer=name, settings={"lr": 0.1})
        for name in ("Adam", "RAdam", "NAdam", "Adagrad", "Rprop", "SGD")
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


def alive(name: str, dtype: torch.dtype, steps: int) -> Tree:
    """The optimiser as torch means it, kept from step to step."""
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in start(dtype).items()}
    optimizer = getattr(torch.optim, name)(list(leaves.values()), **EVERY[name])
    for step in range(steps):
        for key, gradient in slope(
            {key: leaf.detach() for key, leaf in leaves.items()}, step
        ).items():
            leaves[key].grad = gradient
        optimizer.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


def stepped(outer: TorchOptimizer, theta: Tree, state: Any, steps: range) -> tuple[Tree, Any]:
    for step in steps:
        theta, state = outer.step(theta, slope(theta, step), state, 0.0)
    return theta, state


@every_class
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_numbers_are_those_of_the_optimiser_kept_alive(name: str, dtype: torch.dtype) -> None:
    outer = TorchOptimizer(optimizer=name, settings=EVERY[name])
    theta, _ = stepped(outer, start(dtype), outer.init(start(dtype)), range(12))
    assert_same(theta, alive(name, dtype, 12))


@every_class
def test_its_state_goes_on_from_a_file_bit_for_bit(name: str) -> None:
    outer = TorchOptimizer(optimizer=name, settings=EVERY[name])
    theta, state = stepped(outer, start(), outer.init(start()), range(5))
    structure, leaves = pack(state)
    read = unpack(json.loads(json.dumps(structure)), leaves)
    one, other = (stepped(outer, theta, each, range(5, 9))[0] for each in (state, read))
    assert_same(one, other)
    assert_same(one, alive(name, F64, 9))


def test_nothing_it_is_given_changes() -> None:
    outer = TorchOptimizer(
        optimizer="SGD", settings={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    )
    theta = start()
    gradient = slope(theta, 0)
    _, state = outer.step(theta, gradient, outer.init(theta), 0.0)
    before = [pack(each)[1] for each in (theta, gradient, state)]
    first, _ = outer.step(theta, gradient, state, 0.0)
    again, _ = outer.step(theta, gradient, state, 0.0)
    assert_same([pack(each)[1] for each in (theta, gradient, state)], before)
    assert_same(first, again)
    assert not any(leaf.requires_grad for leaf in first.values())


SCHEDULES: dict[str, Any] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=12),
}


@pytest.mark.parametrize("name", ["SGD", "NAdam"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_torch_goes_a_step_further_with_each_outer_step(name: str, kind: str) -> None:
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in start().items()}
    optimizer = getattr(torch.optim, name)(list(leaves.values()), **EVERY[name])
    schedule = SCHEDULES[kind](optimizer)
    outer = TorchOptimizer(optimizer=name, settings=EVERY[name], schedule=SCHEDULES[kind])
    theta = start()
    state = outer.init(start())
    for step in range(6):
        for key, gradient in slope(
            {key: leaf.detach() for key, leaf in leaves.items()}, step
        ).items():
            leaves[key].grad = gradient
        optimizer.step()
        schedule.step()
        theta, state = stepped(outer, theta, state, range(step, step + 1))
        # each time as another process that has never seen the schedule
        structure, tensors = pack(state)
        state = unpack(json.loads(json.dumps(structure)), tensors)
        outer = attrs.evolve(outer)
    assert_same(theta, {key: leaf.detach() for key, leaf in leaves.items()})


def test_a_schedule_over_the_budget_is_that_of_the_other_optimisers() -> None:
    ours = Sgd(lr=0.2, schedule=Schedule(kind="cosine", final=0.1))
    theirs = TorchOptimizer(
        optimizer="SGD", settings={"lr": 0.2}, schedule=Schedule(kind="cosine", final=0.1)
    )
    one, other = (
        outer.step(start(), slope(start(), 0), outer.init(start()), 0.3)[0]
        for outer in (ours, theirs)
    )
    assert_same(one, other, rtol=1e-14)


def test_a_schedule_that_looks_at_a_loss_is_refused() -> None:
    outer = TorchOptimizer(
        schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    )
    with rejects("not-supported", "schedule"):
        outer.init(start())


class Sign(torch.optim.Optimizer):
    """θ ← θ − lr·sign(h), counting in its group: an optimiser of one's own."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for leaf in group["params"]:
                leaf.sub_(group["lr"] / group["count"] * leaf.grad.sign())


class Shared(Sign):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all"]["count"] = 1


class Hoarder(Sign):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["memory"] = object()


def test_a_class_of_ones_own_from_python() -> None:
    outer = TorchOptimizer(optimizer=Sign, settings={"lr": 1.0})
    theta: Tree = {"t": torch.zeros(2)}
    state = outer.init(theta)
    for _ in range(3):
        theta, state = outer.step(theta, {"t": torch.tensor([2.0, -3.0])}, state, 0.0)
    torch.testing.assert_close(theta["t"], torch.tensor([-1.0, 1.0]) * (1 + 1 / 2 + 1 / 3))
    config = read('optimizer = "SGD"')
    with rejects("not-supported", "method", "outer", "optimizer"):
        attrs.evolve(config, method=attrs.evolve(config.method, outer=outer)).to_toml()


def test_a_memory_that_no_file_can_hold_is_refused() -> None:
    outer = TorchOptimizer(optimizer=Hoarder)
    with rejects("not-supported", "outer", "optimizer") as caught:
        outer.step(
            {"t": torch.zeros(2)}, {"t": torch.ones(2)}, outer.init({"t": torch.zeros(2)}), 0.0
        )
    assert "object" in caught.value.message


def test_a_memory_that_belongs_to_no_parameter_is_refused() -> None:
    outer = TorchOptimizer(optimizer=Shared)
    with rejects("not-supported", "outer", "optimizer") as caught:
        outer.step(
            {"t": torch.zeros(2)}, {"t": torch.ones(2)}, outer.init({"t": torch.zeros(2)}), 0.0
        )
    assert "Shared" in caught.value.message


def test_matrices_only_is_said_in_torchs_words() -> None:
    outer = TorchOptimizer(optimizer="Muon")
    theta = {"t": normal(3, 2)}
    moved, _ = outer.step(theta, {"t": normal(3, 2, seed=1)}, outer.init(theta), 0.0)
    assert moved["t"].shape == (3, 2)
    with rejects("wrong-value", "settings") as caught:
        outer.init({"t": torch.zeros(3)})
    assert "Muon only supports 2D" in caught.value.message  # the words of torch


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


def test_a_table_of_settings_survives_a_file() -> None:
    config = read('optimizer = "NAdam"\nsettings = { lr = 0.05, betas = [0.8, 0.99] }')
    assert config.method.outer == TorchOptimizer(
        optimizer="NAdam", settings={"lr": 0.05, "betas": (0.8, 0.99)}
    )
    assert RunConfig.from_toml(config.to_toml()) == config


@pytest.mark.parametrize(
    ("fields", "place", "shown"),
    [
        ('optimizer = "RAdm"', "optimizer", "'RAdam'"),
        ('optimizer = "LBFGS"', "optimizer", "LBFGS"),
        ('optimizer = "SparseAdam"', "optimizer", "sparse"),
        ('optimizer = "Optimizer"', "optimizer", "'Optimizer'"),
        ("settings = { lrr = 0.1 }", "settings.lrr", "'lr'"),
        ("settings = { lr = -1.0 }", "settings", "-1.0"),
        ("settings = { lr = [1.0, 2.0] }", "settings", "Adam"),
        ("optimiser = 3", "optimiser", "'optimizer'"),
        ("settings = 0.1", "settings", "0.1"),
    ],
)
def test_bad_input_ends_with_a_message_and_no_traceback(
    fields: str, place: str, shown: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(TEXT.format(fields), encoding="utf-8")
    result = CliRunner().invoke(main, ["run", str(config), "--out", str(tmp_path / "runs")])
    assert result.exit_code == 2, result.output
    assert shown in result.output
    assert f"method.outer.{place})" in result.output
    assert "Traceback" not in result.output


def test_a_whole_run_with_radam_goes_down() -> None:
    config = read('optimizer = "RAdam"\nsettings = { lr = 0.05 }')
    method = attrs.evolve(config.method, generator=attrs.evolve(config.method.generator, steps=30))
    problem = config.task.problem(config.seed, torch.device("cpu"), F64)
    rows = run(method, problem, Budget(outer_steps=25)).records
    losses: list[float] = [row["upper_loss"] for row in rows if "upper_loss" in row]
    assert losses[-1] < losses[0]


def test_the_gradient_may_have_another_type() -> None:
    outer = TorchOptimizer(optimizer="SGD", settings={"lr": 1.0})
    theta: dict[str, Tensor] = {"t": torch.ones(2, dtype=torch.bfloat16)}
    moved, _ = outer.step(theta, {"t": torch.full((2,), 0.5)}, outer.init(theta), 0.0)
    assert moved["t"].dtype == torch.bfloat16
    assert moved["t"].tolist() == [0.5, 0.5]
