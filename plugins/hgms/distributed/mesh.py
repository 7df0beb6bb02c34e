"""The ranks of a run as a mesh: branches × rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import init_device_mesh

from hgms_core import Tree


def shape_of(ranks: int, candidates: int, even: bool = False) -> tuple[int, int]:
    """Return (B, S): the number of rank groups, and the ranks per group, which share rows.

    B is as large as the candidates allow. ``even``: each group has the same number of candidates.

    Examples
    --------
    >>> shape_of(4, 8), shape_of(4, 2), shape_of(4, 1), shape_of(6, 4), shape_of(6, 4, even=True)
    ((4, 1), (2, 2), (1, 4), (3, 2), (2, 3))
    """
    fits = [
        number for number in range(1, ranks + 1) if ranks % number == 0 and number <= candidates
    ]
    groups = max(number for number in fits if not even or candidates % number == 0)
    return groups, ranks // groups


def parts_of(candidates: int, ranks: int) -> list[list[int]]:
    """Assign consecutive candidates to each rank.

    If the numbers do not divide evenly, the first ranks have one candidate more.

    Examples
    --------
    >>> parts_of(5, 3)
    [[0, 1], [2, 3], [4]]
    """
    return [part.tolist() for part in torch.arange(candidates).tensor_split(ranks)]


@frozen(eq=False)
class Mesh:
    """The groups of this rank.

    ``branches`` contains one rank per part of the candidates. ``rows`` contains the ranks that
    propose the same candidates. ``world`` contains all ranks.
    """

    branches: Any
    rows: Any
    world: Any

    @classmethod
    def of(cls, ranks: int, candidates: int, device: torch.device, even: bool = False) -> Mesh:
        mesh = init_device_mesh(
            device.type, shape_of(ranks, candidates, even), mesh_dim_names=("branches", "rows")
        )
        return cls(mesh.get_group("branches"), mesh.get_group("rows"), dist.group.WORLD)

    def members(self, candidates: int) -> list[int]:
        """Return the candidates that this rank proposes.

        They are consecutive, so the parts are in order.
        """
        return parts_of(candidates, dist.get_world_size(self.branches))[
            dist.get_rank(self.branches)
        ]

    def gather(self, tree: Tree, candidates: int) -> Tree:
        """Return the rows of all candidates, collected from all ranks."""
        return {name: self._all(leaf, candidates) for name, leaf in tree.items()}

    def _all(self, own: torch.Tensor, candidates: int) -> torch.Tensor:
        shares = parts_of(candidates, dist.get_world_size(self.branches))
        padded = own.new_zeros((len(shares[0]), *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in shares]
        dist.all_gather(parts, padded, group=self.branches)
        return torch.cat([part[: len(share)] for part, share in zip(parts, shares, strict=True)])
