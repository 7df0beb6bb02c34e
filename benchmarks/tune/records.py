"""One line of JSON per run, in a file that a later call continues."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def main(
    description: str | None,
    columns: Sequence[str],
    cells: Iterable[tuple[Any, ...]],
    run: Callable[..., Row],
    summary: Callable[[list[Row]], None],
    seeds: str = "20:25",
) -> None:
    """Run each cell with each seed, unless the file has its row; then print the summary.

    ``columns`` are the names of a cell's values in a row. ``run(*cell, seed)`` returns a row.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default=seeds, help="FIRST:END")
    parser.add_argument("--only", nargs="*", help=f"values of {columns[0]}")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    options = parser.parse_args()
    rows = []
    if options.out.exists():
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    done = {tuple(row[column] for column in (*columns, "seed")) for row in rows}
    wanted = [cell for cell in cells if options.only is None or cell[0] in options.only]
    first, end = map(int, options.seeds.split(":"))
    for seed in () if options.summary else range(first, end):
        for cell in wanted:
            if (*cell, seed) not in done:
                rows.append(run(*cell, seed))
                with options.out.open("a") as stream:
                    stream.write(json.dumps(rows[-1]) + "\n")
    summary(rows)
