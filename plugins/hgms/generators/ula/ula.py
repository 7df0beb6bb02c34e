"""Unadjusted Langevin chains at temperature λ: the candidate generator of the analysed HG-MS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms.config import lowering
from hgms.generators.ula.program import Walk, add_noise_, moved_compiled
from hgms_core import (
    Candidates,
    ConfigError,
    Cost,
    Key,
    Mode,
    Problem,
    State,
    Tree,
    component,
    detach,
    gradient,
    groups,
    repeat,
)
from hgms_core.capabilities import Capabilities, ProposesSome
from hgms_core.validators import not_negative, optional_positive, positive

NOISE_BLOCK = 4096
"""Noise values drawn at a time for one chain."""


@final
@component
class Ula:
    """N parallel chains that sample the Gibbs measure exp(−g(θ, x)/λ), which concentrates on the
    lower minimisers as λ → 0.

    Each chain, K times (Algorithm ULA of the paper)::

        x ← x − h ∇_x g(θ, x) + √(2λh) ξ,        ξ ~ N(0, I)

    Use when the lower minimisers form a manifold that the chains should explore. Avoid for networks
    trained in a few steps (``branches``): mixing takes many steps. Stability needs h < 2/L, with L
    the largest curvature of g.

    Parameters
    ----------
    count
        N chains.
    steps
        K.
    lr
        The step size h.
    temperature
        λ (0 gives gradient descent).
    spread
        τ, chains start from N(z, τλI) around their centre z; 0 starts exactly there (warm start).
    carry_rule
        The centre is the last ``selected`` state, each chain's end (``per-branch``) or x0
        (``restart``).
    batch_size
        None for the full gradient; a number gives stochastic-gradient Langevin dynamics.
    mode, chunk
        Stacked (vmap) or looped evaluation, and the number of chains stacked at a time. ``auto``
        selects by size, and loops if vmap cannot evaluate the loss.

    Notes
    -----
    Cost: N·K lower gradients. Memory: N lower states (``per-branch``: 2N), gradients and
    activations of ``chunk`` chains.

    Source: HG-MS paper, Algorithm ULA and Lemma (λ-scaled Gaussian initialisation); Chewi,
    *Log-concave sampling*.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.zeros(2)},
    ...     g=lambda t, x, _: 0.5 * (x["x"] ** 2).sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> ula = Ula(count=4000, steps=100, lr=0.1, temperature=0.25)
    >>> x = ula.propose(problem, problem.theta0, ula.init(problem, Key(0)), Key(0)).x["x"]
    >>> bool(
    ...     (x.var(0) - 0.25 / (1 - 0.05)).abs().max() < 0.02
    ... )  # λ/(1 − h/2): the step size biases ULA
    True
    """

    name: ClassVar[str] = "ula"
    capabilities: ClassVar[Capabilities] = frozenset({ProposesSome})

    count: int = field(default=8, validator=positive)
    steps: int = field(default=100, validator=positive)
    lr: float = field(default=1e-2, validator=positive)
    temperature: float = field(default=1e-3, validator=not_negative)
    spread: float = field(default=1.0, validator=not_negative)
    carry_rule: Literal["selected", "per-branch", "restart"] = "restart"
    batch_size: int | None = field(default=None, validator=optional_positive)
    mode: Mode = "auto"
    chunk: int | None = field(default=None, validator=optional_positive)

    memory_hints = lowering(same=["chunk"], other=["batch_size", "count"])

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": repeat(problem.x0, self.count if self.carry_rule == "per-branch" else 1)}

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        members = range(self.count)
        return self.propose_some(problem, theta, start, key, progress, members)

    def propose_some(
        self,
        problem: Problem,
        theta: Tree,
        start: State,
        key: Key,
        progress: float,
        members: Sequence[int],
    ) -> Candidates:
        """Return the candidates of the chains ``members``.

        They equal the same candidates in a full proposal, because keys are addresses.
        """
        generators = self._generators(start, key, members)
        x, index = self._begin(problem, start, key, members, generators)
        rows = problem.lower_data.count(self.batch_size)
        losses = next(iter(x.values())).new_empty(len(members))
        theta = detach(theta)
        programs = problem.compiler
        walk = Walk(self.lr, self._scale, self.steps, rows)

        def trial() -> tuple[Tree, Tree]:
            return theta, problem.lower_data.batch(None if index is None else index[:, 0])

        for group in groups(
            problem.g,
            x,
            own_batch=index is not None,
            rows=rows,
            mode=self.mode,
            chunk=self.chunk,
            trial=trial,
        ):
            leaves = list(group.x.values())
            stacked = isinstance(group.part, slice)
            chains = leaves if stacked else [leaf.unsqueeze(0) for leaf in leaves]
            noise = _Noise(
                generators[group.part]
                if isinstance(group.part, slice)
                else [generators[group.part]],
                self.steps,
            )
            drawn = None if index is None else group.rows_of(index)
            if programs is not None and noise.in_blocks(chains):
                draw = partial(noise.draw_noise, chains)
                losses[group.part] = moved_compiled(
                    programs, problem, theta, group, drawn, draw, walk
                )
                continue
            for step in range(self.steps):
                batch = problem.lower_data.batch(None if drawn is None else drawn[..., step, :])
                grads, loss = gradient(group.loss, theta, group.x, batch)
                torch._foreach_add_(leaves, grads, alpha=-self.lr)
                noise.add_to(chains, step, self._scale)
                del grads  # free its memory for the next gradient
            losses[group.part] = loss

        calls = len(members) * self.steps
        cost = Cost(lower_gradients=calls, rows=calls * rows)
        return Candidates(x=x, losses=losses, cost=cost)

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        if self.carry_rule == "per-branch":
            return {"x": candidates.x}
        if self.carry_rule == "restart":
            return {"x": repeat(problem.initial(key), 1)}
        return {
            "x": {
                name: leaf.index_select(0, index.reshape(1)) for name, leaf in candidates.x.items()
            }
        }

    @property
    def _scale(self) -> float:
        return math.sqrt(2 * self.temperature * self.lr)

    def _generators(self, start: State, key: Key, members: Sequence[int]) -> list[torch.Generator]:
        device = next(iter(start["x"].values())).device
        return [key.fold("noise", member).generator(device) for member in members]

    def _begin(
        self,
        problem: Problem,
        start: State,
        key: Key,
        members: Sequence[int],
        generators: list[torch.Generator],
    ) -> tuple[Tree, Tensor | None]:
        carried = next(iter(start["x"].values())).shape[0]
        if carried not in (1, self.count):
            raise ConfigError(
                "wrong-length",
                f"the carried state has {carried} chains, but count={self.count}",
                place=("generator", "count"),
            )
        # Index with views of rows: a list of row numbers would be copied to the GPU and force a
        # wait.
        rows = [0 if carried == 1 else member for member in members]
        x = {name: torch.stack([leaf[row] for row in rows]) for name, leaf in start["x"].items()}
        if self.spread:
            scale = math.sqrt(self.spread * self.temperature)
            for row, generator in enumerate(generators):
                for leaf in x.values():
                    drawn = torch.randn(
                        leaf[row].shape, generator=generator, dtype=leaf.dtype, device=leaf.device
                    )
                    leaf[row].add_(drawn, alpha=scale)
        data = problem.lower_data
        index = [
            data.draw(key.fold("batches", member), self.batch_size, self.steps)
            for member in members
        ]
        return x, None if index[0] is None else torch.stack(
            [drawn for drawn in index if drawn is not None]
        )


class _Noise:
    """The Gaussian increments of some chains.

    Each chain has a separate random generator, so some chains can be computed alone. Small states
    draw many steps at once, to save calls. Large states draw one leaf of one chain at a time, to
    save memory.
    """

    def __init__(self, generators: list[torch.Generator], steps: int) -> None:
        self.generators = generators
        self.steps = steps
        self._block = torch.empty(0)

    def add_to(self, chains: list[Tensor], step: int, scale: float) -> None:
        """Add scale·ξ of this step to ``chains``.

        ``chains`` are the leaves of stacked chains. Steps must come in order.
        """
        if not self.in_blocks(chains):
            for row, generator in enumerate(self.generators):
                for leaf in chains:
                    drawn = torch.randn(
                        leaf.shape[1:], generator=generator, dtype=leaf.dtype, device=leaf.device
                    )
                    leaf[row].add_(drawn, alpha=scale)
            return
        add_noise_(chains, self.draw_noise(chains, step), scale)

    def in_blocks(self, chains: list[Tensor]) -> bool:
        """Return whether many steps are drawn at once."""
        return sum(leaf[0].numel() for leaf in chains) <= NOISE_BLOCK

    def draw_noise(self, chains: list[Tensor], step: int) -> Tensor:
        """Return ξ of this step, ``[chains, numbers]``."""
        size = sum(leaf[0].numel() for leaf in chains)
        length = max(1, min(self.steps, NOISE_BLOCK // size))
        if step % length == 0:
            dtype = chains[0].dtype
            device = chains[0].device
            blocks = [
                torch.randn(length, size, generator=own, dtype=dtype, device=device)
                for own in self.generators
            ]
            self._block = torch.stack(blocks, dim=1)
        return self._block[step % length]
