"""scikit-learn's embedded tables, with noise features, split into standardised rows."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms_core import Key
from hgms_core.errors import DataError, MissingExtra

DATASETS = ("breast-cancer", "wine", "digits", "diabetes")
REGRESSION = frozenset({"diabetes"})


@frozen(eq=False)
class Table:
    """Rows of features ``[n, d]`` with their target ``[n]``; the last ``noise`` features are
    irrelevant.

    The target is one of ``classes`` classes, or a number if ``classes`` is 0.
    """

    features: Tensor
    target: Tensor
    noise: int
    classes: int


def load(dataset: str) -> Table:
    """One of :data:`DATASETS`, in float64, without the features that are the same on every row
    (three pixels of the digits).

    Raises
    ------
    MissingExtra
        Without scikit-learn.

    Examples
    --------
    >>> load("digits").features.shape
    torch.Size([1797, 61])
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingExtra(
            "missing-package",
            f"the dataset {dataset!r} requires scikit-learn",
            place=("dataset",),
            install="pip install scikit-learn",
        ) from error
    bunch = getattr(datasets, f"load_{dataset.replace('-', '_')}")()
    features = torch.from_numpy(np.asarray(bunch.data, np.float64))
    target = torch.from_numpy(
        np.asarray(bunch.target, np.float64 if dataset in REGRESSION else np.int64)
    )
    varied = features.amax(0) > features.amin(0)
    return Table(
        features[:, varied], target, 0, 0 if dataset in REGRESSION else int(target.max()) + 1
    )


def with_noise(table: Table, count: int, kind: str, key: Key) -> Table:
    """Return the table with ``count`` more features, independent of the target and of each other.

    ``gaussian``: N(0, 1). ``permuted``: the table's features in a random order, repeated if
    necessary, each with permuted rows, so that the values of a single column do not reveal noise.
    """
    rows, d = table.features.shape
    draw = key.generator()
    if kind == "gaussian":
        columns = [torch.randn(rows, generator=draw, dtype=torch.float64) for _ in range(count)]
    else:
        order = torch.cat([torch.randperm(d, generator=draw) for _ in range(-(-count // d))])[
            :count
        ].tolist()
        columns = [table.features[torch.randperm(rows, generator=draw), j] for j in order]
    return Table(
        torch.cat([table.features, torch.stack(columns, dim=1)], dim=1),
        table.target,
        count,
        table.classes,
    )


def split(table: Table, shares: tuple[float, ...], key: Key) -> list[dict[str, Tensor]]:
    """Split the rows into ``{"a": features, "y": target}`` for training, validation and test, in an
    order drawn from ``key``.

    Features, and a numeric target, have mean 0 and standard deviation 1 over the training rows. A
    feature that is constant there becomes 0 there, and keeps its units elsewhere.
    """
    order = torch.randperm(len(table.target), generator=key.generator())
    ends = [round(sum(shares[: i + 1]) * len(order)) for i in range(3)]
    parts = [order[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    if min(len(part) for part in parts) == 0:
        raise DataError(
            "too-few-rows",
            f"the shares {shares} of {len(order)} rows leave one part without rows",
            place=("shares",),
            hint="increase the smallest share",
        )
    features = _standardised(table.features, parts[0])
    target = table.target
    if not table.classes:
        target = _standardised(target, parts[0])
    return [{"a": features[part], "y": target[part]} for part in parts]


def _standardised(values: Tensor, train: Tensor) -> Tensor:
    seen = values[train]
    mean = seen.mean(0)
    spread = seen.std(0, correction=0)
    # A constant column's computed deviation is its rounding error.
    return (values - mean) / torch.where(
        spread > 1e-12 * (1 + mean.abs()), spread, torch.ones_like(spread)
    )
