"""Rows of a DataLoader are those that it yields; what is no table is rejected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.helpers import F64, rejects
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hgms.adapters import as_data, from_losses
from hgms_core import ConfigError, Problem

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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(3))


def hub(**columns: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def padded(items: list[Any]) -> dict[str, torch.Tensor]:
    return {"a": torch.nn.utils.rnn.pad_sequence([item["a"] for item in items], batch_first=True)}


TWENTY = TensorDataset(torch.arange(20.0))


LOADERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "subset by batches": (
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(10)), 5, False)},
        list(range(10)),
    ),
    "in order by batches": (
        {"batch_sampler": BatchSampler(SequentialSampler(TWENTY), 5, False)},
        list(range(20)),
    ),
    "a shorter source": ({"sampler": SequentialSampler(range(7))}, list(range(7))),
    "a shorter source, shuffled": ({"sampler": RandomSampler(range(7))}, list(range(7))),
    "in order without the rest": ({"batch_size": 8, "drop_last": True}, list(range(16))),
    "shuffled without the rest": (
        {"batch_size": 8, "drop_last": True, "shuffle": True},
        list(range(20)),
    ),
    "some of each epoch": ({"sampler": RandomSampler(TWENTY, num_samples=3)}, list(range(20))),
}


class Backwards(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Odd(SequentialSampler):
    def __iter__(self) -> Any:
        return iter(range(1, len(self.data_source), 2))


class Longest(BatchSampler):
    pass


def normalised(rows: Any) -> Any:
    column = torch.stack([row for (row,) in rows])
    return {"a": column - column.mean()}


def packed(rows: Any) -> Any:
    return {"a": torch.stack([row for (row,) in rows])[None]}


DRAW = itertools.count()


# the rows, then the code and the place of the error, and values that it shows
REFUSED: dict[str, tuple[Any, ...]] = {
    "nothing": (lambda: None, "wrong-type", (), "Data()"),
    "no columns": (dict, "no-rows", (), "Data()"),
    "no rows": (lambda: {"a": torch.zeros(0)}, "no-rows", ()),
    "an empty dataset": (lambda: Rows(float, 0), "no-rows", ()),
    "lengths": (lambda: {"a": A, "y": Y[:4]}, "wrong-length", (), "a 6, y 4"),
    "a number": (lambda: {"a": 3.0}, "wrong-column", ("a",), "a float"),
    "a tensor without rows": (lambda: {"a": torch.zeros(())}, "wrong-column", ("a",)),
    "a tensor alone": (lambda: torch.zeros(3), "wrong-type", (), "a Tensor", "{'x': …}"),
    "an array alone": (lambda: A, "wrong-type", (), "a ndarray"),
    "a file": (lambda: "train.csv", "wrong-type", (), "pandas.read_csv(path)"),
    "a frame among arrays": (
        lambda: (pd.DataFrame(A), Y),
        "wrong-column",
        ("0",),
        "a DataFrame",
        ".to_numpy()",
    ),
    "a list of arrays": (lambda: [A, Y], "wrong-type", (), "(X, y)", "{'x': X, 'y': y}"),
    "an iterator": (lambda: iter([1]), "wrong-type", (), "itertools.islice(rows, 10_000)"),
    "a stream": (Stream, "wrong-type", (), "a Stream"),
    "a loader of a stream": (lambda: DataLoader(Stream()), "wrong-type", (), "a Stream"),
    "a stream of datasets": (
        lambda: hub(a=[1]).to_iterable_dataset(),
        "wrong-type",
        (),
        "an IterableDataset",
    ),
    "several splits": (lambda: _splits(), "wrong-column", ("train",), "a Dataset", "rows['train']"),
    "text": (
        lambda: {"a": A, "t": ["x"] * 6},
        "wrong-column",
        ("t",),
        "pandas.factorize(column)[0]",
    ),
    "text of pandas": (lambda: pd.DataFrame({"t": ["x", "y"]}), "wrong-column", ("t",), "strings"),
    "text of datasets": (lambda: hub(t=["x", "y"]), "wrong-column", ("t",), "strings"),
    "text of a dataset": (lambda: Rows(lambda i: ("x", i)), "wrong-column", ("0",), "strings"),
    "a string": (lambda: {"a": A, "DESCR": "text"}, "wrong-column", ("DESCR",), "a str"),
    "dates": (
        lambda: pd.DataFrame({"d": pd.to_datetime(["2026-01-01"])}),
        "wrong-column",
        ("d",),
        "dates",
    ),
    "missing": (
        lambda: pd.DataFrame({"n": [1, None, object()]}),
        "wrong-column",
        ("n",),
        "missing values",
    ),
    "ragged": (lambda: {"a": [[1.0], [1.0, 2.0]]}, "wrong-column", ("a",), "different sizes"),
    "ragged tensors": (
        lambda: {"a": [torch.ones(1), torch.ones(2)]},
        "wrong-column",
        ("a",),
        "different sizes",
    ),
    "ragged items": (
        lambda: Rows(lambda i: torch.ones(i + 1)),
        "wrong-row",
        (),
        "stack expects",
        "collate_fn",
    ),
    "objects": (lambda: Rows(lambda i: object()), "wrong-row", (), "<class 'object'>"),
    "random": (lambda: Rows(lambda i: (i, float(next(DRAW)))), "random-transform", ("1",)),
    "weights of rows": (
        lambda: DataLoader(
            TensorDataset(torch.ones(3)), sampler=WeightedRandomSampler([1.0, 2.0, 3.0], 3)
        ),
        "not-supported",
        (),
    ),
    "a part for each process": (
        lambda: DataLoader(TWENTY, sampler=DistributedSampler(TWENTY, 2, 0)),
        "not-supported",
        (),
        "DistributedSampler",
    ),
    "an own sampler": (lambda: DataLoader(TWENTY, sampler=Odd(TWENTY)), "not-supported", (), "Odd"),
    "an own sampler of batches": (
        lambda: DataLoader(TWENTY, batch_sampler=Longest(SequentialSampler(TWENTY), 5, False)),
        "not-supported",
        (),
        "Longest",
    ),
    "weights of rows by batches": (
        lambda: DataLoader(
            TWENTY, batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 20, 5), 5, False)
        ),
        "not-supported",
        (),
        "WeightedRandomSampler",
    ),
    "an own loader": (lambda: Backwards(TWENTY), "not-supported", (), "Backwards"),
    "only the rest": (lambda: DataLoader(TWENTY, batch_size=32, drop_last=True), "no-rows", ()),
    "rows made of batches": (
        lambda: DataLoader(TWENTY, collate_fn=normalised),
        "not-supported",
        ("collate_fn",),
    ),
    "packed rows": (
        lambda: DataLoader(TWENTY, collate_fn=packed),
        "not-supported",
        ("collate_fn",),
    ),
    "batches": (
        lambda: DataLoader(TensorDataset(torch.ones(3)), batch_size=None),
        "not-supported",
        (),
    ),
    "an own index": (lambda: {"a": A, "index": Y}, "reserved-name", ("index",)),
    "a nested column": (lambda: {"a": {"b": A}}, "wrong-column", ("a",), "a dict"),
    "sparse": (lambda: {"a": _sparse()}, "wrong-column", ("a",), "a csr_matrix", ".toarray()"),
}


def _splits() -> Any:
    return pytest.importorskip("datasets").DatasetDict(train=hub(a=[1]), test=hub(a=[1]))


def _sparse() -> Any:
    return pytest.importorskip("scipy.sparse").csr_matrix(A)


def problem(**data: Any) -> Problem:
    return from_losses(
        theta0=torch.ones(1),
        x0=torch.ones(2, dtype=F64),
        g=lambda t, x, b: x.sum(),
        f=lambda t, x, b: x.sum(),
        **data,
    )


def test_a_loader_gives_the_rows_that_its_sampler_lets_through_as_it_puts_them_together() -> None:
    ragged = Rows(lambda i: {"a": torch.arange(1.0, 2.0 + i)}, 3)
    assert as_data(DataLoader(ragged, collate_fn=padded)).whole["a"].tolist() == [
        [1, 0, 0],
        [1, 2, 0],
        [1, 2, 3],
    ]
    part = DataLoader(TensorDataset(torch.arange(5.0)), sampler=SubsetRandomSampler([3, 1]))
    assert as_data(part).whole["0"].tolist() == [3, 1]


@pytest.mark.parametrize("kind", LOADERS)
def test_the_rows_of_a_loader_are_those_that_it_may_yield(kind: str) -> None:
    options, expected = LOADERS[kind]
    loader = DataLoader(TWENTY, **options)
    assert as_data(loader).whole["0"].tolist() == expected
    seen = {float(row) for _ in range(60) for (rows,) in loader for row in rows}
    assert seen == set(map(float, expected))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_table_is_refused(kind: str) -> None:
    rows, code, place, *shown = REFUSED[kind]
    with rejects(code, of=ConfigError) as caught:
        as_data(rows())
    assert caught.value.place == place
    assert all(part in str(caught.value) for part in shown)


def test_a_problem_takes_rows_as_they_are_in_the_type_of_x() -> None:
    made = problem(lower_data=(A, Y), upper_data=pd.DataFrame({"y": Y}))
    assert made.lower_data.whole["0"].dtype == F64
    sizes = {role: data.size for role, data in made.upper_data.items()}
    assert sizes == dict.fromkeys(("differentiate", "select", "stop"), 6)
    assert as_data((A, Y), device=torch.device("meta")).device.type == "meta"
    data = as_data((A, Y))
    split = problem(lower_data=data, upper_data={"select": (A, Y), "differentiate": data})
    assert (split.lower_data is data, split.upper_data["differentiate"] is data) == (True, True)
    with rejects("no-rows-for-role", "upper_data", "stop", of=ConfigError):
        split.upper_data["stop"]
    assert problem().upper_data["select"].size == 0
