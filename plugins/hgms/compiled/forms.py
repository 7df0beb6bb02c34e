"""Run a component's step eagerly or as a compiled function, with numbers that change per step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hgms.compiled.programs import Programs
from hgms_core import Tree

Numbers = Sequence[float] | Tensor
"""Numbers of a step: a sequence of numbers, or a tensor of them."""


def form(
    programs: Programs | None,
    key: tuple[Hashable, ...],
    function: Callable[..., Any],
    once: bool = False,
) -> Callable[..., Any]:
    """Return the compiled form of the function for the key; without ``programs``, the function.

    A function that an outer step calls ``once`` is compiled on a CPU only if its inputs are small.

    Examples
    --------
    >>> form(None, ("double",), lambda x: 2 * x)(torch.ones(2))
    tensor([2., 2.])
    """
    return function if programs is None else programs(key, function, once)


def launch(
    programs: Programs | None,
    key: tuple[Hashable, ...],
    function: Callable[..., Any],
    numbers: Sequence[float],
    x: Tree,
    *arguments: Any,
) -> Any:
    """Call ``function(numbers, x, *arguments)``, eagerly or compiled.

    Without ``programs``, the function runs eagerly with the given numbers. Otherwise it is
    compiled, and the numbers become a tensor with the type and device of ``x``. Different numbers
    then use the same compiled function.

    The key contains everything that the function reads in addition to its arguments.

    Examples
    --------
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
