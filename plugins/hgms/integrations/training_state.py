"""State that outer steps use and restore: repeated batches, the model's mode, and generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hgms_core import ConfigError


class Batches:
    """An iterable that restarts at its end, with a count of the batches since its last start."""

    def __init__(self, source: Iterable[Any], called: str) -> None:
        self.source = source
        self.called = called
        self.taken = 0
        self._running: Iterator[Any] | None = None

    def take(self) -> Any:
        if self._running is None:
            self._running = iter(self.source)
        try:
            batch = next(self._running)
        except StopIteration:
            if self.taken == 0:
                raise ConfigError(
                    "no-rows",
                    f"{self.called} returns no batch",
                    place=(self.called,),
                    hint="pass an iterable that can be repeated, such as a DataLoader",
                ) from None
            self._running = None
            self.taken = 0
            return self.take()
        self.taken += 1
        return batch

    def skip(self, count: int) -> None:
        self._running = None
        self.taken = 0
        for _ in range(count):
            self.take()


@contextlib.contextmanager
def preserve_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Set evaluation mode inside the context; restore the mode and the global generators
    afterwards.
    """
    training = [module for module in model.modules() if module.training]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch on the model's device.

    Tensors and objects with a method ``to`` are converted, also inside dictionaries, lists and
    tuples.
    """
    if isinstance(batch, Tensor) or callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: move_batch(item, device) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_batch(item, device) for item in batch)
    return batch
