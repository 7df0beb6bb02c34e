"""A plugin file that is right in every way, for test_wrong_classes.py to spoil: a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs
import torch

from hgms_core import Data, Key, Problem, Tree, hookimpl


@attrs.frozen(kw_only=True)
class Mine:
    """A line through noisy points, with a penalty on its slope.

    >>> Mine().rows
    12

    Source: ridge regression.
    """

    name: ClassVar[str] = "mine"
    version: ClassVar[str] = "1"
    metrics: ClassVar[Mapping[str, bool]] = {"test_error": False}
    rows: int = 12

    def table(self, key: Key, dtype: torch.dtype) -> Tree:
        draw = key.generator()
        a = torch.randn(self.rows, 3, generator=draw, dtype=torch.float64)
        y = a.sum(1) + 0.1 * torch.randn(self.rows, generator=draw, dtype=torch.float64)
        return {"a": a.to(dtype), "y": y.to(dtype)}

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        key = Key(seed).fold("mine")
        test = self.table(key.fold("test"), dtype)

        def error(x: Tree, batch: Tree) -> torch.Tensor:
            return (batch["a"] @ x["x"] - batch["y"]).square().mean()

        return Problem(
            theta0={"penalty": torch.zeros(1, dtype=dtype)},
            x0={"x": torch.zeros(3, dtype=dtype)},
            g=lambda theta, x, batch: (
                error(x, batch) + theta["penalty"].exp().sum() * x["x"].square().sum()
            ),
            f=lambda theta, x, batch: error(x, batch),
            lower_data=Data.of(self.table(key.fold("train"), dtype)),
            upper_data={
                role: Data.of(self.table(key.fold(role), dtype))
                for role in ("differentiate", "select", "stop")
            },
            evaluate=lambda theta, x: {"test_error": float(error(x, test))},
        )


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [Mine]
