"""ScaleBiO: the value gap as a game, min over (θ, w) and max over u of f(w) + α (g(w) − g(u))."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers, launch, programs_of
from hgms.config import lowering
from hgms.generators.penalty import shared
from hgms.generators.penalty.compositions import best_of_n, single_loop
from hgms.generators.penalty.layers import layers, moving
from hgms.optim.adam import adam_, corrections
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
    clone,
    component,
    hookimpl,
    norm,
)
from hgms_core.validators import (
    at_least,
    decay_rate,
    each,
    not_negative,
    optional_positive,
    positive,
)


@final
@component
class Minimax:
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

    Arguments:
        optimizer: of u and w. ``lr``: η_w. ``lr_u``: η_u (None: η_w). ``betas``, ``eps``,
            ``weight_decay``: as in torch.optim.AdamW (decay is decoupled for sgd too).
            ``schedule``: ``constant`` or ``cosine``, of both rates.
        alpha: α. ``stage_factor``, ``stage_steps``: τ and the outer steps of a stage (None: one
            stage).
        clip: bounds the norms of w's and of u's gradient by clip·α_k (None: no bound).
        warmup: number of first outer steps in which u does not move.
        blocks: number of layers that move (LISA), drawn for u and for w separately every
            ``block_every`` outer steps (None: all move). A layer is all leaves with the same name
            up to the first number: ``model.layers.3`` includes its attention, its norms and the
            adapters on it. Leaves without a number (embeddings, the last norm, the head) always
            move. If no name has a number, a block is a module: ``hidden`` for hidden.weight and
            hidden.bias. The other leaves cost no gradient. AdamW's moments of a layer exist while
            it moves and are reset at each draw.
        batch_size, upper_batch_size: rows of a lower and an upper batch (None: all).
        count, noise, carry_rule: N pairs (w, u) on separate batches, as in ``value-gap``.

    Errors: ConfigError for more blocks than the lower variable has, and if all N candidates would
        be equal.

    Cost: 2N lower gradients and N upper gradients. Memory: 2N lower states, with AdamW 6N (less
        with ``blocks``).

    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: ((x["x"] - 3) ** 2).sum(),
    ... )
    >>> generator = Minimax(alpha=2.0, lr=0.05, optimizer="sgd")
    >>> candidates = generator.propose(
    ...     problem, problem.theta0, generator.init(problem, Key(0)), Key(0)
    ... )
    >>> (
    ...     candidates.x["x"],
    ...     candidates.aux["u.x"],
    ...     candidates.aux["theta.t"],
    ... )  # ∇_w = −6 − 2·2,  ∇_u = −2·2,  w = u: h = 0
    (tensor([[0.5000]]), tensor([[0.2000]]), tensor([[0.]]))

    Source: Pan et al., *ScaleBiO: scalable bilevel optimization for LLM data reweighting* (2025);
        the multi-stage game: Wang et al. (2023).
    """

    name: ClassVar[str] = "minimax"

    count: int = field(default=1, validator=positive)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = field(default=0.01, validator=positive)
    lr_u: float | None = field(default=None, validator=optional_positive)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=each(decay_rate))
    eps: float = field(default=1e-8, validator=positive)
    weight_decay: float = field(default=0.0, validator=not_negative)
    alpha: float = field(default=10.0, validator=positive)
    stage_factor: float = field(default=1.0, validator=positive)
    stage_steps: int | None = field(default=None, validator=optional_positive)
    clip: float | None = field(default=None, validator=optional_positive)
    warmup: int = field(default=0, validator=at_least(0))
    schedule: Literal["constant", "cosine"] = "constant"
    blocks: int | None = field(default=None, validator=optional_positive)
    block_every: int = field(default=20, validator=positive)
    batch_size: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)
    noise: float = field(default=0.0, validator=not_negative)
    carry_rule: Literal["selected", "per-branch"] = "selected"

    memory_hints = lowering(other=["batch_size", "count"])

    def init(self, problem: Problem, key: Key) -> State:
        known = len(set(layers(problem.x0).values()) - {""})
        if self.blocks is not None and self.blocks > known:
            raise ConfigError(
                "out-of-range",
                f"blocks={self.blocks} must be at most {known}, the number of layers of the lower "
                "variable",
                place=("generator", "blocks"),
            )
        return {
            **shared.begin(self, problem, key, twins=("u",)),
            "blocks": key.fold("blocks").derive(),
        }

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        done = start["step"]
        stages = 0 if self.stage_steps is None else done // self.stage_steps
        alpha = self.alpha * self.stage_factor**stages
        slower = self.stage_factor**-stages
        if self.schedule == "cosine":
            slower *= 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
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
        # u ascends
        rates = {
            "w": self.lr * slower,
            "u": -(self.lr if self.lr_u is None else self.lr_u) * slower,
        }
        if done < self.warmup:
            active_names["u"] = []
        always = {name: layer_of.get(name, "") == "" for name in problem.x0}
        numbers = [alpha]
        for which, rate in rates.items():
            numbers += [rate, 1 - abs(rate) * self.weight_decay]
            for kind in (True, False):
                numbers += corrections(rate, max(counts[which][kind], 1), self.betas)
        # A new draw of layers would require a new compilation each time.
        programs = programs_of(problem) if self.blocks is None else None
        function = partial(self._moved, problem.g, problem.f, active_names, always)

        def step(w: Tree, aux: Tree, key: Key) -> tuple[Tree, Tree, Tensor]:
            models = {"w": w, "u": shared.untagged("u", aux)}
            moments: Tree = {}
            for which, names in active_names.items() if self.optimizer == "adamw" else ():
                for tag, name in (
                    (f"{kind}{which}.{name}", name) for kind in "mv" for name in names
                ):
                    begins = counts[which][always[name]] <= 1
                    moments[tag] = torch.zeros_like(models[which][name]) if begins else aux[tag]
            settings = (self.name, self, problem.g, problem.f, bool(active_names["u"]))
            batches = shared.draw(problem, key, self)
            x, kept, loss = launch(
                programs, settings, function, numbers, w, models["u"], moments, theta, *batches
            )
            return x, kept, loss

        rows, upper_rows = shared.rows(problem, self)
        return shared.branches(
            start,
            key,
            self,
            step,
            Cost(lower_gradients=2, upper_gradients=1, rows=2 * rows + upper_rows),
        )

    carry = shared.carry

    def _moved(
        self,
        g: Loss,
        f: Loss,
        active_names: dict[str, list[str]],
        always: dict[str, bool],
        numbers: Numbers,
        w: Tree,
        u: Tree,
        moments: Tree,
        theta: Tree,
        below: Tree,
        above: Tree,
    ) -> tuple[Tree, Tree, Tensor]:
        """Take the step of one pair, as a function of tensors.

        ``numbers`` are α_k and, for w and for u: the rate, the decay factor, and Adam's two
        coefficients for leaves that always move and for layers.
        """
        alpha, *rest = numbers
        models = {"w": w, "u": u}
        upper = shared.tracked(theta)
        active = {
            which: shared.tracked({name: models[which][name] for name in active_names[which]})
            for which in models
        }
        with torch.enable_grad():
            at_w = g(upper, models["w"] | active["w"], below)
            at_u = g(upper, models["u"] | active["u"], below)
            value = f(upper, models["w"] | active["w"], above)
            to_theta, to_w, to_u = shared.gradients(
                value + alpha * (at_w - at_u), upper, active["w"], active["u"]
            )

        kept: Tree = {**shared.tagged("theta", to_theta), "upper_loss": value.detach()}
        for which, slope, (rate, left, *adams) in (("w", to_w, rest[:6]), ("u", to_u, rest[6:])):
            if not slope:
                continue
            slope = self._clipped(slope, alpha)
            for kind, adam in ((True, adams[:2]), (False, adams[2:])):
                own = {name: leaf for name, leaf in slope.items() if always[name] == kind}
                if not own:
                    continue
                before = (
                    {m: {name: moments[f"{m}{which}.{name}"] for name in own} for m in "mv"}
                    if moments
                    else {}
                )
                old = {name: models[which][name] for name in own}
                moved, after = self._stepped(old, own, before, rate, left, *adam)
                models[which] = models[which] | moved
                for m, moment in after.items():
                    kept |= shared.tagged(f"{m}{which}", moment)
        return models["w"], kept | shared.tagged("u", models["u"]), at_w.detach()

    def _clipped(self, slope: Tree, alpha: float | Tensor) -> Tree:
        if self.clip is None:
            return slope
        bound = self.clip * alpha
        scale = bound / norm(slope).clamp_min(bound)
        return {name: leaf * scale for name, leaf in slope.items()}

    def _stepped(
        self,
        x: Tree,
        slope: Tree,
        before: dict[str, Tree],
        rate: float | Tensor,
        left: float | Tensor,
        scale: float | Tensor,
        correction: float | Tensor,
    ) -> tuple[Tree, dict[str, Tree]]:
        """Take one step of sgd or AdamW against ``slope``.

        A negative rate moves along ``slope``, because both directions are odd in the rate.
        """
        if self.weight_decay:
            x = {name: leaf * left for name, leaf in x.items()}
        if self.optimizer == "sgd":
            return shared.descended(x, slope, rate), {}
        x = clone(x)
        moments = {kind: clone(tree) for kind, tree in before.items()}
        trees = (x, slope, moments["m"], moments["v"])
        adam_(
            *(list(tree.values()) for tree in trees),
            scale=scale,
            correction=correction,
            betas=self.betas,
            eps=self.eps,
        )
        return x, moments


SCALEBIO = single_loop(
    "scalebio",
    (
        "Minimax game of two lower models, min over (θ, w) and max over u of f(w) + α (g(w) − "
        "g(u)), first order."
    ),
    "Pan et al. 2025, ScaleBiO.",
    {"name": "minimax", "lr": 0.03, "alpha": 10.0},
    # The authors use AdamW for u, w and the logits, with all rates falling to 0 as a cosine. Their
    # rates are 1e-5 and 1e-2 with whole models, where `blocks = 2` is their LISA. The rate 1e-4 is
    # for adapters, which they do not combine with LISA.
    on={
        "sources": {
            "generator": {
                "optimizer": "adamw",
                "lr": 1e-4,
                "weight_decay": 5e-4,
                "schedule": "cosine",
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
