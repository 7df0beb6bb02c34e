"""Causes of torch's errors, recognised by their texts.

Tests pin each text to torch's own error. torch raises RuntimeError for most failures, and each
predicate recognises one cause. No other module of ``hgms`` and ``hgms_mix`` reads these texts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hgms_core.torch_errors import no_second_derivative


def once_differentiable(error: BaseException) -> bool:
    """Return whether torch has a first derivative here, but no second and no forward-mode one.

    The causes are fused kernels, and activations that are recomputed.
    """
    text = str(error)
    missing = "derivative for " in text and "not implemented" in text
    again = type(error).__name__ == "CheckpointError" and text.startswith("torch.utils.checkpoint")
    signs = (
        "differentiate twice a function",
        "don't yet support saved tensor hooks",  # recomputed activations, under torch.func
        # a kernel of another library, under torch.func
        "must override the setup_context staticmethod",
        "no autograd formula was registered",  # the backward kernel of another library
        "Trying to use forward AD with",
        "must implement the jvp function for custom autograd.Function",
    )
    return isinstance(error, RuntimeError) and (
        missing or again or any(sign in text for sign in signs)
    )


def is_inside_functorch(error: BaseException) -> bool:
    """Return whether an in-place or eager operation met a tensor of vmap, grad or jvp."""
    signs = (
        "being vmapped",
        "being transformed by a functorch transform",
        # an operation on several tensors, such as torch.cat, some of them of a vmap that is over
        "maybe_level.has_value() INTERNAL ASSERT FAILED",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def is_freed_graph(error: BaseException) -> bool:
    """Return whether a backward pass ran through a graph that an earlier pass has freed."""
    sign = "backward through the graph a second time"
    return isinstance(error, RuntimeError) and sign in str(error)


def is_overflow(error: BaseException) -> bool:
    """Return whether a Python number was too large for the dtype of a tensor."""
    signs = ("cannot be converted to type", "overflow")
    return isinstance(error, RuntimeError) and all(sign in str(error) for sign in signs)


def is_batch_of_one(error: BaseException) -> bool:
    """Return whether batch normalisation in training mode received a batch of one row."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective operation failed because another rank is gone."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def is_failed_write(error: BaseException) -> bool:
    """Return whether ``torch.save`` could not write its file."""
    signs = ("PytorchStreamWriter", "inline_container")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


@contextlib.contextmanager
def differences_named() -> Iterator[None]:
    """Turn an error about a derivative that torch lacks into a ConfigError.

    It names the strategy without second derivatives.
    """
    try:
        yield
    except RuntimeError as error:
        if once_differentiable(error):
            raise no_second_derivative(error) from error
        raise
