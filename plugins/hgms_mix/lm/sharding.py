"""A frozen base whose parameters are parted among the ranks of a run (FSDP2), loaded by one of
them.

Each decoder layer is gathered when a pass comes to it and given back after it, forward and again
backward; what is outside the layers (embeddings, last norm, head) is gathered for all of a pass.
The base has no gradients: adapters are leaves of their own, on every rank, and only slopes of
activations go through it.

What this takes of torch is loaded when it is needed: it takes half as long as all of torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from hgms_core import ConfigError

SHARD = ("task", "model", "shard")
"""The place of the option that splits the base."""
FIRST_ORDER = ConfigError(
    "no-second-derivative",
    "the base is split across ranks (shard = true), so a loss has only first derivatives, by "
    "backward passes",
    place=SHARD,
    hint="use a hypergradient of first order: through-step with derivative = 'difference' or "
    "'per-source', carried, one-step with derivative = 'difference', or implicit with strategy = "
    "'difference' (also with operator = 'ggn')\n"
    "with a tilt, set mode = 'loop' in the generator\n"
    "or remove shard",
)
"""Raised as a copy: a traceback belongs to one error."""


def ensure_ranks() -> None:
    """Errors: ConfigError where this process is the only rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        raise ConfigError(
            "not-supported",
            "shard = true requires at least 2 ranks, but the run has 1",
            place=SHARD,
            hint="set run.ranks to the number of processes or GPUs, or remove shard",
        )


class Sharded(nn.Module):
    """A base in parts: ``model`` keeps its modules, and ``sharded(function, *args)`` is
    ``function(*args)`` while they may be called. All ranks call it equally often, each on its own
    arguments.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return function(*args, **named)


def sharded(
    make: Callable[[], nn.Module], outline: Callable[[], nn.Module], device: torch.device
) -> Sharded:
    """The model that ``make`` gives, in parts on ``device``, an equal one for each rank.

    Rank 0 alone makes it, on its CPU; the others have its ``outline``, the same model on the meta
    device. Parts of the model are handed over one after the other, a layer at a time, so that
    beside its own share a rank holds one whole layer (at the end embeddings and head), and rank 0
    what is not handed over yet, on the CPU.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    first = dist.get_rank() == 0
    model = make() if first else outline()
    _alike(model, device)
    known: dict[int, Tensor] = {}
    for unit in (*layers_of(model), model):
        for table, name, leaf in _leaves(unit):
            if id(leaf) not in known:
                known[id(leaf)] = _handed(leaf, device)
            table[name] = known[id(leaf)]
        known.clear()  # what is tied is tied within a unit
        if unit is not model:
            fully_shard(unit, mesh=mesh)
            unit.register_forward_hook(_given_back)
    root: Any = fully_shard(Sharded(model), mesh=mesh)
    root.eval().requires_grad_(False)
    return root


def called_through(root: nn.Module) -> nn.Module:
    """The model in ``root``, which may then be called itself: its ``forward`` is that of ``root``,
    so that parts are gathered for it. What is added to its layers afterwards (peft's adapters) is
    on every rank, whole.
    """
    model: Any = root.model
    forward = model.forward

    @functools.wraps(forward)
    def gathered(*args: Any, **named: Any) -> Any:
        return root(forward, *args, **named)

    model.forward = gathered
    return model


def is_in_parts(model: nn.Module) -> bool:
    """Whether some of its parameters are parted among ranks."""
    return any(in_parts(leaf) for leaf in model.parameters())


def _given_back(layer: Any, _args: Any, _output: Any) -> None:
    """A layer of a pass that is computed again for the backward pass is given back as in the first
    one (torch keeps it, so that all layers would be whole at once), unless its own backward pass
    has begun.
    """
    from torch.distributed.fsdp import fully_shard

    backward = torch._C._current_graph_task_id() != -1
    state = fully_shard.state(layer)  # type: ignore[attr-defined]
    if backward and state._fsdp_param_group._training_state.name != "PRE_BACKWARD":
        layer.reshard()


def in_parts(leaf: Tensor) -> bool:
    return hasattr(leaf, "to_local")  # a DTensor


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, which are gathered one by one. None are known of a model that is not
    written as transformers' are: all of it is then gathered at once."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _leaves(unit: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Parameters and buffers that are not in parts yet, with the tables of modules that they
    stand in.
    """
    for module in unit.modules():
        for table in (module._parameters, module._buffers):
            for name, leaf in table.items():
                if leaf is not None and not in_parts(leaf):
                    yield table, name, leaf


def _handed(leaf: Tensor, device: torch.device) -> Tensor:
    """Rank 0's values, on every rank's device."""
    own = (
        leaf.detach().to(device) if dist.get_rank() == 0 else torch.empty_like(leaf, device=device)
    )
    own = own.contiguous()
    dist.broadcast(own, src=0)
    return nn.Parameter(own, requires_grad=False) if isinstance(leaf, nn.Parameter) else own


def _alike(model: nn.Module, device: torch.device) -> None:
    """The outlines get the types that rank 0's parameters have. Errors: ConfigError where they
    have other parameters.
    """
    own = {f"{kind}.{name}": leaf for kind, leaves in _named(model) for name, leaf in leaves}
    table = {
        name: [list(leaf.shape), str(leaf.dtype).removeprefix("torch.")]
        for name, leaf in own.items()
    }
    theirs = json.loads(_said(json.dumps(table), device))
    if {name: shape for name, (shape, _) in theirs.items()} != {
        name: shape for name, (shape, _) in table.items()
    }:
        raise ConfigError(
            "other-settings",
            f"the parameters of the model differ between rank {dist.get_rank()} and rank 0",
            place=("task", "model"),
            hint="use the same files and the same versions of torch and transformers on all ranks",
        )
    if dist.get_rank() == 0:
        return
    for name, (_, dtype) in theirs.items():
        if own[name].dtype != getattr(torch, dtype):
            own[name].data = own[name].data.to(getattr(torch, dtype))


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield "parameter", model.named_parameters()
    yield "buffer", model.named_buffers()


def _said(text: str, device: torch.device) -> str:
    """What rank 0 says, to all."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(own)], device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        own = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(own, src=0)
    return bytes(own.cpu().numpy()).decode()


class _Once(Function):
    """A value with a first derivative alone: the parts that its graph was built with are given
    back after each pass.
    """

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, slope: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise FIRST_ORDER.at()
        return slope


def once(value: Tensor) -> Tensor:
    """The value. Errors: ConfigError where it is differentiated for a second derivative."""
    result: Tensor = _Once.apply(value)
    return result
