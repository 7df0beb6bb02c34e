"""Tables of numbers with a target, by name: scikit-learn, LIBSVM files, OpenML, or the Hub.

Also their split and their problem.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import Attribute, frozen
from torch import Tensor

from hgms.config import check_memory, data_fingerprint, expand
from hgms.gauss_newton import Composite
from hgms.packages import optional_module
from hgms_core import ROLES, ConfigError, Data, Key, Problem, Tree
from hgms_core.errors import DataError

TRAITS = frozenset(
    {
        "smooth-lower",
        "few-upper",
        "per-example-losses",
        "stop-rows",
        "validation-rows",
        "closed-form",
    }
)
METRICS = dict.fromkeys(
    ("value_function", "stationarity", "lower_distance", "upper_loss", "test_loss"), False
)

EMBEDDED = ("diabetes", "breast-cancer", "wine", "iris", "digits")
FORMS = (
    f"sklearn:NAME ({', '.join(EMBEDDED)}), libsvm:FILE, openml:NAME@VERSION or hub:NAME@REVISION"
)


@frozen(eq=False)
class Table:
    """n rows of features ``[n, d]`` in float64, one target per row, and their source."""

    features: np.ndarray
    target: np.ndarray
    where: str

    def __attrs_post_init__(self) -> None:
        if self.features.ndim != 2 or self.target.shape != self.features.shape[:1]:
            raise DataError(
                "wrong-shape",
                f"features have the shape {self.features.shape} and targets {self.target.shape}, "
                "but must have one target per row",
                place=(self.where,),
            )
        bad = np.flatnonzero(~np.isfinite(self.features).all(1))
        if len(bad):
            raise DataError(
                "not-finite",
                f"row {bad[0]} has a missing or infinite value (number of such rows: {len(bad)})",
                place=(self.where,),
                hint="replace these values or remove the rows, and use libsvm:FILE",
            )


def table_name(instance: object, attribute: Attribute[str], value: str) -> None:
    """The attrs validator of a field that names a table."""
    kind, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not (
        rest in EMBEDDED if kind == "sklearn" else kind in ("libsvm", "openml", "hub") and rest
    ):
        message = f"{attribute.name}={value!r} must be {FORMS}"
        raise ConfigError("wrong-value", message, place=(attribute.name,))


def split_shares(instance: object, attribute: Attribute[Any], value: tuple[float, ...]) -> None:
    """The attrs validator of the shares of rows that train, validate and test."""
    if len(value) != 3 or min(value) <= 0 or sum(value) > 1 + 1e-9:
        raise ConfigError(
            "wrong-value",
            f"{attribute.name}={value} must be three positive shares (train, validation, test) "
            "with a sum of at most 1",
            place=(attribute.name,),
        )


def load_table(dataset: str, width: int | None = None) -> Table:
    """Load the table named by ``dataset`` (see :data:`FORMS`), with the targets as stored.

    A relative LIBSVM file that is not in the working directory is searched for below
    ``$HGMS_DATA``. ``width`` is the required number of features. A LIBSVM file, which does not
    store zeros, is filled up to this width.

    >>> load_table("sklearn:iris").features.shape
    (150, 4)
    """
    table = _load(dataset, width)
    if width not in (None, table.features.shape[1]):
        raise DataError(
            "wrong-shape",
            f"the table has {table.features.shape[1]} features, but must have {width}",
            place=(dataset,),
        )
    return table


def contents(*datasets: str | None) -> dict[str, list[str]]:
    """Return the checksums of the LIBSVM files of these tables.

    Other tables are identified by name: scikit-learn's by the version of scikit-learn, tables of
    OpenML and the Hub by the version in the name.
    """
    names = [dataset.partition(":") for dataset in datasets if dataset is not None]
    return data_fingerprint(_libsvm_file(rest) for kind, _, rest in names if kind == "libsvm")


def _libsvm_file(name: str) -> Path:
    path = expand(name, ("dataset",))
    if path.exists():
        return path
    root = expand(os.environ.get("HGMS_DATA", ""), ("HGMS_DATA",))
    return root / path  # an absolute path is unchanged


def _load(dataset: str, width: int | None) -> Table:
    kind, _, rest = dataset.partition(":")
    if kind == "hub":
        return _hub(rest)
    user = f"the table {dataset!r}"
    datasets = optional_module("sklearn.datasets", user, "sklearn", place=("dataset",))
    if kind == "sklearn":
        bunch = getattr(datasets, f"load_{rest.replace('-', '_')}")()
        return Table(np.asarray(bunch.data, np.float64), np.asarray(bunch.target), dataset)
    if kind == "libsvm":
        path = _libsvm_file(rest)
        try:
            if path.exists() and not path.is_file():  # a pipe or a device has no end
                raise OSError("it is not a file")
            features, target = datasets.load_svmlight_file(
                str(path), dtype=np.float64, n_features=width
            )
        except (OSError, ValueError, EOFError, OverflowError, zlib.error) as error:
            raise DataError(
                "unreadable-file",
                f"the file cannot be read as LIBSVM: {error}",
                place=(dataset,),
                hint="check the path; a line has the form `target index:value …`",
            ) from error
        # One large index makes every row as long, and the cost of a solve grows with the width of
        # the table.
        try:
            check_memory("rows × largest index", *features.shape)
            check_memory("largest index squared", features.shape[1], features.shape[1])
        except ConfigError as error:
            raise error.at(dataset) from None
        return Table(features.toarray(), target, dataset)
    name, _, version = rest.partition("@")
    try:
        bunch = datasets.fetch_openml(
            name, version=int(version) if version else "active", as_frame=False, parser="liac-arff"
        )
    except Exception as error:
        # scikit-learn raises errors of urllib, its parser and its own: all mean the same here
        raise _unreachable(dataset, "OpenML", error) from error
    return _numeric(bunch.data, bunch.target, dataset)


def _hub(reference: str) -> Table:
    user = f"the table {reference!r}"
    datasets = optional_module("datasets", user, "hub", place=("dataset",))
    name, _, revision = reference.partition("@")
    where = f"hub:{reference}"
    try:
        rows = datasets.load_dataset(name, split="train", revision=revision or None)
    except Exception as error:
        # The library raises its own errors and errors of requests, httpx and pyarrow: all mean the
        # same here.
        raise _unreachable(where, "the Hub", error) from error
    columns = {column: np.asarray(rows[column]) for column in rows.column_names}
    target = next(
        (column for column in ("target", "label", "class", "y") if column in columns),
        rows.column_names[-1],
    )
    features = [
        values
        for column, values in columns.items()
        if column != target and values.dtype.kind in "iufb"
    ]
    if not features:
        raise DataError(
            "missing-column",
            f"the columns {', '.join(columns)} include no numbers except the target {target!r}",
            place=(where,),
        )
    return _numeric(np.stack(features, axis=1), columns[target], where)


def _numeric(features: Any, target: np.ndarray, where: str) -> Table:
    try:
        return Table(np.asarray(features, np.float64), target, where)
    except (TypeError, ValueError) as error:
        raise DataError(
            "wrong-type",
            f"some features are not numbers: {error}",
            place=(where,),
            hint="encode them, and use libsvm:FILE",
        ) from error


def _unreachable(where: str, place: str, error: Exception) -> DataError:
    return DataError(
        "cannot-download",
        f"{place} does not provide the table: {type(error).__name__}: {error}",
        place=(where,),
        hint="check the name, the version and the network, or use a local file: libsvm:FILE",
    )


def split(table: Table, shares: tuple[float, ...], key: Key) -> list[Tensor]:
    """Return the row numbers of the disjoint parts train, validation, test."""
    order = torch.randperm(len(table.target), generator=key.generator())
    sizes = [round(share * len(order)) for share in shares]
    sizes[2] = min(sizes[2], len(order) - sizes[0] - sizes[1])  # correct the rounding
    if min(sizes) < 1:
        raise DataError(
            "too-few-rows",
            f"{len(order)} rows are too few for the shares {shares}",
            place=(table.where,),
        )
    return list(order[: sum(sizes)].split(sizes))


def standardise_parts(parts: list[Tensor]) -> list[Tensor]:
    """Scale features to mean 0 and standard deviation 1 over the first (the *training*) part.

    A feature that is constant there becomes 0 there.
    """
    mean = parts[0].mean(0)
    spread = parts[0].std(0, correction=0)
    # The computed deviation of a constant column is its rounding error.
    spread = torch.where(spread > 1e-12 * (1 + mean.abs()), spread, torch.ones_like(spread))
    return [(part - mean) / spread for part in parts]


def penalty(theta: Tree, x: Tree) -> Tensor:
    """Return ½ Σ e^θ x², with one θ per feature, ``[d]``, or per vector, ``[vectors, 1]``."""
    return 0.5 * (theta["log_penalty"].exp() * x["x"] * x["x"]).sum()


def problem_of(
    outputs: Callable[[Tree, Tree], Tensor],
    criterion: Callable[[Tensor, Tree], Tensor],
    parts: list[Tree],
    theta0: Tensor,
    x0: Tensor,
    bound: float,
    evaluate: Callable[[Tree, Tree], Mapping[str, float]],
) -> Problem:
    """Return the problem of a criterion with penalties.

    g = criterion(outputs) + penalty on the training rows, f = criterion(outputs) on the validation
    rows, Θ = [−bound, bound]^p.
    """
    train, validation, *_ = parts
    return Problem(
        theta0={"log_penalty": theta0.clamp(-bound, bound)},
        x0={"x": x0},
        g=Composite(
            outputs=outputs,
            criterion=lambda theta, x, z, batch: criterion(z, batch) + penalty(theta, x),
        ),
        f=Composite(outputs=outputs, criterion=lambda theta, x, z, batch: criterion(z, batch)),
        lower_data=Data.of(train),
        # F is a function of all validation rows, so every role uses all rows.
        upper_data=dict.fromkeys(ROLES, Data.of(validation)),
        project=lambda theta: {"log_penalty": theta["log_penalty"].clamp(-bound, bound)},
        evaluate=evaluate,
    )
