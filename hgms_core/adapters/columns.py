"""Rows as people have them (arrays, frames, datasets, loaders), read into columns: tensors by
name, one row after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from hgms_core.adapters.arguments import kind_of
from hgms_core.errors import ConfigError


def is_table(value: object) -> bool:
    """Whether this is a table by itself, and no column of one."""
    frame = hasattr(value, "columns") or hasattr(value, "column_names")
    return frame or isinstance(value, Mapping | Dataset | DataLoader)


def columns_of(rows: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The columns of a table of any kind; ``dtype`` is the type of floats that come as arrays or
    Python numbers.
    """
    names = (
        None
        if isinstance(rows, Dataset)
        else getattr(rows, "column_names", getattr(rows, "columns", None))
    )
    if isinstance(rows, DataLoader):
        table = _loaded(rows)
    elif isinstance(rows, Mapping):
        table = dict(rows)
    elif (
        hasattr(rows, "with_format")
        and getattr(rows, "format", {}).get("type", "custom") != "custom"
    ):
        # `datasets`
        table = rows.with_format("numpy", columns=rows.format["columns"])[:]
    elif isinstance(rows, TensorDataset | tuple):
        arrays = rows if isinstance(rows, tuple) else rows.tensors
        table = dict(zip(getattr(rows, "_fields", range(len(arrays))), arrays, strict=True))
    elif names is not None and hasattr(rows, "__len__") and not hasattr(rows, "with_format"):
        if len(set(names)) != len(names):
            raise ConfigError("two columns of the frame have the same name; rename one")
        table = {name: rows[name] for name in names}
    elif isinstance(rows, list) and not (rows and isinstance(rows[0], Mapping | tuple)):
        raise ConfigError(
            "a list holds rows, as dictionaries or tuples; give columns as a tuple (X, y), or "
            "{'x': X, 'y': y}"
        )
    elif _is_sequence(rows):
        table = _read(rows, default_collate)
    else:
        raise ConfigError(_no_table(rows))
    return {str(name): _column(str(name), values, dtype) for name, values in table.items()}


def _is_sequence(rows: object) -> bool:
    other = isinstance(rows, str | bytes | Tensor | torch.nn.Module | IterableDataset) or hasattr(
        rows, "__array__"
    )
    return hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not other


def _no_table(rows: object) -> str:
    kinds = "a dictionary of columns, a data frame, a dataset, a loader or a tuple of arrays"
    text = f"rows are {kinds}, and this is {kind_of(rows)}"
    if rows is None:
        return f"{text}\n  a loss without data takes `Data.none()`"
    if isinstance(rows, str | bytes):
        return f"{text}\n  read the file first, for example by `pandas.read_csv({rows!r})`"
    if isinstance(rows, Tensor) or hasattr(rows, "__array__"):
        return f"{text}\n  give it a name, {{'x': …}}"
    if isinstance(rows, Iterable):
        return (
            f"{text}, without a length\n  read what is needed first, "
            "`list(itertools.islice(rows, 10_000))`"
        )
    return text


def _loaded(loader: DataLoader[Any]) -> dict[Any, Any]:
    """The rows that a loader's sampler lets through, put together as the loader does."""
    if not _is_sequence(loader.dataset):
        raise ConfigError(_no_table(loader.dataset))
    if loader.batch_sampler is None:
        raise ConfigError(
            "a loader with batch_size=None gives no single rows; give its dataset, "
            "`Data.of(loader.dataset)`"
        )
    if isinstance(loader.sampler, SubsetRandomSampler):
        return _read(
            loader.dataset, loader.collate_fn, [int(number) for number in loader.sampler.indices]
        )
    if not isinstance(loader.sampler, SequentialSampler | RandomSampler):
        raise ConfigError(
            f"rows are drawn evenly here, and the loader has a {type(loader.sampler).__name__}\n"
            "  give its dataset, `Data.of(loader.dataset)`, and put the weights of rows into the "
            "loss"
        )
    return _read(loader.dataset, loader.collate_fn)


def _read(
    rows: Any, collate: Callable[[list[Any]], Any], numbers: Sequence[int] | None = None
) -> dict[Any, Any]:
    """All rows of a dataset with numbered rows, or some of them, put together at once."""
    numbers = range(len(rows)) if numbers is None else numbers
    if not numbers:
        raise ConfigError("the dataset has no rows; a loss without data takes `Data.none()`")
    try:
        few, again = (_named(collate([rows[i] for i in numbers[:8]])) for _ in range(2))
        table = _named(collate([rows[i] for i in numbers]))
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            "the rows cannot be put together: "
            f"{(str(error) or type(error).__name__).splitlines()[0]}\n"
            "  let each item be tensors, arrays and numbers of one size, or give a DataLoader "
            "with a `collate_fn` that pads"
        ) from error
    changing = [name for name, leaf in few.items() if not _same(leaf, again[name])]
    if changing:
        raise ConfigError(
            "reading the same rows twice gives other values of "
            f"{', '.join(map(repr, changing))}: a random transform\n"
            "  give the dataset without it (rows are read once, and a draw would be frozen), or "
            "draw in `Data(size=…, rows=…)`"
        )
    own = _named(rows[numbers[0]])
    # collate makes float64 of Python numbers
    arrays = {name for name, leaf in own.items() if not isinstance(leaf, Tensor)}
    return {
        name: leaf.numpy() if name in arrays and isinstance(leaf, Tensor) else leaf
        for name, leaf in table.items()
    }


def _named(item: Any) -> dict[Any, Any]:
    if isinstance(item, Mapping):
        return dict(item)
    return dict(enumerate(item)) if isinstance(item, list | tuple) else {0: item}


def _same(a: Any, b: Any) -> bool:
    return (
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        if isinstance(a, Tensor)
        else str(a) == str(b)
    )


def _column(name: str, values: Any, dtype: torch.dtype) -> Tensor:
    if is_table(values):
        other = (
            "write `.to_numpy()`"
            if hasattr(values, "to_numpy")
            else f"choose one of the tables, rows[{name!r}]"
        )
        advice = "give its parts as columns" if isinstance(values, Mapping) else other
        raise ConfigError(f"the column {name!r} is {kind_of(values)}; {advice}")
    if (
        isinstance(values, list | tuple)
        and values
        and all(isinstance(value, Tensor) for value in values)
    ):
        if len({value.shape for value in values}) > 1:
            raise ConfigError(_ragged(name))
        values = torch.stack(list(values))
    column = values if isinstance(values, Tensor) else _from_array(name, values, dtype)
    if column.dim() == 0:
        raise ConfigError(
            f"the column {name!r} is a single number; a column's first axis counts the rows"
        )
    return column


def _from_array(name: str, values: Any, dtype: torch.dtype) -> Tensor:
    """Floats as ``dtype``, whole numbers as int64 (but bytes, which images are made of), truth
    values as they are.
    """
    import numpy as np

    if isinstance(values, str) or not (
        hasattr(values, "__array__") or isinstance(values, list | tuple | range)
    ):
        dense = (
            "; write `.toarray()`"
            if hasattr(values, "toarray")
            else "; leave it out, or make numbers of it"
        )
        raise ConfigError(f"the column {name!r} is {kind_of(values)}{dense}")
    try:
        array = np.asarray(values)
        array = np.array(array.tolist()) if array.dtype == object else array
    except ValueError:
        raise ConfigError(_ragged(name)) from None
    kind = array.dtype.kind
    if kind not in "fiub":
        known = {
            "U": "strings",
            "S": "strings",
            "T": "strings",
            "M": "dates",
            "m": "times",
            "c": "complex numbers",
        }
        what = known.get(kind, "objects or missing values")
        advice = (
            "number the values, `pandas.factorize(column)[0]`"
            if what == "strings"
            else "make floats of them"
        )
        raise ConfigError(
            f"the column {name!r} holds {what}, and columns are numbers\n"
            f"  {advice}, or leave the column out"
        )
    if kind == "f":
        return torch.from_numpy(
            np.array(array, dtype=np.float64 if array.itemsize == 8 else np.float32)
        ).to(dtype)
    return torch.from_numpy(
        np.array(array, dtype=array.dtype if array.itemsize == 1 and kind in "ub" else np.int64)
    )


def _ragged(name: str) -> str:
    return (
        f"the rows of the column {name!r} have different sizes\n"
        "  pad them to one size, with a mask as another column"
    )
