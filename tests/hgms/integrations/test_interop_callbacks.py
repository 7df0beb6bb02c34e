"""Outer steps in training loops that are not ours, and in Lightning's: a closed form, and
trainings that go on from a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, rejects
from torch import Tensor, nn

import hgms.integrations.lightning
import hgms.integrations.trainer
from hgms.integrations import OuterSteps
from hgms.outer import Adam, Sgd, TorchOptimizer
from hgms.runs import load_state, save_state
from hgms_core import ConfigError

AIM = torch.tensor([1.0, -2.0], dtype=F64)


def identity(_matvec: Any, b: Tensor) -> Tensor:
    return b


class Point(nn.Module):
    """The lower variable alone, and a layer whose presence says in which mode the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2, dtype=F64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=F64), requires_grad=False)
        self.noise = nn.Dropout(0.5)


def f(_theta: Any, x: Any, batch: Tensor) -> Tensor:
    return 0.5 * (x["x"] - batch).square().sum()


def g(theta: Tensor, x: Any, _batch: Any) -> Tensor:
    return 0.5 * (x["x"] - theta).square().sum()


DEFAULTS: dict[str, Any] = {
    "f": f,
    "g": g,
    "upper": [AIM],
    "solver": identity,
    "optimizer": Sgd(lr=0.5),
}


def outer(theta: Any, **fields: Any) -> OuterSteps:
    return OuterSteps(theta=theta, **{**DEFAULTS, "lower": [None], "every": 1, **fields})


def start() -> Tensor:
    return torch.tensor([5.0, 6.0], dtype=F64)


@pytest.mark.parametrize("optimizer", ["ours", "torch"])
def test_theta_goes_where_the_closed_form_says(optimizer: str) -> None:
    """With x at its minimiser θ, each step of rate ½ halves the way to the aim."""
    theta = start()
    steps = outer(
        theta,
        optimizer=Sgd(lr=0.5)
        if optimizer == "ours"
        else TorchOptimizer(optimizer="SGD", settings={"lr": 0.5}),
    )
    model = Point()
    for step in range(1, 5):
        model.x.data.copy_(theta)
        row = steps.step(model, step)
        expected = AIM + (start() - AIM) * 0.5**step
        torch.testing.assert_close(theta, expected, rtol=1e-13, atol=1e-14)
        assert (row["outcome"], row["lower_gradient_norm"]) == ("converged", 0)
        assert row["moved"] == pytest.approx(0.5 * row["hypergradient_norm"])
    assert [step for step in range(10) if outer(theta, every=3).due(step)] == [3, 6, 9]


def test_theta_may_be_a_dictionary() -> None:
    theta = {"a": torch.zeros(2, dtype=F64), "b": torch.zeros((), dtype=F64)}
    steps = outer(theta, g=lambda upper, x, _: g(upper["a"] + upper["b"], x, None))
    steps.step(Point(), 1)
    assert_same(theta, {"a": 0.5 * AIM, "b": 0.5 * AIM.sum()}, rtol=1e-13)


def test_the_training_is_not_disturbed_and_does_not_disturb() -> None:
    """Modes of all modules, gradients, the global generator: as they were. Dropout is off
    meanwhile; frozen parameters and θ are no lower variables, and what the training left in θ's
    gradient does not count.
    """
    model = Point().train()
    model.theta = nn.Parameter(torch.zeros(2, dtype=F64))
    model.x.grad, model.theta.grad = torch.full((2,), 7.0, dtype=F64), 1e6 * AIM
    seen = set()

    def watching(theta: Tensor, x: Any, batch: Any) -> Tensor:
        seen.add((model.training, *x))
        torch.rand(3)
        return g(theta, x, batch)

    before = torch.get_rng_state()
    outer(model.theta, g=watching).step(model, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert (seen, model.training, model.noise.training) == ({(False, "x")}, True, True)
    assert (model.x.grad.tolist(), model.theta.requires_grad) == ([7.0, 7.0], True)
    torch.testing.assert_close(model.theta.detach(), 0.5 * AIM)


def test_a_hypergradient_that_is_not_finite_moves_nothing() -> None:
    theta = torch.zeros(2, dtype=F64)
    steps = outer(theta, f=lambda theta, x, batch: f(theta, x, batch) + (theta * torch.nan).sum())
    assert steps.step(Point(), 1)["moved"] == 0
    assert theta.tolist() == [0.0, 0.0]


def test_batches_are_gone_through_again_and_again_and_moved() -> None:
    seen = []

    def watching(_theta: Any, x: Any, batch: Any) -> Tensor:
        seen.append(batch["rows"][0].tolist())
        return f(_theta, x, batch["pair"][1])

    upper = [{"rows": [torch.tensor(i)], "pair": (i, AIM)} for i in range(3)]
    steps = outer(torch.zeros(2, dtype=F64), f=watching, upper=upper)
    for step in range(1, 6):
        steps.step(Point(), step)
    assert seen == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("optimizer", ["ours", "torch"])
def test_it_goes_on_from_a_file(optimizer: str, tmp_path: Path) -> None:
    """Five steps, and three, a file, and two more, with a moment and the places among the
    batches to remember.
    """

    def go(numbers: range, state: Any = None) -> tuple[Tensor, OuterSteps]:
        theta = start()
        chosen = TorchOptimizer(optimizer="RMSprop", settings={"lr": 0.1, "momentum": 0.9})
        steps = outer(
            theta,
            g=lambda theta, x, factor: factor * g(theta, x, None),
            upper=[AIM, 2 * AIM, -AIM],
            lower=[1.0, 2.0],
            optimizer=Adam(lr=0.1) if optimizer == "ours" else chosen,
        )
        if state is not None:
            steps.load_state_dict(state)
        for step in numbers:
            steps.step(Point(), step)
        return theta, steps

    theta, whole = go(range(1, 6))
    save_state(tmp_path / "state.safetensors", go(range(1, 4))[1].state_dict())
    again, resumed = go(range(4, 6), load_state(tmp_path / "state.safetensors"))
    assert torch.equal(theta, again)
    assert whole.records == resumed.records


ZERO = torch.zeros(2, dtype=F64)


def twice(steps: OuterSteps) -> None:
    for step in (1, 2):
        steps.step(Point(), step)


@pytest.mark.parametrize(
    ("call", "code", "place"),
    [
        (lambda: outer(torch.zeros(2, dtype=torch.int64)), "wrong-type", "theta"),
        (lambda: outer(ZERO.clone().requires_grad_() * 2), "wrong-type", "theta"),
        (lambda: outer(ZERO, optimizer="adam"), "wrong-part", "optimizer"),
        (lambda: outer(ZERO, every=0), "out-of-range", "every"),
        (lambda: twice(outer(ZERO, upper=(row for row in [AIM]))), "no-rows", "upper"),
        (lambda: outer(ZERO).step(Point().requires_grad_(False), 1), "no-parameters", "model"),
        (
            lambda: outer(ZERO).load_state_dict(outer(torch.zeros(3, dtype=F64)).state_dict()),
            "other-settings",
            "theta",
        ),
    ],
)
def test_bad_input(call: Any, code: str, place: str) -> None:
    with rejects(code, place, of=ConfigError):
        call()


# --- Lightning
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def generators() -> Iterator[None]:
    pytest.importorskip("lightning")
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def callback(theta: Tensor, **fields: Any) -> Any:
    made = hgms.integrations.lightning.HypergradientCallback
    return made(theta=theta, **{**DEFAULTS, "every": 2, **fields})


def fit(folder: Path, theta: Tensor, callback: Any, steps: int, **more: Any) -> Any:
    import lightning.pytorch as pl

    class Pull(pl.LightningModule):
        """x one step from wherever it is to θ: the training's own minimiser, at once."""

        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros(2, dtype=F64))

        def training_step(self, batch: Tensor, _number: int) -> Tensor:
            return 0.5 * (self.x - theta.detach()).square().sum() + 0 * batch.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    resume = more.pop("resume", None)
    quiet = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=pl.loggers.CSVLogger(folder),
        callbacks=[callback],
        log_every_n_steps=1,
        **quiet,
        **more,
    )
    data = torch.utils.data.DataLoader(torch.arange(8.0, dtype=F64), batch_size=2)
    trainer.fit(Pull(), data, ckpt_path=resume, weights_only=True if resume else None)
    return trainer


# Lightning's advice on loaders, loggers and folders is ignored
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("generators")
def test_in_lightning_theta_goes_where_the_closed_form_says_and_is_logged(tmp_path: Path) -> None:
    seen = set()

    def watching(theta: Tensor, x: Any, batch: Tensor) -> Tensor:
        seen.add(tuple(batch.tolist()))
        return g(theta, x, batch)

    theta = start()
    mine = callback(theta, g=watching)
    trainer = fit(tmp_path, theta, mine, 6)
    expected = AIM + (start() - AIM) * 0.5**3
    torch.testing.assert_close(theta, expected, rtol=1e-13, atol=1e-14)
    assert seen == {(2.0, 3.0), (6.0, 7.0)}, "g sees the batch of the training step"
    written = Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()
    assert "hgms/hypergradient_norm" in written[0]
    assert [row.split(",")[-1] for row in written] == ["step", "2", "4", "6"]


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("generators")
def test_lightnings_checkpoints_hold_theta(tmp_path: Path) -> None:
    def fitted(steps: int, **more: Any) -> tuple[Tensor, Any, Any]:
        theta = start()
        mine = callback(theta, optimizer=Adam(lr=0.3), upper=[AIM, 2 * AIM, -AIM])
        return theta, mine.records, fit(tmp_path, theta, mine, steps, **more)

    fitted(4)[2].save_checkpoint(tmp_path / "half.ckpt")
    assert_same(fitted(8, resume=str(tmp_path / "half.ckpt"))[:2], fitted(8)[:2])


@pytest.mark.extended
def test_lightnings_callback_refuses_several_processes() -> None:
    pytest.importorskip("lightning.pytorch")
    several = type("Trainer", (), {"world_size": 2})
    with rejects("not-supported", of=ConfigError):
        callback(torch.zeros(2)).on_fit_start(several, None)
