"""What commands and stages of a mix are told wrong, and what they say of what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.finetuning import gpt, random_rows
from support.helpers import rejects
from support.small_mixes import TASK, begin

from hgms.store import Folder
from hgms_core import ConfigError
from hgms_core.errors import OutOfMemory
from hgms_mix.stages import uncertainty
from hgms_mix.stages.config import load
from hgms_mix.stages.finetune import chosen_rows, ensure_supported
from hgms_mix.stages.mix import STAGES, runner_of
from hgms_mix.stages.reweight import reweight
from hgms_mix.stages.settings import Finetune, Resampling
from hgms_mix.stages.training import train
from hgms_mix.stages.tuned_model import TunedModel

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

from hgms_mix.lm import BaseModel, Lora
from hgms_mix.lm.tokenizers import byte_tokenizer

MIX = f"""
seed = 1
budget = "3 steps"
method = "uniform"
{TASK}
[sample]
size = 20
"""
BASE = BaseModel(path="anywhere")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    begin(MIX)
    return tmp_path


def test_a_sharded_model_to_fine_tune_is_rejected(here: Path) -> None:
    model = "{config={model_type='gpt2', n_embd=8, n_head=2}, tokenizer='bytes', shard=true}"
    config = load(Path("mix.toml"), [f"finetune.model={model}"])
    with rejects("not-supported", "finetune", "model", "shard", of=ConfigError):
        ensure_supported(config)


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda: Finetune(epochs=0), ("epochs",)),
        (lambda: Finetune(start="reweighted", model=BASE), ("start",)),
        (lambda: Finetune(start="reweighted", adapter=Lora()), ("start",)),
    ],
)
def test_settings_of_fine_tuning_that_exclude_each_other(
    call: Callable[[], object], place: tuple[str, ...]
) -> None:
    with rejects("conflicting-options", *place, of=ConfigError):
        call()


@pytest.mark.extended
def test_rows_that_are_too_long_in_the_tokens_of_the_tuned_model_are_left_out(here: Path) -> None:
    """Two digits are a token of the model that learns, and two of the one that is tuned."""
    pairs = byte_tokenizer()
    pairs.add_tokens([f"{i:02d}" for i in range(100)])
    pairs.save_pretrained("pairs")
    larger = "{config={model_type='gpt2', n_embd=8, n_head=2}, tokenizer='bytes'}"
    sets = ["task.model.tokenizer=pairs", f"finetune.model={larger}", "task.max_length=10"]
    sets += ["sample.size=60"]
    said: list[str] = []
    config = load(Path("mix.toml"), sets)
    learned = reweight(config.reweight, here / "some")
    sample = runner_of(config, learned).run(STAGES["sample"])
    model = TunedModel.of(config)
    file = sample.path / "rows.jsonl.gz"
    tables = model.sampled_tables(file, "sources")
    rows = chosen_rows(model, sample.facts, file, tables, said.append)
    assert 0 < len(rows) < 60
    assert all(len(bytes(tokens[:-1].tolist()).decode()) < 10 for tokens, _ in rows)
    assert any(line.startswith(f"  {60 - len(rows)} of 60 rows") for line in said)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), MemoryError()])
def test_what_fine_tuning_runs_out_of_is_said_with_the_setting_that_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    model = gpt()
    monkeypatch.setattr(model, "forward", Mock(side_effect=error))
    with rejects("out-of-memory", "finetune"):
        train(Finetune(accumulation=1), model, random_rows(4), Folder(tmp_path, ""))


def test_an_uncertainty_that_cannot_be_measured_is_skipped_but_for_memory_and_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    config = SimpleNamespace(role=None, method_name="mine")
    learned: Any = SimpleNamespace(config=config, weights={"a": 0.5, "b": 0.5})
    fail = Mock(side_effect=ConfigError("no-rows", "too few", place=("task",)))
    monkeypatch.setattr(uncertainty, "measure", fail)

    def estimate() -> Any:
        return uncertainty.estimate(
            Folder(tmp_path, ""), learned=learned, uncertainty=Resampling(), log=said.append
        )

    assert "too few" in estimate()["skipped"]
    assert "too few" in said[-1]
    fail.side_effect = torch.OutOfMemoryError("CUDA out of memory")
    with rejects("out-of-memory", "uncertainty", "rows", of=OutOfMemory):
        estimate()
    fail.side_effect = RuntimeError("a fault")
    with pytest.raises(RuntimeError, match="a fault"):
        estimate()


def test_what_rows_say_of_a_mixture_is_in_its_table() -> None:
    weights = {"a": 0.75, "b": 0.25}
    rows = [
        {
            "source": name,
            "value": value,
            "low": value - 0.25,
            "high": value + 0.25,
            "evidence": sign,
        }
        for name, value, sign in (("a", 0.5, 1), ("b", -0.125, 0))
    ]
    table = {"weights": weights, "prior": dict.fromkeys(weights, 0.5), "rows": {"sources": rows}}
    column = "gain over the prior"
    assert [
        (line["weight"], line["prior"], line[column], line["rows say"])
        for line in uncertainty.rows_of(table)
    ] == [
        ("0.750", "0.500", "+0.500 [+0.250, +0.750]", "more"),
        ("0.250", "0.500", "-0.125 [-0.375, +0.125]", "cannot be told"),
    ]
