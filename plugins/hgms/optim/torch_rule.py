"""A torch optimiser as the rule of lower steps."""

from __future__ import annotations

from typing import NoReturn

from attrs import frozen

from hgms.optim.rule import not_linear
from hgms.optim.stepper import Build
from hgms.optim.timetable import Timetable
from hgms_core import Tree


@frozen(eq=False)
class TorchRule:
    """A torch optimiser: its constructor ``build``, and its learning rate and decay per step.

    ``clip`` bounds the norm of ∇g (None: no bound). ``done`` is the number of steps already taken.
    """

    build: Build
    times: Timetable
    clip: float | None = None
    done: int = 0

    def check_linear(self) -> NoReturn:
        raise not_linear("torch")

    def no_moments(self, x: Tree) -> Tree:
        return {}
