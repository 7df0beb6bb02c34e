"""Samples that are handed over: of a chat template and of a named one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.small_mixes import TASK, right, write_sums

CHAT = (
    "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% if turn['role'] == "
    "'assistant' %}<|eos|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HEAD = """
seed = 1
budget = "1 step"
method = { name = "fixed", mixture = { sums = 0.7, "dots, 2" = 0.3 } }
"""
TAIL = "[sample]\nsize = 30\n[finetune]\nlr = 1e-2\nmicro_batch = 3\naccumulation = 2\n"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sources of 40 and 60 rows, mixed 0.7 to 0.3, and a finished sample of each
    template.
    """
    from hgms_mix.lm.tokenizers import byte_tokenizer

    here = tmp_path_factory.mktemp("exchange")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT.replace("<|eos|>", tokenizer.eos_token)
    tokenizer.save_pretrained(here / "tokenizer")
    task = TASK.replace("dots]", '"dots, 2"]').replace("test.jsonl", "validation.jsonl")
    chat = task.replace('"plain"', '"model"').replace('"bytes"', '"tokenizer"')
    texts = {"plain": task, "chat": chat.replace("= 40", "= 64")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        write_sums("sums", range(40))
        write_sums("dots", range(100, 160), ".")
        write_sums("validation", range(200, 208))
        for name, text in texts.items():
            label = text.replace("[task]\n", f"[task]\nlabel = {json.dumps(name)}\n")
            Path(f"{name}.toml").write_text(HEAD + label + TAIL)
            right("mix", "sample", f"{name}.toml")
    return here


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(made)
    return made
