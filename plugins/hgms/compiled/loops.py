"""Loops of functions of tensors: Python loops, or operations of one graph while they are traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx

from hgms.compiled.small_products import LOOPS
from hgms.compiled.trace import (
    KNOWN,
    apart,
    flatten,
    leaves_of,
    lift_constants,
    split,
    unflatten,
    without_changes_of_new_tensors,
    without_mutations,
)

Values = Any
"""Tensors in dictionaries, lists and tuples."""


def replacements() -> dict[Any, Callable[..., Any]]:
    """Return replacements of the operations in the program of a step.

    They include inductor's, so that the program is not traced again. The replacement of maximum
    pooling reads the module ``lowering``, which torch imports with its first compilation.
    """
    import torch._inductor.lowering  # noqa: F401
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), **KNOWN, **LOOPS}


def is_traced() -> bool:
    """Return whether operations are recorded in a graph, so that tensors have no values."""
    return get_proxy_mode() is not None


def repeat(
    body: Callable[[Values], Values],
    values: Values,
    most: int,
    going: Callable[[Values], Tensor] | None = None,
) -> tuple[Values, int | Tensor]:
    """Compute ``values = body(values)`` while ``going(values)``, at most ``most`` times.

    Return the values and the number of turns. While a program is traced, the loop is one operation
    of its graph, and the number of turns is a tensor. The body must return values of the same
    shapes and types. It may read other tensors. The part of the body that depends on these only is
    computed once, before the loop.

    Notes
    -----
    Source: torch.ops.higher_order.while_loop.

    Examples
    --------
    >>> repeat(lambda x: 2 * x, torch.tensor(1), 10, going=lambda x: x < 5)
    (tensor(8), 3)
    """
    if is_traced():
        return _trace_loop(body, values, most, going)
    turns = 0
    while turns < most and (going is None or going(values)):
        values = body(values)
        turns = turns + 1
    return values, turns


def _trace_loop(
    body: Callable[[Values], Values],
    values: Values,
    most: int,
    going: Callable[[Values], Tensor] | None,
) -> tuple[Values, Tensor]:
    leaves: list[Tensor] = []
    arranged = flatten(values, leaves)
    # Start values that are equal, such as r and p, change separately.
    leaves = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in leaves]
    count = len(leaves)

    def turn_of(*leaves: Tensor) -> list[Tensor]:
        outputs = leaves_of(body(unflatten(arranged, leaves)))
        return [output.detach().contiguous() for output in outputs]

    def condition_of(*leaves: Tensor) -> list[Tensor]:
        assert going is not None
        return [going(unflatten(arranged, leaves)).detach()]

    graph, read = _operations(turn_of, leaves)
    late = range(len(read), len(read) + count)
    parts = split(graph, late, [count])
    known = [*read, *parts.before(*read)]
    fixed = [known[i] for i in parts.kept[0]]
    turn = parts.after[0]
    condition, limits = (None, ()) if going is None else _operations(condition_of, leaves)
    size = len(fixed)

    def continues(turns: Tensor, *inputs: Tensor) -> Tensor:
        below = turns < most
        if condition is None:
            return below
        return below & condition(*inputs[count + size :], *inputs[:count])[0]

    def advance(turns: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = turn(*inputs[count : count + size], *inputs[:count])
        given = {id(leaf) for leaf in inputs}
        fresh: list[Tensor] = []
        for output in outputs:
            fresh.append(output.clone() if id(output) in given else output)
            given.add(id(fresh[-1]))
        return turns + 1, *fresh

    start = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    with torch.no_grad():
        ended = torch.ops.higher_order.while_loop(
            continues, advance, (start, *leaves), tuple(apart([*fixed, *limits]))
        )
    return unflatten(arranged, ended[1:]), ended[0]


def _operations(
    function: Callable[..., list[Tensor]], leaves: Sequence[Tensor]
) -> tuple[GraphModule, tuple[Tensor, ...]]:
    """Return ``graph(*read, *leaves)`` of a function, and the tensors that it reads in addition."""
    table = replacements()
    with disable_proxy_modes_tracing():
        fresh = [torch.empty_like(leaf) for leaf in leaves]
        traced = make_fx(function, table, _allow_non_fake_inputs=True)(*fresh)
    graph, read = lift_constants(without_changes_of_new_tensors(traced), first=True)
    with disable_proxy_modes_tracing():
        return without_mutations(graph, [*map(torch.empty_like, read), *fresh], table), read
