"""What would make a program wait for a GPU, found without one: on the meta device, operation by
operation.

A computation can be recorded as a CUDA graph only if nothing in it reads a number off the device or
brings one there. On a CPU both go unseen; tensors of the meta device hold no numbers and are on a
device of their own, so both show (but ``torch.tensor(number, device=…)`` and indices in a list,
which are copied before any operation sees them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "unique_consecutive",
    "_unique2",
}


class Waits(AssertionError):
    """The operation that would have waited."""


class NoWaiting(TorchDispatchMode):
    """Inside, an operation that would wait for the device raises :class:`Waits`.

    Arithmetic takes a number of the CPU as an argument of its kernel, which is fine.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)]
        # Forward mode works out the shape of a product with a zero on the meta device, whatever the
        # device is.
        here = [each for each in tensors if each.device.type == "cpu" and not each._is_zerotensor()]
        there = len(tensors) > len(here)
        if there and name in READS:
            raise Waits(f"{func} reads a number off the device")
        arithmetic = torch.Tag.pointwise in func.tags and all(each.dim() == 0 for each in here)
        if there and here and not arithmetic:
            raise Waits(f"{func} brings a tensor of the CPU to the device")
        found = func(*args, **(kwargs or {}))
        made = [
            each
            for each in tree_leaves(found)
            if isinstance(each, Tensor) and each.device.type != "cpu"
        ]
        if here and made and not there:
            raise Waits(f"{func} copies from the CPU to the device")
        return found
