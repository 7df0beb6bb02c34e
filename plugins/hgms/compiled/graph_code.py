"""A graph of tensor operations as Python code, which another process loads without a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

NAMES = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
"""The names that the code of a graph may use."""


@final
class Code:
    """``code(*inputs)`` returns the outputs of a graph that has no constants.

    Pickle stores the text only. torch traces a stored ``GraphModule`` again when it is loaded.

    Examples
    --------
    >>> code = Code.of(symbolic_trace(lambda a: [a + 1]))
    >>> code(torch.ones(2)), code.as_module()(torch.ones(2))
    ([tensor([2., 2.])], [tensor([2., 2.])])
    """

    def __init__(self, text: str) -> None:
        self.text = text
        names: dict[str, Any] = dict(NAMES)
        exec(compile(text, "<graph>", "exec"), names)
        self._forward: Callable[..., Sequence[Tensor]] = names["forward"]

    @classmethod
    def of(cls, module: GraphModule) -> Code:
        """Return the code of a graph. Errors: ValueError for a graph with constants."""
        if has_constants(module):
            raise ValueError("a constant of a graph has no code")
        return cls(module.graph.python_code("self").src.strip())

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        return self._forward(None, *inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Code, (self.text,)

    def as_module(self) -> GraphModule:
        """Return the graph again, for a compiler."""
        module = type("Coded", (torch.nn.Module,), {"forward": self._forward})
        return symbolic_trace(module())


def has_constants(module: GraphModule) -> bool:
    """Return whether a graph contains tensors, or graphs of loops and branches."""
    return any(node.op == "get_attr" for node in module.graph.nodes)
