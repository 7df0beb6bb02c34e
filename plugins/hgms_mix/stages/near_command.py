"""The command ``hgms mix near``: find near-duplicate rows in sources, validation and test sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import click
import numpy as np

from hgms.cli import print_table
from hgms_mix.lm import Near, examples_at, near_copies, read_examples
from hgms_mix.stages.config import MixConfig


def near(config: MixConfig, threshold: float) -> list[dict[str, Any]]:
    """Return near-duplicates between every two sets, as a table with the texts of one pair each."""
    sets = {
        f"{which} {name}": source
        for which in ("sources", "validation", "test")
        for name, source in getattr(config.task, which).items()
    }
    results: Sequence[Near] = near_copies(
        {name: read_examples(name, source) for name, source in sets.items()}, threshold
    )
    table = []
    for pair in results:
        first, second, _ = pair.pairs[0]
        texts = [
            next(examples_at(name, sets[name], np.array([row])))
            for name, row in ((pair.name, first), (pair.other, second))
        ]
        table.append(
            {
                **attrs.asdict(pair),
                "texts": ["\n".join(turn.text for turn in text.messages) for text in texts],
            }
        )
    return table


def show(table: Sequence[dict[str, Any]]) -> None:
    """Print the table, and one pair per two sets."""
    if not table:
        click.echo("no row of a set is nearly a row of another")
        return
    columns = [
        {
            "set": row["name"],
            "near rows of": row["other"],
            "rows": row["count"],
            "of": row["size"],
            "share": f"{row['count'] / row['size']:.1%}",
        }
        for row in table
    ]
    print_table(tuple(columns[0]), columns)
    for row in table:
        (number, other, agreement), (here, there) = row["pairs"][0], row["texts"]
        click.echo(
            f"  {row['name']} row {number} and {row['other']} row {other} agree by {agreement}:"
        )
        click.echo(f"    {_short(here)}\n    {_short(there)}")


def _short(text: str, most: int = 100) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
