"""Seeds: every random number comes from a generator derived from (seed, what it is for, step).

The global generators of torch, numpy and random are never touched, so two runs with one seed are
equal, a resumed run equals an uninterrupted one, and two parts of a program cannot disturb each
other's draws.
"""

from __future__ import annotations

import hashlib

import torch
from attrs import field, frozen, validators
from torch import Tensor


@frozen
class Key:
    """A seed with a path. Folding in a label gives an independent stream.

    >>> Key(0).fold("branch", 1) == Key(0).fold("branch", 1)
    True
    """

    seed: int = field(validator=validators.instance_of(int))
    path: tuple[str | int, ...] = ()

    def fold(self, *labels: str | int) -> Key:
        """The key one or more labels further down."""
        return Key(self.seed, self.path + labels)

    def derive(self) -> int:
        """A 63-bit integer seed: the sha256 of the whole path."""
        digest = hashlib.sha256(repr((self.seed, self.path)).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh torch generator for this key."""
        return torch.Generator(device=device).manual_seed(self.derive())

    def indices(
        self, size: int, batch_size: int, steps: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """``[steps, batch_size]`` row numbers below ``size``: consecutive pieces of reshuffled
        epochs.

        Within one call no row comes twice before every row has come once. The numbers are drawn on
        the CPU, so a GPU run sees the batches that a CPU run sees.
        """
        generator = self.generator()
        needed = steps * batch_size
        epochs = [torch.randperm(size, generator=generator) for _ in range(-(-needed // size))]
        numbers = epochs[0] if len(epochs) == 1 else torch.cat(epochs)
        return numbers[:needed].reshape(steps, batch_size).to(device, non_blocking=True)
