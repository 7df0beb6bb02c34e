"""`hgms mix` on conversations: a row for each answer where the model's chat template requires it,
answers with weight 0, and what exporters make of both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.small_mixes import TASK, report_of, right, sampled, write_rows

from hgms_mix.lm.tokenizers import byte_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    )
]

QWEN = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MIX = f"""
seed = 1
budget = "1 step"
method = {{ name = "fixed", mixture = {{ sums = 0.5, dots = 0.5 }} }}
{TASK}
[sample]
size = 24
[finetune]
lr = 1e-2
micro_batch = 3
accumulation = 2
"""


def turns(number: int, **first: int) -> dict[str, Any]:
    """A conversation of two answers; ``first``: more of the first of them."""
    pairs = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n), **more}]
        for n, more in ((number, first), (number + 1, {}))
    ]
    return {"messages": [*pairs[0], *pairs[1]]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("sums", "dots", "validation", "test"), start=1):
        write_rows(name, [turns(100 * number + row) for row in range(8)])
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = QWEN
    tokenizer.save_pretrained("tokenizer")
    text = MIX.replace('template = "plain"', 'template = "model"').replace('"bytes"', '"tokenizer"')
    text = text.replace("max_length = 40", "max_length = 96")
    Path("mix.toml").write_text(text.replace("n_positions = 40", "n_positions = 96"))
    return tmp_path


def exported(*arguments: object) -> list[Any]:
    """The rows that ``hgms mix export`` writes."""
    right("mix", "export", "mix.toml", *arguments, "--out", "out")
    files = Path("out", "rows").glob("*.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.extended
def test_each_answer_is_a_row_where_the_template_writes_earlier_ones_differently(
    here: Path,
) -> None:
    report = report_of("mix", "mix.toml")
    assert [row["of"] for row in report["sources"]] == [16, 16]
    assert (report["test"]["sums"]["rows"], report["finetune"]["rows"]) == (16, 24)
    rows = sampled(report)
    assert len({(row["source"], row["row"]) for row in rows}) == 24
    for row in rows:
        conversation, answer = divmod(row["row"], 1000)
        start = {"sums": 100, "dots": 200}[row["source"]] + conversation
        assert row["messages"][-1] == {"role": "assistant", "content": str(start + answer)}
        weights = [turn.get("weight", 1) for turn in row["messages"]]
        assert weights == ([1, 0, 1, 1] if answer else [1, 1])


def test_an_answer_with_the_weight_0_is_context_in_every_stage(here: Path) -> None:
    for first, name in ((100, "sums"), (200, "dots")):
        write_rows(name, [turns(first + row, weight=0) for row in range(8)])
    sets = ("--set", 'task.template="plain"', "--set", "sample.size=8")
    report = report_of("mix", "sample", "mix.toml", *sets)
    assert [row["of"] for row in report["sources"]] == [8, 8]
    weights = [[turn.get("weight", 1) for turn in row["messages"]] for row in sampled(report)]
    assert weights == [[1, 0, 1, 1]] * 8
    for row in exported(*sets, "--to", "trl"):
        assert row["prompt"].count("?") == 2
        answer = row["completion"].removesuffix("<eos>")
        assert int(answer) - 1 == int(row["prompt"].split("?")[0])
