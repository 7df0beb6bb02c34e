"""ScaleBiO: the value gap as a game, min over (θ, w) and max over u of f(w) + α (g(w) − g(u))."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

import torch
from attrs import field, frozen
from torch import Tensor

from hgms.compiled import Numbers, launch
from hgms.generators.penalty import base
from hgms.generators.penalty.compositions import best_of_n, single_loop
from hgms.generators.penalty.layers import layers, moving
from hgms.generators.penalty.pair import PairOptimizer, Stages
from hgms_core import (
    Candidates,
    Composition,
    ConfigError,
    Cost,
    Key,
    Loss,
    Problem,
    State,
    Tree,
    component,
    hookimpl,
    norm,
)
from hgms_core.trees import require_grad
from hgms_core.validators import at_least, optional_positive, positive


@frozen
class _Moving:
    """The leaves of w and of u that move, and whether a leaf always moves."""

    names: dict[str, list[str]]
    always: dict[str, bool]


@final
@component
class Minimax(base.PenaltyGenerator):
    """The pair (w, u) of ScaleBiO, and the upper gradient of the pass that moves both.

    With one lower batch B for both models, all three gradients at the old (θ, w, u)::

        min over θ, w  max over u     f(θ, w) + α_k (g(θ, w; B) − g(θ, u; B))
        w ← w − η_w D[∇_w f + α_k ∇_w g(θ, w)]
        u ← u − η_u D[α_k ∇_u g(θ, u)]    (not in the first ``warmup`` steps)
        h = ∇_θ f(θ, w) + α_k (∇_θ g(θ, w) − ∇_θ g(θ, u))
        α_k = α τ^s,   η_k = η τ^−s c_k,   s = number of finished stages

    D is the gradient itself (``sgd``) or AdamW's direction. c_k is 1, or falls from 1 to 0 over the
    budget as a cosine. w, which is scored and returned, corresponds to V-PBGD's y; u tracks the
    lower solution. Combine with hypergradient ``carried`` and an outer ``sgd`` or ``adamw``.

    Use when the lower model is large: first order, no inner loop. Avoid large α with ``sgd`` at a
    fixed rate: α multiplies the step of u and w (AdamW does not depend on it).

    Parameters
    ----------
    optimizer
        D, η_w, η_u, c and the weight decay (:class:`PairOptimizer`).
    alpha
        α.
    stages
        τ and the outer steps of a stage (:class:`Stages`).
    clip
        Bounds the norms of w's and of u's gradient by clip·α_k (None: no bound).
    warmup
        Number of first outer steps in which u does not move.
    blocks
        Number of layers that move (LISA), drawn for u and for w separately every ``block_every``
        outer steps (None: all move). A layer is all leaves with the same name up to the first
        number: ``model.layers.3`` includes its attention, its norms and the adapters on it. Leaves
        without a number (embeddings, the last norm, the head) always move. If no name has a number,
        a block is a module: ``hidden`` for hidden.weight and hidden.bias. The other leaves cost no
        gradient. AdamW's moments of a layer exist while it moves and are reset at each draw.
    batch_size, upper_batch_size
        Rows of a lower and an upper batch (None: all).
    count, noise, carry_rule
        N pairs (w, u) on separate batches, as in ``value-gap``.

    Raises
    ------
    ConfigError
        For more blocks than the lower variable has, and if all N candidates would be equal.

    Notes
    -----
    Cost: 2N lower gradients and N upper gradients. Memory: 2N lower states, with AdamW 6N (less
    with ``blocks``).

    Source: Pan et al., *ScaleBiO: scalable bilevel optimization for LLM data reweighting* (2025);
    the multi-stage game: Wang et al. (2023).

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: ((x["x"] - 3) ** 2).sum(),
    ... )
    >>> generator = Minimax(alpha=2.0, optimizer=PairOptimizer(lr=0.05))
    >>> candidates = generator.propose(
    ...     problem, problem.theta0, generator.init(problem, Key(0)), Key(0)
    ... )
    >>> (
    ...     candidates.x["x"],
    ...     candidates.aux["u.x"],
    ...     candidates.aux["theta.t"],
    ... )  # ∇_w = −6 − 2·2,  ∇_u = −2·2,  w = u: h = 0
    (tensor([[0.5000]]), tensor([[0.2000]]), tensor([[0.]]))
    """

    name: ClassVar[str] = "minimax"
    twins: ClassVar[tuple[str, ...]] = ("u",)

    optimizer: PairOptimizer = field(factory=PairOptimizer)
    alpha: float = field(default=10.0, validator=positive)
    stages: Stages = field(factory=Stages)
    clip: float | None = field(default=None, validator=optional_positive)
    warmup: int = field(default=0, validator=at_least(0))
    blocks: int | None = field(default=None, validator=optional_positive)
    block_every: int = field(default=20, validator=positive)

    def init(self, problem: Problem, key: Key) -> State:
        known = len(set(layers(problem.x0).values()) - {""})
        if self.blocks is not None and self.blocks > known:
            raise ConfigError(
                "out-of-range",
                f"blocks={self.blocks} must be at most {known}, the number of layers of the lower "
                "variable",
                place=("generator", "blocks"),
            )
        return {**super().init(problem, key), "blocks": key.fold("blocks").derive()}

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        done = start["step"]
        growth, slower = self.stages.at(done)
        alpha = self.alpha * growth
        since = done if self.blocks is None else done % self.block_every
        drawn = Key(start["blocks"]).fold(done - since)
        active_names = {which: moving(problem.x0, self.blocks, drawn.fold(which)) for which in "wu"}
        # Number of steps since the moments were reset, including this step: for leaves that always
        # move, and for a layer. The moments of u start after the warm-up.
        layer_of = layers(problem.x0) if self.blocks is not None else {}
        begun = {"w": 0, "u": self.warmup}
        counts = {
            which: {True: done - first + 1, False: done - max(done - since, first) + 1}
            for which, first in begun.items()
        }
        if done < self.warmup:
            active_names["u"] = []
        always = {name: layer_of.get(name, "") == "" for name in problem.x0}
        numbers = [alpha]
        for which, rate in self.optimizer.rates(slower, progress).items():
            numbers += self.optimizer.numbers(rate, (counts[which][True], counts[which][False]))
        # A new draw of layers would require a new compilation each time.
        programs = problem.compiler if self.blocks is None else None
        function = partial(
            self._step_tensors, (problem.g, problem.f), _Moving(active_names, always)
        )

        def step(w: Tree, aux: Tree, key: Key) -> tuple[Tree, Tree, Tensor]:
            models = {"w": w, "u": base.untag("u", aux)}
            following: Tree = base.tag("u", models["u"])
            for which, names in active_names.items() if self.optimizer.kind == "adamw" else ():
                for tag, name in (
                    (f"{kind}{which}.{name}", name) for kind in "mv" for name in names
                ):
                    begins = counts[which][always[name]] <= 1
                    following[tag] = torch.zeros_like(models[which][name]) if begins else aux[tag]
            settings = (self.name, self, problem.g, problem.f, bool(active_names["u"]))
            batches = self.lower_batch(problem, key), self.upper_batch(problem, key)
            x, kept, loss = launch(
                programs, settings, function, numbers, w, following, theta, batches
            )
            return x, kept, loss

        rows, upper_rows = self.rows(problem)
        cost = Cost(lower_gradients=2, upper_gradients=1, rows=2 * rows + upper_rows)
        return self.branches(start, key, step, cost)

    def _step_tensors(
        self,
        losses: tuple[Loss, Loss],
        moving: _Moving,
        numbers: Numbers,
        w: Tree,
        aux: Tree,
        theta: Tree,
        batches: tuple[Tree, Tree],
    ) -> tuple[Tree, Tree, Tensor]:
        """Take the step of one pair, as a function of tensors.

        ``aux`` contains u and, with AdamW, the moments. ``numbers`` are α_k and, for w and for u:
        the rate, the decay factor, and Adam's two coefficients for leaves that always move and for
        layers.
        """
        g, f = losses
        below, above = batches
        alpha, *rest = numbers
        models = {"w": w, "u": base.untag("u", aux)}
        upper = require_grad(theta)
        active = {
            which: require_grad({name: models[which][name] for name in moving.names[which]})
            for which in models
        }
        with torch.enable_grad():
            at_w = g(upper, models["w"] | active["w"], below)
            at_u = g(upper, models["u"] | active["u"], below)
            value = f(upper, models["w"] | active["w"], above)
            to_theta, to_w, to_u = base.gradients(
                value + alpha * (at_w - at_u), upper, active["w"], active["u"]
            )

        kept: Tree = {**base.tag("theta", to_theta), "upper_loss": value.detach()}
        for which, slope, (rate, left, *adams) in (("w", to_w, rest[:6]), ("u", to_u, rest[6:])):
            if not slope:
                continue
            slope = self._clip(slope, alpha)
            for kind, adam in ((True, adams[:2]), (False, adams[2:])):
                own = {name: leaf for name, leaf in slope.items() if moving.always[name] == kind}
                if not own:
                    continue
                before = (
                    {m: {name: aux[f"{m}{which}.{name}"] for name in own} for m in "mv"}
                    if self.optimizer.kind == "adamw"
                    else {}
                )
                old = {name: models[which][name] for name in own}
                moved, after = self.optimizer.step(old, own, before, rate, left, *adam)
                models[which] = models[which] | moved
                for m, moment in after.items():
                    kept |= base.tag(f"{m}{which}", moment)
        return models["w"], kept | base.tag("u", models["u"]), at_w.detach()

    def _clip(self, slope: Tree, alpha: float | Tensor) -> Tree:
        if self.clip is None:
            return slope
        bound = self.clip * alpha
        scale = bound / norm(slope).clamp_min(bound)
        return {name: leaf * scale for name, leaf in slope.items()}


SCALEBIO = single_loop(
    "scalebio",
    (
        "Minimax game of two lower models, min over (θ, w) and max over u of f(w) + α (g(w) − "
        "g(u)), first order."
    ),
    "Pan et al. 2025, ScaleBiO.",
    {"name": "minimax", "optimizer": {"lr": 0.03}, "alpha": 10.0},
    # The authors use AdamW for u, w and the logits, with all rates falling to 0 as a cosine. Their
    # rates are 1e-5 and 1e-2 with whole models, where `blocks = 2` is their LISA. The rate 1e-4 is
    # for adapters, which they do not combine with LISA.
    on={
        "sources": {
            "generator": {
                "optimizer": {
                    "kind": "adamw",
                    "lr": 1e-4,
                    "weight_decay": 5e-4,
                    "schedule": "cosine",
                },
                "batch_size": 16,
                "upper_batch_size": 16,
            },
            "outer": {
                "name": "adamw",
                "lr": 0.01,
                "weight_decay": 0.01,
                "schedule": {"kind": "cosine", "final": 0.0},
            },
        }
    },
)

SCALEBIO_BEST_OF_N = best_of_n(SCALEBIO, count=4, noise=0.01)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [Minimax]


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [SCALEBIO, SCALEBIO_BEST_OF_N]
