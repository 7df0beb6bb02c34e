"""A frozen base, with parameters split across the ranks of a run (FSDP2).

Rank 0 loads the base. Each decoder layer is gathered when a pass reaches it and freed after it, in
the forward and in the backward pass. Parameters outside the layers (embeddings, last norm, head)
are gathered for the whole pass.

The base has no gradients. Adapters are separate leaves on every rank, and only gradients of
activations pass through the base.

The required parts of torch are imported on first use: they take half as long as all of torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from hgms.arguments import require
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
    """Require at least 2 ranks.

    Raises
    ------
    ConfigError
        If this process is the only rank.
    """
    require(
        dist.is_available() and dist.is_initialized() and dist.get_world_size() != 1,
        "not-supported",
        "shard = true requires at least 2 ranks, but the run has 1",
        place=SHARD,
        hint="set run.ranks to the number of processes or GPUs, or remove shard",
    )


class ModelCall(nn.Module):
    """A model as a submodule: ``call(function, *args)`` computes ``function(*args)``.

    Hooks and replaced parameters of the module then apply to any function of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return function(*args, **named)


class Sharded(ModelCall):
    """A sharded base: its modules may be called while ``sharded(function, *args)`` runs.

    All ranks must call it equally often, each with its arguments.
    """


def shard_model(
    make: Callable[[], nn.Module], outline: Callable[[], nn.Module], device: torch.device
) -> Sharded:
    """Split the model from ``make`` across the ranks: one equal part per rank, on ``device``.

    Only rank 0 creates the model, on its CPU. The other ranks use its ``outline``, the same model
    on the meta device.

    The model is distributed one layer at a time. A rank therefore stores its share and one whole
    layer (at the end embeddings and head). Rank 0 also stores the remaining layers, on the CPU.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = make() if dist.get_rank() == 0 else outline()
    _match_types(model, device)
    known: dict[int, Tensor] = {}
    for unit in (*layers_of(model), model):
        for table, name, leaf in _leaves(unit):
            if id(leaf) not in known:
                known[id(leaf)] = _broadcast(leaf, device)
            table[name] = known[id(leaf)]
        known.clear()  # parameters are tied only within a unit
        if unit is not model:
            fully_shard(unit, mesh=mesh)
            unit.register_forward_hook(_free_recomputed_layer)
    root: Any = fully_shard(Sharded(model), mesh=mesh)
    root.eval().requires_grad_(False)
    return root


def _free_recomputed_layer(layer: Any, _args: Any, _output: Any) -> None:
    """Free a layer after its forward pass is recomputed for the backward pass.

    Torch does not free such a layer, so the memory would contain all layers. A layer is not freed
    after its backward pass has started.
    """
    from torch.distributed.fsdp import fully_shard

    backward = torch._C._current_graph_task_id() != -1
    state = fully_shard.state(layer)  # type: ignore[attr-defined]
    if backward and state._fsdp_param_group._training_state.name != "PRE_BACKWARD":
        layer.reshard()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers, which are gathered one by one.

    The list is empty for a model without transformers' structure. Such a model is gathered as a
    whole.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _leaves(unit: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield parameters and buffers that are not split yet.

    Each comes with the table of its module and its name in that table.
    """
    from torch.distributed.tensor import DTensor

    for module in unit.modules():
        for table in (module._parameters, module._buffers):
            for name, leaf in table.items():
                if leaf is not None and not isinstance(leaf, DTensor):
                    yield table, name, leaf


def _broadcast(leaf: Tensor, device: torch.device) -> Tensor:
    """Copy rank 0's values to every rank's device."""
    own = (
        leaf.detach().to(device) if dist.get_rank() == 0 else torch.empty_like(leaf, device=device)
    )
    own = own.contiguous()
    dist.broadcast(own, src=0)
    return nn.Parameter(own, requires_grad=False) if isinstance(leaf, nn.Parameter) else own


def _match_types(model: nn.Module, device: torch.device) -> None:
    """Give the outlines the types of rank 0's parameters.

    Raises
    ------
    ConfigError
        If an outline has other parameters.
    """
    own = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    table = {name: (leaf.shape, leaf.dtype) for name, leaf in own.items()}
    received = [table]
    dist.broadcast_object_list(received, src=0, device=device)
    theirs = received[0]
    require(
        {name: shape for name, (shape, _) in theirs.items()}
        == {name: shape for name, (shape, _) in table.items()},
        "other-settings",
        f"the parameters of the model differ between rank {dist.get_rank()} and rank 0",
        place=("task", "model"),
        hint="use the same files and the same versions of torch and transformers on all ranks",
    )
    for name, (_, dtype) in theirs.items():
        own[name].data = own[name].data.to(dtype)


class FirstDerivative(Function):
    """A value with a first derivative only; a second derivative raises ConfigError.

    The parameters used to build its graph are freed after each pass.
    """

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, slope: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise FIRST_ORDER.at()
        return slope
