"""K-FAC's inverse by curvlinops, for a loss that declares its outputs.

The linear layers become modules, and the criterion becomes a square.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hgms.gauss_newton import composite
from hgms.packages import optional_module
from hgms_core import Batch, ConfigError, Key, Loss, Ravel, Tree

WANTED_BY = 'solver "kfac"'


def kronecker_inverse(
    loss: Loss, theta: Tree, x: Tree, batch: Batch, ridge: float
) -> Callable[[Tensor], Tensor]:
    """Return the function r ↦ (K + (ridge + τ)I)⁻¹ r for flat r.

    curvlinops supports three losses, and no weights of rows. The function therefore passes ½ Σ_i
    ‖S_iᵀ z_i‖² to curvlinops, where S_i S_iᵀ is the criterion's Hessian in row i's outputs. Any
    criterion that is a sum over rows has the Gauss–Newton matrix of this expression.
    """
    curvlinops = _curvlinops()
    outputs, criterion = composite(loss, WANTED_BY)
    x = {name: leaf.detach() for name, leaf in x.items()}
    layers = _layers(outputs, x, batch)
    parameters = {name: getattr(module, part) for name, (module, part) in layers.items()}

    z = outputs(x, batch)

    def level(at: Tree, z: Any) -> Tensor:
        return criterion(theta, at, z, batch)

    roots, decay = _roots(level, x, z)
    model = _Outputs(
        outputs,
        parameters,
        batch,
        list(dict.fromkeys(module for module, _ in layers.values())),
        roots,
    )
    rows = sum(len(root) for root in roots)
    width = roots[0].shape[-1]
    data = [(torch.arange(rows, device=roots[0].device), roots[0].new_zeros(rows, width))]
    with torch.enable_grad():
        factors = curvlinops.KFACLinearOperator(
            model,
            nn.MSELoss(reduction="sum"),
            [parameters[name] for name in x],
            data,
            fisher_type="type-2",
            check_deterministic=False,
            separate_weight_and_bias=False,
            num_data=rows,
            num_per_example_loss_terms=1,
        )
        factors.compute_kronecker_factors()
    damping = max(ridge + decay, torch.finfo(roots[0].dtype).tiny ** 0.5)
    inverse = curvlinops.KFACInverseLinearOperator(factors, damping=damping, use_exact_damping=True)
    spec = Ravel.of(x)

    def apply(r: Tensor) -> Tensor:
        return spec.ravel_leaves(inverse @ spec.unravel_leaves(r))

    return apply


class _Outputs(nn.Module):
    """Compute S_iᵀ z_i/√2 of every row.

    The linear layers are called as modules, so that their hooks receive inputs and gradients.
    """

    def __init__(
        self,
        outputs: Any,
        parameters: Tree,
        batch: Batch,
        layers: list[nn.Module],
        roots: list[Tensor],
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._call = lambda: outputs(parameters, batch)
        self._roots = roots

    def forward(self, index: Tensor) -> Tensor:
        with _AsModules({id(layer.weight): layer for layer in self.layers}):
            leaves = tree_flatten(self._call())[0]
        squared = [
            torch.einsum("nc,ncd->nd", leaf, root)
            for leaf, root in zip(leaves, self._roots, strict=True)
        ]
        return torch.cat(squared) / 2**0.5


class _AsModules(TorchFunctionMode):
    """Inside the context, a linear layer of registered weights becomes a call of its module."""

    def __init__(self, modules: dict[int, Any]) -> None:
        super().__init__()
        self.modules = modules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in (functional.linear, functional.conv2d)
            and len(args) > 1
            and id(args[1]) in self.modules
        ):
            return self.modules[id(args[1])](args[0])
        return func(*args, **(kwargs or {}))


class _Seen(TorchFunctionMode):
    """Inside the context, the arguments of linear layers are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Tensor, Tensor | None, dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.linear, functional.conv2d) and len(args) > 1:
            settings = (
                dict(
                    zip(("bias", "stride", "padding", "dilation", "groups"), args[2:], strict=False)
                )
                | kwargs
            )
            self.calls.append((func, args[1], settings.pop("bias", None), settings))
        return func(*args, **kwargs)


def _layers(outputs: Any, x: Tree, batch: Batch) -> dict[str, tuple[nn.Module, str]]:
    """Return the module of every leaf of x, and ``weight`` or ``bias``."""
    with torch.no_grad(), _Seen() as seen:
        outputs(x, batch)
    names = {id(leaf): name for name, leaf in x.items()}
    layers: dict[str, tuple[nn.Module, str]] = {}
    for func, weight, bias, settings in seen.calls:
        if (
            id(weight) not in names
            or names[id(weight)] in layers
            or (bias is not None and id(bias) not in names)
        ):
            continue
        has_bias = bias is not None
        with torch.device("meta"):
            module: nn.Module
            if func is functional.linear:
                module = nn.Linear(weight.shape[1], weight.shape[0], has_bias)
            else:
                channels = weight.shape[1] * settings.get("groups", 1)
                module = nn.Conv2d(
                    channels, weight.shape[0], tuple(weight.shape[2:]), bias=has_bias, **settings
                )
        for part, leaf in (("weight", weight), ("bias", bias)):
            if leaf is not None:
                setattr(module, part, nn.Parameter(leaf.clone()))
                layers[names[id(leaf)]] = module, part
    if missing := [name for name in x if name not in layers]:
        raise ConfigError(
            "not-supported",
            f"{WANTED_BY} requires weights and biases of linear layers, but {', '.join(missing)} "
            "of x is not one in the problem's outputs",
            place=("solver",),
            hint="call torch.nn.functional.linear or conv2d with leaves of x, or use another "
            "solver",
        )
    return {name: layers[name] for name in x}


def _roots(level: Callable[[Tree, Any], Tensor], x: Tree, z: Any) -> tuple[list[Tensor], float]:
    """Compute the roots S_i and the curvature τ.

    Return (S_i of every row, ``[n, C, C]`` per output leaf; τ, the mean curvature of the criterion
    in x only).
    """
    leaves, shape = tree_flatten(z)
    if len({leaf.shape[1:] for leaf in leaves}) > 1 or leaves[0].dim() != 2:
        raise ConfigError(
            "wrong-shape",
            f"{WANTED_BY} requires one output of the shape [rows, C], but the shapes are "
            f"{[list(leaf.shape) for leaf in leaves]}",
            place=("g", "outputs"),
        )

    def product(tangents: list[Tensor]) -> list[Tensor]:
        slope = torch.func.grad(lambda z: level(x, z))
        return tree_flatten(torch.func.jvp(slope, (z,), (tree_unflatten(tangents, shape),))[1])[0]

    eye = torch.eye(leaves[0].shape[1], dtype=leaves[0].dtype, device=leaves[0].device)
    columns = [product([axis.expand_as(leaf).contiguous() for leaf in leaves]) for axis in eye]
    hessians = [torch.stack(parts, -1) for parts in zip(*columns, strict=True)]
    generator = Key(0).fold("kfac").generator()
    probe = [
        torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
        for leaf in leaves
    ]
    for hessian, v, image in zip(hessians, probe, product(probe), strict=True):
        off = (torch.einsum("ncd,nd->nc", hessian, v) - image).norm()
        if off > 1e-3 * image.norm():
            raise ConfigError(
                "not-supported",
                f"{WANTED_BY} requires a criterion that is a sum over rows, but the criterion of "
                "the problem combines rows",
                place=("g", "criterion"),
            )
    values, vectors = zip(
        *(torch.linalg.eigh((hessian + hessian.mT) / 2) for hessian in hessians), strict=True
    )
    roots = [
        v * value.clamp_min(0).sqrt()[:, None, :] for value, v in zip(values, vectors, strict=True)
    ]
    ones = {name: torch.ones_like(leaf) for name, leaf in x.items()}
    own = torch.func.jvp(
        torch.func.grad(level),
        (x, z),
        (ones, tree_unflatten([torch.zeros_like(leaf) for leaf in leaves], shape)),
    )[1]
    curvature = sum(leaf.sum() for leaf in own.values()) / sum(leaf.numel() for leaf in x.values())
    return roots, max(0.0, float(curvature))


def _curvlinops() -> Any:
    return optional_module("curvlinops", "the solver kfac", "curvlinops", place=("solver",))
