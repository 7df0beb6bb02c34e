"""Conversations in token tables, where a chat template writes the last answer in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from support.chat_templates import QWEN, with_template
from support.source_files import source_of, turns

from hgms_core import Key
from hgms_mix.lm.rows import examples_at
from hgms_mix.lm.tokens import drawn_table, token_table

pytest.importorskip("transformers", reason="transformers is not installed")

USER, ASSISTANT, THOUGHTS = (
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
    "<think>\n\n</think>\n\n",
)
END = "<|im_end|>"


def test_a_conversation_is_a_row_for_each_answer_where_the_template_requires_it(
    tmp_path: Path,
) -> None:
    """Qwen3. The rows are the same whether they are all tokenised, picked by their numbers, or
    drawn.
    """
    tokenizer = with_template(QWEN)
    talks = [turns("Q", "A", "R", "B"), turns("S", "C"), turns("T", "", "U", "D")]
    source = source_of(tmp_path / "s.jsonl", [{"messages": talk} for talk in talks])

    def table_of(own: Any = source, **options: Any) -> Any:
        return token_table("s", own, tokenizer, template="model", max_length=200, **options)

    table = table_of()
    # answer 0 of row 2 is empty
    assert table.rows.tolist() == [0, 1, 1000, 2001]
    before = [
        f"{USER}Q{END}\n{ASSISTANT}",
        f"{USER}Q{END}\n{ASSISTANT}A{END}\n{USER}R{END}\n{ASSISTANT}",
        f"{USER}S{END}\n{ASSISTANT}",
        f"{USER}T{END}\n{ASSISTANT}{END}\n{USER}U{END}\n{ASSISTANT}",
    ]
    for position, (prompt, answer) in enumerate(zip(before, "ABCD", strict=True)):
        tokens, mask = table.row(position)
        assert tokenizer.decode(tokens) == f"{prompt}{THOUGHTS}{answer}{END}"
        assert tokenizer.decode(tokens[mask]) == f"{THOUGHTS}{answer}{END}"
    picked = table_of(pick=torch.tensor([1000, 1]))
    assert picked.rows.tolist() == [1000, 1]
    assert torch.equal(picked.row(1)[0], table.row(1)[0])
    options: dict[str, Any] = {"template": "model", "max_length": 200, "count": 3, "key": Key(0)}
    drawn = drawn_table("s", source, tokenizer, **options)
    assert drawn.size == 3
    assert set(drawn.rows.tolist()) < set(table.rows.tolist())
    # parts of a file share no conversation
    parts = [evolve(source, shuffle_seed=0, **part) for part in ({"rows": 1}, {"skip": 1})]
    taken = [{row // 1000 for row in table_of(part).rows.tolist()} for part in parts]
    assert sorted([*taken[0], *taken[1]]) == [0, 1, 2]
    found = examples_at("s", source, np.array([1, 1000]), split=True)
    assert [[(message.text, message.learned) for message in item.messages] for item in found] == [
        [("Q", True), ("A", False), ("R", True), ("B", True)],
        [("S", True), ("C", True)],
    ]
