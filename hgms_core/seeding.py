"""Seeds: every random number comes from a generator derived from (seed, purpose, step).

The global generators of torch, numpy and random are never used, so two runs with one seed are
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
    """A seed with a path. Each path gives an independent stream of random numbers.

    Examples
    --------
    >>> Key(0).fold("branch", 1) == Key(0).fold("branch", 1)
    True
    """

    seed: int = field(validator=validators.instance_of(int))
    path: tuple[str | int, ...] = ()

    def fold(self, *labels: str | int) -> Key:
        """Return the key with these labels appended to its path."""
        return Key(self.seed, self.path + labels)

    def derive(self) -> int:
        """Return a 63-bit integer seed: the sha256 of the seed and the path."""
        digest = hashlib.sha256(repr((self.seed, self.path)).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a new torch generator for this key."""
        return torch.Generator(device=device).manual_seed(self.derive())

    def indices(
        self, size: int, batch_size: int, steps: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return row numbers below ``size``, ``[steps, batch_size]``: parts of reshuffled epochs.

        Within one call, each row occurs once before any row occurs again. The numbers are drawn on
        the CPU, so a run on a GPU has the same batches as a run on a CPU.
        """
        generator = self.generator()
        needed = steps * batch_size
        epochs = [torch.randperm(size, generator=generator) for _ in range(-(-needed // size))]
        numbers = epochs[0] if len(epochs) == 1 else torch.cat(epochs)
        return numbers[:needed].reshape(steps, batch_size).to(device, non_blocking=True)
