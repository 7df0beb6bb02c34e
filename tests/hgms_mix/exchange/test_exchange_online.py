"""A mixture that changes while the Trainer of transformers trains: its rows, its steps, and a
resumed training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.helpers import rejects
from torch import Tensor

from hgms.outer import Adam, DualAveraging, Sgd
from hgms_core import ConfigError, Key
from hgms_core.errors import CheckpointError
from hgms_mix.exchange.plan import Plan
from hgms_mix.exchange.rules import Alignment

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
)
SIZES = {"copy": 10, "noise": 14}
LENGTH = 6
WORDS = 11
SAVED = {"save_strategy": "steps", "save_steps": 2, "steps": 4}


def fixed(*values: float) -> Any:
    """The same scores at every change; it draws random numbers and runs the model."""

    def scores(loss: Any, model: Any, lower: Any, upper: Any, optimizer: Any) -> Tensor:
        torch.randn(5)
        loss(model, upper)
        return torch.tensor(values, dtype=torch.float64)

    return SimpleNamespace(rows=2, upper=2, values=values, scores=scores)


def callback(**changes: Any) -> Any:
    from hgms_mix.exchange.online import MixtureCallback

    return MixtureCallback(**{"sources": SIZES, "outer": Sgd(lr=2.0), **changes})


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    state = torch.get_rng_state()  # the Trainer seeds the global generators
    yield
    torch.set_rng_state(state)


def numbered(text: Tensor, first: int = 0) -> list[dict[str, Tensor]]:
    return [
        {"input_ids": row, "labels": row, "number": torch.tensor(number)}
        for number, row in enumerate(text, first)
    ]


DRAW = torch.Generator().manual_seed(0)
COPY = torch.randint(WORDS, (SIZES["copy"], 1), generator=DRAW).expand(-1, LENGTH)
NOISE = torch.randint(WORDS, (SIZES["noise"], LENGTH), generator=DRAW)
ROWS = numbered(torch.cat([COPY, NOISE]))
"""Words that repeat, then words at random."""
VALIDATION = numbered(torch.arange(WORDS)[:, None].expand(-1, LENGTH), -WORDS)


def trainer_in(folder: Path, steps: int = 6, accumulation: int = 2, **more: Any) -> Any:
    """A Trainer; ``seen`` of it are the numbers of the rows that it trained on."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2
    )

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if torch.is_grad_enabled() and trainer.model.training:
            trainer.seen.extend(int(row["number"]) for row in rows if row["number"] >= 0)
        return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}

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
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=ROWS,
        eval_dataset=VALIDATION,
        data_collator=collate,
    )
    trainer.seen = []
    return trainer


def trained(
    folder: Path, resume: int | None = None, change: Any = None, **more: Any
) -> tuple[Any, Any]:
    """A trainer and its mixture; ``resume``: from the checkpoint of that step."""
    trainer = trainer_in(folder, **more)
    mixture = callback(**{"rule": Alignment(rows=4, upper=5), "every": 2, **(change or {})})
    mixture.attach(trainer)
    trainer.model.train()
    checkpoint = None if resume is None else str(folder / f"checkpoint-{resume}")
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, mixture


def ended(trainer: Any, mixture: Any) -> Any:
    """All that a training leaves."""
    leaves = [leaf.tolist() for leaf in trainer.model.parameters()]
    history = [(start, weights.tolist()) for start, weights in mixture.plan.history()]
    return leaves, mixture.records, mixture.theta.tolist(), history


def test_theta_takes_the_steps_of_the_formula_and_the_rows_are_the_plan_s(tmp_path: Path) -> None:
    """By a loop of its own over places: six rows a step, a new mixture from the batch after
    the next.
    """
    trainer, mixture = trained(tmp_path)
    theta = torch.log(torch.tensor([10, 14], dtype=torch.float64) / 14)
    plan = Plan(SIZES, Key(0).fold("mixture"))
    plan.begin(0, theta.softmax(0))
    assert [record["step"] for record in mixture.records] == [2, 4, 6]
    for record in mixture.records:
        w = theta.softmax(0)
        a = torch.tensor(record["scores"], dtype=torch.float64)
        assert bool((a.abs() <= 1).all())
        theta = theta + 2.0 * (torch.diag(w) - torch.outer(w, w)) @ a
        assert record["weights"] == pytest.approx(theta.softmax(0).tolist(), abs=1e-14)
        plan.begin(record["step"] * 6 + 3, torch.tensor(record["weights"], dtype=torch.float64))
    first = {"copy": 0, "noise": SIZES["copy"]}
    # the loader has one batch more
    assert trainer.seen[:36] == [first[name] + row for name, row in map(plan.row, range(36))]


def test_a_change_leaves_the_training_s_random_numbers_alone(tmp_path: Path) -> None:
    """Scores that are all the same change nothing, however often."""
    often, never = (
        trained(tmp_path / str(every), change={"rule": fixed(1, 1), "every": every})[0]
        for every in (1, 100)
    )
    for one, other in zip(often.model.parameters(), never.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("outer", "at", "options"),
    [(DualAveraging(), 3, {}), (Adam(lr=0.5), 4, {"accumulation": 1, "optim": "adafactor"})],
    ids=["none-due", "adafactor"],
)
def test_a_resumed_training_equals_an_uninterrupted_one(
    tmp_path: Path, outer: Any, at: int, options: dict[str, Any]
) -> None:
    """Over more than an epoch of 24 rows, with dropout, stopped where a change is due and
    where none is.
    """
    options = {**SAVED, "steps": 10, "save_steps": at, "change": {"outer": outer}, **options}
    whole, resumed = trained(tmp_path, **options), trained(tmp_path, at, **options)
    assert ended(*whole) == ended(*resumed)
    assert all(math.isfinite(score) for row in whole[1].records for score in row["scores"])


def test_scores_that_are_not_finite_leave_the_mixture_and_checkpoints_of_others_are_refused(
    tmp_path: Path,
) -> None:
    change = {"rule": fixed(math.nan, 1.0)}
    _, mixture = trained(tmp_path, change=change, **SAVED)
    assert list(mixture.weights.values()) == pytest.approx([10 / 24, 14 / 24], abs=1e-14)
    file = tmp_path / "checkpoint-2" / "mixture.safetensors"
    with rejects("other-settings", str(file), of=CheckpointError):
        trained(tmp_path, 2, change=change | {"seed": 5}, **SAVED)


def test_a_checkpoint_without_its_mixture_or_of_another_optimiser_is_refused(
    tmp_path: Path,
) -> None:
    trained(tmp_path, **SAVED)
    file = tmp_path / "checkpoint-2" / "mixture.safetensors"
    with rejects("other-settings", str(file), of=CheckpointError):
        callback(outer=Adam(lr=0.5)).load(file.parent)
    file.unlink()
    with rejects("missing-file", str(file), of=CheckpointError):
        trained(tmp_path, 2, **SAVED)


ARGS = {
    "world_size": 1,
    "dataloader_num_workers": 0,
    "train_sampling_strategy": "random",
    "auto_find_batch_size": False,
    "ignore_data_skip": False,
}


def attached(args: dict[str, Any] = ARGS, times: int = 1, **changes: Any) -> None:
    """To what stands for a trainer."""
    data = {"train_dataset": ROWS, "eval_dataset": VALIDATION, **changes}
    trainer = SimpleNamespace(args=SimpleNamespace(**args), add_callback=lambda _: None, **data)
    for _ in range(times):
        callback().attach(trainer)


REFUSED: list[tuple[str, tuple[str, ...], Any]] = [
    *(
        ("wrong-value", ("sources",), lambda sources=sources: callback(sources=sources))
        for sources in ({"copy": 10}, {"copy": 10, "noise": 0}, {"copy": 10, "noise": 1.5})
    ),
    ("out-of-range", ("every",), lambda: callback(every=0)),
    *(
        ("out-of-range", ("start", name), lambda start=start: callback(start=start))
        for name, start in (
            ("noise", {"copy": 1.0, "noise": -1.0}),
            ("copy", {"copy": math.inf, "noise": 1.0}),
        )
    ),
    ("wrong-value", ("start",), lambda: callback(start={"copy": 0.0})),
    ("unknown-source", ("start", "copies"), lambda: callback(start={"copies": 1.0})),
    ("wrong-rows", ("trainer", "train_dataset"), lambda: attached(times=2)),
    ("wrong-rows", ("trainer", "train_dataset"), lambda: attached(train_dataset=iter(ROWS))),
    ("wrong-rows", ("trainer", "train_dataset"), lambda: attached(train_dataset={"a": ROWS})),
    ("wrong-rows", ("trainer", "train_dataset"), lambda: attached(train_dataset=ROWS[1:])),
    *(
        ("no-rows", ("validation",), lambda rows=rows: attached(eval_dataset=rows))
        for rows in (None, [], {"one": VALIDATION})
    ),
    *(
        (
            "not-supported",
            ("args", name),
            lambda name=name, value=value: attached({**ARGS, name: value}),
        )
        for name, value in {
            "world_size": 2,
            "dataloader_num_workers": 1,
            "train_sampling_strategy": "group_by_length",
            "auto_find_batch_size": True,
            "ignore_data_skip": True,
        }.items()
    ),
    ("not-attached", ("trainer",), lambda: callback().on_train_begin(None, None, None)),
]


@pytest.mark.parametrize(("code", "place", "call"), REFUSED)
def test_what_a_mixture_cannot_be_laid_over_is_refused(
    code: str, place: tuple[str, ...], call: Any
) -> None:
    attached()
    with rejects(code, *place, of=ConfigError):
        call()
