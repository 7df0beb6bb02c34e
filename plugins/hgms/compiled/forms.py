"""A step of a component, with numbers that change from step to step: as it is written, or as a
program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hgms.compiled.programs import Programs
from hgms_core import Tree

Numbers = Sequence[float] | Tensor
"""What a step takes its numbers as: those of one step, or a tensor of them."""


def form(
    programs: Programs | None, key: tuple[Hashable, ...], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function as it is where ``programs`` is None, else the program of it that they keep for
    the key.

    >>> form(None, ("double",), lambda x: 2 * x)(torch.ones(2))
    tensor([2., 2.])
    """
    return function if programs is None else programs(key, function)


def launch(
    programs: Programs | None,
    key: tuple[Hashable, ...],
    function: Callable[..., Any],
    numbers: Sequence[float],
    x: Tree,
    *arguments: Any,
) -> Any:
    """``function(numbers, x, *arguments)``: where ``programs`` is None as it is written, of numbers
    as they are; else as a program, of a tensor of them with the type and the place of ``x``, so
    that other numbers are no other program.

    The key holds all that the function reads beside its arguments.

    >>> launch(
    ...     None, ("scaled",), lambda numbers, x: numbers[0] * x["x"], (2.0,), {"x": torch.ones(2)}
    ... )
    tensor([2., 2.])
    """
    if programs is None:
        return function(numbers, x, *arguments)
    like = next(iter(x.values()))
    values = torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)
    return form(programs, key, function)(values, x, *arguments)
