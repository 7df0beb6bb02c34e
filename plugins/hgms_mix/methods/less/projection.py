"""Random projections of per-row gradients in blocks: the whole matrix is never in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from attrs import field, frozen
from torch import Tensor

from hgms_core import Key, component
from hgms_core.validators import positive

BLOCK = 2**23
"""Coordinates of a block times dimensions: a block has its own random numbers."""

REPEATS = 4
"""Non-zero entries in each row of the projection."""


@final
@component
class GradientProjection:
    """Table ``projection`` of LESS: the random projection of gradients.

    Parameters
    ----------
    dims
        dimensions.
    seed
        For another projection of the same run.

    Examples
    --------
    >>> GradientProjection().dims
    8192
    """

    dims: int = field(default=8192, validator=positive)
    seed: int = 0

    def projector(self, key: Key) -> Projector:
        """Return the projection with random numbers from ``key``."""
        return Projector(key=key.fold("projection", self.seed), dims=self.dims)


@frozen(kw_only=True)
class Projector:
    """x ↦ x R for a random R, ``[d, D]``, with E‖xR‖² = ‖x‖². The inner product of two vectors is
    preserved up to a standard deviation of at most √(2/D) times their lengths (Johnson and
    Lindenstrauss).

    Each row of R has four entries ±½ (Kane and Nelson 2014: 4d additions per vector). ``dims`` is
    D. With D ≥ d, the vectors do not change. R depends only on ``key``, D, the shapes and the kind
    of device.

    Examples
    --------
    >>> rows = torch.randn(2, 3000, generator=Key(0).generator(), dtype=torch.float64)
    >>> short = Projector(key=Key(1), dims=2000).apply([rows])
    >>> short.shape, bool(((short.norm(dim=1) / rows.norm(dim=1)) - 1).abs().max() < 0.1)
    (torch.Size([2, 2000]), True)
    """

    key: Key
    dims: int

    def apply(self, leaves: Sequence[Tensor]) -> Tensor:
        """Return the projections ``[B, D]`` of B vectors given in pieces ``[B, ...]``."""
        flat = [leaf.flatten(1) for leaf in leaves]
        total = sum(piece.shape[1] for piece in flat)
        if total <= self.dims:
            return torch.cat(flat, dim=1)
        out = flat[0].new_zeros(flat[0].shape[0], self.dims)
        height = max(1, BLOCK // self.dims)
        for number, piece in enumerate(flat):
            for block, part in enumerate(torch.split(piece, height, dim=1)):
                _scatter(out, part, self.key.fold("block", number, block).generator(part.device))
        return out / REPEATS**0.5


def _scatter(out: Tensor, part: Tensor, generator: torch.Generator) -> None:
    """Add each coordinate, with a random sign, to ``REPEATS`` random positions."""
    shape = (REPEATS, part.shape[1])
    device = part.device
    places = torch.randint(out.shape[1], shape, generator=generator, device=device)
    signs = torch.randint(2, shape, generator=generator, device=device, dtype=torch.int8) * 2 - 1
    for place, sign in zip(places, signs, strict=True):
        out.index_add_(1, place, part * sign)
