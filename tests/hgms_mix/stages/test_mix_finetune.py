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

from hgms.store import Folder
from hgms_mix.lm import TokenTable
from hgms_mix.lm.models import BaseModel
from hgms_mix.stages.batches import collate, completion_loss
from hgms_mix.stages.losses import row_losses, untuned_losses
from hgms_mix.stages.settings import Finetune
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
        turns = [batch["input_ids"].shape[1] - len(tokens) for tokens, _ in rows]
        batch = {
            name: torch.stack([leaf.roll(n) for leaf, n in zip(leaves, turns, strict=True)])
            for name, leaves in batch.items()
        }
    seen = batch["attention_mask"]
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(input_ids=batch["input_ids"], attention_mask=seen, position_ids=positions)
    loss = float(completion_loss(out.logits, batch["labels"]))
    assert loss == pytest.approx(by_hand(model, rows), rel=1e-5)


def test_one_step_is_torch_adamw_on_the_mean_over_all_tokens(tmp_path: Path) -> None:
    """Three micro-batches of two rows of different lengths: their losses add up to the mean over
    the tokens of all six rows.
    """
    rows = random_rows(6)
    settings = Finetune(lr=1e-2, micro_batch=2, accumulation=3, weight_decay=0.0)
    done = train(settings, gpt(), rows, Folder(tmp_path, ""))
    assert (done["optimizer_steps"], done["kind"], done["rows"]) == (1, "model", 6)
    assert done["first_loss"] == pytest.approx(by_hand(gpt().eval(), rows), rel=1e-5)

    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    batch = collate(rows, pad=0)
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    completion_loss(out.logits, batch["labels"]).backward()
    optimiser.step()
    expected = dict(model.named_parameters())
    # AdamW's first step is lr·sign(gradient) where a gradient is not tiny: elsewhere rounding
    # decides it
    sure = {name: leaf.grad.abs() > 1e-6 for name, leaf in expected.items()}
    result = parameters(tmp_path)
    for name, leaf in result.items():
        assert torch.allclose(leaf[sure[name]], expected[name][sure[name]], atol=1e-5), name
    assert sum(int(sure[name].sum()) for name in result) > 5000


def test_the_adapter_is_one_that_peft_loads_whether_gradients_are_checkpointed_or_not(
    tmp_path: Path,
) -> None:
    """With dropout by the seed of fine-tuning, if it has one."""
    assert [Finetune(seed=seed).with_seed(7).seed for seed in (3, None)] == [3, 7]
    rows = random_rows(6)
    result = []
    for on in (False, True):
        folder = tmp_path / str(on)
        folder.mkdir()
        settings = Finetune(lr=1e-2, accumulation=2, checkpointing=on, seed=3)
        train(settings, gpt(), rows, Folder(folder, ""), adapter=lora(dropout=0.1))
        result.append(parameters(folder))
    assert all(torch.allclose(leaf, result[1][name], atol=1e-6) for name, leaf in result[0].items())
    adapter = tmp_path / "True" / "tuned"
    tuned = peft.PeftModel.from_pretrained(gpt(), adapter).eval()
    assert by_hand(tuned, rows) < by_hand(gpt().eval(), rows)


def a_table(rows: Rows) -> TokenTable:
    tokens, masks = (torch.cat(parts) for parts in zip(*rows, strict=True))
    lengths = torch.tensor([0, *(len(tokens) for tokens, _ in rows)])
    return TokenTable("t", tokens, masks, lengths.cumsum(0), torch.arange(len(rows)), "digest")


def test_losses_of_rows_are_those_computed_by_hand_however_they_are_grouped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in fewer rows at once, where memory runs out."""
    model = gpt(dropout=0.3)
    rows = random_rows(5)
    result = row_losses(model, a_table(rows), rows=3)
    expected = [by_hand(model.eval(), [row]) for row in rows]
    assert result.per_row.tolist() == pytest.approx(expected, rel=1e-5)
    seen = []
    forward = transformers.GPT2LMHeadModel.forward

    def limited(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        seen.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, input_ids=input_ids, **more)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", limited)
    assert torch.allclose(row_losses(model, a_table(rows), rows=4).total, result.total, rtol=1e-5)
    assert seen == [4, 2, 2, 1]


def test_losses_before_tuning_are_computed_once_for_an_experiment(tmp_path: Path) -> None:
    """The second mix of an experiment reads them; another model has its own."""
    loads: list[int] = []
    tables = {"t": a_table(random_rows(5))}

    def losses(seed: int = 0) -> list[float]:
        def base() -> Any:
            loads.append(seed)
            return gpt(seed)

        path = tmp_path / f"model-{seed}"
        gpt(seed).save_pretrained(path)
        model: Any = SimpleNamespace(
            model=BaseModel(path=str(path), tokenizer="bytes"), load=base, test_tables=tables
        )
        return untuned_losses(model, tmp_path / "untuned")["t"].total.tolist()

    expected = row_losses(gpt(), tables["t"]).total.tolist()
    assert [losses(), losses(), loads] == [expected, expected, [0]]
    assert losses(seed=1) != expected
    assert loads == [0, 1]
