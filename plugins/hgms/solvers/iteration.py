"""Solver iterations until no system is active: eager, or in compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from hgms.compiled import CompiledProduct, is_traced, repeat
from hgms_core import LinearSystem, Tree

READ_EVERY = 8
"""Iterations between two reads of the unfinished systems on an accelerator."""


def waits(system: LinearSystem) -> bool:
    """Return whether the host waits for a device when it reads a number of the system."""
    return system.rhs.device.type != "cpu"


def is_unfinished(system: LinearSystem, active: Tensor, turn: int) -> bool:
    """Return whether iteration ``turn``, from 0, is necessary.

    On an accelerator the host reads ``active`` only every :data:`READ_EVERY` iterations, because it
    waits for the device each time. Iterations in between do not change finished systems.
    """
    if waits(system) and (turn == 0 or turn % READ_EVERY):
        return True
    return bool(active.any())


def eager(system: LinearSystem, iteration: Callable[[Tree], Tree], state: Tree, most: int) -> Tree:
    """Apply ``iteration(state)`` until no system is active, at most ``most`` times."""
    if is_traced():
        before = system.products
        state, turns = repeat(iteration, state, most, going=lambda state: state["active"].any())
        system.products = before + turns
        return state
    turn = 0
    while turn < most and is_unfinished(system, state["active"], turn):
        if waits(system):
            system.products = system.products + state["active"].any().long() - 1
        state = iteration(state)
        turn = turn + 1
    return state


def iterate(
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
        return eager(system, lambda state: iteration(system, state, *settings), state, most)
    advance = system.matvec.loop(
        name,
        settings,
        system.ridge,
        lambda inner, values: iteration(inner, values, *settings),
        most,
    )
    at_once = system.matvec.at_once(most)
    turn = 0
    while turn < most and is_unfinished(system, state["active"], turn):
        state, needed = advance(state)
        system.products += needed if waits(system) else int(needed)
        turn = turn + at_once
    return state
