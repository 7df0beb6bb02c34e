"""Rows of every kind become the same columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from support.helpers import F64, assert_same
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, TensorDataset

from hgms_core import Data, Key

A = np.arange(12.0).reshape(6, 2) / 8


Y = np.array([0, 1, 0, 1, 1, 0])


class Rows(Dataset[Any]):
    """A map-style dataset of whatever ``item`` makes of a number."""

    def __init__(self, item: Any, count: int = 6) -> None:
        self.item = item
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Pair(NamedTuple):
    a: Any
    y: Any


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.from_numpy(A).float(), "y": torch.from_numpy(Y)}


def hub(**columns: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def polars() -> Any:
    frame = pytest.importorskip("polars").DataFrame
    return frame({"b": A[:, 0], "c": A[:, 1], "y": Y})


NAMED: dict[str, Any] = {
    "tensors": tensors,
    "arrays": lambda: {"a": A, "y": Y},
    "narrow arrays": lambda: {"a": A.astype(np.float32), "y": Y.astype(np.int32)},
    "arrays in reverse": lambda: {"a": A[::-1][::-1], "y": Y},
    "foreign byte order": lambda: {"a": A.astype(">f8"), "y": Y.astype(">i4")},
    "lists": lambda: {"a": A.tolist(), "y": Y.tolist()},
    "a list of tensors": lambda: {"a": list(tensors()["a"]), "y": range(6) and Y},
    "a named tuple": lambda: Pair(A, Y),
    "a dataset of dictionaries": lambda: Rows(lambda i: {"a": A[i], "y": int(Y[i])}),
    "a dataset of tensors by name": lambda: StackDataset(**tensors()),
    "a list of dictionaries": lambda: [{"a": A[i], "y": Y[i]} for i in range(6)],
    "datasets": lambda: hub(a=A.tolist(), y=Y.tolist()),
    "datasets, a column left out": lambda: _with_columns(
        hub(a=A.tolist(), y=Y.tolist(), text=["t"] * 6), ["a", "y"]
    ),
    "datasets with a transform": lambda: hub(a=A.tolist(), y=Y.tolist()).with_transform(_arrays),
    "a loader": lambda: DataLoader(
        Rows(lambda i: {"a": A[i], "y": int(Y[i])}), batch_size=4, shuffle=True
    ),
    "a loader of datasets": lambda: DataLoader(
        hub(a=A.tolist(), y=Y.tolist()).with_format("torch"), batch_size=4
    ),
}


def _with_columns(rows: Any, columns: list[str]) -> Any:
    rows.set_format("torch", columns=columns)
    return rows


def _arrays(rows: dict[str, Any]) -> dict[str, Any]:
    return {name: [np.asarray(value) for value in values] for name, values in rows.items()}


NUMBERED: dict[str, Any] = {
    "a tuple": lambda: (A, Y),
    "TensorDataset": lambda: TensorDataset(*tensors().values()),
    "a dataset of tuples": lambda: Rows(lambda i: (A[i], int(Y[i]))),
    "a list of tuples": lambda: list(zip(A, Y, strict=True)),
    "a loader": lambda: DataLoader(
        TensorDataset(*tensors().values()), batch_size=4, shuffle=True, drop_last=True
    ),
    "a part": lambda: Subset(
        TensorDataset(*(torch.cat([leaf[:1], leaf]) for leaf in tensors().values())), range(1, 7)
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_table_by_names(kind: str) -> None:
    data = Data.of(NAMED[kind]())
    assert_same(data.whole, {**tensors(), "index": torch.arange(6)})
    assert data.whole["a"].dtype == torch.float32
    assert data.whole["y"].dtype == torch.int64
    assert_same(
        data.sample(Key(0), 4)[0],
        {name: leaf[data.sample(Key(0), 4)[0]["index"]] for name, leaf in data.whole.items()},
    )


@pytest.mark.parametrize("kind", NUMBERED)
def test_a_table_without_names_is_numbered(kind: str) -> None:
    assert_same(
        Data.of(NUMBERED[kind]()).whole,
        {"0": tensors()["a"], "1": tensors()["y"], "index": torch.arange(6)},
    )


@pytest.mark.parametrize(
    "frame", [lambda: pd.DataFrame({"b": A[:, 0], "c": A[:, 1], "y": Y}, index=[*"fedcba"]), polars]
)
def test_a_frame(frame: Any) -> None:
    whole = Data.of(frame()).whole
    assert_same(
        whole,
        {
            "b": tensors()["a"][:, 0],
            "c": tensors()["a"][:, 1],
            "y": tensors()["y"],
            "index": torch.arange(6),
        },
    )
    frame = frame()
    assert_same(Data.of({"b": frame["b"], "y": frame["y"]}).whole["b"], whole["b"])


def test_types() -> None:
    table = {
        "f": A[:, 0],
        "h": A[:, 0].astype(np.float16),
        "t": torch.from_numpy(A[:, 0]),
        "b": Y > 0,
        "p": Y.astype(np.uint8),
    }
    kinds = {
        name: leaf.dtype
        for name, leaf in Data.of({**table, "u": Y.astype(np.uint16)}).whole.items()
    }
    assert kinds == {
        "f": torch.float32,
        "h": torch.float32,
        "t": F64,
        "b": torch.bool,
        "p": torch.uint8,
        "u": torch.int64,
        "index": torch.int64,
    }
    assert Data.of(table, dtype=F64).whole["f"].dtype == F64
    assert_same(Data.of(table, dtype=F64).whole["f"], table["t"])
    assert (
        Data.of(Rows(lambda i: (0.5, torch.zeros((), dtype=F64)))).whole["0"].dtype == torch.float32
    )
    assert Data.of(Rows(lambda i: (0.5, torch.zeros((), dtype=F64)))).whole["1"].dtype == F64
    nullable = pd.DataFrame({"n": pd.array([1, 2], dtype="Int64"), "c": pd.Categorical([3, 4])})
    assert [leaf.tolist() for leaf in Data.of(nullable).whole.values()] == [[1, 2], [3, 4], [0, 1]]
    kept = A.copy()
    data = Data.of({"a": kept})
    kept[:] = 9
    assert_same(data.whole["a"], tensors()["a"])
