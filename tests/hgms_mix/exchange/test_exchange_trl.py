"""A sample handed to TRL: its rows for several answers, its own parser, loader and script, and a
mixture that changes while its SFTTrainer trains.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exports import lines, rows_in, several_answers, write

from hgms.outer import DualAveraging
from hgms_mix.exchange.rules import Alignment
from hgms_mix.exchange.with_trl import TRL

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install 'hgms[trl]'"
)


@pytest.mark.parametrize("marks", [False, True])
def test_trl_gets_a_row_for_each_answer_unless_the_template_marks_answers(
    here: Path, tmp_path: Path, marks: bool
) -> None:
    """TRL stops at a chat template that it can neither use nor patch (SmolLM2's, for example)."""
    sample = several_answers(marks)
    TRL.write(sample, tmp_path)
    table = yaml.safe_load((tmp_path / "sft.yaml").read_text())
    rows = {part.name: lines(tmp_path / "rows" / f"{part.stem}.jsonl") for part in sample.parts}
    fractions = [part["fraction"] for part in table["datasets"]]
    if marks:
        assert table["assistant_only_loss"] is True
        assert [len(row["messages"]) for row in rows["sums"]] == [4] * 21
        assert fractions == pytest.approx([0.7, 0.3])
        return
    assert "assistant_only_loss" not in table
    assert table["completion_only_loss"] is True
    assert {name: len(listed) for name, listed in rows.items()} == {"sums": 42, "dots, 2": 9}
    # by these fractions TRL takes each row once
    assert fractions == pytest.approx([42 / 51, 9 / 51])
    turns = sample.parts[0].rows[0]["messages"]
    assert rows["sums"][:2] == [
        {"prompt": turns[:1], "completion": turns[1:2]},
        {"prompt": turns[:3], "completion": turns[3:]},
    ]


def test_an_answer_of_weight_0_is_no_row_for_trl(here: Path, tmp_path: Path) -> None:
    sample = several_answers(marks=True)
    first = sample.parts[0].rows[0]["messages"]
    first[1] = {**first[1], "weight": 0}
    TRL.write(sample, tmp_path)
    written = lines(tmp_path / "rows" / "sums.jsonl")
    assert len(written) == 41
    assert [len(row["prompt"]) for row in written[:2]] == [3, 1]


@needs_trl
@pytest.mark.parametrize("name", ["chat", "plain"])
def test_its_parser_and_loader_take_the_sample(
    here: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import (
        DatasetMixtureConfig,
        ModelConfig,
        ScriptArguments,
        SFTConfig,
        TrlParser,
        get_dataset,
        get_peft_config,
    )

    out = write(tmp_path / "out", name)
    monkeypatch.chdir(out)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    with warnings.catch_warnings():
        # of an option that the file sets
        warnings.filterwarnings("error", message=".*deprecated.*")
        _, training, model, data = parser.parse_args_and_config(
            ["--config", "sft.yaml", "--use_cpu", "true", "--bf16", "false"]
        )
    assert (
        training.learning_rate,
        training.per_device_train_batch_size,
        training.gradient_accumulation_steps,
    ) == (1e-2, 3, 2)
    assert (training.num_train_epochs, training.weight_decay, training.max_grad_norm) == (
        1,
        0.01,
        0.0,
    )
    assert training.completion_only_loss is True
    assert (training.activation_checkpointing, training.gradient_checkpointing) == (False, False), (
        "trl's default is True"
    )
    adapter = get_peft_config(model)
    assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (2, 4, r"(.*\.)?c_attn")
    rows = get_dataset(data)["train"].to_list()
    assert sorted(map(str, rows)) == sorted(map(str, rows_in(out)))
    assert len(rows) == 30


@needs_trl
def test_the_settings_that_hgms_mix_gives_it_come_along(here: Path, tmp_path: Path) -> None:
    sets = (
        "finetune.trainer.name=trl",
        "finetune.trainer.packing=true",
        "finetune.trainer.sft.packing_strategy=bfd",
    )
    out = write(tmp_path / "out", "plain", sets=sets)
    table = yaml.safe_load((out / "sft.yaml").read_text())
    assert (table["packing"], table["padding_free"], table["packing_strategy"]) == (
        True,
        False,
        "bfd",
    )


@needs_trl
@pytest.mark.filterwarnings("ignore")  # of trl and peft, about what each gives the other
@pytest.mark.parametrize("name", ["chat", "plain", "several answers"])
def test_its_own_script_trains_on_it(
    here: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trl sft`, in this process: adapter and all, three optimiser steps."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
    from trl.scripts.sft import main as sft

    out = tmp_path / "out"
    model = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(here / "tokenizer")
    tokenizer.save_pretrained(model)
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    size = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **ends)).save_pretrained(model)
    if name == "several answers":
        out.mkdir()
        TRL.write(several_answers(marks=False), out)
    else:
        write(out, name)
    monkeypatch.chdir(out)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    options = {
        "model_name_or_path": model,
        "use_cpu": "true",
        "bf16": "false",
        "report_to": "none",
        "max_steps": 3,
    }
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    state = torch.get_rng_state()
    sft(*parser.parse_args_and_config(["--config", "sft.yaml", *words]))
    torch.set_rng_state(state)
    assert (out / "tuned" / "adapter_model.safetensors").is_file()


def mixed(folder: Path, resume: str | None = None) -> tuple[Any, Any]:
    import transformers
    import trl
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


@needs_trl
def test_a_resumed_training_of_a_changing_mixture_equals_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    whole, one = mixed(tmp_path)
    resumed, other = mixed(tmp_path, str(tmp_path / "checkpoint-3"))
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
