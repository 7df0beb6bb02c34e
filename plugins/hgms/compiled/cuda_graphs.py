"""Work of fixed shapes, recorded once and launched at once: CUDA graphs.

On a GPU a small step costs what it costs to launch its kernels one by one. A :class:`Recording`
keeps the kernels of the first call and then launches all of them together. Recording is asked for
(``cuda_graphs = true`` of a component), because not every loss can be recorded: nothing in it may
wait for the device, choose by a number on it, or copy from the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from hgms_core import ConfigError, Problem, Tree
from hgms_core.torch_errors import first_line

RECORDING = ("cuda",)
"""The types of devices on which anything is recorded."""

Argument = Tensor | Tree | None
Value = TypeVar("Value")


@final
class Recording:
    """``function(*arguments)`` with the kernels that it launched for the first arguments, as often
    as one likes.

    Arguments are tensors, trees or None, of the same shapes each time; they are copied into
    ``arguments``, whose addresses the kernels know, so the function may also change those in place.
    What it returns is overwritten by the next call: copy what is to be kept. Anything else the
    function reads (a batch it holds on to) has to stay where it is. Python inside it runs while
    recording only. Autograd graphs that it builds and keeps stay valid: their saved tensors are
    renewed by every call, and a further :class:`Recording` may go backward through them.

    On a CPU, which has nothing to gain, the function is simply run again.

    Errors: :class:`ConfigError` where the function cannot be recorded.

    Cost: two more calls of the function, once. Memory: a copy of the arguments, and everything the
        function allocates.

    >>> double = Recording(lambda x: 2 * x, torch.ones(2))
    >>> double(torch.tensor([1.0, 3.0]))
    tensor([2., 6.])

    Source: CUDA graphs, as torch.cuda.graph offers them.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Argument) -> None:
        self.arguments: list[Any] = [_copied(argument) for argument in arguments]
        self._places = _leaves(self.arguments)
        before = [place.clone() for place in self._places]
        self._launch: Callable[[], None]
        if self._places[0].is_cuda:
            device = self._places[0].device
            # A capture that fails would leave its own stream the current one.
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
                self._record(function)
        else:
            self._rerun(function)
        copy_(self._places, before)  # the call that warmed up may have changed them

    def __call__(self, *arguments: Argument) -> Any:
        self.load(*arguments)
        return self.run()

    def load(self, *arguments: Argument) -> None:
        """Copies arguments into their places."""
        copy_(self._places, _leaves(arguments))

    def run(self) -> Any:
        """The function of what is in ``arguments`` now."""
        self._launch()
        return self.outputs

    def _record(self, function: Callable[..., Any]) -> None:
        try:
            # Libraries set themselves up in the first call, which must not be recorded; in a stream
            # of its own, as torch asks.
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                function(*self.arguments)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.outputs = function(*self.arguments)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                "not-supported",
                f"the losses cannot be recorded as a CUDA graph: {first_line(error)}",
                place=("cuda_graphs",),
                hint="remove cuda_graphs, or change the losses: they must not wait for the device, "
                "branch on a number on the device, or copy from the CPU",
            ) from error
        self._launch = graph.replay

    def _rerun(self, function: Callable[..., Any]) -> None:
        def launch() -> None:
            self.outputs = function(*self.arguments)

        launch()
        self._launch = launch


@final
class RecordedProduct:
    """A recorded operator v ↦ Av that a solver may call, or record its own iteration with
    (:meth:`recording`).

    >>> product = RecordedProduct(lambda v: 2 * v, torch.zeros(2))
    >>> product(torch.tensor([1.0, 3.0]))
    tensor([2., 6.])
    >>> product.recording("shifted", lambda v: product(v) + v, torch.zeros(2))(torch.ones(2))
    tensor([3., 3.])
    """

    def __init__(self, matvec: Callable[[Tensor], Tensor], like: Tensor) -> None:
        self._matvec, self._product = matvec, Recording(matvec, like)
        self._recordings: dict[Hashable, Recording] = {}

    def __call__(self, v: Tensor) -> Tensor:
        if v.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._matvec(v)  # what records cannot launch a recording
        product: Tensor = self._product(v)
        return product.clone()

    def recording(
        self, key: Hashable, function: Callable[..., Any], *arguments: Argument
    ) -> Recording:
        """A :class:`Recording` of a function that calls this operator, made once for a key, which
        must hold all that the function reads beside its arguments."""
        if key not in self._recordings:
            self._recordings[key] = Recording(function, *arguments)
        return self._recordings[key]


def recorded(
    problem: Problem, key: Hashable, device: torch.device, record: Callable[[], Value]
) -> Value | None:
    """What ``record()`` returns for this problem, called at the second request and kept as long as
    the problem (:attr:`Problem.kept`).

    None at the first request, since what is done once is not worth recording, and wherever nothing
    is recorded (on a CPU). What is recorded is kept by the problem, and must hold no reference to
    it: the memory of such a circle stays taken for long.
    """
    if device.type not in RECORDING:
        return None
    key = ("recorded", key)
    if key not in problem.kept:
        problem.kept[key] = None
        return None
    if problem.kept[key] is None:
        problem.kept[key] = record()
    value: Value = problem.kept[key]
    return value


def copy_(places: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Copies leaves into places, those of one type and stride at once, since torch copies a
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


def _copied(argument: Argument) -> Argument:
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return argument.detach().clone()
    return {name: leaf.detach().clone() for name, leaf in argument.items()}


def _leaves(arguments: Any) -> list[Tensor]:
    leaves: list[Tensor] = []
    for argument in arguments:
        leaves += (
            []
            if argument is None
            else [argument]
            if isinstance(argument, Tensor)
            else argument.values()
        )
    return leaves
