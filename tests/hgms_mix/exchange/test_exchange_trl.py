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


def test_trl_gets_a_row_for_each_answer_unless_the_template_marks_answers(
    here: Path, tmp_path: Path
) -> None:
    """TRL stops at a chat template that it can neither use nor patch (SmolLM2's, for example)."""

    def written(sample: Any) -> tuple[Any, dict[str, Any]]:
        TRL.write(sample, tmp_path)
        rows = {part.name: lines(tmp_path / f"rows/{part.stem}.jsonl") for part in sample.parts}
        return yaml.safe_load((tmp_path / "sft.yaml").read_text()), rows

    table, rows = written(several_answers(marks=True))
    assert (table["assistant_only_loss"], table.get("completion_only_loss")) == (True, None)
    assert [len(row["messages"]) for row in rows["sums"]] == [4] * 21
    assert [part["fraction"] for part in table["datasets"]] == pytest.approx([0.7, 0.3])

    sample = several_answers(marks=False)
    turns = sample.parts[0].rows[0]["messages"]
    table, rows = written(sample)
    assert (table.get("assistant_only_loss"), table["completion_only_loss"]) == (None, True)
    assert {name: len(listed) for name, listed in rows.items()} == {"sums": 42, "dots, 2": 9}
    # by these fractions TRL takes each row once
    fractions = [part["fraction"] for part in table["datasets"]]
    assert fractions == pytest.approx([42 / 51, 9 / 51])
    both = [{"prompt": turns[:n], "completion": turns[n : n + 1]} for n in (1, 3)]
    assert rows["sums"][:2] == both

    turns[1] = {**turns[1], "weight": 0}  # which is no row
    lengths = [len(row["prompt"]) for row in written(sample)[1]["sums"]]
    assert (len(lengths), lengths[:2]) == (41, [3, 1])


@needs_trl
@pytest.mark.filterwarnings("ignore")  # of trl and peft, about what each gives the other
@pytest.mark.parametrize("name", ["chat", "plain", "several answers"])
def test_its_parser_loader_and_script_take_the_sample(
    here: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trl sft`, in this process: adapter and all, two optimiser steps."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
    from trl import (
        DatasetMixtureConfig,
        ModelConfig,
        ScriptArguments,
        SFTConfig,
        TrlParser,
        get_dataset,
        get_peft_config,
    )
    from trl.scripts.sft import main as sft

    out, model = tmp_path / "out", tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(here / "tokenizer")
    tokenizer.save_pretrained(model)
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    size = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **ends)).save_pretrained(model)
    if name == "several answers":
        out.mkdir()
        TRL.write(several_answers(marks=False), out)
    else:
        sets = ["finetune.trainer.name=trl", "finetune.trainer.sft.packing_strategy=bfd"]
        write(out, name, sets=sets)
    monkeypatch.chdir(out)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    options = {"model_name_or_path": model, "use_cpu": "true", "bf16": "false"}
    options |= {"report_to": "none", "max_steps": 2}
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    with warnings.catch_warnings():
        # of an option that the file sets
        warnings.filterwarnings("error", message=".*deprecated.*")
        parsed = parser.parse_args_and_config(["--config", "sft.yaml", *words])
    _, training, settings, data = parsed
    assert {
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "weight_decay": 0.01,
        "max_grad_norm": 0.0,
        "completion_only_loss": True,
        "gradient_checkpointing": False,  # trl's default is True
        "packing_strategy": "bfd",
    }.items() <= vars(training).items()
    adapter = get_peft_config(settings)
    assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (2, 4, r"(.*\.)?c_attn")
    rows = get_dataset(data)["train"].to_list()
    assert sorted(map(str, rows)) == sorted(map(str, rows_in(out)))
    state = torch.get_rng_state()
    sft(*parsed)
    torch.set_rng_state(state)
    assert (out / "tuned" / "adapter_model.safetensors").is_file()


def mixed(folder: Path, resume: str | None = None) -> tuple[Any, Any]:
    import transformers
    import trl
    from datasets import Dataset, concatenate_datasets

    from hgms_mix.exchange.online import MixtureCallback
    from hgms_mix.lm.tokenizers import byte_tokenizer

    parts = {
        name: Dataset.from_list(
            [{"prompt": f"{n} + 1 =", "completion": answer or f" {n + 1}"} for n in range(count)]
        )
        for name, count, answer in (("sums", 9, ""), ("dots", 13, " ."))
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
    rule = Alignment(rows=4, upper=4)
    counts = {name: len(part) for name, part in parts.items()}
    mixture = MixtureCallback(sources=counts, outer=DualAveraging(), every=1, rule=rule)
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
    history = whole.state.log_history
    # TRL's statistics are of its own steps
    own = ["mean_token_accuracy" in row for row in history if "loss" in row]
    ours = ["mean_token_accuracy" in row for row in history if "mixture/sums" in row]
    assert (own, any(ours), whole._metrics["eval"]) == ([True] * 6, False, {})
    for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(left, right)
