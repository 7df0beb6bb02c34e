"""A trainer for a base in parts with an adapter that every rank holds (``model.shard``).

The gradients of the adapter are averaged over ranks once per optimiser step. (For models that every
rank holds completely, accelerate uses DistributedDataParallel.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def of_replicas(trainer: Any) -> Any:
    """Return the class of such a trainer."""

    class Replicated(trainer):
        def _wrap_model(
            self, model: nn.Module, training: bool = True, dataloader: Any = None
        ) -> nn.Module:
            # accelerate would wrap the model, but torch's wrapper rejects sharded parameters
            return model if isinstance(model, _Replica) else _Replica(model, self.accelerator)

        def training_step(self, *args: Any, **named: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **named)
            if self.accelerator.sync_gradients:
                average([leaf for leaf in self.model.parameters() if leaf.requires_grad])
            return loss

    return Replicated


class _Replica(nn.Module):
    """The model, called in the precision that accelerate selects for it."""

    def __init__(self, model: nn.Module, accelerator: Any) -> None:
        super().__init__()
        self.model = model
        self._precision = accelerator.autocast

    def forward(self, *args: Any, **named: Any) -> Any:
        with self._precision():
            return self.model(*args, **named)


def average(leaves: list[Tensor]) -> None:
    """Replace gradients by their means over ranks, in one message.

    A missing gradient on a rank counts as 0.
    """
    flat = torch.cat(
        [
            (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).reshape(-1).float()
            for leaf in leaves
        ]
    )
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for leaf, mean in zip(leaves, flat.split([leaf.numel() for leaf in leaves]), strict=True):
        leaf.grad = mean.reshape(leaf.shape).to(leaf.dtype)
