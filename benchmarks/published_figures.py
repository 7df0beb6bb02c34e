"""Compare published figures with the raw records: published_figures.toml as rows of tables.

Marks: ``reproduced`` if the interval of the difference of the two means includes zero, otherwise
``above`` or ``below``; ``not the same protocol`` if the file lists differences; ``not run`` without
a record.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms.results.statistics import Interval, spell

FOLDER = Path(__file__).resolve().parent
FILE = FOLDER / "published_figures.toml"
CELLS = FOLDER / "paper" / "cells.toml"
HEAD = ("method", "task", "metric", "published", "source", "ours", "mark")

Records = Callable[[str], Sequence[Mapping[str, Any]]]
"""Returns the rows of a file of runs by its name, or an empty list without the file."""


def entries() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def methods() -> set[str]:
    """Return the methods with an entry."""
    table = entries()
    return {figure["method"] for figure in table["figure"]} | {
        name for none in table["none"] for name in none["methods"]
    }


def published(figure: Mapping[str, Any]) -> Interval:
    """Return a figure as an interval, with a half width of NaN if it is not published."""
    if "seeds" in figure:
        return Interval.of(figure["seeds"])
    return Interval(figure["value"], figure.get("half_width", math.nan), 1)


def ours(
    figure: Mapping[str, Any], protocol: Mapping[str, Any], records: Records
) -> tuple[str, Interval] | None:
    """Return the first file with runs of the method, and the interval over its seeds.

    The interval has the unit of the published figure; for curves it uses each seed's best value.
    """
    if "measured" in figure:
        return figure["where"], Interval(*figure["measured"], 1)
    for name in protocol.get("records", ()):
        rows = records(f"{name}.curves" if protocol.get("best") else name)
        by_seed: dict[int, list[float]] = {}
        for row in rows:
            if (row["task"], row["method"]) == (protocol["label"], figure["method"]):
                by_seed.setdefault(row["seed"], []).append(row[f"metric.{protocol['ours']}"])
        if by_seed:
            factor = 100 if "(%)" in protocol["metric"] else 1
            return f"`{name}`", Interval.of([factor * max(values) for values in by_seed.values()])
    return None


def mark(theirs: Interval, mine: Interval | None, protocol: Mapping[str, Any]) -> str:
    if mine is None:
        return "not run" + (f": {protocol['not_run']}" if "not_run" in protocol else "")
    return "not the same protocol" if "differs" in protocol else verdict(theirs, mine)


def verdict(theirs: Interval, mine: Interval) -> str:
    """Return ``reproduced``, ``above`` or ``below``."""
    widths = [0.0 if math.isnan(side.half_width) else side.half_width for side in (theirs, mine)]
    if abs(mine.mean - theirs.mean) <= math.hypot(*widths):
        return "reproduced"
    return "above" if mine.mean > theirs.mean else "below"


def table_of_cells() -> dict[str, Any]:
    """Return the cells of the paper's MNIST tables and our variants."""
    return tomllib.loads(CELLS.read_text(encoding="utf-8"))


def cells(records: Records) -> list[list[str]]:
    """Return a line per cell of the paper's MNIST tables and variant that was run.

    A line contains the test and training accuracies of the paper and of our runs, and a verdict on
    each if there is more than one seed.
    """
    table = table_of_cells()
    lines = []
    for cell in table["cell"]:
        prefix = "balanced_" if cell["task"] == "imbalanced" else ""
        found = []
        for variant in table["variant"]:
            runs = [
                row
                for row in records(variant["records"])
                if (row["task"].split(",")[0], row["method"]) == (cell["task"], cell["method"])
            ]
            if not runs:
                continue
            line = [variant["name"]]
            for part in ("test", "train"):
                values = [100 * row[f"metric.{part}_{prefix}accuracy"] for row in runs]
                mine = Interval.of(values)
                line.append(_cell(cell[part]))
                if len(values) > 1:
                    line.append(_cell((mine.mean, mine.half_width)))
                    line.append(verdict(Interval(*cell[part], 1), mine))
                else:
                    line += [f"{mine.mean:.2f}", "one seed"]
            found.append(line)
        nothing = ["not run", _cell(cell["test"]), "–", "–", _cell(cell["train"]), "–", "–"]
        lines += [[cell["task"], f"`{cell['method']}`", *line] for line in found or [nothing]]
    return lines


def _cell(pair: Sequence[float]) -> str:
    mean, half_width = pair
    return f"{mean:.2f} ± {half_width:.2f}"


def rows(records: Records) -> list[list[str]]:
    """Return a line per figure, then a line per reason for a missing figure."""
    table = entries()
    lines = []
    for figure in table["figure"]:
        protocol = table["protocol"][figure["protocol"]]
        theirs = published(figure)
        mine = ours(figure, protocol, records)
        shown = f"{_spelt(mine[1], protocol)} ({mine[0]})" if mine else "–"
        # the number of published digits
        text = spell(theirs) if "seeds" in figure else f"{figure['value']:g}"
        if "half_width" in figure:
            text = f"{figure['value']:.2f} ± {figure['half_width']:.2f}"
        verdict = mark(theirs, mine[1] if mine else None, protocol)
        about = [protocol[key] for key in ("task", "metric")]
        lines.append([f"`{figure['method']}`", *about, text, protocol["source"], shown, verdict])
    for none in table["none"]:
        names = ", ".join(f"`{name}`" for name in none["methods"])
        lines.append([names, "–", "–", f"none ({none['why']})", "–", "–", "–"])
    return lines


def _spelt(interval: Interval, protocol: Mapping[str, Any]) -> str:
    return (
        spell(interval.scale(0.01), share=True) if "(%)" in protocol["metric"] else spell(interval)
    )


def differences() -> list[str]:
    """Return the differences from the published protocols, one sentence per source."""
    table = entries()
    said = {}
    for figure in table["figure"]:
        protocol = table["protocol"][figure["protocol"]]
        if "differs" in protocol:
            said[protocol["source"], protocol["differs"]] = None
    return [f"{source}: {what}" for source, what in said]
