"""What a base in parts takes of a rank's memory: its share, and what is gathered of the others'."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hgms_mix.lm.sharding import in_parts, layers_of


def share_bytes(model: nn.Module) -> int:
    """Bytes of the base that this rank keeps."""
    leaves: Any = (*model.parameters(), *model.buffers())
    parts = [leaf.to_local() if in_parts(leaf) else leaf for leaf in leaves]
    return sum(
        {
            part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts
        }.values()
    )


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of what is whole at the peak of a pass: what is outside the layers, and of layers the
    one that is computed and the one that is fetched meanwhile, which comes in one piece and is then
    parted into parameters.
    """
    layers = [_bytes(layer) for layer in layers_of(model)]
    return _bytes(model) - sum(layers) + 3 * max(layers, default=0)


def _bytes(module: nn.Module) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in module.parameters())


def places(model: nn.Module) -> list[Tensor]:
    """The tensors that parts are gathered in, which keep their storages from pass to pass. All
    ranks ask for them together.
    """
    found: list[Tensor] = []
    for unit in _units(model):
        unit.unshard()
        found += [leaf for leaf in unit.parameters() if not in_parts(leaf)]
        unit.reshard()
    return found


def messages(model: nn.Module) -> set[int]:
    """Bytes of what comes in one piece when a layer, or what is outside the layers, is gathered:
    its parameters, padded.
    """
    ranks = dist.get_world_size()
    sizes = set()
    known = set[int]()
    for unit in reversed(_units(model)):  # layers before what is around them
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
