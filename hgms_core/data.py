"""The rows that losses are computed on, and the roles of validation rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from hgms_core.adapters.arguments import arguments_named
from hgms_core.adapters.columns import columns_of, is_table
from hgms_core.adapters.display import as_html, as_text, data_rows
from hgms_core.errors import ConfigError, one_of
from hgms_core.seeding import Key
from hgms_core.trees import Tree

Batch = Tree
"""Rows of a data set by the names of their columns, each ``[B, …]``."""


@arguments_named
@frozen
class Data:
    """The rows a loss is computed on.

    ``rows(index)`` is the batch of the rows with these numbers; ``index`` is an integer tensor of
    any shape, whose axes lead every leaf of the batch. ``whole`` is the batch of all ``size`` rows.
    It may be empty: ``batch(None)`` then takes all rows from ``rows``. ``Data.none()`` is for a
    loss without data.

    ``strata`` are the names and sizes of consecutive groups of rows (the sources of a mixture). A
    batch then holds equally many rows of each, up to one; which groups get the odd rows is drawn
    anew for each batch. A group's rows are drawn by its name, not by where it stands, and within
    one call none comes twice before all of the group have come.

    >>> table = torch.arange(10.0)
    >>> data = Data(size=10, whole={"t": table}, rows=lambda index: {"t": table[index]})
    >>> data.batch(data.draw(Key(0), batch_size=4, steps=3))["t"].shape
    torch.Size([3, 4])
    """

    size: int
    whole: Batch = Factory(dict)
    rows: Callable[[Tensor], Batch] = field(default=lambda index: {}, eq=False)
    device: torch.device = torch.device("cpu")
    strata: tuple[tuple[str, int], ...] | None = None

    __repr__ = as_text
    _repr_html_ = as_html
    _rows = data_rows

    @classmethod
    def none(cls) -> Data:
        return cls(0)

    @classmethod
    def of(
        cls, rows: Any, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Data:
        """The rows of a table that fits into memory, read once; a batch also holds each row's
        number as ``index``.

        A table is a dictionary of columns (tensors, numpy arrays, columns of pandas or polars,
        lists of numbers); a frame; a dataset with numbered rows of torch or of the library
        ``datasets``, or a list of rows (dictionaries, or tuples, whose columns are called ``0``,
        ``1``, …); a ``DataLoader`` (the rows that its samplers let through, by its ``collate_fn``;
        ``worker_init_fn`` is not called); or a tuple of arrays (X, y), again ``0`` and ``1``.
        Larger ones take ``Data(size=…, rows=…)``.

        Tensors keep their type. Of arrays and Python numbers floats become ``dtype`` (torch's
        default, float32; within ``Problem(lower_data=…)`` the type of x), whole numbers int64, but
        bytes stay bytes. Columns are moved to ``device`` (None: stay where they are; within
        ``Problem(lower_data=…)`` x's).

        Errors: ConfigError where columns differ in length or device, hold no numbers, or change
        when they are read again (a random transform), where a table has no rows, or no number
        of rows, and for a loader that weights, orders or splits its rows in its own way.

        >>> data = Data.of(([[0.0, 1.0], [2.0, 3.0]], [0, 1]))
        >>> data.batch(torch.tensor([1]))
        {'0': tensor([[2., 3.]]), '1': tensor([1]), 'index': tensor([1])}
        """
        if isinstance(rows, Data):
            return rows
        table = columns_of(rows, dtype or torch.get_default_dtype())
        counts = {name: leaf.shape[0] for name, leaf in table.items()}
        if not any(counts.values()):
            raise ConfigError(
                "no-rows",
                f"the table has no {'rows' if counts else 'columns'}",
                hint="use Data.none() for a loss without data",
            )
        if len(set(counts.values())) != 1:
            known = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ConfigError(
                "wrong-length", f"all columns must have the same number of rows, not {known}"
            )
        table = table if device is None else {name: leaf.to(device) for name, leaf in table.items()}
        devices = {leaf.device for leaf in table.values()}
        if len(devices) > 1:
            raise ConfigError(
                "several-devices",
                f"all columns must be on one device, not {', '.join(sorted(map(str, devices)))}",
            )
        size = max(counts.values())
        device = devices.pop()
        numbers = torch.arange(size, device=device)
        if "index" in table and not (
            table["index"].shape == numbers.shape and bool((table["index"] == numbers).all())
        ):
            raise ConfigError(
                "reserved-name",
                "the column name 'index' is reserved: each batch has its row numbers there",
                place=("index",),
                hint="rename the column",
            )
        whole = {**table, "index": numbers}

        def taken(index: Tensor) -> Batch:
            # index_select copies whole rows, three times as fast as table[index]
            flat = index.reshape(-1)
            return {
                name: leaf.index_select(0, flat).reshape(index.shape + leaf.shape[1:])
                for name, leaf in whole.items()
            }

        return cls(size, whole, taken, device)

    def draw(self, key: Key, batch_size: int | None, steps: int) -> Tensor | None:
        """What ``rows`` takes, ``[steps, batch_size]``, or None where each step sees the whole
        data.
        """
        if batch_size is None or batch_size >= self.size:
            return None
        return self.numbers(key, batch_size, steps)

    def numbers(self, key: Key, batch_size: int, steps: int) -> Tensor:
        """Numbers of rows, ``[steps, batch_size]``, also where a batch is larger than the data."""
        if self.strata is None:
            return key.indices(self.size, batch_size, steps, self.device)
        return self._stratified(key, batch_size, steps, self.strata).to(
            self.device, non_blocking=True
        )

    def _stratified(
        self, key: Key, batch_size: int, steps: int, strata: tuple[tuple[str, int], ...]
    ) -> Tensor:
        even, odd = divmod(batch_size, len(strata))
        # By name, so that the same rows are drawn in whichever order the groups stand.
        names = sorted(name for name, _ in strata)
        generator = key.fold("odd").generator()
        luck = [
            torch.randperm(len(names), generator=generator)[:odd].tolist() if odd else []
            for _ in range(steps)
        ]
        chosen = [[names[i] for i in sorted(step)] for step in luck]
        own = {}
        first = 0
        for name, size in strata:
            counts = [even + (name in step) for step in chosen]
            numbers = key.fold("stratum", name).indices(size, max(1, sum(counts)), 1)[
                0, : sum(counts)
            ]
            own[name] = torch.split(first + numbers, counts)
            first += size
        batches = [
            [
                *(own[name][step][:even] for name, _ in strata),
                *(own[name][step][even:] for name in more),
            ]
            for step, more in enumerate(chosen)
        ]
        return torch.stack([torch.cat(parts) for parts in batches])

    def batch(self, index: Tensor | None) -> Batch:
        if index is not None:
            return self.rows(index)
        return self.whole or (
            self.rows(torch.arange(self.size, device=self.device)) if self.size else {}
        )

    def sample(self, key: Key, size: int | None) -> tuple[Batch, int]:
        """One batch of ``size`` rows drawn by ``key`` (all if None), and how many rows it counts
        (:meth:`count`).

        >>> batch, rows = Data.of({"t": torch.arange(10.0)}).sample(Key(0), 4)
        >>> batch["t"].shape, rows
        (torch.Size([4]), 4)
        """
        numbers = self.draw(key, size, 1)
        return self.batch(None if numbers is None else numbers[0]), self.count(size)

    def count(self, batch_size: int | None) -> int:
        """Rows in a batch of the asked size; a loss without data counts one."""
        return max(1, self.size if batch_size is None else min(batch_size, self.size))


@frozen(kw_only=True, eq=False)
class Rows:
    """One weight for each lower row: θ's leaf ``leaf``, ``[n]``, holds the logits, row i weighs
    σ(θ_i)::

        g(θ, x; batch) = mean_i σ(θ_i) ℓ_i(x; batch) + r(θ, x; batch)
            i: the rows of the batch, batch["index"]

    ``losses(x, batch)`` are the ℓ_i, ``[B]``, without weight and regulariser; ``regulariser`` is r,
    which knows nothing of θ's leaf. So a method may weigh the rows of a batch as it likes, by
    numbers that are no sigmoid of anything.

    >>> rows = Rows(losses=lambda x, batch: (x["x"] - batch["a"]).square())
    >>> rows.leaf, rows.losses({"x": torch.zeros(1)}, {"a": torch.tensor([1.0, 2.0])})
    ('logits', tensor([1., 4.]))
    """

    leaf: str = "logits"
    losses: Callable[[Tree, Batch], Tensor]
    regulariser: Callable[[Tree, Tree, Batch], Tensor] = lambda theta, x, batch: next(
        iter(x.values())
    ).new_zeros(())


ROLES = ("differentiate", "select", "stop")
"""What validation data is used for: differentiating f, selecting a candidate, deciding when a
state is the best so far.
"""


def roles(validation: Tree, shares: tuple[float, ...]) -> dict[str, Data]:
    """The validation rows each role sees: consecutive parts (views, not copies), or all of them for
    shares (1, 1, 1).

    >>> {role: data.size for role, data in roles({"a": torch.zeros(10)}, (0.6, 0.2, 0.2)).items()}
    {'differentiate': 6, 'select': 2, 'stop': 2}
    """
    whole = Data.of(validation)
    if all(share == 1 for share in shares):
        return dict.fromkeys(ROLES, whole)
    ends = [round(whole.size * sum(shares[:i])) for i in range(len(ROLES) + 1)]
    parts = {}
    for role, first, end in zip(ROLES, ends, ends[1:], strict=False):
        if first == end:
            raise ConfigError(
                "no-rows-for-role",
                f"validation_split={tuple(shares)} gives 0 of {whole.size} validation rows to the "
                f"role {role!r}",
                place=("validation_split",),
                hint="increase its share or validation_size",
            )
        parts[role] = Data.of({name: leaf[first:end] for name, leaf in validation.items()})
    return parts


def data_of(rows: Any, place: str, like: Tensor) -> Data:
    """Return the rows with the dtype and device of a tensor; errors have the ``place``."""
    try:
        return Data.of(rows, like.dtype, like.device)
    except ConfigError as error:
        raise error.at(place) from None


class Roles(dict[str, Data]):
    """Validation rows by role, which say what is missing."""

    def __missing__(self, role: str) -> Data:
        raise ConfigError(
            "no-rows-for-role",
            f"there are no validation rows for the role {role!r}, only for: "
            f"{', '.join(self) or 'none'}",
            place=("upper_data", role),
            hint="pass upper_data as one table for all roles, or add a table for this role",
        )


def by_role(rows: Any, place: str, like: Tensor) -> Roles:
    """Validation rows of any kind: a table for each of some roles by name, or one for all of
    them.
    """
    several = rows if isinstance(rows, Mapping) else {}
    if several and (
        set(several) & set(ROLES)
        or all(isinstance(rows, Data) or is_table(rows) for rows in several.values())
    ):
        for role in rows:
            one_of("role of validation rows", role, ROLES, (place, role))
        tables = Roles()
        for role, table in rows.items():
            try:
                tables[role] = data_of(table, role, like)
            except ConfigError as error:
                raise error.at(place) from None
        return tables
    return Roles(dict.fromkeys(ROLES, data_of(rows, place, like)))
