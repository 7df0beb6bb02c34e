"""Both levels at one (θ, x) with every kernel recorded: three graphs, for f and ∇g, for a
product and for the mixed term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hgms.compiled import RecordedProduct, Recording
from hgms_core import Data, Linearization, Loss, Strategy, Tree


class Recorded:
    """:class:`hgms_core.Linearization` of one problem, replayed for one (θ, x) and batch after the
    other.

    It knows the losses and the data, not the problem, so that it dies with it.
    """

    eager: Linearization

    def __init__(
        self,
        g: Loss,
        f: Loss,
        lower: Data,
        upper: Data,
        how: tuple[Strategy, torch.dtype | None],
        *arguments: Any,
    ) -> None:
        def linearize(
            theta: Tree, x: Tree, below: Tensor | None, above: Tensor | None
        ) -> tuple[Tensor, Tree, Tensor, Tensor]:
            lower_batch = lower.batch(below)
            upper_batch = upper.batch(above)
            # Kept, because the two graphs below go through the autograd graph that is built here.
            self.eager = Linearization.of(
                lambda t, x: f(t, x, upper_batch), lambda t, x: g(t, x, lower_batch), theta, x, *how
            )
            return self.eager.upper_loss, self.eager.direct, self.eager.rhs, self.eager.slope

        self._levels = Recording(linearize, *arguments)
        self._levels.run()  # what is recorded next starts from numbers
        like = torch.zeros_like(self.eager.rhs)
        self._product = RecordedProduct(lambda v: self.eager.matvec(v), like)
        self._mixed = Recording(lambda v: self.eager.mixed(v), like)

    def at(self, *arguments: Any) -> Linearization:
        """At (θ, x, lower row numbers, upper row numbers); valid until the next call."""
        upper_loss, direct, rhs, slope = self._levels(*arguments)
        mixed: Callable[[Tensor], Tree] = self._mixed
        return Linearization(
            upper_loss.clone(), direct, rhs, slope, self._product, mixed, self.eager.passes
        )
