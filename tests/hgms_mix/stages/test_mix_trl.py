"""TRL's SFTTrainer as the trainer of a mix: rows, masks, losses and resumption of transformers'
Trainer, and its options.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from support.finetuning import (
    PowerCut,
    Rows,
    assert_ended_alike,
    cut_at,
    gpt,
    logged,
    lora,
    parameters,
    random_rows,
)
from support.helpers import rejects

from hgms.store import Folder
from hgms_core import ConfigError
from hgms_mix.lm import BaseModel
from hgms_mix.stages.settings import Finetune
from hgms_mix.stages.trainers import Transformers
from hgms_mix.stages.training import train
from hgms_mix.stages.trl_trainer import OURS, PLACE, RESERVED, Trl

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
)
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")


needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install 'hgms[trl]'"
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
)

BYTES = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
BYTES |= {"n_positions": 64, "n_layer": 1}


def rows_of_bytes(count: int, whole: bool = False) -> Rows:
    return random_rows(count, (0, 256), whole)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return BaseModel(config={"model_type": "gpt2"}, tokenizer="bytes").load_tokenizer()


def losses(
    folder: Path, settings: Finetune, rows: Rows, tokenizer: Any, dropout: float = 0.0, **more: Any
) -> list[float]:
    """The loss of every optimiser step; the adapter is in the folder."""
    folder.mkdir(exist_ok=True)
    model = gpt(dropout=dropout, **BYTES)
    own: dict[str, Any] = {"adapter": lora(dropout), "tokenizer": tokenizer, **more}
    train(evolve(settings, seed=5), model, rows, Folder(folder, ""), **own)
    return [row["loss"] for row in logged(folder)]


@needs_trl
@pytest.mark.parametrize("whole", [False, True])
def test_an_epoch_has_the_losses_of_the_trainer_of_transformers(
    whole: bool, tokenizer: Any, tmp_path: Path
) -> None:
    """Dropout, accumulation, a schedule, clipping, and a last step that is not full; TRL
    computes its loss in another way.
    """
    rows = rows_of_bytes(14, whole)
    shared = {"lr": 1e-2, "micro_batch": 3, "accumulation": 2, "schedule": "linear", "clip": 1.0}
    ours, theirs = (
        losses(tmp_path / name, Finetune(**shared, trainer=part), rows, tokenizer, dropout=0.1)
        for name, part in (("ours", Transformers()), ("theirs", Trl()))
    )
    assert len(ours) == 3
    assert theirs == pytest.approx(ours, abs=1e-5)
    tuned = parameters(tmp_path / "theirs")
    for name, leaf in parameters(tmp_path / "ours").items():
        assert torch.allclose(leaf, tuned[name], atol=1e-5)


@needs_trl
@pytest.mark.parametrize(
    "part",
    [
        Trl(completion_only_loss=False),
        Trl(padding_free=True),
        Trl(packing=True),
        Trl(packing=True, sft={"max_length": 40}),
    ],
    ids=["prompts", "flat", "packed", "wide"],
)
def test_rows_laid_side_by_side_do_not_see_each_other_and_prompts_are_learned_where_asked(
    part: Trl, tokenizer: Any, tmp_path: Path
) -> None:
    """All rows in one optimiser step: however they are laid out, the loss is the mean over the same
    tokens. Attention over the borders of rows would change it."""
    rows = rows_of_bytes(12)
    learned = [(tokens, mask | (not part.completion_only_loss)) for tokens, mask in rows]
    shared = {"micro_batch": 4, "accumulation": 3}
    expected = losses(tmp_path / "ours", Finetune(**shared), learned, tokenizer)
    found = losses(tmp_path / "theirs", Finetune(**shared, trainer=part), rows, tokenizer)
    assert found == pytest.approx(expected, abs=1e-5)


@needs_trl
@pytest.mark.parametrize("packing", [False, True])
def test_a_resumed_run_ends_with_the_very_bits_of_an_uninterrupted_one(
    packing: bool, tokenizer: Any, tmp_path: Path
) -> None:
    options = {"lr": 1e-2, "accumulation": 2, "save_every": 3, "schedule": "cosine", "epochs": 2}
    settings = Finetune(**options, trainer=Trl(packing=packing))
    arguments = (settings, rows_of_bytes(9), tokenizer, 0.1)
    assert len(losses(tmp_path / "whole", *arguments)) > 5
    with pytest.raises(PowerCut):
        losses(tmp_path / "broken", *arguments, watch=cut_at(5))
    assert (tmp_path / "broken" / "checkpoints" / "checkpoint-3" / "sha256.json").exists()
    losses(tmp_path / "broken", *arguments)
    assert_ended_alike(tmp_path / "whole", tmp_path / "broken")


@needs_trl
def test_fields_that_sftconfig_does_not_have_or_that_are_reserved_are_refused() -> None:
    from trl import SFTConfig

    assert {*OURS, *RESERVED} <= {part.name for part in dataclasses.fields(SFTConfig)}
    Trl(sft={"optim": "sgd", "adam_beta2": 0.95, "packing_strategy": "bfd"}).check(["c_attn"])
    for code, name in (
        ("unknown-option", "activation_ofloading"),
        ("conflicting-options", "learning_rate"),
    ):
        with rejects(code, *PLACE, name, of=ConfigError):
            Trl(sft={name: 1.0}).check(None)
