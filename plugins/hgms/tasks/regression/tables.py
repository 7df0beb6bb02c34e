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

from hgms.arguments import errors_at
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
FORMS = f"sklearn:NAME ({', '.join(EMBEDDED)}) or libsvm:FILE"


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
    if not (rest in EMBEDDED if kind == "sklearn" else kind == "libsvm" and rest):
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

    Examples
    --------
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

    Tables of scikit-learn are identified by the version of scikit-learn.
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
    user = f"the table {dataset!r}"
    datasets = optional_module("sklearn.datasets", user, "sklearn", place=("dataset",))
    if kind == "sklearn":
        bunch = getattr(datasets, f"load_{rest.replace('-', '_')}")()
        return Table(np.asarray(bunch.data, np.float64), np.asarray(bunch.target), dataset)
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
    with errors_at(dataset):
        check_memory("rows × largest index", *features.shape)
        check_memory("largest index squared", features.shape[1], features.shape[1])
    return Table(features.toarray(), target, dataset)


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
