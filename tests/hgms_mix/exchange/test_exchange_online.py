"""A mixture that changes while the Trainer of transformers trains: its rows, its steps, and a
resumed training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects
from torch import Tensor

from hgms.outer import Adam, DualAveraging, Sgd
from hgms_core import CheckpointError, ConfigError, Key
from hgms_mix.exchange.plan import Plan
from hgms_mix.exchange.rules import Alignment, Losses

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
)
SIZES = {"copy": 10, "noise": 14}
LENGTH = 6
WORDS = 11


def shares(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)


class Fixed:
    """The same scores at every change; it draws random numbers and runs the model."""

    name = "fixed"
    rows = 2
    upper = 2

    def __init__(self, *values: float) -> None:
        self.values = values

    def check(self, names: Any) -> None: ...

    def scores(self, loss: Any, model: Any, lower: Any, upper: Any, optimizer: Any) -> Tensor:
        torch.randn(5)
        loss(model, upper)
        return shares(*self.values)


def callback(**changes: Any) -> Any:
    from hgms_mix.exchange.online import MixtureCallback

    return MixtureCallback(**{"sources": SIZES, "outer": Sgd(lr=2.0), **changes})


SAVED = {"save_strategy": "steps", "save_steps": 2, "steps": 4}


class TestTraining:
    @pytest.fixture(autouse=True)
    def _quiet(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        state = torch.get_rng_state()  # the Trainer seeds the global generators
        yield
        torch.set_rng_state(state)

    @property
    def rows(self) -> list[dict[str, Tensor]]:
        """Words that repeat, then words at random; each row's number is its first word's place
        in ``seen``.
        """
        draw = torch.Generator().manual_seed(0)
        copy = torch.randint(WORDS, (SIZES["copy"], 1), generator=draw).expand(-1, LENGTH)
        text = torch.cat([copy, torch.randint(WORDS, (SIZES["noise"], LENGTH), generator=draw)])
        return [
            {"input_ids": row, "labels": row, "number": torch.tensor(number)}
            for number, row in enumerate(text)
        ]

    @property
    def validation(self) -> list[dict[str, Tensor]]:
        return [
            {"input_ids": row, "labels": row, "number": torch.tensor(-1)}
            for row in torch.arange(WORDS)[:, None].expand(-1, LENGTH)
        ]

    def trainer(self, folder: Path, steps: int = 6, accumulation: int = 2, **more: Any) -> Any:
        torch.manual_seed(3)
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2
        )
        self.seen: list[int] = []

        def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            if torch.is_grad_enabled() and int(rows[0]["number"]) >= 0 and self.model.training:
                self.seen.extend(int(row["number"]) for row in rows)
            return {
                name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")
            }

        arguments = {
            "output_dir": str(folder),
            "max_steps": steps,
            "per_device_train_batch_size": 3,
            "learning_rate": 1e-2,
            "gradient_accumulation_steps": accumulation,
            "seed": 1,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
            "remove_unused_columns": False,
            "save_strategy": "no",
            **more,
        }
        return transformers.Trainer(
            model=transformers.GPT2LMHeadModel(config),
            args=transformers.TrainingArguments(**arguments),
            train_dataset=self.rows,
            eval_dataset=self.validation,
            data_collator=collate,
        )

    def trained(
        self, folder: Path, resume: int | None = None, change: Any = None, **more: Any
    ) -> tuple[Any, Any]:
        """A trainer and its mixture; ``resume``: from the checkpoint of that step."""
        trainer = self.trainer(folder, **more)
        self.model = trainer.model
        mixture = callback(**{"rule": Alignment(rows=4, upper=5), "every": 2, **(change or {})})
        mixture.attach(trainer)
        self.model.train()
        checkpoint = None if resume is None else str(folder / f"checkpoint-{resume}")
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer, mixture

    def test_a_training_with_adafactor_is_mixed(self, tmp_path: Path) -> None:
        _, mixture = self.trained(tmp_path, optim="adafactor")
        assert [record["step"] for record in mixture.records] == [2, 4, 6]
        assert all(math.isfinite(score) for row in mixture.records for score in row["scores"])

    def test_theta_takes_the_steps_of_the_formula_and_the_rows_are_the_plan_s(
        self, tmp_path: Path
    ) -> None:
        """By a loop of its own over places: six rows a step, a new mixture from the batch after
        the next.
        """
        trainer, mixture = self.trained(tmp_path)
        theta = torch.log(shares(10, 14) / 14)
        plan = Plan(SIZES, Key(0).fold("mixture"))
        plan.begin(0, theta.softmax(0))
        assert [record["step"] for record in mixture.records] == [2, 4, 6]
        for record in mixture.records:
            w = theta.softmax(0)
            a = torch.tensor(record["scores"], dtype=torch.float64)
            assert bool((a.abs() <= 1).all())
            theta = theta + 2.0 * (torch.diag(w) - torch.outer(w, w)) @ a
            assert record["weights"] == pytest.approx(theta.softmax(0).tolist(), abs=1e-14)
            plan.begin(record["step"] * 6 + 3, shares(*record["weights"]))
        assert mixture.weights["copy"] > 10 / 24  # validation repeats its words
        history = trainer.state.log_history
        logged = [row["mixture/copy"] for row in history if "mixture/copy" in row]
        assert logged == [record["weights"][0] for record in mixture.records]
        assert sum("loss" in row for row in history) == 6
        first = {"copy": 0, "noise": SIZES["copy"]}
        # the loader has one batch more
        assert self.seen[:36] == [first[name] + row for name, row in map(plan.row, range(36))]

    def test_a_change_leaves_the_training_s_random_numbers_alone(self, tmp_path: Path) -> None:
        """Scores that are all the same change nothing, however often."""
        often, never = (
            self.trained(tmp_path / str(every), change={"rule": Fixed(1, 1), "every": every})[0]
            for every in (1, 100)
        )
        for one, other in zip(often.model.parameters(), never.model.parameters(), strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize(
        ("outer", "at", "accumulation"),
        [(DualAveraging(), 3, 2), (Adam(lr=0.5), 4, 2), (Adam(lr=0.5), 5, 1)],
        ids=["dual-averaging-3-2", "adam-4-2", "adam-5-1"],
    )
    def test_a_resumed_training_equals_an_uninterrupted_one(
        self, tmp_path: Path, outer: Any, at: int, accumulation: int
    ) -> None:
        """Over more than an epoch of 24 rows, with dropout, stopped where a change is due and
        where none is.
        """
        options = {**SAVED, "steps": 10, "accumulation": accumulation, "save_steps": at}
        whole, one = self.trained(tmp_path, change={"outer": outer}, **options)
        resumed, other = self.trained(tmp_path, at, change={"outer": outer}, **options)
        for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(left, right)
        assert one.records == other.records
        assert len(one.records) == 5
        assert torch.equal(one.theta, other.theta)
        assert [(a, b.tolist()) for a, b in one.plan.history()] == [
            (a, b.tolist()) for a, b in other.plan.history()
        ]

    def test_weights_of_a_training_begin_anew_when_it_does(self, tmp_path: Path) -> None:
        trainer, mixture = self.trained(tmp_path, steps=4)
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            trainer.model = trainer.model_wrapped = self.model = transformers.GPT2LMHeadModel(
                trainer.model.config
            )
            trainer.optimizer = trainer.lr_scheduler = None
            trainer.train()
            runs.append((list(mixture.records), mixture.theta))
        assert [record["step"] for record in mixture.records] == [2, 4]
        assert runs[0][0] == runs[1][0]
        assert torch.equal(runs[0][1], runs[1][1])

    @pytest.mark.parametrize(
        "change",
        [
            {"dataloader_num_workers": 1},
            {"train_sampling_strategy": "group_by_length"},
            {"auto_find_batch_size": True},
            {"ignore_data_skip": True},
            {"world_size": 2},
        ],
    )
    def test_what_it_cannot_do_is_said(
        self, tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        several = "world_size" in change
        trainer = self.trainer(tmp_path, **({} if several else change))
        if several:
            monkeypatch.setattr(type(trainer.args), "world_size", property(lambda _: 2))
        with rejects("not-supported", "args", *change, of=ConfigError):
            callback().attach(trainer)

    def test_data_that_do_not_fit_are_refused(self, tmp_path: Path) -> None:
        from torch.utils.data import IterableDataset

        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return iter(())

            def __len__(self) -> int:
                return sum(SIZES.values())

        trainer = self.trainer(tmp_path)
        trainer.add_callback(lost := callback())
        with rejects("not-attached", "trainer", of=ConfigError):
            trainer.train()
        trainer.remove_callback(lost)
        with rejects("wrong-length", "trainer", "train_dataset", of=ConfigError):
            callback(sources={"a": 10, "b": 15}).attach(trainer)
        for validation in (None, {"first": self.validation, "second": self.validation}, []):
            trainer.eval_dataset = validation
            with rejects("no-rows", "validation", of=ConfigError):
                callback().attach(trainer)
        callback(rule=Losses()).attach(trainer)  # needs none
        # a cell of a notebook that runs twice makes a second callback for the same trainer
        with rejects("conflicting-options", "trainer", "train_dataset", of=ConfigError):
            callback(rule=Losses()).attach(trainer)
        names = [type(other).__name__ for other in trainer.callback_handler.callbacks]
        assert names.count("MixtureCallback") == 1
        trainer.train_dataset = Stream()
        with rejects("wrong-type", "trainer", "train_dataset", of=ConfigError):
            callback().attach(trainer)

    @pytest.mark.parametrize(
        ("change", "code", "place"),
        [
            ({"start": {"copy": 1.0}}, "wrong-value", ("start",)),
            ({"start": dict.fromkeys(SIZES, 0.0)}, "out-of-range", ("start",)),
            ({"sources": {"copy": 3}}, "wrong-value", ("sources",)),
            ({"every": 0}, "out-of-range", ("every",)),
            ({"rule": Losses(reference={"copy": 1.0})}, "wrong-value", ("rule", "reference")),
        ],
    )
    def test_wrong_settings_are_refused(
        self, change: dict[str, Any], code: str, place: tuple[str, ...]
    ) -> None:
        with rejects(code, *place, of=ConfigError):
            callback(**change)

    def test_scores_that_are_not_finite_leave_the_mixture_as_it_is(self, tmp_path: Path) -> None:
        change = {"rule": Fixed(math.nan, 1.0)}
        _, mixture = self.trained(tmp_path, change=change, **SAVED)
        assert list(mixture.weights.values()) == pytest.approx([10 / 24, 14 / 24], abs=1e-14)
        assert [record["step"] for record in mixture.records] == [2, 4]
        self.trained(tmp_path, 2, change=change, **SAVED)

    def test_a_checkpoint_without_its_file_or_of_others_is_refused(self, tmp_path: Path) -> None:
        self.trained(tmp_path, **SAVED)
        file = tmp_path / "checkpoint-2" / "mixture.safetensors"
        for change in (
            {"seed": 5},
            {"sources": dict(reversed(SIZES.items()))},
            {"outer": Adam(lr=0.1)},
        ):
            with rejects("other-settings", str(file), of=CheckpointError):
                self.trained(tmp_path, 2, change=change, **SAVED)
        file.unlink()
        with rejects("missing-file", str(file), of=CheckpointError):
            self.trained(tmp_path, 2, **SAVED)
