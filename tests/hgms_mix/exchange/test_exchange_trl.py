"""A sample handed to TRL: its rows for several answers, its own parser, loader and script, and a
mixture that changes while its SFTTrainer trains.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.exports import rows_in, several_answers, write

from hgms_mix.exchange import trl

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install trl"
)


def test_trl_gets_a_row_for_each_learned_answer(here: Path, tmp_path: Path) -> None:
    sample = several_answers()
    turns = next(iter(sample.rows.values()))[0]["messages"]
    notes = trl.export(sample, tmp_path / "first")
    rows = rows_in(tmp_path / "first")
    assert len(rows) == 2 * 21 + 9
    assert "Each learned answer is a row: 51 for the 30 of the sample." in notes
    assert rows[:2] == [{"prompt": turns[:n], "completion": turns[n : n + 1]} for n in (1, 3)]
    turns[1] = {**turns[1], "weight": 0}  # which is no row
    trl.export(sample, tmp_path / "second")
    assert [len(row["prompt"]) for row in rows_in(tmp_path / "second")[:2]] == [3, 1]


@needs_trl
@pytest.mark.filterwarnings("ignore")  # of trl and peft, about what each gives the other
@pytest.mark.parametrize("name", ["chat", "plain"])
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
    )
    from trl.scripts.sft import main as sft

    out, model = tmp_path / "out", tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(here / "tokenizer")
    tokenizer.save_pretrained(model)
    size = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 64}
    size |= dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size)).save_pretrained(model)
    write(out, name)
    monkeypatch.chdir(out)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    options = {
        "model_name_or_path": model,
        "use_cpu": "true",
        "bf16": "false",
        "report_to": "none",
        "max_steps": 2,
    }
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    parsed = parser.parse_args_and_config(["--config", "sft.yaml", *words])
    _, training, _, data = parsed
    assert {
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "weight_decay": 0.01,
        "max_grad_norm": 0.0,
        "completion_only_loss": True,
        "gradient_checkpointing": False,  # trl's default is True
    }.items() <= vars(training).items()
    rows = get_dataset(data)["train"].to_list()
    assert sorted(map(str, rows)) == sorted(map(str, rows_in(out)))
    state = torch.get_rng_state()
    sft(*parsed)
    torch.set_rng_state(state)
    assert (out / "tuned" / "adapter_model.safetensors").is_file()
