"""Token tables of plain text in bytes, and what is in them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from hgms_mix.lm.sources import Source
from hgms_mix.lm.table import TokenTable
from hgms_mix.lm.tokenizers import byte_tokenizer
from hgms_mix.lm.tokens import token_table

LEAVES = ("tokens", "mask", "offsets", "rows", "keys")


def table_of(source: Source, tokenizer: Any = None, name: str = "s", **options: Any) -> TokenTable:
    settings = {"template": "plain", "max_length": 64} | options
    return token_table(name, source, tokenizer or byte_tokenizer(), **settings)


def rows_of(table: TokenTable) -> list[tuple[list[int], list[bool]]]:
    return [
        (table.tokens[a:b].tolist(), table.mask[a:b].tolist())
        for a, b in pairwise(table.offsets.tolist())
    ]


def same(first: TokenTable, second: TokenTable) -> bool:
    leaves = [torch.equal(getattr(first, leaf), getattr(second, leaf)) for leaf in LEAVES]
    return all(leaves) and first.report == second.report
