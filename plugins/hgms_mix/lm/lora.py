"""Low-rank adapters (``[task.adapter]``), stacked: the updates of N candidates share one pass over
the frozen base.

A forward hook on every target module adds s·B A h to its output. If A and B have a leading axis N,
the rows of h are N blocks, and block i belongs to candidate i. The two small products are then
batched products. The base is read once for all candidates, and ordinary autograd differentiates the
whole computation. Activation checkpointing works, which ``torch.func.vmap`` does not allow.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import attrs
import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from hgms.arguments import require
from hgms_core import ConfigError, Key, Tree, component
from hgms_core.validators import at_least, less_than, positive
from hgms_mix.lm.hub import transformers_quietly
from hgms_mix.lm.sharding import layers_of

TARGETS = ("task", "adapter", "targets")
"""The place of the targets in the configuration."""
ALL_LINEAR = "all-linear"
"""The target for all linear modules except the output embedding, as in peft."""
KERNELS = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}
"""Each attention kernel, and the function that returns whether it is enabled."""


@final
@component
class Lora:
    """Low-rank adapters: a frozen W becomes W + (alpha/rank)·BA, with A ``[rank, in]`` and B
    ``[out, rank]`` trained.

    A starts uniform (Kaiming, as in peft), B at zero. ``dropout`` acts on the input of A, only in
    training. Its masks are a function of the batch, so that a branch can be computed again.
    ``targets`` are module names or their last parts, each of at least one linear module (None:
    peft's choice for the architecture; ``["all-linear"]``: all but the output embedding).

    Notes
    -----
    Source: Hu et al., *LoRA: low-rank adaptation of large language models*, ICLR 2022.
    """

    rank: int = field(default=16, validator=positive)
    alpha: float = field(default=32.0, validator=positive)
    dropout: float = field(default=0.0, validator=[at_least(0), less_than(1)])
    targets: tuple[str, ...] | None = None

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    @property
    def everywhere(self) -> bool:
        """Whether all linear modules get an adapter: ``targets = ["all-linear"]``."""
        return self.targets == (ALL_LINEAR,)

    def modules(self, model: Any) -> list[str]:
        """Return the names of the modules that get an adapter.

        Raises
        ------
        ConfigError
            For a target without a linear module, for the output embedding, and for a model that has
            no default targets.
        """
        linear = [name for name, module in model.named_modules() if width_of(module) is not None]
        head = model.get_output_embeddings()
        inner = [name for name in linear if head is None or model.get_submodule(name) is not head]
        if self.everywhere:
            return inner
        known = ", ".join(sorted({name.rpartition(".")[2] for name in inner}))
        targets = _usual_targets(model, known) if self.targets is None else self.targets
        found = {
            target: [name for name in linear if name == target or name.endswith("." + target)]
            for target in targets
        }
        # peft's defaults name the modules of all variants of an architecture.
        needed = targets if self.targets is not None or not any(found.values()) else ()
        if missing := [target for target in needed if not found[target]]:
            raise ConfigError(
                "unknown-module",
                f"{type(model).__name__} has no linear module {' or '.join(map(repr, missing))}",
                place=TARGETS,
                hint=f"available: {known}, {ALL_LINEAR}",
            )
        chosen = {name for names in found.values() for name in names}
        require(
            chosen <= set(inner),
            "not-supported",
            f"targets={targets} include the output embedding, which cannot have an adapter",
            place=TARGETS,
            hint="remove it from task.adapter.targets",
        )
        return [name for name in linear if name in chosen]

    def peft_config(self, model: nn.Module) -> Any:
        """Return the same adapters as a ``peft.LoraConfig``, for fine-tuning and for saving."""
        transformers_quietly()
        import peft

        modules = self.modules(model)
        convolution = any(type(model.get_submodule(name)).__name__ == "Conv1D" for name in modules)
        return peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=modules,
            fan_in_fan_out=convolution,
            task_type="CAUSAL_LM",
        )


def _usual_targets(model: Any, known: str) -> tuple[str, ...]:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as usual

    kind = model.config.model_type
    require(
        kind in usual,
        "missing-option",
        f"adapters for a model of type {kind!r} require targets: it has no default",
        place=TARGETS,
        hint=f'set task.adapter.targets = ["{ALL_LINEAR}"], or some of: {known}',
    )
    return tuple(usual[kind])


def interpolate(states: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """Compute Σ_s λ_s x_s of lower states.

    For adapters, the result is the adapter that adds Σ_s λ_s B_s A_s to its weight. Its rank is the
    sum of their ranks.

    Examples
    --------
    >>> two = [
    ...     {"q.lora_A.weight": torch.ones(1, 2), "q.lora_B.weight": sign * torch.ones(3, 1)}
    ...     for sign in (1, -1)
    ... ]
    >>> mean = interpolate(two, [0.75, 0.25])
    >>> mean["q.lora_B.weight"] @ mean["q.lora_A.weight"]
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    pairs = list(zip(states, weights, strict=True))
    mean = {}
    for name in states[0]:
        if name.endswith(".lora_A.weight"):
            mean[name] = torch.cat([x[name] for x in states], dim=-2)
        elif name.endswith(".lora_B.weight"):
            mean[name] = torch.cat([weight * x[name] for x, weight in pairs], dim=-1)
        else:
            mean[name] = torch.stack([weight * x[name] for x, weight in pairs]).sum(0)
    return mean


def width_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a linear module, including GPT-2's Conv1D and quantised modules."""
    if type(module).__name__ == "Conv1D":
        return int(module.nx), int(module.nf)  # type: ignore[arg-type]
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    return None


@attrs.frozen(eq=False)
class Active:
    """The adapters of one forward pass.

    They are the values, and the seeds of the dropout masks, one per block of rows.
    """

    x: Tree
    seeds: tuple[int, ...] | None = None


@define(eq=False)
class Adapters:
    """Hooks on the target modules of a base model, and the adapters that they currently add."""

    model: nn.Module
    spec: Lora
    names: list[str]
    length: int
    active: Active | None = None

    @classmethod
    def on(cls, model: nn.Module, spec: Lora, length: int) -> Adapters:
        """Install hooks for ``spec`` on ``model``.

        ``length`` is the longest sequence, which determines the size of dropout masks.
        """
        adapters = cls(model, spec, spec.modules(model), length)
        for number, name in enumerate(adapters.names):
            hook = functools.partial(adapters._add, name, number)
            model.get_submodule(name).register_forward_hook(hook)
        return adapters

    def start(self, key: Key, device: torch.device, dtype: torch.dtype) -> Tree:
        """Return a fresh adapter: A uniform in ±1/√in (Kaiming with a = √5), B zero."""
        x = {}
        for name in self.names:
            width = width_of(self.model.get_submodule(name))
            assert width is not None
            into, out = width
            draw = torch.rand(
                self.spec.rank,
                into,
                generator=key.fold("adapter", name).generator(),
                dtype=torch.float64,
            )
            x[f"{name}.lora_A.weight"] = ((2 * draw - 1) / math.sqrt(into)).to(device, dtype)
            x[f"{name}.lora_B.weight"] = torch.zeros(
                out, self.spec.rank, device=device, dtype=dtype
            )
        return x

    @contextlib.contextmanager
    def use(self, active: Active | None) -> Iterator[None]:
        before = self.active
        self.active = active
        try:
            yield
        finally:
            self.active = before

    def _add(
        self, name: str, number: int, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> Tensor | None:
        active = self.active
        if active is None:
            return None
        down = active.x[f"{name}.lora_A.weight"]
        up = active.x[f"{name}.lora_B.weight"]
        hidden = args[0]
        scaling = self.spec.scaling
        if active.seeds is not None and self.spec.dropout:
            hidden = hidden * self._mask(active.seeds, number, hidden)
            scaling /= 1 - self.spec.dropout
        shape = hidden.shape[:-1]
        if down.dim() == 3:
            hidden = hidden.reshape(down.shape[0], -1, hidden.shape[-1])
        if hidden.dtype == torch.bfloat16 and down.dtype == torch.float32:
            both = _down(hidden, down, scaling)
            update = _times(torch.cat([both, both], dim=-1), torch.cat(_halves(up), dim=-1))
        else:
            update = _times(scaling * _times(hidden.to(down.dtype), down), up)
        return output + update.reshape(*shape, up.shape[-2]).to(output.dtype)

    def _mask(self, seeds: tuple[int, ...], number: int, hidden: Tensor) -> Tensor:
        """Return dropout masks, which depend only on the seed and the module.

        They are drawn for the longest sequence and cut to the current one. A branch therefore gets
        the same mask in a separate pass and in a stacked one.
        """
        rows, length, width = hidden.shape
        kept = 1 - self.spec.dropout  # the division by this share is part of the scaling
        blocks = []
        for seed in seeds:
            generator = torch.Generator(hidden.device).manual_seed(
                (seed * 1_000_003 + number) % 2**63
            )
            shape = (rows // len(seeds), self.length, width)
            draw = torch.rand(shape, generator=generator, device=hidden.device, dtype=torch.float32)
            blocks.append(draw[:, :length] < kept)
        return torch.cat(blocks).to(hidden.dtype)


def _times(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute hidden·Wᵀ, or the product of each block of rows with its own W."""
    return functional.linear(hidden, weight) if weight.dim() == 2 else torch.bmm(hidden, weight.mT)


def _down(hidden: Tensor, weight: Tensor, scaling: float) -> Tensor:
    """Compute scaling·A h with h in bfloat16 and A in float32.

    Both halves of A are multiplied at once: no float32 copy of h is created or stored.
    """
    coarse: Tensor
    coarse, fine = _times(hidden, torch.cat(_halves(weight), dim=-2)).chunk(2, dim=-1)
    return scaling * (coarse + fine)


def _halves(weight: Tensor) -> list[Tensor]:
    """Split a float32 tensor into two of bfloat16 whose sum has 16 of its 24 bits.

    A step of 1e-5 is therefore not lost. The derivative passes only through the first tensor, since
    the second is a rounding error.
    """
    coarse = weight.to(torch.bfloat16)
    return [coarse, (weight - coarse.float()).detach().to(torch.bfloat16)]


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute ``function`` of the arguments, and compute it again in the backward pass.

    The recomputation uses the attention kernels of the first computation. The kernels allowed
    during the recomputation may differ: a second derivative requires the math kernel while its
    graph is built.
    """
    kernels = [kernel for kernel, allowed in KERNELS.items() if allowed()]

    def with_kernels(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(kernels):
            return function(*args, **kwargs)

    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(with_kernels, *args, **options, **kwargs)


def checkpoint_layers(model: nn.Module, adapters: Adapters | None) -> None:
    """Set every decoder layer to store only its input, and to recompute the rest in the backward
    pass.

    The recomputation uses the adapters (or parameters) of the first computation.
    They are passed to it, since they are no longer installed by then.
    """
    for layer in layers_of(model):
        layer.forward = _checkpoint_layer(layer, layer.forward, adapters)


def _checkpoint_layer(
    layer: nn.Module, forward: Callable[..., Any], adapters: Adapters | None
) -> Callable[..., Any]:
    replaying = False

    def again(*args: Any, **kwargs: Any) -> Any:
        active = None if adapters is None else adapters.active
        leaves = [] if active is None else active.x.values()
        idle = adapters is not None and not any(leaf.requires_grad for leaf in leaves)
        if replaying or idle or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        values: dict[str, Tensor] = dict(layer.named_parameters())

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal replaying
            if adapters is not None:
                with adapters.use(active):
                    return forward(*args, **kwargs)
            replaying = True
            try:
                return torch.func.functional_call(layer, values, args, kwargs)
            finally:
                replaying = False

        return recompute(run, *args, **kwargs)

    return again
