"""Conversations in token tables, where a chat template writes the last answer in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import QWEN, with_template
from support.source_files import source_of, turns

from hgms_core import Key
from hgms_mix.lm.tokens import drawn_table, token_table

pytest.importorskip("transformers", reason="transformers is not installed")

USER, ASSISTANT, THOUGHTS = (
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
    "<think>\n\n</think>\n\n",
)
END = "<|im_end|>"


def test_the_last_answer_of_a_conversation_is_learned_where_the_template_requires_it(
    tmp_path: Path,
) -> None:
    """Qwen3. The rows are the same whether they are all tokenised, picked by their numbers, or
    drawn.
    """
    tokenizer = with_template(QWEN)
    talks = [turns("Q", "A", "R", "B"), turns("S", "C"), turns("T", "", "U", "D")]
    source = source_of(tmp_path / "s.jsonl", [{"messages": talk} for talk in talks])

    def table_of(**options: Any) -> Any:
        return token_table("s", source, tokenizer, template="model", max_length=200, **options)

    table = table_of()
    assert table.rows.tolist() == [0, 1, 2]
    before = [
        f"{USER}Q{END}\n{ASSISTANT}A{END}\n{USER}R{END}\n{ASSISTANT}",
        f"{USER}S{END}\n{ASSISTANT}",
        f"{USER}T{END}\n{ASSISTANT}{END}\n{USER}U{END}\n{ASSISTANT}",
    ]
    for position, (prompt, answer) in enumerate(zip(before, "BCD", strict=True)):
        tokens, mask = table.row(position)
        assert tokenizer.decode(tokens) == f"{prompt}{THOUGHTS}{answer}{END}"
        assert tokenizer.decode(tokens[mask]) == f"{THOUGHTS}{answer}{END}"
    picked = table_of(pick=torch.tensor([2, 0]))
    assert picked.rows.tolist() == [2, 0]
    assert torch.equal(picked.row(1)[0], table.row(0)[0])
    options: dict[str, Any] = {"template": "model", "max_length": 200, "count": 2, "key": Key(0)}
    drawn = drawn_table("s", source, tokenizer, **options)
    assert drawn.size == 2
    assert set(drawn.rows.tolist()) < set(table.rows.tolist())
