"""The growth of a penalty's factor γ over the outer steps."""

from __future__ import annotations

from typing import final

from attrs import field

from hgms_core import component
from hgms_core.validators import not_negative


@final
@component
class Ramp:
    """γ_k = γ_0 + (γ − γ_0) k / K before outer step K, and γ from then on.

    Parameters
    ----------
    start
        γ_0.
    steps
        K, in outer steps; 0: γ from the start.

    Examples
    --------
    >>> ramp = Ramp(start=2.0, steps=10)
    >>> ramp.at(4.0, 5), ramp.at(4.0, 10)
    (3.0, 4.0)
    """

    start: float = field(default=0.0, validator=not_negative)
    steps: int = field(default=1000, validator=not_negative)

    def at(self, gamma: float, step: int) -> float:
        """Return γ_k at k = ``step``, with γ = ``gamma``."""
        if step < self.steps:
            return self.start + (gamma - self.start) * step / self.steps
        return gamma

    def weights(self, gamma: float, step: int, normalise: bool) -> tuple[float, float]:
        """Return (γ_k, c_k); c_k is 1 without ``normalise``."""
        gamma = self.at(gamma, step)
        return gamma, 1 / gamma if normalise and gamma > 1 else 1.0
