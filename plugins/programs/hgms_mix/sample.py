"""The fine-tuning set: which rows of which source, drawn by the learned weights or taken from the top of a ranking."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from attrs import field, frozen, validators
from torch import Tensor

from hgms_core import ConfigError, Key
from hgms_mix.apportion import apportion
from hgms_run import replace_file


@final
@frozen(kw_only=True)
class Sample:
    """Table ``[sample]``: how many rows the fine-tuning set has, and how they are drawn.

    Every source gives a whole number of rows by its learned weight (:func:`hgms_mix.apportion.apportion`: largest remainders,
    within what it has), drawn without replacement by a stream of its own that comes from ``seed`` and the source's *name*: the
    order of sources never matters, and a larger sample of a source contains the smaller ones. A method that ranks rows
    (``less``, ``rho-loss``) is not drawn from: its ``size`` best rows are taken. The set is then shuffled.

    Arguments:
        size: rows in all.
        seed: None: the mix's own.
        allow_fewer: False: what a source is short of is given by the others, in proportion to their weights, and the total is
            exact. True: nothing is moved, and the set is smaller.

    >>> Sample(size=20_000).allow_fewer
    False
    """

    version: ClassVar[str] = "1"

    size: int = field(validator=validators.ge(1))
    seed: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    allow_fewer: bool = False

    def draw(self, weights: Mapping[str, float], capacity: Mapping[str, int], *, seed: int) -> dict[str, Tensor]:
        """Row positions of each source, ascending."""
        counts = apportion(weights, capacity, self.size, allow_fewer=self.allow_fewer)
        key = self._key(seed)
        return {name: draw_rows(key.fold("source", name), capacity[name], count) for name, count in counts.items()}

    def top(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Row positions of the ``size`` rows with the highest scores, ascending; NaN is never taken, and ties go to the source
        that sorts first and then to the earlier row."""
        names = sorted(scores)
        flat = torch.cat([scores[name].double().cpu() for name in names])
        rankable = int((~flat.isnan()).sum())
        if rankable < self.size and not self.allow_fewer:
            pool = ", ".join(f"{name} {int((~scores[name].isnan()).sum())}" for name in names)
            raise ConfigError(
                f"sample.size = {self.size}, but the method ranked {rankable} rows ({pool})\n"
                f"  raise task.cache (rows a source that are kept for reweighting), lower sample.size to {rankable} or less, "
                "or set sample.allow_fewer = true"
            )
        # NaN sorts as −∞, and a stable order breaks ties
        order = flat.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argsort(descending=True, stable=True)
        order = order[~flat[order].isnan()][: self.size]
        taken = torch.zeros(len(flat), dtype=torch.bool)
        taken[order] = True
        parts = taken.split([len(scores[name]) for name in names])
        found = {name: part.nonzero().flatten() for name, part in zip(names, parts, strict=True)}
        return {name: found[name] for name in scores}

    def order(self, count: int, *, seed: int) -> Tensor:
        """The order of the drawn rows."""
        return torch.randperm(count, generator=self._key(seed).fold("order").generator())

    def _key(self, seed: int) -> Key:
        return Key(seed if self.seed is None else self.seed).fold("sample")


def draw_rows(key: Key, capacity: int, count: int) -> Tensor:
    """``count`` of ``capacity`` positions without replacement, ascending: the first of a seeded permutation."""
    return torch.randperm(capacity, generator=key.generator())[:count].sort().values


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines, compressed; the same bytes for the same rows (no time stamp)."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    replace_file(path, buffer.getvalue())


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def moved(weights: Mapping[str, float], counts: Mapping[str, int], size: int) -> list[str]:
    """A line for each source that is short of what its weight asks for."""
    total = sum(weights.values())
    lines = []
    for name, count in counts.items():
        wanted = size * weights[name] / total
        if count < wanted - 1:
            lines.append(f"source {name!r} has {count} rows, its weight {weights[name] / total:.3f} asks for {round(wanted)}")
    return lines


def positions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The positions in each source's token table, in the order of the rows."""
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row["source"], []).append(row["position"])
    return {name: torch.tensor(each) for name, each in found.items()}
