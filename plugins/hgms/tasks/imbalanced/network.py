"""The classifier: two convolutions with pooling and two linear layers, pure functions of
parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from hgms.config import check_memory
from hgms_core import Key, Tree

KERNEL = 5


@frozen
class Network:
    """conv(5×5, pad 2) → act → pool(2) → conv(5×5, pad 2) → act → pool(2) → linear → act → linear.

    With ``smooth`` the activation is SiLU and pooling takes the mean, so that the output is smooth
    in the parameters; otherwise ReLU and the maximum, which are differentiable almost everywhere.
    """

    shape: tuple[int, int, int]
    channels: tuple[int, int]
    hidden: int
    classes: int
    smooth: bool

    def logits(self, x: Tree, pixels: Tensor) -> Tensor:
        """``[rows, classes]`` from ``[rows, colours, height, width]``."""
        maps = self._block(
            F.conv2d(pixels, x["conv1.weight"], x["conv1.bias"], padding=KERNEL // 2)
        )
        maps = self._block(F.conv2d(maps, x["conv2.weight"], x["conv2.bias"], padding=KERNEL // 2))
        return F.linear(
            self._act(F.linear(maps.flatten(1), x["hidden.weight"], x["hidden.bias"])),
            x["output.weight"],
            x["output.bias"],
        )

    def outputs(self, x: Tree, batch: Tree) -> Tensor:
        """The logits of a batch."""
        return self.logits(x, batch["pixels"])

    def fresh(self, key: Key, device: torch.device, dtype: torch.dtype) -> Tree:
        """Draw the default initialisation of the layers, U(±1/√fan_in) for weights and biases.

        The numbers are the same in every precision.
        """
        generator = key.generator()
        colours, height, width = self.shape
        first, second = self.channels
        sizes = {
            "conv1": (first, colours, KERNEL, KERNEL),
            "conv2": (second, first, KERNEL, KERNEL),
            "hidden": (self.hidden, second * (height // 4) * (width // 4)),
            "output": (self.classes, self.hidden),
        }
        for name, size in sizes.items():
            check_memory(f"channels and hidden: the weights of {name}", *size)
        tree = {}
        for name, size in sizes.items():
            bound = torch.Size(size[1:]).numel() ** -0.5
            for part, shape in (("weight", size), ("bias", size[:1])):
                unit = torch.rand(*shape, generator=generator, dtype=torch.float64)
                tree[f"{name}.{part}"] = ((2 * unit - 1) * bound).to(device, dtype)
        return tree

    def _act(self, values: Tensor) -> Tensor:
        return F.silu(values) if self.smooth else values.relu()

    def _block(self, maps: Tensor) -> Tensor:
        # ReLU after the maximum equals ReLU before it, on a quarter of the numbers.
        return self._act(F.avg_pool2d(maps, 2)) if self.smooth else F.max_pool2d(maps, 2).relu()
