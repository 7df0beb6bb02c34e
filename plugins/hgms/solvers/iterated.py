"""Solver iterations until no system is active: eager, or in compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from hgms.compiled import CompiledProduct
from hgms_core import LinearSystem, Tree


def iterated(
    name: str,
    settings: tuple[Hashable, ...],
    system: LinearSystem,
    iteration: Callable[..., Tree],
    state: Tree,
    most: int,
) -> Tree:
    """Apply ``iteration(system, state, *settings)`` until no system is active; return the state.

    The iteration runs at most ``most`` times. It is a function of tensors only, with one product.
    For systems with ``state["active"]`` false, it must not change results. ``state["steps"]``
    counts iterations per system; ``state["r"]`` is a vector. Products are counted the same way.
    """
    if not isinstance(system.matvec, CompiledProduct):
        while state["active"].any():
            state = iteration(system, state, *settings)
        return state
    advance = system.matvec.loop(
        name,
        settings,
        system.ridge,
        lambda inner, values: iteration(inner, values, *settings),
        most,
    )
    while state["active"].any():
        state, needed = advance(state)
        system.products += int(needed)
    return state
