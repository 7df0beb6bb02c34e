"""Trees: lower and upper variables are flat dictionaries of named tensors.

A tree has no nesting, so it uses the names of ``nn.Module.named_parameters`` and of safetensors
files. A *stacked* tree contains N candidates: every leaf has the same leading axis N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from hgms_core.errors import ConfigError

Tree = dict[str, Tensor]
"""Tensors by name: θ, x and their gradients. The ``named_parameters`` of a module form a tree."""


def check_tree(what: str, tree: object) -> None:
    """Require a dictionary of floating-point tensors, else raise ConfigError ``wrong-type``."""
    leaves = tree.values() if isinstance(tree, Mapping) else [None]
    if not all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
        raise ConfigError(
            "wrong-type",
            f"{what} must be a dictionary of floating-point tensors",
            place=(what,),
            hint="use hgms.from_losses for tensors, lists and nested dictionaries",
        )


def check_alike(what: str, tree: object, like: Tree, verb: str = "returns") -> None:
    """Require the names and shapes of ``like``, else raise ConfigError ``wrong-result``.

    ``what`` is the place, with dots between its parts.
    """
    shapes = {name: leaf.shape for name, leaf in like.items()}
    leaves = tree if isinstance(tree, Mapping) else {}
    own = {name: leaf.shape if isinstance(leaf, Tensor) else None for name, leaf in leaves.items()}
    if own != shapes or not isinstance(tree, Mapping):
        shown = summary(leaves) if leaves else type(tree).__name__
        raise ConfigError(
            "wrong-result",
            f"{what} {verb} {shown}, but must have the shapes {summary(like)}",
            place=tuple(what.split(".")),
            hint="add a return statement" if tree is None else None,
        )


def summary(tree: Mapping[str, object], most: int = 4) -> str:
    """Return names, shapes and types as text.

    For more than ``most`` leaves, return the number of leaves, their total size and types.

    Examples
    --------
    >>> summary({"w": torch.zeros(3, 4), "b": torch.zeros(3)})
    'w [3, 4], b [3], float32'
    """
    tensors = [leaf for leaf in tree.values() if isinstance(leaf, Tensor)]
    kinds = sorted({str(leaf.dtype).removeprefix("torch.") for leaf in tensors})
    kind = " and ".join(kinds) or "nothing"
    if len(tree) > most:
        return f"{len(tree)} tensors, {sum(leaf.numel() for leaf in tensors):,} numbers, {kind}"
    shapes = [
        f"{name} {list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__}"
        for name, leaf in tree.items()
    ]
    return ", ".join([*shapes, kind])


def detach(tree: Mapping[str, Tensor]) -> Tree:
    """Return the same values without an autograd graph (no copy)."""
    return {name: leaf.detach() for name, leaf in tree.items()}


def clone(tree: Mapping[str, Tensor]) -> Tree:
    """Return a detached copy."""
    return {name: leaf.detach().clone() for name, leaf in tree.items()}


def require_grad(tree: Mapping[str, Tensor]) -> Tree:
    """Return new autograd leaves that share memory with ``tree``."""
    return {name: leaf.detach().requires_grad_() for name, leaf in tree.items()}


def stack(trees: Sequence[Mapping[str, Tensor]]) -> Tree:
    """Return N trees as one stacked tree."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def repeat(tree: Mapping[str, Tensor], n: int) -> Tree:
    """Return n copies of ``tree`` along a new leading axis.

    The rows do not share memory, so each row can be changed separately.
    """
    return {name: leaf.detach().expand(n, *leaf.shape).clone() for name, leaf in tree.items()}


def take(tree: Mapping[str, Tensor], index: int | Tensor) -> Tree:
    """Return row ``index`` of a stacked tree. A tensor index stays on its device, to avoid a wait
    for the GPU.

    The row is copied, so that the memory of the other rows can be freed. A tensor index into a
    single row returns a view.
    """
    if isinstance(index, Tensor):
        if all(leaf.shape[0] == 1 for leaf in tree.values()):
            return {name: leaf.squeeze(0) for name, leaf in tree.items()}
        # a traced index has no value
        if index.device.type != "cpu" or type(index) is not Tensor:
            row = index.reshape(1)
            return {name: leaf.index_select(0, row)[0] for name, leaf in tree.items()}
        # On a CPU this is ten times as fast as index_select, and no device must finish first.
        index = int(index)
    return {name: leaf[index].clone() for name, leaf in tree.items()}


def norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Return the Euclidean norm over all leaves, 0-dimensional.

    Examples
    --------
    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    if not tree:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tree.values()))))
    return total


def slopes(value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of a scalar in each leaf, in one backward pass. It is zero for leaves
    that the scalar does not depend on.

    The backward pass frees the graph. For several losses of one forward pass, use
    ``torch.autograd.grad(loss, leaves, retain_graph=True)`` for all but the last loss.

    Examples
    --------
    >>> x = torch.ones(2, requires_grad=True)
    >>> slopes((3 * x).sum(), [x]), slopes(torch.tensor(1.0), [x])
    ([tensor([3., 3.])], [tensor([0., 0.])])
    """
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(value, list(leaves), materialize_grads=True))


@frozen
class Ravel:
    """The bijection between a tree and one flat vector, for solvers that use vectors.

    ``batch_dims=1`` keeps a leading axis: N stacked candidates become an ``[N, d]`` matrix.

    Examples
    --------
    >>> spec = Ravel.of({"w": torch.ones(2, 3), "b": torch.zeros(3)})
    >>> spec.unravel(spec.ravel({"w": torch.ones(2, 3), "b": torch.zeros(3)}))["b"]
    tensor([0., 0., 0.])
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]
    batch_dims: int

    @classmethod
    def of(cls, tree: Mapping[str, Tensor], batch_dims: int = 0) -> Ravel:
        shapes = tuple(leaf.shape[batch_dims:] for leaf in tree.values())
        return cls(tuple(tree), shapes, tuple(shape.numel() for shape in shapes), batch_dims)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def ravel(self, tree: Mapping[str, Tensor]) -> Tensor:
        return self.ravel_leaves([tree[name] for name in self.names])

    def ravel_leaves(self, leaves: Sequence[Tensor]) -> Tensor:
        if len(leaves) == 1:
            return leaves[0].reshape(*leaves[0].shape[: self.batch_dims], -1)
        return torch.cat(
            [leaf.reshape(*leaf.shape[: self.batch_dims], -1) for leaf in leaves], dim=-1
        )

    def unravel_leaves(self, vector: Tensor) -> list[Tensor]:
        lead = vector.shape[:-1]
        parts = torch.split(vector, list(self.sizes), dim=-1)
        return [part.reshape(lead + shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def unravel(self, vector: Tensor) -> Tree:
        return dict(zip(self.names, self.unravel_leaves(vector), strict=True))
