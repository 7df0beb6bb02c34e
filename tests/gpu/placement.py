"""Where tensors are, and how often something is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
