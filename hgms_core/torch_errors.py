"""Errors of torch about losses, recognised by their texts.

Tests pin each text to torch's own error. torch raises RuntimeError for most failures.
:func:`explain_errors` turns the errors of impure losses into errors with a remedy. The other texts
are in ``hgms.torch_errors``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from hgms_core.errors import ConfigError

Result = TypeVar("Result")


def first_line(error: BaseException) -> str:
    """Return the first line of an error of another library, or its type if it has no text.

    Examples
    --------
    >>> first_line(ValueError("bad\\nmore")), first_line(ValueError())
    ('bad', 'ValueError')
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory was insufficient.

    True for torch's own class, MemoryError, and RuntimeErrors of allocators and CUDA libraries.

    Examples
    --------
    >>> out_of_memory(
    ...     RuntimeError(
    ...         "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    ...     )
    ... )
    True
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Turn torch's errors about a loss that is not a pure function into a ConfigError.

    The codes are ``random-loss``, ``loss-with-state``, ``loss-not-stackable`` and
    ``compiled-loss``.
    """
    try:
        yield
    except RuntimeError as error:
        for sign, cause in _IMPURE:
            if sign in str(error):
                raise cause.at() from error  # a copy: the traceback belongs to this error
        raise


def with_forward_mode(forward: Callable[[], Result], backward: Callable[[], Result]) -> Result:
    """Return ``forward()``, or ``backward()`` where torch has no forward-mode derivative."""
    try:
        with explain_errors():
            return forward()
    except RuntimeError as error:
        if out_of_memory(error):
            raise
    return backward()


def no_second_derivative(error: BaseException) -> ConfigError:
    """Return the error of a loss without the second derivative, for an error of torch."""
    return ConfigError(
        "no-second-derivative",
        f"a loss has no second derivative: {first_line(error)}",
        place=("hypergradient", "strategy"),
        hint='set strategy = "difference", which uses first derivatives only',
    )


_NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
"""The last is of libraries that allocate memory themselves: cuBLAS, cuSOLVER, cuDNN."""

RANDOM = ConfigError(
    "random-loss",
    "the loss draws random numbers, so two calls with equal arguments differ",
    place=("loss",),
    hint="call model.eval(), or draw before the loss and pass the numbers in θ, x or the batch\n"
    "hgms.from_module supports nn.Dropout layers, but not dropout in attention or from "
    "torch.nn.functional",
)
NOT_REPEATABLE = ConfigError(
    "random-loss",
    "two calls of the loss with equal arguments differ",
    place=("loss",),
    hint="remove random numbers (numpy, random) and in-place changes of rows or attributes",
)
_WITH_STATE = ConfigError(
    "loss-with-state",
    "the loss changes tensors in place, such as the running statistics of batch normalisation",
    place=("loss",),
    hint="call model.eval(), set track_running_stats=False, or use hgms.from_module",
)
_COMPILED = ConfigError(
    "compiled-loss",
    "the loss calls torch.compile, and compiled code cannot be differentiated twice in reverse",
    place=("hypergradient", "strategy"),
    hint='set strategy = "jvp" or "difference", or pass the module without torch.compile',
)
NOT_STACKABLE = ConfigError(
    "loss-not-stackable",
    "torch cannot vectorise an operation of the loss, so candidates cannot be evaluated together",
    place=("generator", "mode"),
    hint='set mode = "loop" in the generator and the selector',
)
_INFERENCE = ConfigError(
    "inference-mode",
    "the loss uses a tensor that was created inside torch.inference_mode(), so it has no "
    "derivative",
    place=("loss",),
    hint="use .clone() outside inference_mode, or torch.no_grad() in its place",
)
_IMPURE = (
    ("Inference tensors cannot be saved for backward", _INFERENCE),
    ("Cannot set version_counter for inference tensor", _INFERENCE),
    ("randomness error mode", RANDOM),
    ("would mutate a captured Tensor", _WITH_STATE),
    ("Batch norm got a batched tensor as input while the running_mean", _WITH_STATE),
    ("Batching rule not implemented", NOT_STACKABLE),
    ("compiled with non-empty donated buffers", _COMPILED),
    ("aot_autograd does not currently support double backward", _COMPILED),
)
