"""The rows that losses are computed on, and the roles of validation rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from attrs import field, frozen
from torch import Tensor

from hgms_core.arguments import reports_errors
from hgms_core.errors import ConfigError, one_of
from hgms_core.seeding import Key
from hgms_core.trees import Tree, summary

Batch = Tree
"""Rows of a data set by the names of their columns, each ``[B, …]``."""


@reports_errors
@frozen
class Data:
    """The rows that a loss is computed on.

    ``rows(index)`` returns the batch of the rows with these numbers. ``index`` is an integer tensor
    of any shape; its axes are the leading axes of every leaf of the batch. ``whole`` is the batch
    of all ``size`` rows. If it is empty, ``batch(None)`` reads all rows through ``rows``.
    ``Data()`` is for a loss without data.

    ``strata`` contains the names and sizes of consecutive groups of rows, such as the sources of a
    mixture. A batch then contains equally many rows per group, up to one. Each batch draws the
    groups that contribute one more row. The drawn rows of a group depend on its name, not on its
    position. Within one call, no row of a group is repeated before all its rows are drawn.

    Examples
    --------
    >>> table = torch.arange(10.0)
    >>> data = Data(size=10, whole={"t": table}, rows=lambda index: {"t": table[index]})
    >>> data.batch(data.draw(Key(0), batch_size=4, steps=3))["t"].shape
    torch.Size([3, 4])
    """

    size: int = 0
    whole: Batch = field(factory=dict, repr=summary)
    rows: Callable[[Tensor], Batch] = field(default=lambda index: {}, eq=False, repr=False)
    device: torch.device = torch.device("cpu")
    strata: tuple[tuple[str, int], ...] | None = None

    @classmethod
    def of(cls, columns: Batch) -> Data:
        """Return the rows of a table of tensors. A batch also contains the row numbers, ``index``.

        ``hgms.as_data`` reads arrays, data frames, datasets and loaders.

        Raises
        ------
        ConfigError
            For a value that is not a dictionary of tensors (``wrong-type``) and for a table without
            rows (``no-rows``). Columns of different lengths (``wrong-length``) or on different
            devices (``several-devices``) also raise it, as do other values in ``index``
            (``reserved-name``).

        Examples
        --------
        >>> data = Data.of({"x": torch.tensor([[0.0, 1.0], [2.0, 3.0]])})
        >>> data.batch(torch.tensor([1]))
        {'x': tensor([[2., 3.]]), 'index': tensor([1])}
        """
        if not isinstance(columns, Mapping) or not all(
            isinstance(leaf, Tensor) and leaf.dim() for leaf in columns.values()
        ):
            raise ConfigError(
                "wrong-type",
                "columns must be tensors by name with one entry per row",
                hint="use hgms.as_data for arrays, data frames, datasets and loaders",
            )
        counts = {name: len(leaf) for name, leaf in columns.items()}
        if not any(counts.values()):
            raise ConfigError(
                "no-rows",
                f"the table has no {'rows' if counts else 'columns'}",
                hint="use Data() for a loss without data",
            )
        if len(set(counts.values())) != 1:
            known = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ConfigError(
                "wrong-length", f"all columns must have the same number of rows, not {known}"
            )
        devices = {leaf.device for leaf in columns.values()}
        if len(devices) > 1:
            raise ConfigError(
                "several-devices",
                f"all columns must be on one device, not {', '.join(sorted(map(str, devices)))}",
            )
        size = max(counts.values())
        device = devices.pop()
        numbers = torch.arange(size, device=device)
        if "index" in columns and not torch.equal(columns["index"], numbers):
            raise ConfigError(
                "reserved-name",
                "the column name 'index' is reserved: each batch has its row numbers there",
                place=("index",),
                hint="rename the column",
            )
        whole = {**columns, "index": numbers}

        def take(index: Tensor) -> Batch:
            # index_select copies whole rows, three times as fast as table[index]
            flat = index.reshape(-1)
            return {
                name: leaf.index_select(0, flat).reshape(index.shape + leaf.shape[1:])
                for name, leaf in whole.items()
            }

        return cls(size, whole, take, device)

    def draw(self, key: Key, batch_size: int | None, steps: int) -> Tensor | None:
        """Return row numbers for ``rows``, ``[steps, batch_size]``.

        The result is None if each step uses all rows.
        """
        if batch_size is None or batch_size >= self.size:
            return None
        return self.numbers(key, batch_size, steps)

    def numbers(self, key: Key, batch_size: int, steps: int) -> Tensor:
        """Return row numbers, ``[steps, batch_size]``, even if a batch is larger than the data."""
        if self.strata is None:
            return key.indices(self.size, batch_size, steps, self.device)
        even, odd = divmod(batch_size, len(self.strata))
        # Sorted by name, so that the order of the groups does not change the drawn rows.
        names = sorted(name for name, _ in self.strata)
        generator = key.fold("odd").generator()
        extra = [
            {names[i] for i in torch.randperm(len(names), generator=generator)[:odd].tolist()}
            for _ in range(steps)
        ]
        counts = {name: [even + (name in step) for step in extra] for name in names}
        drawn = {
            name: key.fold("stratum", name).indices(size, max(1, sum(counts[name])), 1)[0]
            for name, size in self.strata
        }
        firsts = accumulate((size for _, size in self.strata), initial=0)
        own = {
            name: torch.split(first + drawn[name][: sum(counts[name])], counts[name])
            for (name, _), first in zip(self.strata, firsts, strict=False)
        }
        evenly = [
            [
                *(own[name][step][:even] for name, _ in self.strata),
                *(own[name][step][even:] for name in names),
            ]
            for step in range(steps)
        ]
        return torch.stack([torch.cat(parts) for parts in evenly]).to(
            self.device, non_blocking=True
        )

    def batch(self, index: Tensor | None) -> Batch:
        if index is not None:
            return self.rows(index)
        return self.whole or (
            self.rows(torch.arange(self.size, device=self.device)) if self.size else {}
        )

    def sample(self, key: Key, size: int | None) -> tuple[Batch, int]:
        """Return one batch of ``size`` rows drawn by ``key`` (None: all rows), and its row count.

        :meth:`count` computes the row count.

        Examples
        --------
        >>> batch, rows = Data.of({"t": torch.arange(10.0)}).sample(Key(0), 4)
        >>> batch["t"].shape, rows
        (torch.Size([4]), 4)
        """
        numbers = self.draw(key, size, 1)
        return self.batch(None if numbers is None else numbers[0]), self.count(size)

    def count(self, batch_size: int | None) -> int:
        """Return the row count of a batch of this size; a loss without data counts as one row."""
        return max(1, self.size if batch_size is None else min(batch_size, self.size))


ROLES = ("differentiate", "select", "stop")
"""The uses of validation rows: differentiate f, select a candidate, and decide if a state is the
best so far.
"""


def roles(validation: Tree, shares: tuple[float, ...]) -> dict[str, Data]:
    """Split validation rows into consecutive parts, one per role (views, not copies).

    With the shares (1, 1, 1), each role uses all rows.

    Examples
    --------
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


class Roles(dict[str, Data]):
    """Validation rows by role. Error: ConfigError ``no-rows-for-role`` for a missing role."""

    def __missing__(self, role: str) -> Data:
        raise ConfigError(
            "no-rows-for-role",
            f"there are no validation rows for the role {role!r}, only for: "
            f"{', '.join(self) or 'none'}",
            place=("upper_data", role),
            hint="pass one Data for all roles, or add one for this role",
        )


def by_role(rows: Data | Mapping[str, Data]) -> Roles:
    """Return validation rows by role: the rows of a mapping, or the same rows for all roles."""
    if isinstance(rows, Data):
        return Roles(dict.fromkeys(ROLES, rows))
    if not isinstance(rows, Mapping):
        raise not_data("upper_data")
    for role, data in rows.items():
        one_of("role of validation rows", role, ROLES, ("upper_data", role))
        if not isinstance(data, Data):
            raise not_data("upper_data", role)
    return Roles(rows)


def not_data(*place: str) -> ConfigError:
    """Return the error for rows that are not a Data."""
    return ConfigError(
        "wrong-type",
        f"{'.'.join(place)} must be a Data",
        place=place,
        hint="use hgms.from_losses for arrays, data frames, datasets and loaders",
    )
