"""Tables of arrays, data frames, datasets and loaders as :class:`hgms_core.Data`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from hgms.adapters.shapes import Array, field_names
from hgms.arguments import errors_at, require
from hgms_core import ROLES, ConfigError, Data
from hgms_core.arguments import kind_of
from hgms_core.errors import one_of
from hgms_core.torch_errors import first_line


def as_data(
    rows: Any, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Data:
    """Read a table that fits into memory, once.

    Parameters
    ----------
    rows
        A dictionary of columns (tensors, NumPy arrays, columns of pandas or polars, lists of
        numbers); a data frame; a dataset with numbered rows of torch or of the library
        ``datasets``; a list of rows (dictionaries, or tuples, whose columns are called ``0``,
        ``1``, ...); a ``DataLoader`` (the rows that its samplers select, by its ``collate_fn``;
        ``worker_init_fn`` is not called); or a tuple of arrays (X, y), called ``0`` and ``1``.
        For larger tables, use ``Data(size=..., rows=...)``.
    dtype
        Type of floats in arrays and lists; torch's default type by default. Tensors keep their
        type, whole numbers become int64, and bytes stay bytes.
    device
        Device of the columns; by default the columns stay on their device.

    Raises
    ------
    ConfigError
        For columns that contain no numbers, or that have different lengths or devices.
        For columns that change in a second read (a random transform). For a table without
        rows. For a loader that weights, orders or splits its rows in a custom way.

    Examples
    --------
    >>> as_data(([[0.0, 1.0], [2.0, 3.0]], [0, 1])).batch(torch.tensor([1]))
    {'0': tensor([[2., 3.]]), '1': tensor([1]), 'index': tensor([1])}
    """
    if isinstance(rows, Data):
        return rows
    columns = columns_of(rows, dtype or torch.get_default_dtype())
    if device is not None:
        columns = {name: leaf.to(device) for name, leaf in columns.items()}
    return Data.of(columns)


def read_table(rows: Any, place: str, like: Tensor) -> Data:
    """Return the rows with the dtype and device of a tensor; errors start with ``place``."""
    with errors_at(place):
        return as_data(rows, like.dtype, like.device)


def read_roles(rows: Any, place: str, like: Tensor) -> Data | dict[str, Data]:
    """Return validation rows: one table per role, or one table for all roles."""
    several = rows if isinstance(rows, Mapping) else {}
    has_roles = bool(set(several) & set(ROLES))
    if several and (
        has_roles or all(isinstance(item, Data) or is_table(item) for item in several.values())
    ):
        for role in several:
            one_of("role of validation rows", role, ROLES, (place, role))
        with errors_at(place):
            return {role: read_table(table, role, like) for role, table in several.items()}
    return read_table(rows, place, like)


NAMES = ("column_names", "columns")
"""Attributes with the names of columns: of pyarrow and the library `datasets`; of data frames."""


def is_table(value: object) -> bool:
    """Whether this is a table, and not a column of a table."""
    has_names = any(hasattr(value, name) for name in NAMES)
    return has_names or isinstance(value, Mapping | Dataset | DataLoader)


def columns_of(rows: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the columns of a table of any kind. ``dtype`` is the type of floats in arrays or
    lists.
    """
    names = None
    if not isinstance(rows, Dataset):
        names = next((getattr(rows, name) for name in NAMES if hasattr(rows, name)), None)
    has_format = isinstance(rows, Sized) and hasattr(rows, "with_format")  # of `datasets`
    if isinstance(rows, DataLoader):
        table = _read_loader(rows)
    elif isinstance(rows, Mapping):
        table = dict(rows)
    elif has_format and rows.format.get("type", "custom") != "custom":
        table = rows.with_format("numpy", columns=rows.format["columns"])[:]
    elif isinstance(rows, TensorDataset | tuple):
        arrays = rows if isinstance(rows, tuple) else rows.tensors
        table = dict(zip(field_names(rows) or range(len(arrays)), arrays, strict=True))
    elif names is not None and _has_numbers(rows) and not has_format:
        require(
            len(set(names)) == len(names),
            "duplicate-name",
            "two columns of the frame have the same name",
            hint="rename one of them",
        )
        table = {name: rows[name] for name in names}
    elif isinstance(rows, list) and not (rows and isinstance(rows[0], Mapping | tuple)):
        raise ConfigError(
            "wrong-type",
            "a list must contain rows, each a dictionary or a tuple",
            hint="pass columns as a tuple (X, y), or as {'x': X, 'y': y}",
        )
    elif _is_sequence(rows):
        table = _read(rows, default_collate)
    else:
        raise _no_table(rows)
    return {str(name): _column(str(name), values, dtype) for name, values in table.items()}


def _has_numbers(rows: object) -> bool:
    return isinstance(rows, Sized) and hasattr(rows, "__getitem__")


def _is_sequence(rows: object) -> bool:
    other = str | bytes | Tensor | torch.nn.Module | IterableDataset | Array
    return _has_numbers(rows) and not isinstance(rows, other)


def _no_table(rows: object) -> ConfigError:
    kinds = "a dictionary of columns, a data frame, a dataset, a loader or a tuple of arrays"
    return ConfigError(
        "wrong-type",
        f"rows must be {kinds}, not {kind_of(rows)}",
        hint="give columns names: {'x': …}\nread files and streams first: pandas.read_csv(path), "
        "list(itertools.islice(rows, 10_000))\nuse Data() for a loss without data",
    )


def _read_loader(loader: DataLoader[Any]) -> dict[Any, Any]:
    """Return the rows that a loader's samplers select, collated by the loader."""
    if not _is_sequence(loader.dataset):
        raise _no_table(loader.dataset)
    batches: Any = loader.batch_sampler  # use the sampler in it, since loader.sampler may be unused
    sampler: Any = getattr(batches, "sampler", None)
    # Require exact types: a subclass may draw rows differently.
    if (
        type(loader).__iter__ is not DataLoader.__iter__
        or type(batches) is not BatchSampler
        or type(sampler) not in (SequentialSampler, RandomSampler, SubsetRandomSampler)
    ):
        parts = ", ".join(type(part).__name__ for part in (loader, batches, sampler))
        raise ConfigError(
            "not-supported",
            f"rows are drawn uniformly, so a loader with another order cannot be used ({parts})",
            hint="pass the rows to train on: torch.utils.data.Subset(loader.dataset, numbers); "
            "weight rows in the loss",
        )
    numbers: Sequence[int]
    if isinstance(sampler, SubsetRandomSampler):
        numbers = [int(number) for number in sampler.indices]
    else:
        numbers = range(len(sampler.data_source))  # may be shorter than the dataset
    never = len(numbers) % batches.batch_size if batches.drop_last else 0
    if isinstance(sampler, SequentialSampler) or len(numbers) == never:
        numbers = numbers[: len(numbers) - never]
    return _read(loader.dataset, loader.collate_fn, numbers)


def _read(
    rows: Any, collate: Callable[[list[Any]], Any], numbers: Sequence[int] | None = None
) -> dict[Any, Any]:
    """Collate the rows of a dataset with these numbers (default: all rows) in one call."""
    numbers = range(len(rows)) if numbers is None else numbers
    require(
        numbers, "no-rows", "the dataset has no rows", hint="use Data() for a loss without data"
    )
    try:
        few, again = (_by_name(collate([rows[i] for i in numbers[:8]])) for _ in range(2))
        half = len(numbers[:8]) // 2
        parts = (numbers[:half], numbers[half:8]) if half else (numbers[:8],)
        halves = [_by_name(collate([rows[i] for i in part])) for part in parts]
        table = _by_name(collate([rows[i] for i in numbers]))
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            "wrong-row",
            f"the rows cannot be collated: {first_line(error)}",
            hint="use tensors, arrays and numbers of one size per column, or a DataLoader whose "
            "collate_fn pads",
        ) from error
    changing = [name for name, leaf in few.items() if not _same(leaf, again[name])]
    if changing:
        raise ConfigError(
            "random-transform",
            "the dataset has a random transform: two reads of the same rows differ in "
            f"{', '.join(map(repr, changing))}",
            place=(str(changing[0]),),
            hint="remove the transform, or apply it in Data(size=…, rows=…)",
        )
    if not all(_is_joined(leaf, *(part[name] for part in halves)) for name, leaf in few.items()):
        raise ConfigError(
            "not-supported",
            "a row depends on the other rows of its batch: collate_fn returns other rows for two "
            f"halves of {len(numbers[:8])} rows than for all of them",
            place=("collate_fn",),
            hint="do this in the loss, which sees whole batches",
        )
    own = _by_name(rows[numbers[0]])
    # collate converts Python numbers to float64
    arrays = {name for name, leaf in own.items() if not isinstance(leaf, Tensor)}
    return {
        name: leaf.numpy() if name in arrays and isinstance(leaf, Tensor) else leaf
        for name, leaf in table.items()
    }


def _is_joined(whole: Any, *parts: Any) -> bool:
    """Return whether the column contains the rows of its parts, in order, possibly padded."""
    if not all(isinstance(part, Tensor) and part.dim() for part in (whole, *parts)):
        return True
    if len(whole) != sum(map(len, parts)):
        return False
    padded = any(part.shape[1:] != whole.shape[1:] for part in parts)
    return padded or _same(whole, torch.cat(parts))


def _by_name(item: Any) -> dict[Any, Any]:
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
    require(
        not is_table(values),
        "wrong-column",
        f"the column {name!r} is {kind_of(values)}",
        hint=f"call .to_numpy(), pass its parts as columns, or use rows[{name!r}] as the table",
        place=(name,),
    )
    if (
        isinstance(values, list | tuple)
        and values
        and all(isinstance(value, Tensor) for value in values)
    ):
        if len({value.shape for value in values}) > 1:
            raise _ragged_column(name)
        values = torch.stack(list(values))
    column = values if isinstance(values, Tensor) else _from_array(name, values, dtype)
    require(
        column.dim() != 0,
        "wrong-column",
        f"the column {name!r} is a single number, but must have one entry per row",
        place=(name,),
    )
    return column


def _from_array(name: str, values: Any, dtype: torch.dtype) -> Tensor:
    """Convert floats to ``dtype`` and integers to int64. Booleans and bytes (which images consist
    of) keep their type.
    """
    import numpy as np

    require(
        isinstance(values, Array | list | tuple | range),
        "wrong-column",
        f"the column {name!r} is {kind_of(values)}",
        hint="remove it, or convert it to numbers (sparse matrices: .toarray())",
        place=(name,),
    )
    try:
        array = np.asarray(values)
        array = np.array(array.tolist()) if array.dtype == object else array
    except ValueError:
        raise _ragged_column(name) from None
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
        raise ConfigError(
            "wrong-column",
            f"the column {name!r} contains {what}, but must contain numbers",
            place=(name,),
            hint="encode strings by pandas.factorize(column)[0], convert others to floats, or "
            "remove the column",
        )
    if kind == "f":
        return torch.from_numpy(
            np.array(array, dtype=np.float64 if array.itemsize == 8 else np.float32)
        ).to(dtype)
    return torch.from_numpy(
        np.array(array, dtype=array.dtype if array.itemsize == 1 and kind in "ub" else np.int64)
    )


def _ragged_column(name: str) -> ConfigError:
    return ConfigError(
        "wrong-column",
        f"the rows of the column {name!r} have different sizes",
        place=(name,),
        hint="pad them to one size, with a mask as another column",
    )
