"""TRL's SFTTrainer as the trainer of a mix: rows, masks, losses and resumption of transformers'
Trainer, and its options.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
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
from support.small_mixes import TASK, report_of, sampled, write_sums

from hgms.config.as_table import plain
from hgms.config.convert import converter_for
from hgms_core import ConfigError, MissingExtra
from hgms_core.registry import Registry
from hgms_mix.lm import BaseModel
from hgms_mix.stages.batches import IGNORED
from hgms_mix.stages.finetune import Finetune
from hgms_mix.stages.trainers import Job, Transformers
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
    train(settings, model, rows, folder, seed=5, adapter=lora(dropout), tokenizer=tokenizer, **more)
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
    ours = losses(tmp_path / "ours", Finetune(**shared), rows, tokenizer, dropout=0.1)
    theirs = losses(
        tmp_path / "theirs", Finetune(**shared, trainer=Trl()), rows, tokenizer, dropout=0.1
    )
    assert len(ours) == 3
    assert theirs == pytest.approx(ours, abs=1e-5)
    tuned = parameters(tmp_path / "theirs")
    assert all(
        torch.allclose(leaf, tuned[name], atol=1e-5)
        for name, leaf in parameters(tmp_path / "ours").items()
    )


def batches(part: Transformers | Trl, rows: Rows, tokenizer: Any, folder: Path) -> list[Any]:
    job = Job(
        settings=Finetune(micro_batch=3, trainer=part),
        model=gpt(**BYTES),
        rows=rows,
        folder=folder,
        seed=3,
        pad=258,
        tokenizer=tokenizer,
        callback=transformers.TrainerCallback(),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return list(part.build(job).get_train_dataloader())


@needs_trl
def test_prompts_are_learned_too_where_that_is_asked_for(tokenizer: Any, tmp_path: Path) -> None:
    rows = rows_of_bytes(6)
    learned = [(tokens, torch.ones_like(mask)) for tokens, mask in rows]
    settings = Finetune(accumulation=6, trainer=Trl(completion_only_loss=False))
    expected = losses(tmp_path / "ours", Finetune(accumulation=6), learned, tokenizer)
    assert losses(tmp_path / "theirs", settings, rows, tokenizer) == pytest.approx(
        expected, abs=1e-5
    )


@needs_trl
@pytest.mark.parametrize(
    "part",
    [Trl(padding_free=True), Trl(packing=True), Trl(packing=True, sft={"max_length": 40})],
    ids=["flat", "packed", "wide"],
)
def test_rows_laid_side_by_side_do_not_see_each_other(
    part: Trl, tokenizer: Any, tmp_path: Path
) -> None:
    """All rows in one optimiser step: however they are laid out, the loss is the mean over the same
    completion tokens. Attention over the borders of rows would change it."""
    rows = rows_of_bytes(12)
    expected = losses(tmp_path / "ours", Finetune(micro_batch=4, accumulation=3), rows, tokenizer)
    settings = Finetune(micro_batch=4, accumulation=3, trainer=part)
    assert losses(tmp_path / "theirs", settings, rows, tokenizer) == pytest.approx(
        expected, abs=1e-5
    )


@needs_trl
def test_packing_makes_fewer_sequences_with_the_labels_of_all_rows(
    tokenizer: Any, tmp_path: Path
) -> None:
    rows = rows_of_bytes(12)
    packed = batches(Trl(packing=True, sft={"max_length": 30}), rows, tokenizer, tmp_path)
    labels = torch.cat([batch["labels"].flatten() for batch in packed])
    wanted = torch.cat([tokens[1:][mask[1:]] for tokens, mask in rows])
    assert labels[labels != IGNORED].sort().values.equal(wanted.long().sort().values)
    assert sum(len(batch["cu_seq_lens_q"]) - 1 for batch in packed) == len(rows)
    assert len(packed) == 1  # three blocks, where 12 rows are four micro-batches


@needs_trl
@pytest.mark.parametrize("packing", [False, True])
def test_a_resumed_run_ends_with_the_very_bits_of_an_uninterrupted_one(
    packing: bool, tokenizer: Any, tmp_path: Path
) -> None:
    part = Trl(packing=packing)
    settings = Finetune(
        lr=1e-2, accumulation=2, save_every=3, schedule="cosine", epochs=2, trainer=part
    )
    rows = rows_of_bytes(9)
    whole = losses(tmp_path / "whole", settings, rows, tokenizer, dropout=0.1)
    with pytest.raises(PowerCut):
        losses(tmp_path / "broken", settings, rows, tokenizer, dropout=0.1, watch=cut_at(5))
    assert (tmp_path / "broken" / "checkpoints" / "checkpoint-3" / "sha256.json").exists()
    losses(tmp_path / "broken", settings, rows, tokenizer, dropout=0.1)
    assert_ended_alike(tmp_path / "whole", tmp_path / "broken")
    assert len(whole) > 5


@needs_trl
def test_a_block_that_would_cut_a_row_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    part = Trl(packing=True, sft={"max_length": 8})
    with rejects("out-of-range", *PLACE, "max_length", of=ConfigError):
        batches(part, rows_of_bytes(12), tokenizer, tmp_path)


@needs_trl
@pytest.mark.parametrize(
    ("settings", "code", "remedy"),
    [
        ({"activation_ofloading": True}, "unknown-option", "activation_offloading"),
        ({"learning_rate": 1.0}, "conflicting-options", "finetune.lr"),
        ({"report_to": "wandb"}, "conflicting-options", "remove"),
        ({"max_length": 12}, "conflicting-options", "finetune.trainer.packing"),
    ],
)
def test_fields_that_sftconfig_does_not_have_are_refused(
    settings: dict[str, Any], code: str, remedy: str
) -> None:
    with rejects(code, *PLACE, *settings, of=ConfigError) as caught:
        Trl(sft=settings).check(None)
    assert remedy in "".join([caught.value.hint or "", *caught.value.did_you_mean])


@needs_trl
def test_what_is_reserved_are_fields_of_sftconfig() -> None:
    import dataclasses

    from trl import SFTConfig

    assert {*OURS, *RESERVED} <= {part.name for part in dataclasses.fields(SFTConfig)}
    with rejects("wrong-value", *PLACE, of=ConfigError):
        Trl(sft={"optim": "adamm"}).check(None)
    Trl(sft={"optim": "sgd", "adam_beta2": 0.95, "packing_strategy": "bfd"}).check(["c_attn"])
    with rejects("not-supported", "task", "adapter", "targets", of=ConfigError):
        Trl().check(["c_attn", "lm_head"])


def test_where_trl_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with rejects("missing-package", "finetune", "trainer", of=MissingExtra) as caught:
        Trl().check(None)
    assert caught.value.install == "pip install 'hgms[trl]'"


def test_the_trainer_is_a_part_chosen_by_its_name() -> None:
    converter = converter_for(Registry.load())
    assert converter.structure({}, Finetune).trainer == Transformers()
    assert converter.structure({"trainer": "trl"}, Finetune).trainer == Trl()
    table = {"name": "trl", "packing": True, "sft": {"max_length": 64}}
    settings = converter.structure({"trainer": table}, Finetune)
    assert settings.trainer == Trl(packing=True, sft={"max_length": 64})
    assert converter.structure(plain(settings), Finetune) == settings
    wrong: Any
    for wrong, code, place, near in [
        ("tlr", "unknown-name", (), ("trl",)),
        ({"name": "trl", "paking": True}, "unknown-option", ("paking",), ("packing",)),
        ({"packing": True}, "wrong-type", (), ()),
        (3, "wrong-type", (), ()),
    ]:
        with rejects(code, "trainer", *place, of=ConfigError) as caught:
            converter.structure({"trainer": wrong}, Finetune)
        assert caught.value.did_you_mean == near


@needs_trl
def test_a_mix_with_it_ends_where_the_mix_without_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("sums", "dots", "validation", "test")):
        write_sums(name, range(100 * number, 100 * number + 20), "7")
    Path("mix.toml").write_text(
        f'seed = 1\nbudget = "1 steps"\nmethod = "uniform"\n{TASK}\n[sample]\nsize = 12\n'
        "[finetune]\nlr = 1e-2\naccumulation = 4\n"
    )
    ours = report_of("mix", "mix.toml")
    theirs = report_of("mix", "mix.toml", sets=["finetune.trainer=trl"])
    for report in (ours, theirs):
        report["finetune"].pop("processor_seconds", None)
    assert theirs["finetune"] == {
        **ours["finetune"],
        "trainer": "trl",
        "sequences": 12,
        **{
            key: pytest.approx(ours["finetune"][key], abs=1e-5)
            for key in ("first_loss", "last_loss")
        },
    }
    assert theirs["test"]["sums"]["token_loss"] == pytest.approx(
        ours["test"]["sums"]["token_loss"], abs=1e-5
    )
    assert len(sampled(theirs)) == 12
