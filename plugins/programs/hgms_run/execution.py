"""How the steps of a run are carried out: decided once at its start, in force to its end, recorded in ``env.json``.

What is decided here depends on the machine, and may change results in their last digits. So a run that is resumed takes what it
recorded, and the runs of a comparison take what the first of them decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import cattrs
import torch
from attrs import frozen

from hgms_core import Problem
from hgms_graphs import RouteChoice, calibrated, matrix_route
from hgms_run.config import RunSettings

KEY = "execution"
"""What it is called in ``env.json``."""


@frozen(kw_only=True)
class Execution:
    """``matmul`` is the route of float32 matrix products, why it was taken, and what was measured.

    >>> Execution.recorded({"python": "3.12"}).matmul.route      # of a version that knew one route
    'exact'
    """

    matmul: RouteChoice

    @classmethod
    def decided(cls, settings: RunSettings, problem: Problem) -> Execution:
        """What the settings say, and where they leave it open, what is best for this problem on this machine."""
        if settings.matmul == "auto":
            return cls(matmul=calibrated(problem))
        return cls(matmul=RouteChoice(route=settings.matmul, reason="the settings say so"))

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Execution:
        """From :meth:`as_table`."""
        return cattrs.Converter().structure(table, cls)

    @classmethod
    def recorded(cls, environment: Mapping[str, Any]) -> Execution | None:
        """What a run's ``env.json`` says; None where that is empty or says nothing that can be read."""
        if not environment:
            return None
        if KEY not in environment:
            return cls(matmul=RouteChoice(route="exact", reason="the run was begun by a version that knew no other route"))
        try:
            return cls.of(environment[KEY])
        except (cattrs.BaseValidationError, TypeError, ValueError, KeyError):
            return None

    def as_table(self) -> dict[str, Any]:
        """As JSON has it."""
        return attrs.asdict(self)

    @contextmanager
    def in_force(self, device: torch.device) -> Iterator[None]:
        """Everything inside is carried out so; afterwards all is as before."""
        with matrix_route(self.matmul.route, device):
            yield

    def choices(self) -> dict[str, str]:
        """What was decided otherwise than torch does by itself, by the name of the setting."""
        return {} if self.matmul.route == "exact" else {"matmul": self.matmul.route}

    def remarks(self) -> list[str]:
        """A line for each of these choices, with its reason."""
        return [f"{key}: {choice} ({getattr(self, key).reason})" for key, choice in self.choices().items()]
