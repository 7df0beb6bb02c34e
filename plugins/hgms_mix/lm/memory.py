"""Predicted and measured memory of an outer step.

The memory of a pass is measured on three short rows and extrapolated. It is a quadratic function of
the row length (attention without a fused kernel is quadratic, all else linear), times the rows of a
pass.

The rest is computed from sizes: the base once, N adapters with their gradients, and the logits
stored at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hgms_core import Problem, Tree
from hgms_mix.lm.language import LOGITS, LanguageModel
from hgms_mix.lm.losses import UpperLoss
from hgms_mix.lm.models import positions_of


@frozen
class StepMemory:
    """Bytes of an outer step.

    ``base`` is the model. ``adapters`` are all candidates with gradients and copies.
    ``activations`` are those of one pass. ``logits`` is the addition of the head.
    """

    base: int
    adapters: int
    activations: int
    logits: int

    @property
    def peak(self) -> int:
        return self.base + self.adapters + self.activations + self.logits

    def __str__(self) -> str:
        unit, size = ("GiB", 2**30) if self.peak >= 2**30 else ("MiB", 2**20)
        listed = ", ".join(f"{name} {value / size:.2f}" for name, value in asdict(self).items())
        return f"about {self.peak / size:.2f} {unit} at the peak of a step ({listed})"


def step_memory(
    model: LanguageModel, x: Tree, *, candidates: int, batch: int, chunk: int | None, length: int
) -> StepMemory:
    """Return the memory of a step with N ``candidates``.

    Each candidate has ``batch`` rows of ``length`` tokens. ``chunk`` candidates share a pass.
    """
    together = min(chunk or candidates, candidates)
    rows = together * min(model.rows or batch, batch)
    storages = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for leaf in (*model.model.parameters(), *model.model.buffers())
    }
    base = 0 if model.adapters is None else sum(storages.values())
    adapter = sum(leaf.numel() * leaf.element_size() for leaf in x.values())
    # All candidates, their start state, and per candidate of a pass its gradient and step.
    adapters = adapter * (candidates + 1 + 2 * together)

    taken = probe(model, x)
    probes = torch.tensor(list(taken), dtype=torch.float64)
    powers = torch.stack([probes**0, probes, probes**2], dim=1)
    _, slope, bend = torch.linalg.solve(
        powers, torch.tensor(list(taken.values()), dtype=torch.float64)
    ).tolist()
    # The slope of a tiny model is noise.
    pass_bytes = max(0, int(rows * (slope * length + max(bend, 0.0) * length**2)))

    vocabulary, width = model.model.get_output_embeddings().weight.shape
    # Logits, their softmax and the gradient.
    head = 3 * 4 * min(rows * length * int(vocabulary), LOGITS)
    if model.checkpointed is None:
        return StepMemory(base, adapters, pass_bytes, head)
    # A layer is recomputed after the head is freed: only the inputs of the layers exist at both
    # times.
    inputs = (
        rows
        * length
        * int(width)
        * next(model.model.parameters()).element_size()
        * len(model.checkpointed)
    )
    return StepMemory(base, adapters, pass_bytes, max(0, inputs + head - pass_bytes))


def predicted_memory(
    problem: Problem, *, candidates: int, batch: int, chunk: int | None, length: int
) -> StepMemory | None:
    """Return :func:`step_memory` for a problem of the task ``source-mixture``.

    Return None for any other problem, for a model without a head, and for a sharded base.
    """
    if not isinstance(problem.f, UpperLoss):
        return None
    model = problem.f.rows.model
    if model.parts is not None or model.model.get_output_embeddings() is None:
        return None
    return step_memory(
        model, problem.x0, candidates=candidates, batch=batch, chunk=chunk, length=length
    )


def probe(model: LanguageModel, x: Tree) -> dict[int, int]:
    """Return the bytes of the gradient on one row, by number of tokens.

    The numbers are 16, 40 and 64, or fewer if the model has fewer positions.
    """
    most = min(64, positions_of(model.model) or 64)
    return {length: _measure(model, x, length) for length in (most // 4, most * 5 // 8, most)}


def _measure(model: LanguageModel, x: Tree, length: int) -> int:
    """Return the peak bytes of a gradient on one row of ``length`` tokens.

    One token of the row is scored by the head.
    """
    device = next(iter(x.values())).device
    tokens = torch.ones(1, length + 1, dtype=torch.int64, device=device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, -1] = True
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in x.items()}
    before = dict(model.tokens)
    present = [*leaves.values(), *model.model.parameters(), *model.model.buffers()]
    with StorageMeter(present) as follower:
        already = follower.now
        losses, _ = model.nll(leaves, tokens, mask)
        torch.autograd.grad(losses.sum(), list(leaves.values()))
    model.tokens.update(before)
    return follower.peak - already


class StorageMeter(TorchDispatchMode):
    """Sum the sizes of live storages."""

    def __init__(self, present: Iterable[Tensor]) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in present:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.held:
            return
        self.held[key] = storage.nbytes()
        self.now += self.held[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        self.now -= self.held.pop(key, 0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result
