"""Outer steps in the Trainer of transformers: a closed form, its log, and a resumed training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, rejects
from torch import Tensor, nn

from hgms.integrations.trainer import HypergradientCallback
from hgms.outer import Adam, Sgd
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError

pytestmark = pytest.mark.extended
AIM = torch.tensor([1.0, -2.0], dtype=F64)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    state = torch.get_rng_state()  # the Trainer seeds the global generators
    yield
    torch.set_rng_state(state)


class Pull(nn.Module):
    """x one step from wherever it is to θ: the training's own minimiser, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2, dtype=F64))
        self.theta = torch.tensor([5.0, 6.0], dtype=F64)

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        return {"loss": 0.5 * (self.x - self.theta.detach()).square().sum() + 0 * rows.sum()}

    def callback(self, **fields: Any) -> Any:
        defaults: dict[str, Any] = {
            "f": lambda theta, x, batch: 0.5 * (x["x"] - batch).square().sum(),
            "g": lambda theta, x, factor: factor * 0.5 * (x["x"] - theta).square().sum(),
            "upper": [AIM],
            "lower": [1.0],
            "solver": lambda matvec, b: b,
            "optimizer": Sgd(lr=0.5),
            "every": 2,
        }
        return HypergradientCallback(theta=self.theta, **{**defaults, **fields})


def training(folder: Path, model: Pull, callback: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    rows = [{"rows": torch.ones(1)}] * 32
    return Trainer(model, arguments, train_dataset=rows, callbacks=[callback])


def test_theta_goes_where_the_closed_form_says_and_is_logged(tmp_path: Path) -> None:
    model = Pull()
    mine = model.callback()
    first = model.theta.clone()
    trainer = training(tmp_path, model, mine)
    mine.log = trainer.log
    trainer.train()
    expected = AIM + (first - AIM) * 0.5**2
    torch.testing.assert_close(model.theta, expected, rtol=1e-13, atol=1e-14)
    logged = [row for row in trainer.state.log_history if "hgms/upper_loss" in row]
    assert [(row["step"], row["hgms/converged"]) for row in logged] == [(2, 1.0), (4, 1.0)]


def test_a_resumed_training_has_theta_and_goes_on(tmp_path: Path) -> None:
    half = tmp_path / "checkpoint-2"

    def run(resume: str | None = None) -> tuple[Tensor, Any]:
        model = Pull()
        mine = model.callback(optimizer=Adam(lr=0.1), upper=[AIM, 2 * AIM], lower=[1.0, 2.0])
        trainer = training(tmp_path, model, mine)
        trainer.train(resume_from_checkpoint=resume)
        return model.theta, mine.records

    assert_same(run(), run(str(half)))
    missing = half / "hypergradient.safetensors"
    missing.unlink()
    with rejects("missing-file", str(missing), of=CheckpointError):
        run(str(half))


def test_bad_input() -> None:
    with rejects("missing-option", "lower", of=ConfigError):
        Pull().callback(lower=None)
