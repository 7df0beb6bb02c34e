"""The online engine of :func:`hgms.tune`, for networks.

    w ← w − ρ(u) P m(∇_w g(w, u))                                   (Adam, all replicas at once)
    ∇F(u) ≈ ∇_u f(w − ρ(u) P ∇_w g(w, u))                (one preconditioned look-ahead step)

P is Adam's diagonal scale; ρ contains the learned factors of the rate, or 1. With a learned rate or
start, the look-ahead has five steps, with the batches of the next five steps, and every fifth step
takes a hypergradient. Otherwise every second lower step takes a hypergradient. u moves by Adam
with a weak pull to its start. Each restart trains from the same initial w with the current u and
stops early; restarts continue until their share of the budget is spent. Then the model is trained
with fixed u, with and without the validation rows.

The lower rate is a share of the rate that lowers the training loss most in a few steps: two shares
are tried as baselines, and the share with the lower held-out loss is kept.

Cost of one lower step: one gradient per replica; with a hypergradient, about four more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.func import vmap

from hgms.tuning.candidate import Candidate, Engine, scores
from hgms.tuning.meter import Stage, Stages
from hgms.tuning.problem import Masks, Space
from hgms.tuning.row_filter import filter_start, kept_rows, row_mask
from hgms_core import Batch, Key, slopes

RATES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
TRIAL_STEPS = 25
SHARES = (0.1, 0.3)
"""Tried shares of the fastest lower rate."""

OUTER_RATE = 0.1
PULL = 0.03
EVERY = 2
UNROLLED = 5
"""Steps of a look-ahead, and between hypergradients, if the rate or the start is learned."""

CHECK = 10
STALLED = 6
LONGEST = 600
BEHIND = 1.3
"""A baseline stops early if its held-out loss exceeds the best loss by this factor."""

BASELINE_SHARE = 0.4
LEARNING_SHARE = 0.8
LAST_SHARE = 0.95
SHIFTS = (2, 4, 6)
WHOLE = 1024
"""Up to this number of rows, each lower step uses all rows."""


@frozen(eq=False, kw_only=True)
class Trained:
    """The best checkpoint of each replica: parameters, hyperparameters, losses of judged rows.

    The judged rows outside fold k select the checkpoint of replica k, so the judged losses are
    unbiased. All judged rows select the checkpoint of the last replica, at ``step``. ``scores``
    contains the means by which the checkpoints were selected, ``[K + 1]``.
    """

    w: Tensor
    u: Tensor
    judged: Tensor
    scores: Tensor
    step: int

    def merge(self, other: Trained, masks: Masks) -> Trained:
        """Return the better checkpoint of each replica; this one if both are equal."""
        better = other.scores < self.scores
        models = better[masks.group][:, None]
        return Trained(
            w=torch.where(models, other.w, self.w),
            u=torch.where(models, other.u, self.u),
            judged=torch.where(better[masks.fold], other.judged, self.judged),
            scores=torch.where(better, other.scores, self.scores),
            step=other.step if bool(better[-1]) else self.step,
        )


@define(eq=False)
class Adam:
    """Adam's moments of the lower steps of all replicas, ``[R, d]`` or ``[d]``."""

    rate: float
    first: Tensor
    second: Tensor
    count: int = 0

    @classmethod
    def of(cls, w: Tensor, rate: float) -> Adam:
        return cls(rate, torch.zeros_like(w), torch.zeros_like(w))

    def observe(self, slope: Tensor) -> None:
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * slope
        self.second = 0.99 * self.second + 0.01 * slope.square()

    @property
    def scale(self) -> Tensor:
        """Return the diagonal P of a step P·m."""
        return self.rate / ((self.second / (1 - 0.99**self.count)).sqrt() + 1e-6)

    def move(self, w: Tensor, rates: Tensor | float = 1.0) -> Tensor:
        return (w - rates * self.scale * self.first / (1 - 0.9**self.count)).detach()


@define(eq=False)
class Mover:
    """Adam for u ``[R, m]`` with a pull to ``centre``, scaled by the first hypergradient."""

    space: Space
    centre: Tensor
    size: Tensor | None = None
    adam: Adam | None = None

    def move(self, u: Tensor, slope: Tensor) -> Tensor:
        """Return the next u for a hypergradient."""
        slope = torch.nan_to_num(slope.detach(), 0.0, 0.0, 0.0)
        if self.size is None or self.adam is None:
            self.size = slope.square().mean().sqrt()
            self.adam = Adam.of(slope, OUTER_RATE)
        adam = self.adam
        adam.observe(slope + PULL * self.size * (u - self.centre))
        floor = 0.1 * adam.second.mean(1, keepdim=True).sqrt() + 1e-12
        scale = (adam.second / (1 - 0.99**adam.count)).sqrt() + floor
        step = adam.first / (1 - 0.9**adam.count) / scale
        space = self.space
        return (u - OUTER_RATE * space.unit * step).clamp(space.low, space.high)

    def state(self) -> Stage:
        return {"size": self.size, **({} if self.adam is None else attrs.asdict(self.adam))}

    def restore(self, state: Stage) -> None:
        """Continue from a stored state."""
        self.size = state["size"]
        if self.size is not None:
            self.adam = Adam(**{name: state[name] for name in attrs.fields_dict(Adam)})


@define(eq=False)
class Online(Engine):
    """Baselines and learned candidates of a problem; see the module.

    Attributes
    ----------
    lowest
        The lowest held-out loss of a baseline so far.
    best_step, best_cost
        The steps of the best start up to its checkpoint, and the share of the budget that these
        steps have used.
    """

    batch_size: int | None = None
    key: Key = Key(0)
    fastest: float = field(default=0.0, init=False)
    rate: float = field(default=0.0, init=False)
    left: int = field(default=0, init=False)
    lowest: float = field(default=math.inf, init=False)
    best_step: int = field(default=LONGEST, init=False)
    best_cost: float = field(default=0.0, init=False)

    # --- the order of the stages

    def candidates(self, stages: Stages) -> Iterator[Candidate]:
        """Yield the baselines, the model of the restarts, then one with fixed learned values."""
        self.fastest = float(stages.run("rate", self.fastest_rate)["rate"])
        yield from self._starts(stages)
        yield from self._shared_levels(stages)
        yield from self._filters(stages)
        if self.problem.has_validation:
            fit = self.problem.masks.outer
            yield self._train(stages, "validation rows only", self.problem.space.start, fit)[0]
        yield from self._learn(stages)

    def _starts(self, stages: Stages) -> Iterator[Candidate]:
        """Train with the values at the start, at two lower rates."""
        problem = self.problem
        masks, space = problem.masks, problem.space
        self.left = len(SHARES) + problem.has_validation
        self.left += 2 * bool(space.is_penalty.any()) + space.is_per_row
        trials: list[tuple[float, float, Stage]] = []
        for share in SHARES:
            self.rate = share * self.fastest
            name = f"start, rate {self.rate:.2g}"
            found, stage = self._train(stages, name, space.start, masks.fit + masks.outer)
            trials.append((found.loss, self.rate, stage))
            yield found
        _, self.rate, best = min(trials, key=lambda trial: trial[0])
        self.best_step = best["step"]
        self.best_cost = best["cost"]

    def _shared_levels(self, stages: Stages) -> Iterator[Candidate]:
        """Shift all penalties up while the held-out loss falls; learning starts at the best."""
        masks, space = self.problem.masks, self.problem.space
        for shift in SHIFTS if bool(space.is_penalty.any()) else ():
            if self.meter.share >= BASELINE_SHARE:
                return
            u = torch.where(space.is_penalty, space.start + shift, space.start)
            u = u.clamp(space.low, space.high)
            before = self.lowest
            name = f"shared level, {shift:+d} in log λ"
            found, _ = self._train(stages, name, u, masks.fit + masks.outer)
            yield found
            if found.loss >= before:
                return
            self.centre = u

    def _filters(self, stages: Stages) -> Iterator[Candidate]:
        """Train without the rows that an out-of-fold model finds improbable."""
        problem = self.problem
        masks, space = problem.masks, problem.space
        if not space.is_per_row or self.meter.share >= BASELINE_SHARE:
            return
        keep = stages.run("filter", self.filter_rows)["keep"]
        u = filter_start(problem, self.centre, keep)
        before = self.lowest
        fit = masks.fit * row_mask(problem, keep) + masks.outer
        found, _ = self._train(stages, "out-of-fold filter", space.start, fit)
        yield evolve(found, u=u[-1])
        if found.loss < before:
            self.centre = u

    def _learn(self, stages: Stages) -> Iterator[Candidate]:
        """Train with moving u, in restarts, until the share of learning is spent; then fix u."""
        problem = self.problem
        masks = problem.masks
        u = self.centre.expand(len(masks.group), -1)
        mover = Mover(problem.space, u)
        limit = min(LAST_SHARE, max(LEARNING_SHARE, self.meter.share + 0.3))
        best: Trained | None = None
        number = 0
        while best is None or self.meter.share < limit:
            stage = stages.run(f"restart {number}", partial(self.restart, number, u, mover, limit))
            mover.restore(stage)
            u = stage["last"]
            found = Trained(**{name: stage[name] for name in attrs.fields_dict(Trained)})
            best = found if best is None else best.merge(found, masks)
            number += 1
        yield _candidate("learned during training", attrs.asdict(best), False)
        if self.meter.share < 1:
            stage = stages.run("learned, fixed", partial(self.fixed, best.u))
            yield _candidate("learned, fixed", stage, False)

    def _train(self, stages: Stages, name: str, u: Tensor, fit: Tensor) -> tuple[Candidate, Stage]:
        """Train a baseline; return it, and the result of its stage."""
        stage = stages.run(name, partial(self.baseline, name, u, fit))
        self.left -= 1
        found = _candidate(name, stage, True)
        self.lowest = min(self.lowest, found.loss)
        return found, stage

    # --- the stages

    def fastest_rate(self) -> Stage:
        """Return the lower rate that lowers the training loss most in a few steps."""
        problem = self.problem
        fit = problem.masks.fit[-1:]
        mask, batch = self.batches(fit, self.key.fold("trial"), 1)(0)
        u = problem.space.start[None]
        losses: dict[float, float] = {}
        for rate in RATES:
            w = problem.w0[None]
            adam = Adam.of(w, rate)
            for _ in range(TRIAL_STEPS):
                adam.observe(problem.slope(w, u, mask, batch))
                w = adam.move(w)
                self.meter.call(1)
            with torch.no_grad():
                loss = float(problem.train_loss(w[0], u[0], mask[0], batch))
            losses[rate] = loss if math.isfinite(loss) else math.inf
        return {"rate": min(losses, key=losses.__getitem__)}

    def baseline(self, name: str, u: Tensor, fit: Tensor) -> Stage:
        """Train with fixed u, within an equal part of the remaining share of the baselines."""
        now = self.meter.share
        limit = now + max(0.02, (BASELINE_SHARE - now) / max(1, self.left))
        count = len(self.problem.masks.group)
        each = u.expand(count, -1)
        trained, _ = self.train(each, fit, self.key.fold(name), limit, is_baseline=True)
        useful = trained.step / (trained.step + STALLED * CHECK)
        cost = useful * (self.meter.share - now)
        found = {"w": trained.w, "u": u, "judged": trained.judged}
        return {**found, "step": trained.step, "cost": cost}

    def restart(self, number: int, u: Tensor, mover: Mover, limit: float) -> Stage:
        """Train from the initial parameters, with moving u."""
        masks = self.problem.masks
        key = self.key.fold("restart", number)
        trained, last = self.train(u, masks.fit, key, limit, masks.outer, mover)
        return {**attrs.asdict(trained), "last": last, **mover.state()}

    def fixed(self, u: Tensor) -> Stage:
        """Train with the learned u of each replica, also on the validation rows."""
        masks = self.problem.masks
        limit = max(1.0, self.meter.share + 0.02)
        key = self.key.fold("learned, fixed")
        trained, _ = self.train(u, masks.fit + masks.outer, key, limit)
        return {"w": trained.w, "u": u, "judged": trained.judged}

    def filter_rows(self) -> Stage:
        """Return which training rows the out-of-fold filter of each replica keeps.

        K models per replica train as long as the best start. If they would exceed the share of the
        baselines, all replicas share one filter, because short training makes a filter useless.
        """
        cost = self.problem.masks.folds * self.best_cost
        fits = self.meter.share + cost <= BASELINE_SHARE
        key = self.key.fold("filter")
        return {"keep": kept_rows(self.problem, key, self.models_at_start, each=fits)}

    def models_at_start(self, fit: Tensor, limit: float = BASELINE_SHARE) -> Tensor:
        """Train one model per mask for the steps of the best start; return w ``[R, d]``."""
        problem = self.problem
        w = problem.w0.expand(len(fit), -1)
        u = problem.space.start.expand(len(fit), -1)
        adam = Adam.of(w, self.rate)
        rows_at = self.batches(fit, self.key.fold("filter", "rows"), self.best_step)
        for step in range(self.best_step):
            adam.observe(problem.slope(w, u, *rows_at(step)))
            w = adam.move(w)
            self.meter.count()
            self.meter.call(len(w))
            if self.meter.share >= limit:
                break
        return w

    # --- one training

    def train(
        self,
        u: Tensor,
        fit: Tensor,
        key: Key,
        limit: float,
        learn: Tensor | None = None,
        mover: Mover | None = None,
        *,
        is_baseline: bool = False,
    ) -> tuple[Trained, Tensor]:
        """Train all replicas with early stopping; return the best checkpoint and the last u.

        ``fit`` are the masks of the rows, ``limit`` is the share of the budget at the end. With
        ``learn``, the masks of the rows for hypergradients, ``mover`` changes u on the way.
        """
        problem = self.problem
        w = problem.initial(u)
        has_rates = problem.space.uses("rate")
        rates = partial(problem.space.rates, size=w.shape[1])
        unrolled = UNROLLED if has_rates or problem.space.uses("anchor") else 1
        every = max(EVERY, unrolled)
        adam = Adam.of(w, self.rate)
        lower = self.batches(fit, key.fold("lower"), LONGEST)
        upper = None if learn is None else self.batches(learn, key, LONGEST)
        best: Trained | None = None
        stalled = 0
        judging = 0.0
        marks = [self.meter.share]
        for step in range(1, LONGEST + 1):
            adam.observe(problem.slope(w, u, *lower(step - 1)))
            if mover is not None and upper is not None and step > 5 and step % every == 0:
                last = min(step - 1 + unrolled, LONGEST)
                coming = [lower(number) for number in range(step - 1, last)]
                leaf = u.detach().requires_grad_()
                losses = self.ahead(leaf, w, adam.scale, coming, upper(step - 1))
                u = mover.move(u, slopes(losses.sum(), [leaf])[0])
                self.meter.call((len(coming) + 1) * len(w))
            w = adam.move(w, vmap(rates)(u) if has_rates else 1.0)
            self.meter.count()
            self.meter.call(len(w))
            marks.append(self.meter.share)
            following = marks[-1] - marks[-every - 1 :][0] + judging
            spent = marks[-1] + following > limit
            if step % CHECK and not spent:
                continue
            judged = problem.held_out(w)
            self.meter.call(len(w))
            judging = self.meter.share - marks[-1]
            each = scores(judged, problem.masks.fold)
            mean = float(each[-1])
            stalled = 0 if best is None or mean < float(best.scores[-1]) else stalled + 1
            found = Trained(w=w, u=u, judged=judged, scores=each, step=step)
            best = found if best is None else best.merge(found, problem.masks)
            is_behind = is_baseline and step >= 100 and mean > BEHIND * self.lowest
            if stalled >= STALLED or spent or is_behind or not math.isfinite(mean):
                break
        assert best is not None
        return best, u

    def ahead(
        self,
        u: Tensor,
        w: Tensor,
        scale: Tensor,
        coming: Sequence[tuple[Tensor, Batch]],
        upper: tuple[Tensor, Batch],
    ) -> Tensor:
        """Return the upper losses after one preconditioned lower step per batch, ``[R]``.

        ``coming`` and ``upper`` are masks and their rows, as :meth:`batches` returns them.
        """
        problem = self.problem
        if problem.space.uses("rate"):
            scale = scale * vmap(partial(problem.space.rates, size=w.shape[1]))(u)
        for masks, batch in coming:
            w = w - scale * problem.slope(w, u, masks, batch)
        masks, batch = upper
        losses = vmap(problem.outer_loss, in_dims=(0, 0, None))(w, masks, batch)
        return losses / masks.sum(1).clamp_min(1.0)

    @property
    def uses_all_rows(self) -> bool:
        """Whether each lower step uses all rows."""
        return self.problem.total <= (self.batch_size or WHOLE)

    def batches(self, masks: Tensor, key: Key, steps: int) -> Callable[[int], tuple[Tensor, Batch]]:
        """Return a function of the step: masks and rows of its batch.

        Rows are drawn from the rows that any replica uses.
        """
        problem = self.problem
        rows = problem.used(masks)
        if self.uses_all_rows:
            everything = (masks[:, rows], problem.batch(rows))
            return lambda step: everything
        count = min(self.batch_size or 256, len(rows))
        numbers = rows[key.indices(len(rows), count, steps, rows.device)]
        return lambda step: (masks[:, numbers[step]], problem.batch(numbers[step]))

    def final(self, candidate: Candidate) -> Tensor:
        """Return the parameters of the selected candidate, ``[d]``."""
        assert candidate.w is not None
        return candidate.w


def _candidate(name: str, stage: Stage, is_baseline: bool) -> Candidate:
    u = stage["u"]
    return Candidate(
        name=name,
        is_baseline=is_baseline,
        judged=stage["judged"],
        u=u if u.dim() == 1 else u[-1],
        w=stage["w"][-1],
    )
