"""Fine-tuning: the loss against one computed by hand, the optimiser against torch's own, and the
losses of tuned models.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.finetuning import Rows, gpt, lora, parameters, random_rows
from support.helpers import rejects

from hgms_core import ConfigError, OutOfMemory
from hgms_mix.lm.models import BaseModel
from hgms_mix.stages.base_losses import untuned_losses
from hgms_mix.stages.batches import collate, completion_loss
from hgms_mix.stages.finetune import Finetune
from hgms_mix.stages.losses import row_losses
from hgms_mix.stages.training import train

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
)
peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

# peft's own calls of names that transformers has renamed
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
)


def by_hand(model: Any, rows: Rows) -> float:
    """Mean −log p over the completion tokens, one row and one token at a time, no padding."""
    terms = []
    for tokens, mask in rows:
        with torch.no_grad():
            logits = model(input_ids=tokens.long()[None]).logits[0].double()
        scored = [i for i in range(1, len(tokens)) if mask[i]]
        terms += [float(logits[i - 1].logsumexp(0) - logits[i - 1][int(tokens[i])]) for i in scored]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_the_loss_of_a_batch_padded_on_either_side_is_the_one_computed_by_hand(left: bool) -> None:
    model = gpt().eval()
    rows = random_rows(5)
    batch = collate(rows, pad=39)
    if left:
        widest = batch["input_ids"].shape[1]
        lengths = [len(tokens) for tokens, _ in rows]
        batch = {
            name: torch.stack(
                [leaf.roll(widest - length) for leaf, length in zip(leaves, lengths, strict=True)]
            )
            for name, leaves in batch.items()
        }
    seen = batch["attention_mask"]
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(input_ids=batch["input_ids"], attention_mask=seen, position_ids=positions)
    assert float(completion_loss(out.logits, batch["labels"])) == pytest.approx(
        by_hand(model, rows), rel=1e-5
    )


def test_one_step_is_torch_adamw_on_the_mean_over_all_tokens(tmp_path: Path) -> None:
    """Three micro-batches of two rows of different lengths: their losses add up to the mean over
    the tokens of all six rows.
    """
    rows = random_rows(6)
    settings = Finetune(lr=1e-2, micro_batch=2, accumulation=3, weight_decay=0.0)
    done = train(settings, gpt(), rows, tmp_path, seed=0)
    assert (done["optimizer_steps"], done["kind"], done["rows"]) == (1, "model", 6)
    assert done["first_loss"] == pytest.approx(by_hand(gpt().eval(), rows), rel=1e-5)

    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    batch = collate(rows, pad=0)
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    completion_loss(out.logits, batch["labels"]).backward()
    optimiser.step()
    result = parameters(tmp_path)
    expected = dict(model.named_parameters())
    assert set(result) <= set(expected)
    moved = 0
    for name, leaf in result.items():
        # AdamW's first step is lr·sign(gradient) where a gradient is not tiny: elsewhere rounding
        # decides it
        sure = expected[name].grad.abs() > 1e-6
        assert torch.allclose(leaf[sure], expected[name][sure], atol=1e-5), name
        moved += int(sure.sum())
    assert moved > 5000


def test_the_adapter_is_one_that_peft_loads(tmp_path: Path) -> None:
    rows = random_rows(8)
    train(Finetune(lr=1e-2, accumulation=2), gpt(), rows, tmp_path, seed=0, adapter=lora())
    assert sorted(
        path.name
        for path in (tmp_path / "adapter").iterdir()
        if path.suffix in (".json", ".safetensors")
    ) == ["adapter_config.json", "adapter_model.safetensors"]
    tuned = peft.PeftModel.from_pretrained(gpt(), tmp_path / "adapter").eval()
    assert by_hand(tuned, rows) < by_hand(gpt().eval(), rows)


def test_gradient_checkpointing_trains_to_the_same_parameters(tmp_path: Path) -> None:
    result = []
    for on in (False, True):
        folder = tmp_path / str(on)
        folder.mkdir()
        settings = Finetune(lr=1e-2, accumulation=2, checkpointing=on)
        train(settings, gpt(), random_rows(6), folder, seed=0, adapter=lora(dropout=0.1))
        result.append(parameters(folder))
    assert all(torch.allclose(leaf, result[1][name], atol=1e-6) for name, leaf in result[0].items())


def test_the_global_generators_are_left_as_they_were(tmp_path: Path) -> None:
    import random

    import numpy as np

    numpys = np.random.get_state()[1].tolist()  # noqa: NPY002
    before = (torch.get_rng_state(), numpys, random.getstate())
    train(Finetune(accumulation=2), gpt(), random_rows(2), tmp_path, seed=0)
    assert torch.get_rng_state().equal(before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert random.getstate() == before[2]


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        (Finetune(micro_batch=4), ("finetune", "micro_batch")),
        (Finetune(), ("task", "max_length")),
        (Finetune(checkpointing=True), ("task", "max_length")),
    ],
)
def test_out_of_memory_says_which_knob(
    settings: Finetune, place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", full)
    with rejects("out-of-memory", *place, of=OutOfMemory) as caught:
        train(settings, gpt(), random_rows(2), tmp_path, seed=0)
    hint = caught.value.hint or ""
    assert ("micro_batch (now 4)" in hint) == (settings.micro_batch == 4)
    assert ("finetune.checkpointing = true" in hint) != settings.checkpointing


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("lr", 0.0, "out-of-range"),
        ("epochs", -1, "out-of-range"),
        ("epochs", 0, "conflicting-options"),
        ("schedule", "step", "unknown-choice"),
        ("clip", -1.0, "out-of-range"),
    ],
)
def test_settings_are_checked(field: str, value: Any, code: str) -> None:
    with rejects(code, field, of=ConfigError):
        Finetune(**{field: value})


def a_table(rows: Rows) -> Any:
    from hgms_mix.lm import TokenTable

    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    numbers = torch.arange(len(rows))
    return TokenTable(
        "t",
        torch.cat([t for t, _ in rows]),
        torch.cat([m for _, m in rows]),
        offsets,
        numbers,
        "digest",
    )


def test_losses_of_rows_are_those_computed_by_hand_however_they_are_grouped() -> None:
    model = gpt(dropout=0.3)
    rows = random_rows(7)
    result = row_losses(model, a_table(rows), rows=3)
    for i, row in enumerate(rows):
        assert float(result.per_row[i]) == pytest.approx(by_hand(model.eval(), [row]), rel=1e-5)
    assert torch.allclose(row_losses(model, a_table(rows), rows=7).total, result.total, rtol=1e-5)


@pytest.mark.parametrize("fits", [0, 2])
def test_evaluation_takes_fewer_rows_where_memory_runs_out(
    fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = transformers.GPT2LMHeadModel.forward
    seen = []

    def limited(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        seen.append(len(input_ids))
        if len(input_ids) > fits:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you "
                "tried"
            )
        return forward(self, input_ids=input_ids, **more)

    rows = random_rows(5)
    expected = row_losses(gpt(), a_table(rows)).total
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", limited)
    if fits == 0:
        with rejects("out-of-memory", "task", "max_length", of=OutOfMemory):
            row_losses(gpt(), a_table(rows), rows=4)
        return
    assert torch.allclose(row_losses(gpt(), a_table(rows), rows=4).total, expected, rtol=1e-5)
    assert seen == [4, 2, 2, 1]


def test_losses_before_tuning_are_computed_once_for_an_experiment(tmp_path: Path) -> None:
    """The second mix of an experiment reads them; a damaged file is made again; another model or
    other rows have their own.
    """
    loads: list[int] = []

    def mix(method: str, seed: int = 0) -> Any:
        gpt(seed).save_pretrained(tmp_path / f"model-{seed}")
        model = BaseModel(path=str(tmp_path / f"model-{seed}"), tokenizer="bytes")

        def base(ranks: Any = None) -> Any:
            loads.append(seed)
            return gpt(seed)

        config = SimpleNamespace(finetune=SimpleNamespace(model=None))
        folder = tmp_path / method / "seed-0"
        task = SimpleNamespace(model=model)
        return SimpleNamespace(
            config=config, task=task, folder=folder, base=base, tuned_tables=lambda which: tables
        )

    tables = {"t": a_table(random_rows(5))}
    expected = row_losses(gpt(), tables["t"]).total
    first = untuned_losses(mix("hg-ms-1"))["t"]
    second = untuned_losses(mix("uniform-2"))["t"]
    assert loads == [0]
    assert torch.equal(first.total, expected)
    assert torch.equal(second.total, expected)
    (file,) = (tmp_path / "untuned").iterdir()
    file.write_text("{")
    assert torch.equal(untuned_losses(mix("hg-ms-1"))["t"].total, expected)
    other = untuned_losses(mix("hg-ms-1", seed=1))["t"]
    assert loads == [0, 0, 1]
    assert not torch.equal(other.total, expected)
