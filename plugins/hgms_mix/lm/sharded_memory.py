"""Memory of a sharded base on one rank: its share, and the parameters gathered from other ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hgms_mix.lm.sharding import is_split, layers_of


def share_bytes(model: nn.Module) -> int:
    """Return the bytes of the base that this rank stores."""
    leaves: Any = (*model.parameters(), *model.buffers())
    parts = [leaf.to_local() if is_split(leaf) else leaf for leaf in leaves]
    return sum(
        {
            part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts
        }.values()
    )


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes of gathered parameters at the peak of a pass.

    This counts the parameters outside the layers, the layer being computed and the layer being
    fetched. A fetched layer arrives as one buffer, which is then split into parameters.
    """
    layers = [_bytes(layer) for layer in layers_of(model)]
    return _bytes(model) - sum(layers) + 3 * max(layers, default=0)


def _bytes(module: nn.Module) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in module.parameters())


def places(model: nn.Module) -> list[Tensor]:
    """Return the tensors that receive gathered parameters.

    Their storages are the same in every pass. All ranks must call this together.
    """
    found: list[Tensor] = []
    for unit in _units(model):
        unit.unshard()
        found += [leaf for leaf in unit.parameters() if not is_split(leaf)]
        unit.reshard()
    return found


def messages(model: nn.Module) -> set[int]:
    """Return the sizes in bytes of the gather buffers.

    Each buffer contains the padded parameters of one layer, or of the modules outside the layers.
    """
    ranks = dist.get_world_size()
    sizes = set()
    known = set[int]()
    for unit in reversed(_units(model)):  # layers before the modules that contain them
        leaves = [leaf for leaf in unit.parameters() if id(leaf) not in known]
        known |= {id(leaf) for leaf in leaves}
        sizes.add(
            sum(
                -(-leaf.shape[0] // ranks) * ranks * (leaf.nbytes // leaf.shape[0])
                for leaf in leaves
            )
        )
    return sizes


def _units(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
