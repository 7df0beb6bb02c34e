"""Shell completion for the labels of a comparison."""

from __future__ import annotations

from pathlib import Path

import click

from hgms.cli import Completer, component_names, quietly, with_commas


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
