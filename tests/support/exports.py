"""Exports of the samples in the working directory and what they hold."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from hgms.plugins import Registry
from hgms_mix.exchange.sample import Sampled, load_sample
from hgms_mix.exchange.trl import export

plugins = functools.cache(Registry.load)


def sample_of(name: str | Path = "chat", sets: Sequence[str] = (), **more: Any) -> Sampled:
    """That of ``name``.toml, or of a folder of `hgms mix`."""
    place = name if isinstance(name, Path) else Path(f"{name}.toml")
    return load_sample(place, sets, registry=plugins(), **more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "rows.jsonl")


def write(out: Path, name: str = "chat", sets: Sequence[str] = (), **more: Any) -> Path:
    """An export in a folder of its own."""
    export(sample_of(name, sets, **more), out)
    return out


def several_answers() -> Any:
    """The sample of the chat template, with two answers in each row of the first source."""
    sample = sample_of()
    name = next(iter(sample.rows))
    rows = [{**row, "messages": [*row["messages"], *row["messages"]]} for row in sample.rows[name]]
    return evolve(sample, rows={**sample.rows, name: rows})
