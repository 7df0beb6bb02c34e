"""The implicit engine of :func:`hgms.tune`, for small models with a convex training loss.

    w_r(u) = argmin_w  Σ_i m_ri ω_i(u) ℓ_i(w, u) / Σ_i m_ri + ½ Σ_j λ_j(u) w_j²          (lower)
    ∇F(u) = −∇²_uw g v,     (∇²_ww g) v = ∇_w f                          (implicit hypergradient)

1. Newton-CG solves the lower problems of all replicas together, from a warm start. The
   preconditioner is the penalty plus Hutchinson's estimate of the diagonal of the Hessian.
2. A scan shifts all penalties by a shared amount in log space, from large to small. The level with
   the largest gain over the start, minus its doubt (see :func:`_surest`), is a baseline.
3. From there, penalties become inversely proportional to the size of their parameters, which has
   the fixed points of an L1 or a group penalty (Grandvalet 1998). If this is better, they become
   inversely proportional to the squared size, which approximates an L0 penalty (Frommlet and Nuel
   2016). The strength is scanned each time. The best of these is the start of learning.
4. RPROP moves u along the sign of the hypergradient. A Gaussian prior around that start, shifted by
   the mean of each kind of penalty, has the standard deviation s, which is relaxed level by level.
   For other kinds its centre is their start. Each level is a candidate, judged on rows that it has
   not used: without a prior, one penalty per feature overfits the validation rows.

Cost of one step of RPROP: one Newton solve from a warm start, one CG solve, one cross product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.func import vmap

from hgms.tuning.candidate import Candidate, Engine, difference
from hgms.tuning.meter import NotConvex, Stage, Stages
from hgms.tuning.row_filter import filter_start, kept_rows, row_mask
from hgms_core import Key

LARGEST = 10_000
"""The largest number of parameters for this engine."""

LEVELS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
STEPS_PER_LEVEL = 12
PATIENCE = 2
SHIFTS = (8, 6, 4, 2, 0, -2, -4, -6, -8)
"""Shifts of all penalties in log λ, from large to small; then the surest is refined."""
FINER = (0, 1, -1)
REWEIGHTED = {"reweighted": 1, "reweighted, squared": 2}
"""Candidates with penalties inversely proportional to a power of the size of their parameters."""
STRENGTHS = (0, 1, 2, 3)
"""Strengths of reweighted penalties in log λ, for power 1; one more for each further power."""
ROUNDS = 2
"""Reweightings per strength."""
SMALLEST = 0.01
"""The smallest size of parameters over the mean, for reweighted penalties."""

DOUBT = 0.05
"""The largest doubt about a gain, as a share of the lowest loss."""

WORSE = 1.3
"""The scan ends at a level that is worse than the best level by this factor."""

BASELINE_SHARE = 0.1
SCAN_SHARE = 0.25
"""Shares of the budget that one baseline, and the scan, may use."""

MARGIN = 1.5
"""A judgement, and the final training, may take this multiple of the earlier judgements."""


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    diagonal: Tensor,
    tolerance: float,
    steps: int,
    x: Tensor | None = None,
) -> Tensor:
    """Solve H_r x_r = b_r for all replicas, ``[R, d]``, preconditioned by a diagonal.

    Raises
    ------
    NotConvex
        If a direction of negative curvature is met.
    """
    x = torch.zeros_like(b) if x is None else x
    residual = b - product(x)
    scaled = residual / diagonal
    direction = scaled
    size = (residual * scaled).sum(1, keepdim=True)
    target = tolerance * b.norm(dim=1) + 1e-30
    eps = torch.finfo(b.dtype).eps
    largest = diagonal.expand_as(b).amax(1, keepdim=True)
    for _ in range(steps):
        if bool((residual.norm(dim=1) <= target).all()):
            break
        image = product(direction)
        curvature = (direction * image).sum(1, keepdim=True)
        # rounding: a flat direction has a curvature of about ± ε ‖p‖ ‖Hp‖ or ± ε ‖H‖ ‖p‖²
        length = direction.norm(dim=1, keepdim=True)
        stretch = image.norm(dim=1, keepdim=True) / length.clamp_min(1e-30)
        largest = torch.maximum(largest, stretch)
        rounding = torch.maximum(eps**0.5 * stretch, 10 * eps * largest) * length.square()
        if bool((curvature < -rounding).any()):
            raise NotConvex
        step = torch.where(curvature > 0, size / curvature.clamp_min(1e-30), 0.0)
        x = x + step * direction
        residual = residual - step * image
        scaled = residual / diagonal
        before = size
        size = (residual * scaled).sum(1, keepdim=True)
        direction = scaled + size / before.clamp_min(1e-30) * direction
    return x


@define(eq=False)
class Implicit(Engine):
    """See the module. Errors: NotConvex in the first stages."""

    curvature: Tensor = field(init=False)
    scale: float = field(default=0.0, init=False)

    @curvature.default
    def _flat(self) -> Tensor:
        return torch.ones_like(self.problem.w0)

    def units(self) -> Stage:
        """Return the diagonal of the Hessian without penalties, and the size of the first step.

        Hutchinson's estimate with four probes, averaged over the models.
        """
        problem = self.problem
        fit = problem.masks.fit
        u = problem.space.start.expand(len(fit), -1)
        w, _, slope, product, diagonal = self.derivatives(problem.w0.expand(len(fit), -1), u, fit)
        generator = Key(0).fold("probes").generator()
        probes = torch.randint(0, 2, (4, *w.shape), generator=generator).to(w) * 2 - 1
        means = [(probe * product(probe)).mean(0) for probe in probes]
        mean = torch.stack(means).mean(0) - (diagonal - self.curvature).mean(0)
        curvature = mean.clamp_min(0) + 0.1 * mean.mean().abs() + 1e-8
        diagonal = diagonal - self.curvature + curvature
        scale = float((slope.detach() ** 2 / diagonal).sum(1).sqrt().max())
        return {"curvature": curvature, "scale": max(scale, 1e-12)}

    def derivatives(
        self, w: Tensor, u: Tensor, fit: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor], Tensor]:
        """Return w as leaves, the losses, their gradients, Hessian products, a preconditioner."""
        problem = self.problem
        w = w.detach().requires_grad_()
        value = vmap(partial(problem.train_loss, batch=problem.rows))(w, u, fit)
        (slope,) = torch.autograd.grad(value.sum(), w, create_graph=True)

        def product(v: Tensor) -> Tensor:
            self.meter.call(len(w))
            (image,) = torch.autograd.grad(slope, w, v, retain_graph=True)
            return image

        size = w.shape[1]
        penalty = vmap(partial(problem.space.curvature, size=size))(u.detach())
        self.meter.count()
        self.meter.call(len(w))
        return w, value.detach(), slope, product, penalty + self.curvature

    def solve(
        self,
        w: Tensor,
        u: Tensor,
        fit: Tensor,
        tolerance: float = 3e-3,
        limit: float = 1.0,
        steps: int = 30,
    ) -> Tensor:
        """Return the lower solutions for u ``[R, m]`` and the masks ``fit`` ``[R, rows]``."""
        problem = self.problem
        for _ in range(steps):
            w, value, slope, product, diagonal = self.derivatives(w, u, fit)
            flat = slope.detach()
            size = float((flat**2 / diagonal).sum(1).sqrt().max())
            if size < tolerance * self.scale or self.meter.share >= limit:
                break
            inexact = min(0.3, max(0.3 * tolerance * self.scale / size, 1e-4))
            direction = conjugate_gradients(product, -flat, diagonal, inexact, 100)
            expected = (flat * direction).sum(1)
            length = torch.ones_like(expected)
            w = w.detach()
            for _ in range(12):
                self.meter.call(len(w))
                with torch.no_grad():
                    trial = vmap(partial(problem.train_loss, batch=problem.rows))(
                        w + length[:, None] * direction, u, fit
                    )
                is_worse = ~(trial <= value + 1e-4 * length * expected + 1e-9)
                if not bool(is_worse.any()):
                    break
                length = torch.where(is_worse, length / 2, length)
            w = w + torch.where(is_worse, 0.0, length)[:, None] * direction
        return w.detach()

    def hypergradient(self, w: Tensor, u: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ∇F for each replica, ``[K + 1, m]``, and the solutions of the linear systems."""
        problem = self.problem
        masks = problem.masks
        leaf = u.detach().requires_grad_()
        w, _, slope, product, diagonal = self.derivatives(w, leaf[masks.group], masks.fit)
        upper = vmap(partial(problem.outer_loss, batch=problem.rows))(w, masks.outer)
        upper = upper / masks.count[masks.group]
        (b,) = torch.autograd.grad(upper.sum(), w)
        v = conjugate_gradients(product, b, diagonal, 3e-2, 60, v)
        (cross,) = torch.autograd.grad(slope, leaf, v, materialize_grads=True)
        self.meter.call(2 * len(w))
        return -cross, v

    def held_out(self, w: Tensor) -> Tensor:
        """Return the losses of the judged rows."""
        self.meter.call(len(w))
        return self.problem.held_out(w)

    def judge(self, w: Tensor, u: Tensor) -> Stage:
        """Return the judged rows of replicas that also train on their outer rows.

        ``final`` contains the parameters of the last replica, the start of the final training, and
        ``judging`` the spent share of the budget.
        """
        masks = self.problem.masks
        before = self.meter.share
        w = self.solve(w, u[masks.group], masks.fit + masks.outer)
        judged = self.held_out(w)
        return {"judged": judged, "final": w[-1], "judging": self.meter.share - before}

    def baseline(self, fit: Tensor) -> Stage:
        problem = self.problem
        u = problem.space.start.expand(len(fit), -1)
        limit = self.meter.share + BASELINE_SHARE
        w = self.solve(problem.w0.expand(len(fit), -1), u, fit, limit=limit)
        return {"judged": self.held_out(w), "final": w[-1]}

    def filter_rows(self) -> Stage:
        """Return which training rows the out-of-fold filter of each replica keeps."""
        return {"keep": kept_rows(self.problem, Key(0).fold("filter"), self.models_at_start)}

    def models_at_start(self, fit: Tensor) -> Tensor:
        """Train one model per mask with the values at the start; return w ``[R, d]``."""
        problem = self.problem
        u = problem.space.start.expand(len(fit), -1)
        limit = self.meter.share + BASELINE_SHARE
        self.meter.call(len(fit))
        return self.solve(problem.w0.expand(len(fit), -1), u, fit, limit=limit)

    def scan(self) -> Stage:
        """Shift all penalties together, from large to small; return the surest level."""
        problem = self.problem
        space, masks = problem.space, problem.masks

        def shifted(u: Tensor, shift: float, _: Tensor) -> Tensor:
            moved = torch.where(space.is_penalty, u + shift, u).clamp(space.low, space.high)
            return moved.expand(masks.folds + 1, -1)

        w = problem.w0.expand(len(masks.group), -1)
        shifts = SHIFTS if bool(space.is_penalty.any()) else (0,)
        tried = self._train(shifts, partial(shifted, self.centre), w)
        finite = [level for level in tried if math.isfinite(level.loss)]
        reference = min(finite or tried, key=lambda level: abs(level.value))
        best = _surest(tried, reference)
        if len(shifts) > 1:
            tried = self._train(FINER, partial(shifted, best.u), best.w)
            best = _surest(tried, reference)
        u = best.u.clone()
        w = best.w
        offset = torch.zeros_like(u)
        return {"u": u, "w": w, **self.judge(w, u), **self._first_step(w, u), "offset": offset}

    def _train(
        self, values: Sequence[float], u_of: Callable[[float, Tensor], Tensor], w: Tensor
    ) -> list[Scanned]:
        """Train with ``u_of(value, w)`` for one value after the other, from the last w.

        Stop if the outer loss becomes clearly worse, or its share of the budget is spent.
        """
        masks = self.problem.masks
        last = masks.group == masks.folds
        tried: list[Scanned] = []
        limit = self.meter.share + SCAN_SHARE
        for value in values:
            u = u_of(value, w)
            w = self.solve(w, u[masks.group], masks.fit)
            rows = self.problem.losses_under(w[last], masks.outer[last])
            self.meter.call(len(w))
            tried.append(Scanned(value, u, w, rows))
            best = min(level.loss for level in tried)
            if tried[-1].loss > WORSE * best or self.meter.share > limit:
                break
        return tried

    def _first_step(self, w: Tensor, u: Tensor) -> Stage:
        """Return the state of RPROP and of the linear systems before the first step."""
        return {
            "length": torch.full_like(u, 0.1),
            "before": torch.zeros_like(u),
            "v": torch.zeros_like(w),
        }

    def reweight(self, power: int, state: Stage) -> Stage:
        """Make penalties inversely proportional to a power of the size of their parameters.

        ``state`` is the shared level, or the result for ``power - 1``. The strength rises while the
        outer loss does not become clearly worse; each strength has a few rounds, and the best is
        kept.
        """
        space = self.problem.space
        shared = state["u"] + (power - 1) * self._log_sizes(state["w"])

        def reweighted(strength: float, w: Tensor) -> Tensor:
            u = shared + strength - power * self._log_sizes(w)
            return torch.where(space.is_penalty, u, state["u"]).clamp(space.low, space.high)

        strengths = [strength + power - 1 for strength in STRENGTHS for _ in range(ROUNDS)]
        best = min(self._train(strengths, reweighted, state["w"]), key=lambda tried: tried.loss)
        u = best.u
        w = best.w
        return {"u": u, "w": w, **self.judge(w, u), **self._first_step(w, u), "offset": u}

    def _log_sizes(self, w: Tensor) -> Tensor:
        """Return the log of the root mean square of the parameters of each penalty.

        It is relative to the mean of its kind, ``[K + 1, m]``, and averaged over the models of a
        replica; 0 for other hyperparameters.
        """
        problem = self.problem
        space, masks = problem.space, problem.masks
        parts = []
        for name, size in zip(space.blocks, space.sizes, strict=True):
            index = space.blocks[name].index
            if index is None:
                parts.append(w.new_zeros(masks.folds + 1, size))
                continue
            used = index >= 0
            total = w.new_zeros(len(w), size).index_add(1, index[used], w[:, used].square())
            count = torch.bincount(index[used], minlength=size)
            own = w.new_zeros(masks.folds + 1, size).index_add(0, masks.group, total / count)
            own = (own / torch.bincount(masks.group)[:, None]).sqrt()
            mean = own.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)
            parts.append((own / mean + SMALLEST).log())
        return torch.cat(parts, 1)

    def relax(self, level: float, state: Stage, spread: Tensor) -> Stage:
        """Move u by RPROP with a prior of the standard deviation ``level``; return a candidate."""
        problem = self.problem
        space, masks = problem.space, problem.masks
        u, w, v = state["u"], state["w"], state["v"]
        length, before = state["length"], state["before"]
        reserve = _reserve(state)
        marks = [self.meter.share]
        for _ in range(STEPS_PER_LEVEL):
            slope, v = self.hypergradient(w, u, v)
            moved = (u - state["offset"]).split(space.sizes, 1)
            means = [part.mean(1, keepdim=True).expand_as(part) for part in moved]
            centre = state["offset"] + torch.cat(means, 1)
            centre = torch.where(space.is_penalty, centre, self.centre)
            slope = slope + spread / masks.count[:, None] / level**2 * (u - centre)
            turn = slope.sign() * before.sign()
            factor = torch.where(turn > 0, 1.3, torch.where(turn < 0, 0.5, 1.0))
            length = (length * factor).clamp(1e-3, 1.0)
            before = torch.where(turn < 0, 0.0, slope)
            u = (u - length * space.unit * before.sign()).clamp(space.low, space.high)
            w = self.solve(w, u[masks.group], masks.fit, limit=1 - reserve)
            marks.append(self.meter.share)
            if 2 * marks[-1] - marks[-2] + reserve > 1:
                break
        found = self.judge(w, u)
        found["judging"] = max(found["judging"], state["judging"])
        moved_state = {"u": u, "w": w, "v": v, "length": length, "before": before}
        return {**found, **moved_state, "offset": state["offset"]}

    def candidates(self, stages: Stages) -> Iterator[Candidate]:
        """Yield the baselines, then one learned candidate per level of the prior."""
        problem = self.problem
        masks = problem.masks
        units = stages.run("units", self.units)
        self.curvature = units["curvature"]
        self.scale = float(units["scale"])
        every = torch.ones_like(masks.fit[0])
        is_training = (problem.rows["index"] < problem.train_size).to(every)
        start = self._solved(stages, "start", masks.fit + masks.outer, every)
        yield start
        if problem.space.is_per_row:
            keep = stages.run("filter", self.filter_rows)["keep"]
            kept = row_mask(problem, keep)
            final = every - is_training * (1 - kept[-1])
            fit = masks.fit * kept + masks.outer
            found = self._solved(stages, "out-of-fold filter", fit, final)
            u = filter_start(problem, self.centre, keep)
            yield evolve(found, u=u[-1])
            if found.loss < start.loss:
                self.centre = u
        if problem.has_validation:
            final = every - is_training
            yield self._solved(stages, "validation rows only", masks.outer, final)
        yield from self._learn(stages, every)

    def _solved(self, stages: Stages, name: str, fit: Tensor, final: Tensor) -> Candidate:
        """Return a baseline with the values at the start.

        ``fit`` contains the rows of the replicas, ``final`` those of the final training.
        """
        stage = stages.run(name, partial(self.baseline, fit))
        return Candidate(
            name=name,
            is_baseline=True,
            judged=stage["judged"],
            u=self.problem.space.start,
            w=stage["final"],
            fit=final,
        )

    def _learn(self, stages: Stages, every: Tensor) -> Iterator[Candidate]:
        """Yield the shared level, then one candidate per level of the prior."""
        state = stages.run("shared level", self.scan)
        yield _candidate("shared level", state, every)
        spread = state["judged"].std()
        several = int(self.problem.space.is_penalty.sum()) > 1
        for name, power in REWEIGHTED.items() if several else ():
            if self.meter.share + _reserve(state) >= 1:
                break
            found = stages.run(name, partial(self.reweight, power, state))
            yield _candidate(name, found, every)
            if float(found["judged"].mean()) >= float(state["judged"].mean()):
                break
            state = found
        lowest = float(state["judged"].mean())
        worse = 0
        for level in LEVELS:
            if self.meter.share + _reserve(state) >= 1:
                return
            state = stages.run(f"prior {level}", partial(self.relax, level, state, spread))
            yield _candidate(f"learned, prior {level}", state, every)
            mean = float(state["judged"].mean())
            worse = 0 if mean < lowest else worse + 1
            lowest = min(lowest, mean)
            if worse >= PATIENCE:
                return

    def final(self, candidate: Candidate) -> Tensor:
        """Train the selected candidate on its rows; return w ``[d]``."""
        assert candidate.fit is not None
        assert candidate.w is not None
        start = candidate.w[None]
        w = self.solve(start, candidate.u[None], candidate.fit[None], 1e-5, math.inf)
        return w[0]


@frozen(eq=False)
class Scanned:
    """Parameters of all models for one value, and losses of the outer rows of the last replica."""

    value: float
    u: Tensor
    w: Tensor
    rows: Tensor

    @property
    def loss(self) -> float:
        return float(self.rows.mean())


def _surest(tried: Sequence[Scanned], reference: Scanned) -> Scanned:
    """Return the level with the largest gain over the reference, minus the doubt about the gain.

    The doubt is the standard error of the gain, but at most ``DOUBT`` of the lowest loss: the level
    with the lowest loss is often slightly worse than the start on new rows, but on few rows the
    standard error would also reject large gains.
    """
    lowest = min(level.loss for level in tried)

    def cost(level: Scanned) -> float:
        if level is reference:
            return 0.0
        mean, error = difference(level.rows, reference.rows)
        return mean + min(error, DOUBT * abs(lowest))

    return min(tried, key=cost)


def _reserve(state: Stage) -> float:
    """Return the share of the budget for the judgement of a level and the final training."""
    return MARGIN * float(state["judging"])


def _candidate(name: str, state: Stage, fit: Tensor) -> Candidate:
    return Candidate(
        name=name,
        is_baseline=name == "shared level",
        judged=state["judged"],
        u=state["u"][-1],
        w=state["final"],
        fit=fit,
    )
