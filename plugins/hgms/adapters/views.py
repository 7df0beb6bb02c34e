"""A module as a function of its trainable parameters.

A view is a copy of the module without values for these parameters. Each call supplies the values.
All copies share the frozen parameters of the module.

A loss is therefore a function of x for any type of layer, and a run does not change the module.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hgms import arguments
from hgms.adapters.recurrent import without_fused
from hgms.torch_errors import is_batch_of_one
from hgms_core import Batch, ConfigError, Data, Key, Tree
from hgms_core.torch_errors import first_line

LOG = logging.getLogger("hgms")

Function = Callable[..., Any]
MASKED = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_MASKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Dropout layers that were called in a pass."""
_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Views that have logged a batch of all rows.

The record is not part of a view, because the values of a view identify a problem.
"""
require = functools.partial(arguments.require, place=("model",))
"""Raise ConfigError unless a condition of the module is true."""
CHUNK = 256
CHUNKS = 32
"""Rows per batch, and maximum number of batches, for batch normalisation.

An evaluation uses the statistics of these batches.
"""


def replica(model: nn.Module, others: Mapping[Any, nn.Parameter]) -> nn.Module:
    """Return a copy of the module with ``others`` in place of some parameters.

    The copy shares the other parameters with the module. Buffers are copied.
    """
    leaves = [
        leaf
        for part in model.modules()
        for leaf in (*part._parameters.values(), *vars(part).values())
    ]
    try:
        return copy.deepcopy(
            model, {id(leaf): others.get(leaf, leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        )
    except Exception as error:  # a layer's copy method may raise any exception
        raise ConfigError(
            "not-supported",
            f"the module {type(model).__name__} cannot be copied: {first_line(error)}",
            place=("model",),
            hint="use torch.func.functional_call in the losses: Problem(x0=trainable(model), g=…, "
            "f=…)",
        ) from error


class View(nn.Module):
    """Evaluate functions of a module at given parameters x.

    ``view.at(x, function, batch)`` returns ``function(model, batch)`` for a model that computes
    with x.

    In a ``training`` view, layers keep their mode, but the batch determines the masks of dropout.
    In other views, layers are in evaluation mode.

    Batch normalisation in training mode has no state in either view: it uses the statistics of the
    batch. The exception is a view with ``tracking`` (:meth:`track_statistics`).

    All batches of all ``size`` rows have the same masks. The view logs this once.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[str, str],
        training: bool,
        tracking: bool = False,
        size: int | None = None,
    ) -> None:
        super().__init__()
        hollow = {
            leaf: nn.Parameter(leaf.detach().to("meta"))
            for leaf in model.parameters()
            if leaf.requires_grad
        }
        # on the meta device: without x, a call fails instead of using other weights
        self.model = replica(model, hollow)
        self.lent = {
            name: (f"model.{place}", model.get_parameter(place).dtype)
            for name, place in names.items()
        }
        parts: list[Any] = list(self.model.modules())
        self.size = size
        self.recurrent = any(isinstance(part, nn.RNNBase | nn.RNNCellBase) for part in parts)
        self.norms: list[Any] = [
            part
            for part in parts
            if part.training and getattr(part, "running_mean", None) is not None
        ]
        for part in parts:
            if "_orig_mod" in part._modules:
                part.forward = part._orig_mod.forward
            if training and isinstance(part, MASKED) and part.training and part.p > 0:
                part.eval().register_forward_hook(self._mask)
        if not training:
            self.model.eval()
        for norm in self.norms:
            if tracking:
                norm.reset_running_stats()
                norm.momentum = None  # the mean over batches
            else:
                norm.train().running_mean = norm.running_var = norm.num_batches_tracked = None
        self.constants = [] if tracking else list(self.model.named_buffers())
        self.batch: Batch = {}
        self.masks = 0

    def at(self, x: Tree, function: Function, batch: Batch) -> Any:
        where = next(iter(x.values())).device
        before = [leaf._version for _, leaf in self.constants]
        self.batch = {name: leaf.to(where) for name, leaf in batch.items()}
        lent = {place: x[name].to(kind) for name, (place, kind) in self.lent.items()}
        try:
            with without_fused() if self.recurrent else contextlib.nullcontext():
                outcome = functional_call(self, lent, (function,))
        except ValueError as error:
            require(
                not is_batch_of_one(error),
                "too-few-rows",
                "batch normalisation in training mode requires batches of at least 2 rows",
                "increase batch_size, or call layer.eval() first",
            )
            raise
        finally:
            # problems are compared by their values, so a view is equal between calls
            self.batch = {}
            self.masks = 0
        for (name, leaf), version in zip(self.constants, before, strict=True):
            require(
                leaf._version == version,
                "loss-with-state",
                f"the buffer {name.removeprefix('model.')} changes in each pass, so the loss is "
                "not a function of x",
                "call eval() of its layer first",
            )
        return outcome

    def forward(self, function: Function) -> Any:
        return function(self.model, self.batch)

    @contextlib.contextmanager
    def track_statistics(self, x: Tree, loss: Function, data: Data) -> Iterator[None]:
        """Set the statistics of batch normalisation at x inside the context.

        The statistics are the mean over batches of rows of ``data``.
        """
        self.model.eval()  # the function of a previous call may have changed modes
        numbers = data.draw(Key(0).fold("statistics"), CHUNK, min(CHUNKS, -(-data.size // CHUNK)))
        for norm in self.norms:
            norm.train()
        for index in ([None] if numbers is None else numbers) if self.norms else ():
            self.at(x, loss, data.batch(index))
        for norm in self.norms:
            norm.eval()
        yield
        for norm in self.norms:
            norm.reset_running_stats()

    def _mask(self, layer: Any, inputs: Any, output: Tensor) -> Tensor:
        """Apply dropout with a reproducible mask.

        The mask is a function of the rows of the batch and of the number of earlier masks in this
        pass. Replays, products and stacked candidates therefore use the same mask.
        """
        require(
            "index" in self.batch,
            "missing-column",
            "dropout requires the column 'index' of the batch to draw its masks",
            "create the rows by Data.of, which adds it, or call model.eval()",
            place=("batch", "index"),
        )
        shape = (
            output.shape
            if isinstance(layer, nn.Dropout)
            else output.shape[:2] + (1,) * (output.dim() - 2)
        )
        self.masks += 1
        _MASKED.add(layer)
        if self.batch["index"].numel() == self.size and self not in _WARNED:
            _WARNED.add(self)
            LOG.warning(
                "all passes over all %d rows have the same dropout masks, so that dropout is no "
                "noise there: set batch_size below %d in the generator and in the hypergradient, "
                "or call model.eval() first",
                self.size,
                self.size,
            )
        seed = _hash(
            _hash(self.batch["index"].to(torch.int32) + 1).sum(dtype=torch.int32) + self.masks
        )
        numbers = torch.arange(math.prod(shape), dtype=torch.int32, device=output.device)
        # the threshold fits into int32
        kept = _hash(numbers * -0x61C8864F ^ seed) > int(layer.p * 2**31) - 1
        return torch.where(kept.reshape(shape), output / ((1 - layer.p) or 1.0), 0.0)


def unmasked_rates(view: View) -> list[str]:
    """Return the dropout rates above 0 that no mask has replaced so far.

    Each rate comes with its place. These are rates of kernels and functions.
    """
    found = []
    for name, part in view.model.named_modules():
        is_layer = isinstance(part, nn.modules.dropout._DropoutNd)
        rates = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, float) and value > 0 and ("drop" in key or is_layer)
        }
        hooked = view._mask in part._forward_hooks.values()
        if rates and part not in _MASKED and (part.training or hooked):
            text = ", ".join(f"{key}={value:g}" for key, value in rates.items())
            found.append(f"{name or 'the module'} ({type(part).__name__}): {text}")
    return found


def _hash(numbers: Tensor) -> Tensor:
    """Hash int32 numbers to non-negative int32 numbers that look random.

    The hash is the finaliser of MurmurHash3, except that its shifts keep the sign. All transforms
    of torch support its operations. Products keep their last 32 bits.
    """
    numbers = (numbers ^ (numbers >> 16)) * -0x7A143595
    numbers = (numbers ^ (numbers >> 13)) * -0x3D4D51CB
    return numbers ^ (numbers >> 16)
