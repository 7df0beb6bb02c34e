"""A problem on a module: its trainable parameters are x, all else in it is constant.

The losses compute with copies of the module that share its frozen parameters and have none of the trained ones: these are lent
to them for each call. So a loss is a function of x, whatever layers there are, and a run leaves the module as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from hgms_core.data import Batch, Data
from hgms_core.errors import ConfigError, check_function
from hgms_core.seeding import Key
from hgms_core.trees import Tree, trainable

Function = Callable[..., Any]
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
MASKED = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
CHUNK, CHUNKS = 256, 32
"""Rows of a batch, and batches at most, that give batch normalisation the statistics it is evaluated with."""


def fresh_parameters(model: nn.Module) -> Callable[[Key], Tree]:
    """``fresh`` of a problem on this module: its parameters drawn anew by each layer's own ``reset_parameters``, by a key.
    Not for a module that was trained before.

    >>> draw = fresh_parameters(nn.Linear(2, 1))
    >>> [bool((draw(Key(0))["weight"] == draw(Key(seed))["weight"]).all()) for seed in (0, 1)]
    [True, False]

    Errors: ConfigError where a layer with trainable parameters has no such method.

    .. versionadded:: 0.5"""
    like, own, layers = start(model), inner(model), {}
    for name, part in own.named_modules():
        if any(leaf.requires_grad for leaf in part.parameters(recurse=False)):
            layers[name] = list(part.parameters(recurse=False))
            what = f"{name or 'the module'} ({type(part).__name__}) cannot be drawn anew: it has no method `reset_parameters`"
            refuse(_reset(part) is None, what, "give `fresh=` a function of a key that returns the parameters by name")

    def fresh(key: Key) -> Tree:
        # On the CPU, so that a GPU starts from what a CPU starts from.
        copies = {leaf: nn.Parameter(leaf.detach().to("cpu", copy=True)) for leaves in layers.values() for leaf in leaves}
        drawn = replica(own, copies)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key.derive())
            for name in reversed(layers):  # the outer after the inner, as where they are built
                _reset(drawn.get_submodule(name))()
        return {name: drawn.get_parameter(place).detach().to(like[name]) for name, place in places(model, own).items()}

    return fresh


def _reset(layer: nn.Module) -> Any:
    return getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)


@contextlib.contextmanager
def without_fused() -> Iterator[None]:
    """Inside, recurrent layers use no kernels that have no second derivative or no forward mode."""
    libraries: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn]
    before = [library.enabled for library in libraries]
    try:
        for library in libraries:
            library.enabled = False
        yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled


def refuse(wrong: bool, what: str, instead: str) -> None:
    if wrong:
        raise ConfigError(f"{what}\n  {instead}")


def replica(model: nn.Module, others: Mapping[Any, nn.Parameter]) -> nn.Module:
    """A copy of the module with ``others`` in place of some parameters, which shares the rest; buffers are copies."""
    leaves = [leaf for part in model.modules() for leaf in (*part._parameters.values(), *vars(part).values())]
    try:
        return copy.deepcopy(model, {id(leaf): others.get(leaf, leaf) for leaf in leaves if isinstance(leaf, Tensor)})
    except Exception as error:  # whatever a layer's own way to be copied raises
        raise ConfigError(
            f"a {type(model).__name__} cannot be copied: {error}\n"
            "  write the losses with torch.func.functional_call: Problem(x0=trainable(model), g=…, f=…)"
        ) from error


def start(model: nn.Module) -> Tree:
    """The trainable parameters as x0, in one precision: float32 where the module is coarser, since a small update would round
    to nothing."""
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    where = sorted({str(leaf.device) for leaf in leaves})
    refuse(any(map(is_lazy, model.parameters())), "the module has layers without a size yet", "call it once on a batch")
    refuse(not leaves, "no parameter of the module requires a gradient", "`requires_grad_(True)` on what is to be trained")
    refuse("meta" in where, "parameters of the module have no values", "`to_empty(device=…)`, and load or draw them")
    refuse(len(where) > 1, f"the trained parameters are on {' and '.join(where)}", "put them on one device")
    precision = functools.reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)
    return {name: leaf.to(precision) for name, leaf in trainable(model).items()}


def inner(model: Any) -> Any:
    """The module inside torch.compile, DataParallel or DistributedDataParallel; refused where its losses cannot be pure."""
    what = f"'model' must be an nn.Module, not a {type(model).__name__}"
    refuse(not isinstance(model, nn.Module), what, "with losses of tensors: Problem(theta0=…, x0=…, g=…, f=…)")
    while isinstance(model, PARALLEL) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, PARALLEL) else model._orig_mod
    scripted = isinstance(model, torch.jit.ScriptModule)
    refuse(scripted, "a scripted module cannot compute with other parameters", "give it as it was before torch.jit")
    for name, part in model.named_modules():
        kind, way = f"{name or 'the module'} ({type(part).__name__})", "`model.gradient_checkpointing_disable()` ahead"
        again = part.training and getattr(part, "gradient_checkpointing", False)
        refuse(again, f"{kind} computes its activations twice, the second time without x", way)
        rate = part.dropout if part.training and isinstance(part, nn.MultiheadAttention | nn.RNNBase) else 0.0
        way = "set its attribute `dropout` to 0.0 (layers nn.Dropout may stay), or take `model.eval()`"
        refuse(rate > 0, f"{kind} has a dropout of its own, {rate}, whose masks cannot be drawn by a key", way)
    return model


def places(model: nn.Module, own: nn.Module) -> dict[str, str]:
    """The names of the trainable parameters, in the module with its wrappers and without."""
    pairs = zip(model.named_parameters(), own.named_parameters(), strict=True)
    return {name: place for (name, leaf), (place, _) in pairs if leaf.requires_grad}


class View(nn.Module):
    """``view.at(x, function, batch)`` is ``function(model, batch)`` of a model that computes with x.

    In a ``training`` view layers are in the mode that they have, but dropout's masks are drawn by the batch; else they are in
    evaluation mode. Batch normalisation in training mode has no state: it takes its statistics from the batch in either view,
    but where ``tracking`` keeps them (:meth:`tracked`)."""

    def __init__(self, model: nn.Module, names: Mapping[str, str], training: bool, tracking: bool = False) -> None:
        super().__init__()
        hollow = {leaf: nn.Parameter(leaf.detach().to("meta")) for leaf in model.parameters() if leaf.requires_grad}
        self.model = replica(model, hollow)  # which fails without x, rather than computing with other weights
        self.lent = {name: (f"model.{place}", model.get_parameter(place).dtype) for name, place in names.items()}
        parts: list[Any] = list(self.model.modules())
        self.recurrent = any(isinstance(part, nn.RNNBase) for part in parts)
        self.norms: list[Any] = [part for part in parts if part.training and getattr(part, "running_mean", None) is not None]
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
        where, before = next(iter(x.values())).device, [leaf._version for _, leaf in self.constants]
        self.batch = {name: leaf.to(where) for name, leaf in batch.items()}
        lent = {place: x[name].to(kind) for name, (place, kind) in self.lent.items()}
        try:
            with without_fused() if self.recurrent else contextlib.nullcontext():
                outcome = functional_call(self, lent, (function,))
        except ValueError as error:
            what = "batch normalisation in training mode has no statistics of a batch of one row"
            refuse("more than 1 value per channel" in str(error), what, "a larger `batch_size`; or `layer.eval()` ahead")
            raise
        finally:
            self.batch, self.masks = {}, 0  # between calls it is always the same, for what compares problems by their values
        for (name, leaf), version in zip(self.constants, before, strict=True):
            what = f"the buffer {name.removeprefix('model.')} changes in every pass, so that the loss is no function of x"
            refuse(leaf._version != version, what, "put its layer into evaluation mode ahead: `layer.eval()`")
        return outcome

    def forward(self, function: Function) -> Any:
        return function(self.model, self.batch)

    @contextlib.contextmanager
    def tracked(self, x: Tree, loss: Function, data: Data) -> Iterator[None]:
        """Inside, batch normalisation has the statistics that it has at x: their mean over batches of rows of ``data``."""
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
        """Dropout with a mask that is a function of the rows of the batch, and of how many masks this pass had before: replays,
        products and stacked candidates see the same."""
        way = "`Data.of` adds it; or take `model.eval()`"
        refuse("index" not in self.batch, "dropout draws its masks by the batch's column `index`, which is not there", way)
        shape = output.shape if isinstance(layer, nn.Dropout) else output.shape[:2] + (1,) * (output.dim() - 2)
        self.masks += 1
        seed = _hash(_hash(self.batch["index"]).sum() + self.masks)
        numbers = torch.arange(math.prod(shape), device=output.device)
        kept = (_hash(_hash(numbers) ^ seed) >= int(layer.p * 2**32)).reshape(shape)
        masked: Tensor = output * kept.to(output.dtype) / ((1 - layer.p) or 1.0)
        return masked


def _hash(numbers: Tensor) -> Tensor:
    """Numbers below 2³² that look drawn (the finaliser of MurmurHash3), by operations that every transform of torch knows."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & 0xFFFFFFFF
    return numbers


def fields(
    model: nn.Module, loss: Function, train: Any, theta0: Any, lower: Function | None, upper: Function | None,
    evaluate: Function | None,
) -> dict[str, Any]:  # fmt: skip
    """What :meth:`Problem.of_module` makes a problem of."""
    own, x0 = inner(model), start(model)
    names, like = places(model, own), next(iter(x0.values()))
    data = Data.of(train, like.dtype)
    kinds = {leaf.dtype for leaf in own.parameters() if leaf.is_floating_point()}
    coarsest = max(kinds, key=lambda kind: torch.finfo(kind).eps)

    def of_rows(model: nn.Module, batch: Batch) -> Tensor:
        losses: Tensor = loss(model, batch)
        wrong = not isinstance(losses, Tensor)
        refuse(wrong, f"'loss' gives a {type(losses).__name__}", "return the losses of the rows, a tensor [B]")
        return losses

    def weighted(theta: Tensor, model: nn.Module, batch: Batch) -> Tensor:
        losses, index = of_rows(model, batch), batch["index"]
        what = f"'loss' gives {tuple(losses.shape)} for {len(index)} rows, and θ holds a weight for the loss of each row"
        way = 'return a loss a row (reduction="none"), or give `lower(theta, model, batch)` and `theta0`'
        refuse(losses.shape != index.shape, what, way)
        mean: Tensor = (theta[index].sigmoid() * losses).mean()
        return mean

    check_function("loss", loss, "model", "batch")
    for name, function in (("lower", lower), ("upper", upper)):
        check_function(name, function or weighted, "theta", "model", "batch")
    check_function("evaluate", evaluate or (lambda theta, model: {}), "theta", "model")
    way = "such as lambda model, batch: cross_entropy(model(batch['0']), batch['1'], reduction='none')"
    refuse(isinstance(loss, nn.Module), f"'loss' must be a function of (model, batch), not a {type(loss).__name__}", way)

    def bound(training: bool, function: Function) -> Function:
        view = View(own, names, training)

        def value(theta: Any, x: Tree, batch: Batch) -> Tensor:
            outcome: Tensor = view.at(x, functools.partial(function, theta), batch)
            return outcome.to(like.dtype) if isinstance(outcome, Tensor) and outcome.is_floating_point() else outcome

        if view.recurrent:
            value.stacked = None  # type: ignore[attr-defined]  # vmap has no rule for these layers
        return value

    parts = {
        "theta0": torch.zeros(data.size, dtype=like.dtype, device=like.device) if theta0 is None else theta0,
        "x0": x0,
        "g": bound(True, lower or weighted),
        "lower_data": data,
        "f": bound(False, upper or (lambda theta, model, batch: of_rows(model, batch).mean())),
        "precision": None if coarsest == like.dtype else coarsest,
    }
    if evaluate is not None:
        view = View(own, names, training=False, tracking=True)

        def measured(theta: Any, x: Tree) -> Any:
            with torch.no_grad(), view.tracked(x, loss, data):
                return view.at(x, lambda model, _: evaluate(theta, model), {})

        parts["evaluate"] = measured
    return parts
