"""Where branches start: the carried state, its moments, and noise."""

from __future__ import annotations

import torch

from hgms_core import ConfigError, Key, State, Tree, repeat


def starts(start: State, count: int, members: list[int]) -> tuple[Tree, Tree]:
    """Own copies of x and of the moments for some of ``count`` branches."""
    carried = next(iter(start["x"].values())).shape[0]
    if carried not in (1, count):
        raise ConfigError(f"the carried state holds {carried} branches, this generator has count = {count}")

    def own(tree: Tree) -> Tree:
        # By views of rows: a list of row numbers would go to the device, and the GPU be waited for.
        if carried == 1:
            return repeat({name: leaf[0] for name, leaf in tree.items()}, len(members))
        return {name: torch.stack([leaf[member] for member in members]) for name, leaf in tree.items()}

    return own(start["x"]), own(start["moments"])


def add_noise_(x: Tree, members: list[int], noise: float, relative: bool, key: Key) -> None:
    """Gaussian noise on every row but that of branch 0, the noise-free parent; drawn by a branch's own key."""
    device = next(iter(x.values())).device
    for row, member in enumerate(members):
        if not noise or member == 0:
            continue
        generator = key.fold("noise", member).generator(device)
        for leaf in x.values():
            scale = leaf[row].square().mean().sqrt() if relative else 1.0
            drawn = torch.randn(leaf[row].shape, generator=generator, dtype=leaf.dtype, device=leaf.device)
            leaf[row] += noise * scale * drawn
