"""Problems on a module: x is its trainable parameters, the rest is constant."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hgms.adapters.checks import ExplainsRandomness
from hgms.adapters.losses import CommonOptions, check_options, from_losses
from hgms.adapters.tables import read_table
from hgms.adapters.views import Function, View, replica, require, unmasked_rates
from hgms.arguments import arguments_named
from hgms_core import Batch, ConfigError, Key, Problem, Rows, Tree
from hgms_core.arguments import check_function, kind_of
from hgms_core.capabilities import NotStackable
from hgms_core.torch_errors import RANDOM

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def trainable(module: nn.Module) -> Tree:
    """Return copies of the trainable parameters of a module, by name.

    Use them as the lower start x0 for ``torch.func.functional_call``. The copies are detached from
    the module.

    Frozen parameters and buffers are excluded, because ``functional_call`` uses the values in the
    module. A tied weight occurs once, under its first name.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    >>> _ = model[0].requires_grad_(False)
    >>> sorted(trainable(model))
    ['1.bias', '1.weight', '2.bias', '2.weight']
    """
    return {
        name: leaf.detach().clone()
        for name, leaf in module.named_parameters()
        if leaf.requires_grad
    }


def fresh_parameters(model: nn.Module) -> Callable[[Key], Tree]:
    """Return ``fresh`` for a problem on this module.

    ``fresh`` redraws the parameters from a key with the ``reset_parameters`` method of each layer.
    Do not use it for a module that was trained before.

    Raises
    ------
    ConfigError
        If a layer with trainable parameters has no such method.

    Examples
    --------
    >>> draw = fresh_parameters(nn.Linear(2, 1))
    >>> [bool((draw(Key(0))["weight"] == draw(Key(seed))["weight"]).all()) for seed in (0, 1)]
    [True, False]
    """
    like = start(model)
    own = inner(model)
    layers = {}
    for name, part in own.named_modules():
        if any(leaf.requires_grad for leaf in part.parameters(recurse=False)):
            layers[name] = list(part.parameters(recurse=False))
            require(
                _reset(part) is not None,
                "not-supported",
                f"{name or 'the module'} ({type(part).__name__}) cannot be initialised again: it "
                "has no method reset_parameters",
                "pass fresh=, a function of a key that returns the parameters by name",
            )

    def fresh(key: Key) -> Tree:
        # On the CPU, so that runs on a GPU and on a CPU have the same start.
        copies = {
            leaf: nn.Parameter(leaf.detach().to("cpu", copy=True))
            for leaves in layers.values()
            for leaf in leaves
        }
        drawn = replica(own, copies)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key.derive())
            for name in reversed(layers):  # outer layers after inner layers, as in construction
                _reset(drawn.get_submodule(name))()
        return {
            name: drawn.get_parameter(place).detach().to(like[name])
            for name, place in places(model, own).items()
        }

    return fresh


def _reset(layer: nn.Module) -> Any:
    return getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)


def start(model: nn.Module) -> Tree:
    """Return the trainable parameters as x0, in one precision.

    The precision is float32 if the module has a coarser one, because rounding would remove small
    updates.
    """
    leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
    where = sorted({str(leaf.device) for leaf in leaves})
    require(
        not any(map(is_lazy, model.parameters())),
        "wrong-value",
        "the module has lazy layers whose size is not known",
        "call the module once with a batch",
    )
    require(
        bool(leaves),
        "frozen-parameter",
        "no parameter of the module requires a gradient",
        "call requires_grad_(True) on the parameters to train",
    )
    require(
        "meta" not in where,
        "wrong-value",
        "parameters of the module are on the meta device and have no values",
        "call to_empty(device=…), then load or initialise them",
    )
    require(
        len(where) == 1,
        "several-devices",
        f"the trained parameters are on {' and '.join(where)}",
        "move them to one device",
    )
    precision = functools.reduce(
        torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32
    )
    return {name: leaf.to(precision) for name, leaf in trainable(model).items()}


def inner(model: Any) -> Any:
    """Return the module inside torch.compile or a parallel wrapper.

    The wrappers are DataParallel and DistributedDataParallel.

    Raises
    ------
    ConfigError
        If the losses of the module cannot be pure.
    """
    require(
        isinstance(model, nn.Module),
        "wrong-type",
        f"model must be an nn.Module, not {kind_of(model)}",
        "use Problem(theta0=…, x0=…, g=…, f=…) for losses of tensors",
    )
    while isinstance(model, PARALLEL) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, PARALLEL) else model._orig_mod
    scripted = isinstance(model, torch.jit.ScriptModule)
    require(
        not scripted,
        "not-supported",
        "a scripted module cannot be evaluated with other parameters",
        "pass the module without torch.jit",
    )
    for name, part in model.named_modules():
        kind = f"{name or 'the module'} ({type(part).__name__})"
        recomputed = part.training and getattr(part, "gradient_checkpointing", False)
        require(
            not recomputed,
            "not-supported",
            f"{kind} uses gradient checkpointing, which recomputes activations without x",
            "call model.gradient_checkpointing_disable() first",
        )
        require(
            not isinstance(part, EMBEDDINGS) or part.max_norm is None,
            "loss-with-state",
            f"{kind} has max_norm, which changes its parameter in place",
            "remove max_norm, or scale the rows in the loss",
        )
        require(
            not (isinstance(part, EMBEDDINGS) and part.sparse),
            "sparse-gradient",
            f"{kind} has a sparse gradient",
            "use sparse=False",
        )
        rate = (
            part.dropout
            if part.training and isinstance(part, nn.MultiheadAttention | nn.RNNBase)
            else 0.0
        )
        require(
            rate <= 0,
            "random-loss",
            f"{kind} has dropout={rate}, whose masks cannot be reproduced",
            "set its attribute dropout = 0.0, use nn.Dropout layers, or call model.eval()",
        )
    return model


def _randomness_error(model: nn.Module, view: View) -> ConfigError:
    """Return the error for a loss that draws random numbers.

    The error lists the dropout rates that may be the cause. These rates belong to layers that no
    pass has called: the rate is an argument of a kernel.
    """
    config = getattr(model, "config", None)
    rates = [
        name
        for name, value in (vars(config) if hasattr(config, "to_dict") else {}).items()
        if "drop" in name and "att" in name and isinstance(value, float) and value > 0
    ]
    parts = unmasked_rates(view)
    if not parts:
        return RANDOM.at()
    hint = f"set these rates to 0, or call model.eval(): {'; '.join(parts[:5])}"
    if len(parts) > 5:
        hint += f"; and {len(parts) - 5} more"
    if rates:
        settings = ", ".join(f"{name}=0.0" for name in rates)
        hint = f"create the model with {type(config).__name__}({settings})\n{hint}"
    return ConfigError(RANDOM.code, RANDOM.message, place=RANDOM.place, hint=hint)


def places(model: nn.Module, own: nn.Module) -> dict[str, str]:
    """Return the place of each trainable parameter in the module without wrappers.

    The keys are the names of the parameters in the module with its wrappers.
    """
    pairs = zip(model.named_parameters(), own.named_parameters(), strict=True)
    return {name: place for (name, leaf), (place, _) in pairs if leaf.requires_grad}


@frozen(eq=False)
class ModuleParts:
    """A module as functions of its trainable parameters x.

    ``module`` is the module without wrappers of torch, and ``x0`` its parameters by name. Each view
    evaluates functions of the module at any x (:class:`View`): ``fitting`` keeps the modes of the
    layers, ``judging`` has all layers in evaluation mode.

    Examples
    --------
    >>> parts = ModuleParts.of(nn.Linear(2, 1))
    >>> sorted(parts.x0), parts.has_dropout
    (['bias', 'weight'], False)
    """

    module: nn.Module
    x0: Tree
    places: Mapping[str, str]
    fitting: View
    judging: View

    @classmethod
    def of(cls, model: nn.Module) -> ModuleParts:
        """Return the parts.

        Raises
        ------
        ConfigError
            As in :func:`from_module`.
        """
        own = inner(model)
        x0 = start(model)
        names = places(model, own)
        return cls(
            own, x0, names, View(own, names, training=True), View(own, names, training=False)
        )

    @property
    def has_dropout(self) -> bool:
        """Whether a layer draws masks in training mode."""
        layers = self.module.modules()
        kind = nn.modules.dropout._DropoutNd
        return any(isinstance(part, kind) and part.training and part.p > 0 for part in layers)

    def randomness_error(self) -> ConfigError:
        """Return the error for a loss that draws random numbers, with the rates of dropout."""
        return _randomness_error(self.module, self.fitting)

    @property
    def has_batch_statistics(self) -> bool:
        """Whether a layer uses the statistics of the batch."""
        return bool(self.fitting.norms)

    def with_parameters(self, x: Tree) -> nn.Module:
        """Return a copy of the module with the parameters x."""
        copied = copy.deepcopy(self.module)
        with torch.no_grad():
            for name, place in self.places.items():
                copied.get_parameter(place).copy_(x[name])
        return copied


@arguments_named
def from_module(
    model: nn.Module,
    loss: Callable[..., Tensor],
    train: Any,
    validation: Any,
    *,
    theta0: Any = None,
    lower: Callable[..., Tensor] | None = None,
    upper: Callable[..., Tensor] | None = None,
    evaluate: Callable[..., Mapping[str, float]] | None = None,
    **options: Unpack[CommonOptions],
) -> Problem:
    """Build a problem with a lower level that trains a module.

    By default θ weights the rows of the training data::

        g(θ, x; batch) = mean_i σ(θ_i) ℓ_i(x),      f(θ, x; batch) = mean_j ℓ_j(x),      θ0 = 0

    x are the trainable parameters of the module by name; a tied parameter occurs once. Load the
    result with ``model.load_state_dict(result.x, strict=False)``. Frozen parameters and buffers are
    constants. A run does not change the module: in the functions below ``model`` is a copy that
    computes with x.

    Parameters
    ----------
    model
        A module. If it is wrapped in ``torch.compile``, DataParallel or DistributedDataParallel,
        the inner module is used, because a run compiles whole steps itself. Layers keep their mode:
        dropout and batch normalisation in training mode act in g.
    loss
        ``loss(model, batch)``, one loss per row, ``[B]``; with ``lower`` also a scalar.
    train, validation
        Tables as for :func:`hgms.as_data`; ``validation`` may be one table per role.
    theta0
        Start of θ in any nesting; by default zeros, one per training row.
    lower, upper
        ``lower(theta, model, batch)`` replaces g, ``upper(theta, model, batch)`` replaces f.
    evaluate
        ``evaluate(theta, model)`` returns metrics by name, for reports only. The module is in
        evaluation mode.
    options
        ``fresh(key)`` returns another initial x, for example from :func:`fresh_parameters`; by
        default all candidates start at the parameters of the module. ``project``, ``references``,
        ``counters``, ``start``: further fields of :class:`hgms_core.Problem`.

    Raises
    ------
    ConfigError
        If the module has no trainable parameters, or has parameters on several devices. If the loss
        would not be a function of x. If the losses are not per row and ``lower`` is not given.

    Notes
    -----
    Batch normalisation in training mode uses the statistics of the batch, in g and f. ``evaluate``
    uses the statistics of the training rows at x. In evaluation mode its running statistics are
    constants.

    Dropout (``nn.Dropout`` and its variants) acts in g only. Its masks depend on the row numbers of
    the batch, so a batch always has the same masks. Parameters in bfloat16 are float32 in x and
    rounded for each pass.

    Examples
    --------
    >>> model, rows = torch.nn.Linear(1, 1), {"a": torch.ones(4, 1)}
    >>> problem = from_module(model, lambda m, batch: m(batch["a"]).square().squeeze(1), rows, rows)
    >>> sorted(problem.x0), problem.restore(problem.theta0, problem.x0)[0]
    (['bias', 'weight'], tensor([0., 0., 0., 0.]))
    """
    check_options(from_module, options, CommonOptions)
    return from_losses(
        **fields(model, loss, train, theta0, lower, upper, evaluate),
        upper_data=validation,
        **options,
    )


def fields(
    model: nn.Module,
    loss: Function,
    train: Any,
    theta0: Any,
    lower: Function | None,
    upper: Function | None,
    evaluate: Function | None,
) -> dict[str, Any]:
    """Return the arguments of :func:`from_losses` that follow from the module."""
    own = inner(model)
    x0 = start(model)
    names = places(model, own)
    like = next(iter(x0.values()))
    data = read_table(train, "train", like)
    few = lower is None and theta0 is not None and np.shape(theta0) != (data.size,)
    require(
        not few,
        "wrong-size",
        f"theta0 must have {data.size} entries, one weight per training row",
        f"create theta0 with {data.size} entries, or pass lower, too",
        place=("theta0",),
    )
    kinds = {leaf.dtype for leaf in own.parameters() if leaf.is_floating_point()}
    coarsest = max(kinds, key=lambda kind: torch.finfo(kind).eps)

    def of_rows(model: nn.Module, batch: Batch) -> Tensor:
        losses: Tensor = loss(model, batch)
        require(
            isinstance(losses, Tensor),
            "wrong-result",
            f"loss returns {kind_of(losses)}, but must return a tensor",
            "return one loss per row, a tensor [B]",
            place=("loss",),
        )
        return losses

    def weighted_mean(theta: Tensor, model: nn.Module, batch: Batch) -> Tensor:
        losses = of_rows(model, batch)
        index = batch["index"]
        require(
            losses.shape == index.shape,
            "wrong-shape",
            f"loss returns shape {list(losses.shape)} for {len(index)} rows, but must return one "
            "loss per row",
            "call .squeeze(1)"
            if losses.shape == (len(index), 1)
            else 'use reduction="none", or pass lower(theta, model, batch) and theta0',
            place=("loss",),
        )
        return (theta[index].sigmoid() * losses).mean()

    check_function("loss", loss, "model", "batch")
    for name, function in (("lower", lower), ("upper", upper)):
        check_function(name, function or weighted_mean, "theta", "model", "batch")
    check_function("evaluate", evaluate or (lambda theta, model: {}), "theta", "model")
    require(
        not isinstance(loss, nn.Module),
        "wrong-type",
        f"loss must be a function of (model, batch), not a {type(loss).__name__}",
        "use lambda model, batch: cross_entropy(model(batch['0']), batch['1'], reduction='none')",
        place=("loss",),
    )

    def bind(training: bool, function: Function) -> Function:
        view = View(own, names, training, size=data.size)

        def value(theta: Any, x: Tree, batch: Batch) -> Tensor:
            outcome: Tensor = view.at(x, functools.partial(function, theta), batch)
            return (
                outcome.to(like.dtype)
                if isinstance(outcome, Tensor) and outcome.is_floating_point()
                else outcome
            )

        value.randomness_error = functools.partial(_randomness_error, own, view)  # type: ignore[attr-defined]
        recurrent = {NotStackable} if view.recurrent else set()  # vmap has no rule for these layers
        value.capabilities = frozenset({ExplainsRandomness, *recurrent})  # type: ignore[attr-defined]
        return value

    plain = bind(True, lambda theta, model, batch: of_rows(model, batch))
    parts = {
        "theta0": torch.zeros(data.size, dtype=like.dtype, device=like.device)
        if theta0 is None
        else theta0,
        "x0": x0,
        "g": bind(True, lower or weighted_mean),
        "extensions": (Rows(leaf="theta", losses=functools.partial(plain, None)),) * (not lower),
        "lower_data": data,
        "f": bind(False, upper or (lambda theta, model, batch: of_rows(model, batch).mean())),
        "precision": None if coarsest == like.dtype else coarsest,
    }
    if evaluate is not None:
        view = View(own, names, training=False, tracking=True)
        # the other views and the module also use these
        shared = {name: leaf for name, leaf in own.named_parameters() if not leaf.requires_grad}

        def measure(theta: Any, x: Tree) -> Any:
            before = [leaf._version for leaf in shared.values()]
            with torch.no_grad(), view.track_statistics(x, loss, data):
                metrics = view.at(x, lambda model, _: evaluate(theta, model), {})
            for (name, leaf), version in zip(shared.items(), before, strict=True):
                require(
                    leaf._version == version,
                    "changed-in-place",
                    f"evaluate changes the frozen parameter {name} in place, which the losses use",
                    "work on a copy: parameter.detach().clone()",
                    place=("evaluate",),
                )
            return metrics

        parts["evaluate"] = measure
    return parts
