"""Selection of the layers of the lower model that move (LISA): the blocks of `minimax`."""

from __future__ import annotations

import re

import torch

from hgms_core import Key, Tree


def layers(x: Tree) -> dict[str, str]:
    """Return each leaf's layer, its name up to the first number: ``h.0`` of h.0.attn.weight.

    It is empty for a leaf without a number. If no leaf has a number, the layer is the module:
    ``hidden`` of hidden.weight, or the name itself if there is no module.

    Examples
    --------
    >>> layers({"wte.weight": torch.ones(1), "h.0.attn.weight": torch.ones(1)})
    {'wte.weight': '', 'h.0.attn.weight': 'h.0'}
    """
    matches = {name: re.match(r"(?:.*?\.)??\d+(?=\.)", name) for name in x}
    if any(matches.values()):
        return {name: match.group() if match else "" for name, match in matches.items()}
    return {name: name.rpartition(".")[0] or name for name in x}


def moving(x: Tree, blocks: int | None, key: Key) -> list[str]:
    """Return the leaves that move: all, or the leaves of ``blocks`` layers, drawn by ``key``.

    Leaves without a layer always move.
    """
    if blocks is None:
        return list(x)
    of = layers(x)
    known = [layer for layer in dict.fromkeys(of.values()) if layer]
    chosen = {
        known[i] for i in torch.randperm(len(known), generator=key.generator())[:blocks].tolist()
    }
    return [name for name, layer in of.items() if not layer or layer in chosen]
