"""Options of the commands of comparisons, and the completion of their labels."""

from __future__ import annotations

from pathlib import Path

import click

from hgms.cli import Completer, component_names, quietly, with_commas


def _seeds(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> int | list[int] | None:
    """A count (``5``), a list (``0,1,7``) or a range (``10-14``)."""
    from hgms.comparison.grid import MOST_SEEDS

    if value is None:
        return None
    try:
        if "," not in value and "-" not in value:
            return int(value)
        seeds: list[int] = []
        for part in value.split(","):
            first, dash, last = part.partition("-")
            numbers = range(int(first), int(last if dash else first) + 1)
            if not numbers:
                raise ValueError
            if len(seeds) + numbers.stop - numbers.start > MOST_SEEDS:
                raise click.BadParameter(f"at most {MOST_SEEDS:,} seeds, not {value!r}")
            seeds += numbers
    except ValueError:
        raise click.BadParameter(
            f"write a count (5), a list (0,1,7) or a range (10-14), not {value!r}"
        ) from None
    return seeds


seeds_option = click.option(
    "--seeds", callback=_seeds, metavar="N|LIST", help="A count, a list (0,1,7) or a range (10-14)."
)
"""The option ``--seeds`` for a click command: a count, or a list of seeds."""


def labels(kind: str) -> Completer:
    """Complete the labels of tasks or methods in the GRID argument, or their registered names
    without one.
    """

    @quietly
    def of_grid(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        # click stores it there while an option has no value yet
        grid = ctx.params.get("grid") or next(iter(ctx.args), None)
        if grid is None:
            return component_names(kind)(ctx, parameter, incomplete)
        from hgms.config.tables import tables_of

        entries = tables_of(Path(grid), "grid").get(kind, [])
        tables = [
            {"name": entry} if isinstance(entry, str) else entry
            for entry in (entries if isinstance(entries, list) else [entries])
        ]
        return [str(table.get("label", table.get("name"))) for table in tables]

    return with_commas(of_grid)
