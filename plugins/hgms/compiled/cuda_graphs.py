"""Compiled programs as CUDA graphs: all kernels of a program are launched together.

On a GPU the launches of a small step take longer than its kernels. :class:`Programs` therefore
records each compiled program once. Eager code is never recorded: a capture of autograd's work would
have to restore tensors in place that the graph has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import final

import torch
from torch import Tensor

RECORDING = ("cuda",)
"""The types of devices on which programs are recorded."""

Runner = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@final
class Recording:
    """``program(inputs)`` as one CUDA graph for inputs of fixed shapes.

    Inputs are copied into places whose addresses the kernels use. Results are copies, so the next
    call does not change them. On a CPU there is no recording, and each call runs the program.

    Raises
    ------
    RuntimeError
        If the program cannot be recorded: it waits for the device, or copies from the CPU.

    Notes
    -----
    Cost: two more calls of the program, once. Memory: the inputs, and all that the program
    allocates.

    Source: CUDA graphs, as torch.cuda.graph offers them.

    Examples
    --------
    >>> double = Recording(lambda inputs: [2 * inputs[0]], [torch.ones(2)])
    >>> double([torch.tensor([1.0, 3.0])])
    [tensor([2., 6.])]
    """

    def __init__(self, program: Runner, inputs: Sequence[Tensor]) -> None:
        self._places = [leaf.detach().clone() for leaf in inputs]
        self._outputs: Sequence[Tensor] = []
        self._launch: Callable[[], None]
        if self._places[0].is_cuda:
            device = self._places[0].device
            # A failed capture would leave its stream as the current stream.
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
                self._record(program)
        else:
            self._rerun(program)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        copy_(self._places, inputs)
        self._launch()
        copies = [torch.empty_like(output) for output in self._outputs]
        copy_(copies, self._outputs)
        return copies

    def _record(self, program: Runner) -> None:
        # Libraries initialize in the first call, which must not be recorded. It runs in a separate
        # stream, as torch requires.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            program(self._places)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = program(self._places)
        self._launch = graph.replay

    def _rerun(self, program: Runner) -> None:
        def launch() -> None:
            self._outputs = program(self._places)

        self._launch = launch


def copy_(places: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Copy leaves into places; those of one type and stride in one call, because torch copies a
    mixed list one by one.
    """
    alike: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for place, leaf in zip(places, leaves, strict=True):
        into, of = alike.setdefault(
            (place.dtype, leaf.dtype, leaf.device, place.stride() == leaf.stride()), ([], [])
        )
        into.append(place)
        of.append(leaf)
    for into, of in alike.values():
        torch._foreach_copy_(into, of, non_blocking=True)
