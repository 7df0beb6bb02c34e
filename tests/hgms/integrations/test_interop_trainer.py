"""Outer steps in the Trainer of transformers: `hypergradient` on the same weights, its log, and
a resumed training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects
from torch import Tensor, nn

from hgms.outer import Adam, Sgd
from hgms.solvers import MINRES
from hgms_core import CheckpointError, ConfigError, hypergradient


class TestTrainer:
    """A small GPT-2 whose training loss weights its examples by θ."""

    COUNT = 12
    LENGTH = 6
    WORDS = 11

    @pytest.fixture(autouse=True)
    def _quiet(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        state = torch.get_rng_state()  # the Trainer seeds the global generators
        yield
        torch.set_rng_state(state)

    @property
    def rows(self) -> list[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        text = torch.randint(self.WORDS, (self.COUNT, self.LENGTH), generator=draw)
        return [
            {"input_ids": text[i], "labels": text[i], "index": torch.tensor(i)}
            for i in range(self.COUNT)
        ]

    def batch(self, first: int, last: int) -> dict[str, Tensor]:
        return {
            name: torch.stack([row[name] for row in self.rows[first:last]]) for name in self.rows[0]
        }

    def training(
        self, folder: Path, theta: Tensor, steps: int, callbacks: Any = (), **arguments: Any
    ) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        torch.manual_seed(3)
        config = GPT2Config(
            vocab_size=self.WORDS, n_positions=self.LENGTH, n_embd=8, n_layer=1, n_head=2
        )
        self.model = model = GPT2LMHeadModel(config)
        losses = self.losses

        class Weighted(Trainer):
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
                own = dict(model.named_parameters())
                return (theta.detach().exp()[inputs["index"]] * losses(own, inputs)).mean()

        defaults = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            logging_steps=2,
            seed=1,
            save_strategy="no",
            **arguments,
        )
        return Weighted(
            model=model, args=defaults, train_dataset=self.rows, callbacks=list(callbacks)
        )

    def losses(self, x: Any, batch: Any) -> Tensor:
        """Next-token losses, a mean for each example."""
        logits = torch.func.functional_call(
            self.model, x, kwargs={"input_ids": batch["input_ids"]}, tie_weights=True
        ).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        )
        return loss.mean(1)

    def upper(self, _theta: Any, x: Any, batch: Any) -> Tensor:
        return self.losses(x, batch).mean()

    def lower(self, theta: Tensor, x: Any, batch: Any) -> Tensor:
        ridge = 0.5 * sum(leaf.square().sum() for leaf in x.values())
        return (theta.exp()[batch["index"]] * self.losses(x, batch)).mean() + ridge

    def callback(self, theta: Tensor, **fields: Any) -> Any:
        from hgms.integrations.trainer import HypergradientCallback

        defaults: dict[str, Any] = {
            "f": self.upper,
            "g": self.lower,
            "upper": [self.batch(8, 10), self.batch(10, 12)],
            "lower": [self.batch(0, 8)],
            "solver": MINRES(ridge=1.0, rtol=1e-5, max_steps=300),
            "optimizer": Sgd(lr=5.0),
            "every": 2,
        }
        return HypergradientCallback(theta=theta, **{**defaults, **fields})

    def test_theta_takes_the_steps_of_hypergradient_called_directly(self, tmp_path: Path) -> None:
        from transformers import TrainerCallback

        theta = torch.zeros(self.COUNT)
        states: list[dict[str, Tensor]] = []
        thetas: list[Tensor] = []

        class Before(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                states.append(
                    {
                        name: leaf.detach().clone()
                        for name, leaf in kwargs["model"].named_parameters()
                    }
                )

        class After(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                thetas.append(theta.clone())

        mine = self.callback(theta)
        trainer = self.training(tmp_path, theta, 4, [Before(), mine, After()])
        mine.log = trainer.log
        trainer.train()
        assert torch.equal(thetas[0], torch.zeros(self.COUNT))
        self.model.eval()
        at = torch.zeros(self.COUNT)
        for number, rows in ((1, self.batch(8, 10)), (3, self.batch(10, 12))):
            estimate = hypergradient(
                lambda theta, x, rows=rows: self.upper(theta, x, rows),
                lambda theta, x: self.lower(theta, x, self.batch(0, 8)),
                at,
                states[number],
                solver=MINRES(ridge=1.0, rtol=1e-5, max_steps=300),
            ).value
            at = at - 5.0 * estimate
            torch.testing.assert_close(thetas[number], at, rtol=1e-5, atol=1e-7)
            assert estimate[:8].abs().min() > 0
        assert [(row["step"], row["outcome"]) for row in mine.records] == [
            (2, "converged"),
            (4, "converged"),
        ]
        logged = [row for row in trainer.state.log_history if "hgms/upper_loss" in row]
        assert [row["step"] for row in logged] == [2, 4]
        assert logged[0]["hgms/converged"] == 1.0
        own = [row["step"] for row in trainer.state.log_history if "loss" in row]
        assert own == [2, 4]  # its own rows are still there at the steps where ours are

    def test_without_a_log_the_rows_are_in_the_history(self, tmp_path: Path) -> None:
        theta = torch.zeros(self.COUNT)
        trainer = self.training(tmp_path, theta, 2, [self.callback(theta)])
        trainer.train()
        assert [row["step"] for row in trainer.state.log_history if "hgms/residual" in row] == [2]

    def test_a_resumed_training_has_theta_and_goes_on(self, tmp_path: Path) -> None:
        def run(folder: str, steps: int, **arguments: Any) -> tuple[Tensor, Any]:
            theta = torch.zeros(self.COUNT)
            mine = self.callback(theta, optimizer=Adam(lr=0.1))
            trainer = self.training(tmp_path / folder, theta, 4, [mine], **arguments)
            trainer.args.save_strategy = "steps"
            trainer.args.save_steps = 2
            trainer.state.save_steps = 2
            trainer.train(
                resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2")
                if steps == 2
                else None
            )
            return theta, mine

        whole, first = run("a", 4)
        again, second = run("a", 2)
        assert torch.equal(whole, again)
        assert first.records == second.records
        (tmp_path / "a" / "checkpoint-2" / "hypergradient.safetensors").unlink()
        missing = tmp_path / "a" / "checkpoint-2" / "hypergradient.safetensors"
        with rejects("missing-file", str(missing), of=CheckpointError):
            run("a", 2)

    def test_bad_input(self) -> None:
        with rejects("missing-option", "lower", of=ConfigError):
            self.callback(torch.zeros(2), lower=None)

        class Many:
            world_size = 4

        with rejects("not-supported", of=ConfigError) as caught:
            self.callback(torch.zeros(2)).on_train_begin(Many, None, None)
        assert "4" in caught.value.message
