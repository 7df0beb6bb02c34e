"""Where tensors are, and how often something is drawn or waited for."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hgms.testing import counted, no_waiting
from hgms.testing.kit import difference, snapshot, tensors


class Draws:
    """Which generators were asked for since :meth:`clear`."""

    def __init__(self) -> None:
        self.on_device = 0

    def clear(self) -> None:
        self.on_device = 0


def elsewhere(value: Any, device: torch.device) -> dict[str, str]:
    """The tensors of a nested value that are not on the device, each with where it is."""
    found = tensors(snapshot(value))
    return {
        name: str(leaf.device) for name, leaf in found.items() if leaf.device.type != device.type
    }


def brought(value: Any) -> Any:
    """The same nested value on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {name: brought(each) for name, each in value.items()}
    return [brought(each) for each in value] if isinstance(value, list | tuple) else value


def compare(here: Any, there: Any, device: torch.device) -> None:
    """All tensors of ``there`` are on the device, and hold what those of ``here`` do."""
    astray = elsewhere(there, device)
    assert not astray, f"not on {device}: {astray}"
    differs = difference(here, brought(there), rtol=1e-6)
    assert not differs, f"on {device}, {differs} (the CPU's)"


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """Inside, whatever waits for the device is an error (there is nothing to wait for on a CPU)."""
    with no_waiting() if device.type == "simulated" else _sync_mode("error", device):
        yield


@contextmanager
def waits(device: torch.device) -> Iterator[Counter[str]]:
    """How often the host waits for the device inside, by ``file:line`` of the code that waits."""
    found: Counter[str] = Counter()
    if device.type == "simulated":
        with counted() as counts:
            yield found
        found.update(counts.places)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _sync_mode("warn", device):
            yield found
    for each in caught:
        if "synchroniz" in str(each.message):
            found[f"{Path(each.filename).name}:{each.lineno}"] += 1


@contextmanager
def _sync_mode(mode: str, device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
