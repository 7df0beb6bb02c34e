"""Differences between branches: batches, noise at the start, factors on rate and decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from attrs import Attribute, field
from torch import Tensor

from hgms_core import ConfigError, Key, Tree, component
from hgms_core.validators import not_negative


def check_spread(
    instance: object, attribute: Attribute[Any], value: tuple[float, float] | None
) -> None:
    """Require two factors, 0 < low ≤ high."""
    if value is not None and not 0 < value[0] <= value[1]:
        raise ConfigError(
            "wrong-value",
            f"{attribute.name}={value} must be two positive factors (low, high) with low <= high",
            place=(attribute.name,),
        )


@final
@component
class Diversity:
    """The differences between branches. Branch 0 is always free of noise.

    Arguments:
        batches: ``independent`` batches per branch, or ``shared`` batches.
        noise: standard deviation of the Gaussian added to the start, as a multiple of
            ``noise_scale``: 1 (``absolute``), or the root mean square of each leaf (``relative``).
        whole_batch_noise: relative noise that replaces ``noise = 0`` if the branches would be
            equal: no spread, and batches of all rows. In a leaf that is zero, the noise is
            absolute. 0: the branches stay equal in that case.
        lr_spread, decay_spread: (low, high) factors on learning rate and weight decay, log-spaced
            over the branches.
    """

    batches: Literal["independent", "shared"] = "independent"
    noise: float = field(default=0.0, validator=not_negative)
    noise_scale: Literal["absolute", "relative"] = "absolute"
    whole_batch_noise: float = field(default=0.1, validator=not_negative)
    lr_spread: tuple[float, float] | None = field(default=None, validator=check_spread)
    decay_spread: tuple[float, float] | None = field(default=None, validator=check_spread)

    def rates(self, count: int) -> list[float]:
        """Return the factor of each branch on the learning rate."""
        return factors(self.lr_spread, count)

    def decays(self, count: int) -> list[float]:
        """Return the factor of each branch on the weight decay."""
        return factors(self.decay_spread, count)

    def add_noise_(
        self, x: Tree, members: Sequence[int], key: Key, whole: bool, decay: float
    ) -> None:
        """Add Gaussian noise to every row except branch 0.

        Each branch uses a separate key. ``whole`` and ``decay`` are whether a batch contains all
        rows, and the weight decay: they determine whether the branches would be equal.
        """
        spread = self.lr_spread is not None or (self.decay_spread is not None and decay > 0)
        equal = whole and not self.noise and not spread
        noise = self.whole_batch_noise if equal else self.noise
        relative = equal or self.noise_scale == "relative"
        device = next(iter(x.values())).device
        for row, member in enumerate(members):
            if not noise or member == 0:
                continue
            generator = key.fold("noise", member).generator(device)
            for leaf in x.values():
                scale: float | Tensor = 1.0
                if relative:
                    scale = leaf[row].square().mean().sqrt()
                    scale = torch.where(scale > 0, scale, float(equal))
                drawn = torch.randn(
                    leaf[row].shape, generator=generator, dtype=leaf.dtype, device=leaf.device
                )
                leaf[row] += noise * scale * drawn


def factors(spread: tuple[float, float] | None, count: int) -> list[float]:
    """Return one factor per branch, evenly spaced in the logarithm.

    >>> factors((0.25, 4.0), 3)
    [0.25, 1.0, 4.0]
    """
    if spread is None or count == 1:
        return [1.0] * count
    low, high = spread
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]
