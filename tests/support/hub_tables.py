"""What stands for the package `datasets`, which loads tables of the Hugging Face Hub."""

from __future__ import annotations

import sys
from typing import Any

import pytest


class Rows(dict):
    """Stands for datasets.Dataset: columns, each with its feature."""

    def __init__(self, **columns: tuple[object, object]) -> None:
        super().__init__({name: values for name, (values, _) in columns.items()})
        self.features = {name: feature for name, (_, feature) in columns.items()}
        self.column_names = list(columns)
        self.with_format = {"numpy": self}.__getitem__

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items()) if key == slice(None) else super().__getitem__(key)


class Hub:
    """Stands for the package: the tables by name and revision, and what was asked of it."""

    def __init__(self, patch: pytest.MonkeyPatch, **tables: Rows) -> None:
        self.tables = tables
        self.asked: list[tuple[str, str, str | None]] = []
        patch.setitem(sys.modules, "datasets", self)

    def load_dataset(self, name: str, *, split: str, revision: str | None) -> Rows:
        self.asked.append((name, split, revision))
        return self.tables[name.split("/")[-1]]
