"""Rows of every kind become the same columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from support.helpers import F64, assert_same
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, TensorDataset

from hgms.adapters import as_data
from hgms_core import Key

A = np.arange(12.0).reshape(6, 2) / 8
Y = np.array([0, 1, 0, 1, 1, 0])
TENSORS = {"a": torch.from_numpy(A).float(), "y": torch.from_numpy(Y)}


class Rows(Dataset[Any]):
    """A map-style dataset of whatever ``item`` makes of a number."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Pair(NamedTuple):
    a: Any
    y: Any


def hub() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"a": A.tolist(), "y": Y.tolist(), "text": ["t"] * 6})


def arrays(rows: dict[str, Any]) -> dict[str, Any]:
    return {name: [np.asarray(value) for value in rows[name]] for name in ("a", "y")}


def polars(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("polars").DataFrame(columns)


def dictionaries() -> Rows:
    return Rows(lambda i: {"a": A[i], "y": int(Y[i])})


NAMED: dict[str, Any] = {
    "tensors": lambda: TENSORS,
    "arrays": lambda: {"a": A, "y": Y},
    "narrow arrays": lambda: {"a": A.astype(np.float32), "y": Y.astype(np.int32)},
    "arrays in reverse": lambda: {"a": A[::-1][::-1], "y": Y},
    "foreign byte order": lambda: {"a": A.astype(">f8"), "y": Y.astype(">i4")},
    "lists": lambda: {"a": A.tolist(), "y": Y.tolist()},
    "a list of tensors": lambda: {"a": list(TENSORS["a"]), "y": Y},
    "a named tuple": lambda: Pair(A, Y),
    "a dataset of dictionaries": dictionaries,
    "a dataset of tensors by name": lambda: StackDataset(**TENSORS),
    "a list of dictionaries": lambda: [{"a": A[i], "y": Y[i]} for i in range(6)],
    "datasets": lambda: hub().remove_columns("text"),
    "datasets, a column left out": lambda: hub().with_format("torch", columns=["a", "y"]),
    "datasets with a transform": lambda: hub().with_transform(arrays),
    "a loader": lambda: DataLoader(dictionaries(), batch_size=4, shuffle=True),
    "a loader of datasets": lambda: DataLoader(
        hub().remove_columns("text").with_format("torch"), batch_size=4
    ),
}
NUMBERED: dict[str, Any] = {
    "a tuple": lambda: (A, Y),
    "TensorDataset": lambda: TensorDataset(*TENSORS.values()),
    "a dataset of tuples": lambda: Rows(lambda i: (A[i], int(Y[i]))),
    "a list of tuples": lambda: list(zip(A, Y, strict=True)),
    "a loader of tuples": lambda: DataLoader(
        TensorDataset(*TENSORS.values()), batch_size=4, shuffle=True, drop_last=True
    ),
    "a part": lambda: Subset(
        TensorDataset(*(torch.cat([leaf[:1], leaf]) for leaf in TENSORS.values())), range(1, 7)
    ),
}


@pytest.mark.parametrize("kind", NAMED | NUMBERED)
def test_a_table_has_its_columns_by_name_or_numbered(kind: str) -> None:
    data = as_data((NAMED | NUMBERED)[kind]())
    names = ("a", "y") if kind in NAMED else ("0", "1")
    columns = dict(zip(names, TENSORS.values(), strict=True))
    assert_same(data.whole, {**columns, "index": torch.arange(6)})
    assert [data.whole[name].dtype for name in names] == [torch.float32, torch.int64]
    batch = data.sample(Key(0), 4)[0]
    assert_same(batch, {name: leaf[batch["index"]] for name, leaf in data.whole.items()})


@pytest.mark.parametrize("frame", [lambda data: pd.DataFrame(data, index=[*"fedcba"]), polars])
def test_a_frame_has_its_columns(frame: Any) -> None:
    made = frame({"b": A[:, 0], "c": A[:, 1], "y": Y})
    a, y = TENSORS.values()
    expected = {"b": a[:, 0], "c": a[:, 1], "y": y, "index": torch.arange(6)}
    assert_same(as_data(made).whole, expected)
    assert_same(as_data({"b": made["b"], "y": made["y"]}).whole["b"], expected["b"])


def test_the_types_of_columns() -> None:
    table = {
        "f": A[:, 0],
        "h": A[:, 0].astype(np.float16),
        "t": torch.from_numpy(A[:, 0]),
        "b": Y > 0,
        "p": Y.astype(np.uint8),
        "u": Y.astype(np.uint16),
    }
    assert {name: leaf.dtype for name, leaf in as_data(table).whole.items()} == {
        "f": torch.float32,
        "h": torch.float32,
        "t": F64,
        "b": torch.bool,
        "p": torch.uint8,
        "u": torch.int64,
        "index": torch.int64,
    }
    assert_same(as_data(table, dtype=F64).whole["f"], table["t"])
    mixed = as_data(Rows(lambda i: (0.5, torch.zeros((), dtype=F64)))).whole
    assert (mixed["0"].dtype, mixed["1"].dtype) == (torch.float32, F64)
    nullable = pd.DataFrame({"n": pd.array([1, 2], dtype="Int64"), "c": pd.Categorical([3, 4])})
    assert [leaf.tolist() for leaf in as_data(nullable).whole.values()] == [[1, 2], [3, 4], [0, 1]]
