"""A mixture that changes while the Trainer of transformers or of TRL trains: its rows, its
scores, and a resumed training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects
from torch import Tensor, nn

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


class Projected(torch.optim.AdamW):
    """Adam with second moments of another shape than the parameters, as GaLore has them."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for leaf in group["params"]:
                self.state[leaf]["exp_avg_sq"] = torch.ones(2, 2)


def shares(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)


class TestPlan:
    def test_each_source_gives_all_its_rows_before_one_comes_again(self) -> None:
        plan = Plan({"a": 7, "b": 30}, Key(3))
        plan.begin(0, shares(0.5, 0.5))
        plan.begin(23, shares(0.9, 0.1))
        plan.begin(90, shares(0.2, 0.8))
        drawn = [plan.row(place) for place in range(200)]
        for name, size in (("a", 7), ("b", 30)):
            rows = [row for source, row in drawn if source == name]
            for first in range(0, len(rows) - size + 1, size):
                assert sorted(rows[first : first + size]) == list(range(size))

    def test_sources_come_as_often_as_their_weight_says(self) -> None:
        plan = Plan({"a": 5, "b": 5, "c": 5}, Key(0))
        plan.begin(0, shares(0.6, 0.0, 0.4))
        plan.begin(4000, shares(0.1, 0.2, 0.7))
        for places, weights in (
            (range(4000), (0.6, 0.0, 0.4)),
            (range(4000, 8000), (0.1, 0.2, 0.7)),
        ):
            counts = Counter(plan.row(place)[0] for place in places)
            for name, weight in zip("abc", weights, strict=True):
                assert abs(counts[name] - 4000 * weight) <= 4 * math.sqrt(
                    4000 * weight * (1 - weight)
                )

    def test_rows_do_not_depend_on_when_they_are_asked_for(self) -> None:
        """Asked in any order, before or after later mixtures are known, and from a history."""
        first = Plan(SIZES, Key(1))
        second = Plan(SIZES, Key(1))
        early = []
        for start, weights in (
            (0, shares(0.5, 0.5)),
            (5, shares(0.2, 0.8)),
            (2000, shares(0.7, 0.3)),
        ):
            first.begin(start, weights)
            second.begin(start, weights)
            early += [first.row(place) for place in range(start, start + 5)]
        third = Plan(SIZES, Key(1))
        third.replay(second.history())
        late = [second.row(place) for place in (*range(10), *range(2000, 2005))]
        assert early == late
        assert [third.row(place) for place in range(2100)[::-1]] == [
            second.row(place) for place in range(2100)
        ][::-1]

    def test_a_mixture_that_begins_again_takes_the_place_of_the_one_there(self) -> None:
        plan = Plan(SIZES, Key(1))
        plan.begin(0, shares(0.5, 0.5))
        plan.begin(4, shares(1, 0))
        plan.begin(4, shares(0, 1))
        assert {plan.row(place)[0] for place in range(4, 40)} == {"noise"}
        assert [start for start, _ in plan.history()] == [0, 4]


class TestRules:
    """A linear model in float64, whose gradients are written down."""

    @pytest.fixture
    def model(self) -> nn.Module:
        model = nn.Linear(3, 1, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(shares(0.3, -0.2, 0.5)[None])
        return model

    @staticmethod
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).exp().mean()  # the gradient at w of a row a is a·exp(w·a)

    @staticmethod
    def gradient(model: nn.Module, batch: Tensor) -> Tensor:
        w = next(model.parameters()).detach()[0]
        return (batch * (batch @ w).exp()[:, None]).mean(0)

    def batches(self) -> tuple[dict[str, Tensor], Tensor]:
        draw = torch.Generator().manual_seed(0)
        *lower, upper = torch.randn(4, 5, 3, generator=draw, dtype=torch.float64)
        return dict(zip("abc", lower, strict=True)), upper

    def test_alignment_is_the_cosine_of_gradients(self, model: nn.Module) -> None:
        lower, upper = self.batches()
        scores = Alignment().scores(
            self.loss, model, lower, upper, torch.optim.SGD(model.parameters(), lr=1.0)
        )
        wanted = self.gradient(model, upper)
        for score, batch in zip(scores, lower.values(), strict=True):
            own = self.gradient(model, batch)
            assert float(score) == pytest.approx(
                float(wanted @ own / (wanted.norm() * own.norm())), abs=1e-13
            )

    def test_alignment_is_in_the_metric_of_the_trainer_s_adam(self, model: nn.Module) -> None:
        lower, upper = self.batches()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0
        )
        v = torch.zeros(3, dtype=torch.float64)
        for batch in (lower["a"], lower["b"]):
            v = 0.9 * v + 0.1 * self.gradient(model, batch) ** 2
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            optimizer.step()
        scores = Alignment().scores(self.loss, model, lower, upper, optimizer)
        wanted = self.gradient(model, upper)
        for score, batch in zip(scores, lower.values(), strict=True):
            own = self.gradient(model, batch)
            u = own / ((0.9 * v + 0.1 * own**2).sqrt() + 1e-3)
            assert float(score) == pytest.approx(
                float(wanted @ u / (wanted.norm() * u.norm())), abs=1e-12
            )

    @pytest.mark.parametrize(
        "optimizer",
        [
            lambda leaves: transformers.optimization.Adafactor(leaves),
            lambda leaves: torch.optim.Adafactor(leaves),
            lambda leaves: torch.optim.Adamax(leaves),
            lambda leaves: torch.optim.RMSprop(leaves),
            lambda leaves: torch.optim.Adagrad(leaves),
            lambda leaves: Projected(leaves),
        ],
    )
    def test_alignment_under_another_state_is_the_plain_cosine(self, optimizer: Any) -> None:
        """Also of a vector, whose second moment Adafactor calls what Adam calls it."""
        draw = torch.Generator().manual_seed(1)
        model = nn.Linear(3, 1).double()
        with torch.no_grad():
            model.weight.copy_(torch.randn(1, 3, generator=draw))
        lower, upper = self.batches()
        expected = Alignment().scores(self.loss, model, lower, upper, None)
        other = optimizer(model.parameters())
        before = [leaf.detach().clone() for leaf in model.parameters()]
        self.loss(model, lower["a"]).backward()
        other.step()
        with torch.no_grad():
            for leaf, value in zip(model.parameters(), before, strict=True):
                leaf.copy_(value)
        assert any(other.state.values())
        scores = Alignment().scores(self.loss, model, lower, upper, other)
        assert scores.tolist() == expected.tolist()

    def test_losses_are_those_above_the_reference(self, model: nn.Module) -> None:
        lower, _ = self.batches()
        plain = [float(self.loss(model, batch).detach()) for batch in lower.values()]
        rule = Losses(reference={"c": 0.5, "b": 2.0, "a": 1.0})
        assert rule.scores(self.loss, model, lower, None, None).tolist() == pytest.approx(
            [value - base for value, base in zip(plain, (1.0, 2.0, 0.5), strict=True)], abs=1e-14
        )
        assert Losses().scores(self.loss, model, lower, None, None).tolist() == pytest.approx(
            plain, abs=1e-14
        )


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
            if torch.is_grad_enabled() and int(rows[0]["number"]) >= 0 and not self.probing():
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
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "seed": 1,
            "remove_unused_columns": False,
            "logging_steps": 1,
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

    def probing(self) -> bool:
        return not self.model.training

    def trained(
        self,
        folder: Path,
        resume: str | None = None,
        callback: dict[str, Any] | None = None,
        **more: Any,
    ) -> tuple[Any, Any]:
        from hgms_mix.exchange.online import MixtureCallback

        trainer = self.trainer(folder, **more)
        self.model = trainer.model
        fields = {
            "sources": SIZES,
            "outer": Sgd(lr=2.0),
            "rule": Alignment(rows=4, upper=5),
            "every": 2,
            **(callback or {}),
        }
        mixture = MixtureCallback(**fields)
        mixture.attach(trainer)
        self.model.train()
        trainer.train(resume_from_checkpoint=resume)
        return trainer, mixture

    def test_a_training_with_adafactor_is_mixed(self, tmp_path: Path) -> None:
        _, mixture = self.trained(tmp_path, optim="adafactor")
        assert [record["step"] for record in mixture.records] == [2, 4, 6]
        assert all(math.isfinite(score) for row in mixture.records for score in row["scores"])

    def test_theta_takes_the_steps_of_the_formula(self, tmp_path: Path) -> None:
        trainer, mixture = self.trained(tmp_path)
        theta = torch.log(shares(10, 14) / 14)
        assert [record["step"] for record in mixture.records] == [2, 4, 6]
        for record in mixture.records:
            w = theta.softmax(0)
            a = torch.tensor(record["scores"], dtype=torch.float64)
            assert bool((a.abs() <= 1).all())
            theta = theta + 2.0 * (torch.diag(w) - torch.outer(w, w)) @ a
            assert record["weights"] == pytest.approx(theta.softmax(0).tolist(), abs=1e-14)
        assert mixture.weights["copy"] > 10 / 24  # validation repeats its words
        logged = [row["mixture/copy"] for row in trainer.state.log_history if "mixture/copy" in row]
        assert logged == [record["weights"][0] for record in mixture.records]
        assert sum("loss" in row for row in trainer.state.log_history) == 6

    def test_the_rows_are_the_plan_s(self, tmp_path: Path) -> None:
        """By a loop of its own over places: six rows a step, a new mixture from the batch after
        the next.
        """
        _, mixture = self.trained(tmp_path)
        plan = Plan(SIZES, Key(0).fold("mixture"))
        plan.begin(0, torch.log(shares(10, 14) / 14).softmax(0))
        for step, record in zip((2, 4), mixture.records, strict=False):
            plan.begin(step * 6 + 3, shares(*record["weights"]))
        first = {"copy": 0, "noise": SIZES["copy"]}
        expected = [first[name] + row for name, row in map(plan.row, range(36))]
        assert self.seen[:36] == expected  # the loader has one batch more

    def test_a_change_leaves_the_training_s_random_numbers_alone(self, tmp_path: Path) -> None:
        """Scores that are all the same change nothing, however often."""

        class Even:
            name = "even"
            rows = 2
            upper = 2

            def check(self, names: Any) -> None: ...

            def scores(
                self, loss: Any, model: Any, lower: dict[str, Any], upper: Any, optimizer: Any
            ) -> Tensor:
                torch.randn(5)
                loss(model, upper)
                return torch.ones(len(lower))

        often, _ = self.trained(tmp_path / "often", callback={"rule": Even(), "every": 1})
        never, _ = self.trained(tmp_path / "never", callback={"rule": Even(), "every": 100})
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
        options = {
            "steps": 10,
            "accumulation": accumulation,
            "save_strategy": "steps",
            "save_steps": at,
        }
        whole, one = self.trained(tmp_path, callback={"outer": outer}, **options)
        resumed, other = self.trained(
            tmp_path, str(tmp_path / f"checkpoint-{at}"), callback={"outer": outer}, **options
        )
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
        ],
    )
    def test_what_it_cannot_do_is_said(self, tmp_path: Path, change: dict[str, Any]) -> None:
        from hgms_mix.exchange.online import MixtureCallback

        trainer = self.trainer(tmp_path, **change)
        with rejects("not-supported", "args", *change, of=ConfigError):
            MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0)).attach(trainer)

    def test_several_processes_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from hgms_mix.exchange.online import MixtureCallback

        trainer = self.trainer(tmp_path)
        monkeypatch.setattr(type(trainer.args), "world_size", property(lambda _: 2))
        with rejects("not-supported", "args", "world_size", of=ConfigError):
            MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0)).attach(trainer)

    def test_data_that_do_not_fit_are_refused(self, tmp_path: Path) -> None:
        from torch.utils.data import IterableDataset

        from hgms_mix.exchange.online import MixtureCallback

        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return iter(())

            def __len__(self) -> int:
                return sum(SIZES.values())

        trainer = self.trainer(tmp_path)
        with rejects("wrong-length", "trainer", "train_dataset", of=ConfigError) as caught:
            MixtureCallback(sources={"a": 10, "b": 15}, outer=Sgd(lr=1.0)).attach(trainer)
        assert {"24", "25"} <= set(caught.value.message.split())
        for validation in (None, {"first": self.validation, "second": self.validation}, []):
            trainer.eval_dataset = validation
            with rejects("no-rows", "validation", of=ConfigError):
                MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0)).attach(trainer)
        # needs none
        MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0), rule=Losses()).attach(trainer)
        trainer.train_dataset = Stream()
        with rejects("wrong-type", "trainer", "train_dataset", of=ConfigError):
            MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0)).attach(trainer)
        with rejects("wrong-value", "start", of=ConfigError):
            MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0), start={"copy": 1.0})
        with rejects("out-of-range", "start", of=ConfigError):
            MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0), start=dict.fromkeys(SIZES, 0.0))
        with rejects("wrong-value", "sources", of=ConfigError):
            MixtureCallback(sources={"copy": 3}, outer=Sgd(lr=1.0))
        with rejects("out-of-range", "every", of=ConfigError):
            MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0), every=0)
        with rejects("wrong-value", "rule", "reference", of=ConfigError):
            MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0), rule=Losses(reference={"copy": 1.0}))

    def test_rows_are_mixed_once(self, tmp_path: Path) -> None:
        """A cell of a notebook that runs twice makes a second callback for the same trainer."""
        from hgms_mix.exchange.online import MixtureCallback

        trainer = self.trainer(tmp_path)
        MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0)).attach(trainer)
        with rejects("conflicting-options", "trainer", "train_dataset", of=ConfigError):
            MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0)).attach(trainer)
        assert (
            sum(isinstance(other, MixtureCallback) for other in trainer.callback_handler.callbacks)
            == 1
        )

    def test_a_reference_is_by_name(self, tmp_path: Path) -> None:
        """Whatever the order in which its losses are written."""
        rule = Losses(reference={"noise": 50.0, "copy": 0.0})
        _, mixture = self.trained(tmp_path, callback={"rule": rule})
        copy, noise = mixture.records[0]["scores"]
        assert copy > 0
        assert noise < -40

    def test_scores_that_are_not_finite_leave_the_mixture_as_it_is(self, tmp_path: Path) -> None:
        class Broken:
            name = "broken"
            rows = 2
            upper = 0

            def check(self, names: Any) -> None: ...

            def scores(self, *arguments: Any) -> Tensor:
                return shares(math.nan, 1.0)

        options = {"steps": 4, "save_strategy": "steps", "save_steps": 2}
        _, mixture = self.trained(tmp_path, callback={"rule": Broken()}, **options)
        assert list(mixture.weights.values()) == pytest.approx([10 / 24, 14 / 24], abs=1e-14)
        assert [record["step"] for record in mixture.records] == [2, 4]
        self.trained(
            tmp_path, str(tmp_path / "checkpoint-2"), callback={"rule": Broken()}, **options
        )

    def test_a_checkpoint_without_its_file_or_of_others_is_refused(self, tmp_path: Path) -> None:
        options = {"steps": 4, "save_strategy": "steps", "save_steps": 2}
        _, mixture = self.trained(tmp_path, **options)
        file = tmp_path / "checkpoint-2" / "mixture.safetensors"
        other: dict[str, dict[str, Any]] = {
            "seed=5": {"seed": 5},
            "sources={'noise'": {"sources": dict(reversed(SIZES.items()))},
            "Adam": {"outer": Adam(lr=0.1)},
        }
        for part, callback in other.items():
            with rejects("other-settings", str(file), of=CheckpointError) as caught:
                self.trained(tmp_path, str(tmp_path / "checkpoint-2"), callback=callback, **options)
            assert part in caught.value.message
        file.unlink()
        with rejects("missing-file", str(file), of=CheckpointError):
            self.trained(tmp_path, str(tmp_path / "checkpoint-2"), **options)
        assert mixture.records

    def test_added_without_attach_it_says_so(self, tmp_path: Path) -> None:
        from hgms_mix.exchange.online import MixtureCallback

        trainer = self.trainer(tmp_path)
        trainer.add_callback(MixtureCallback(sources=SIZES, outer=Sgd(lr=1.0)))
        with rejects("not-attached", "trainer", of=ConfigError):
            trainer.train()


class TestTrl:
    """SFTTrainer: it tokenises the rows, then the mixture decides their order."""

    def trained(self, folder: Path, resume: str | None = None) -> tuple[Any, Any]:
        trl = pytest.importorskip("trl", reason="trl is not installed")
        from datasets import Dataset, concatenate_datasets

        from hgms_mix.exchange.online import MixtureCallback
        from hgms_mix.lm.tokenizers import byte_tokenizer

        parts = {
            "sums": Dataset.from_list(
                [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(9)]
            ),
            "dots": Dataset.from_list(
                [{"prompt": f"{n} + 1 =", "completion": " ."} for n in range(13)]
            ),
        }
        torch.manual_seed(0)
        tokenizer = byte_tokenizer()
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer), n_positions=32, n_embd=8, n_layer=1, n_head=2
        )
        arguments = trl.SFTConfig(
            output_dir=str(folder),
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            learning_rate=1e-2,
            save_strategy="steps",
            save_steps=3,
            max_length=32,
            gradient_checkpointing=False,
            seed=2,
            logging_steps=1,
        )
        trainer = trl.SFTTrainer(
            model=transformers.GPT2LMHeadModel(config),
            args=arguments,
            processing_class=tokenizer,
            train_dataset=concatenate_datasets(list(parts.values())),
            eval_dataset=parts["sums"],
        )
        mixture = MixtureCallback(
            sources={name: len(part) for name, part in parts.items()},
            outer=DualAveraging(),
            every=1,
            rule=Alignment(rows=4, upper=4),
        )
        mixture.attach(trainer)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, mixture

    def test_a_resumed_training_equals_an_uninterrupted_one(self, tmp_path: Path) -> None:
        whole, one = self.trained(tmp_path)
        resumed, other = self.trained(tmp_path, str(tmp_path / "checkpoint-3"))
        assert one.records == other.records
        assert [record["step"] for record in one.records] == [1, 2, 3, 4, 5, 6]
        assert one.weights["sums"] > 9 / 22
        own = [row for row in whole.state.log_history if "loss" in row]
        assert len(own) == 6
        # TRL's statistics are of its own steps
        assert all("mean_token_accuracy" in row for row in own)
        assert not any(
            "mean_token_accuracy" in row for row in whole.state.log_history if "mixture/sums" in row
        )
        assert not whole._metrics["eval"]
        for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(left, right)
