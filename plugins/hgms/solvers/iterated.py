"""A solver's iterations until no system is active: one by one, or in the programs of an operator
that is compiled.
"""

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
    """The state after ``iteration(system, state, *settings)`` as often as it takes, ``most`` times
    at most.

    The iteration is a function of tensors alone that multiplies once; where ``state["active"]`` is
    false it changes nothing that is read. ``state["steps"]`` counts for each system, ``state["r"]``
    is a vector. Products are counted the same way.
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
