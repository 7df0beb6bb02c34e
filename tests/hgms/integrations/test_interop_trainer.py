"""Outer steps in the Trainer of transformers: `hypergradient` on the same weights, its log, and
a resumed training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import assert_same, rejects
from torch import Tensor, nn

from hgms.outer import Adam, Sgd
from hgms.solvers import MINRES
from hgms_core import CheckpointError, ConfigError, hypergradient

pytestmark = pytest.mark.extended
COUNT, LENGTH, WORDS = 12, 6, 11
TEXT = torch.randint(WORDS, (COUNT, LENGTH), generator=torch.Generator().manual_seed(0))
ROWS = [
    {"input_ids": text, "labels": text, "index": torch.tensor(i)} for i, text in enumerate(TEXT)
]
SOLVER = MINRES(ridge=1.0, rtol=1e-5, max_steps=300)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    state = torch.get_rng_state()  # the Trainer seeds the global generators
    yield
    torch.set_rng_state(state)


def batch(first: int, last: int) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in ROWS[first:last]]) for name in ROWS[0]}


class Weighted:
    """A small GPT-2 whose training loss weights its examples by θ."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(3)
        sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes))
        self.theta = torch.zeros(COUNT)

    def training(self, folder: Path, callbacks: Any = (), **arguments: Any) -> Any:
        from transformers import Trainer, TrainingArguments

        defaults = TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            logging_steps=2,
            seed=1,
            **arguments,
        )
        made = Trainer(self.model, defaults, train_dataset=ROWS, callbacks=list(callbacks))
        made.compute_loss = lambda model, inputs, *_, **__: self.weighted(
            self.theta.detach(), dict(model.named_parameters()), inputs
        )
        return made

    def losses(self, x: Any, batch: Any) -> Tensor:
        """Next-token losses, a mean for each example."""
        logits = torch.func.functional_call(
            self.model, x, kwargs={"input_ids": batch["input_ids"]}, tie_weights=True
        ).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        )
        return loss.mean(1)

    def weighted(self, theta: Tensor, x: Any, batch: Any) -> Tensor:
        return (theta.exp()[batch["index"]] * self.losses(x, batch)).mean()

    def upper(self, _theta: Any, x: Any, batch: Any) -> Tensor:
        return self.losses(x, batch).mean()

    def lower(self, theta: Tensor, x: Any, batch: Any) -> Tensor:
        return self.weighted(theta, x, batch) + 0.5 * sum(
            leaf.square().sum() for leaf in x.values()
        )

    def callback(self, **fields: Any) -> Any:
        from hgms.integrations.trainer import HypergradientCallback

        defaults: dict[str, Any] = {
            "f": self.upper,
            "g": self.lower,
            "upper": [batch(8, 10), batch(10, 12)],
            "lower": [batch(0, 8)],
            "solver": SOLVER,
            "optimizer": Sgd(lr=5.0),
            "every": 2,
        }
        return HypergradientCallback(theta=self.theta, **{**defaults, **fields})


def test_theta_takes_the_steps_of_hypergradient_called_directly(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    states: list[dict[str, Tensor]] = []
    thetas: list[Tensor] = []

    class Before(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            leaves = kwargs["model"].named_parameters()
            states.append({name: leaf.detach().clone() for name, leaf in leaves})

    class After(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            thetas.append(own.theta.clone())

    own = Weighted()
    mine = own.callback()
    trainer = own.training(tmp_path, [Before(), mine, After()], save_strategy="no")
    mine.log = trainer.log
    trainer.train()
    own.model.eval()
    at = torch.zeros(COUNT)
    assert torch.equal(thetas[0], at)
    for number, rows in ((1, batch(8, 10)), (3, batch(10, 12))):
        estimate = hypergradient(
            lambda theta, x, rows=rows: own.upper(theta, x, rows),
            lambda theta, x: own.lower(theta, x, batch(0, 8)),
            at,
            states[number],
            solver=SOLVER,
        ).value
        at = at - 5.0 * estimate
        torch.testing.assert_close(thetas[number], at, rtol=1e-5, atol=1e-7)
        assert estimate[:8].abs().min() > 0
    assert [(row["step"], row["outcome"]) for row in mine.records] == [
        (2, "converged"),
        (4, "converged"),
    ]
    history = trainer.state.log_history
    logged = [row for row in history if "hgms/upper_loss" in row]
    assert [(row["step"], row["hgms/converged"]) for row in logged] == [(2, 1.0), (4, 1.0)]
    # its own rows are still there at the steps where ours are
    assert [row["step"] for row in history if "loss" in row] == [2, 4]


def test_a_resumed_training_has_theta_and_goes_on(tmp_path: Path) -> None:
    half = tmp_path / "checkpoint-2"

    def run(resume: str | None = None) -> tuple[Tensor, Any]:
        own = Weighted()
        mine = own.callback(optimizer=Adam(lr=0.1))
        trainer = own.training(tmp_path, [mine], save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=resume)
        logged = [row["step"] for row in trainer.state.log_history if "hgms/residual" in row]
        assert logged[-1] == 4, "without a log the rows are in the history"
        return own.theta, mine.records

    assert_same(run(), run(str(half)))
    missing = half / "hypergradient.safetensors"
    missing.unlink()
    with rejects("missing-file", str(missing), of=CheckpointError):
        run(str(half))


def test_bad_input() -> None:
    own = Weighted()
    with rejects("missing-option", "lower", of=ConfigError):
        own.callback(lower=None)
    several = type("Trainer", (), {"world_size": 4})
    with rejects("not-supported", of=ConfigError):
        own.callback().on_train_begin(several, None, None)
