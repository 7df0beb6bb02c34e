"""Random halves of token tables.

A reliable method cannot distinguish the two halves of a source.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hgms_core import Key
from hgms_core.errors import DataError
from hgms_mix.lm.table import TokenTable


def halves_of(name: str) -> tuple[str, str]:
    """Return the names of the halves of a source; no source can have such a name.

    >>> halves_of("sums")
    ('sums/1', 'sums/2')
    """
    return f"{name}/1", f"{name}/2"


def in_halves(tables: Mapping[str, TokenTable], key: Key) -> dict[str, TokenTable]:
    """Split every table into two with equal numbers of rows.

    The first half has an odd row. The halves are drawn by ``key`` and the source's name.

    Errors: DataError for a table of one row.
    """
    halves: dict[str, TokenTable] = {}
    for name, table in tables.items():
        if table.size < 2:
            raise DataError(
                "too-few-rows",
                f"two halves require at least 2 rows, but source {name!r} has {table.size}",
                place=("task", "sources", name),
                hint="add rows to it",
            )
        order = torch.randperm(table.size, generator=key.fold("halves", name).generator())
        parts = order.split(-(-table.size // 2))
        halves |= {
            half: table.take(rows.sort().values)
            for half, rows in zip(halves_of(name), parts, strict=True)
        }
    return halves
