"""N runs of an ordinary optimiser from one start: the practical candidate generator of HG-MS.

The file reads from top to bottom: the differences between branches, the generator, and the forward
runs of all branches in efficient groups. ``steps.py`` contains a lower step, ``replay.py`` the
repeated run as a function of θ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, final

import torch
from attrs import Attribute, field
from torch import Tensor

from hgms.config import lowering
from hgms.generators.branches.program import advance_compiled, kept_table
from hgms.generators.branches.replay import KeepPath, Path, check_path, replays_of
from hgms.generators.branches.steps import Course
from hgms.generators.branches.steps_in_program import Form, advance_joined
from hgms.generators.branches.torch_branches import join_memories
from hgms.optim import SGD, LowerOptimizer
from hgms.optim.rule import Rule
from hgms.optim.torch_rule import TorchRule
from hgms_core import (
    Candidates,
    ConfigError,
    Cost,
    Data,
    Key,
    LastStep,
    Mode,
    Problem,
    State,
    Tree,
    component,
    detach,
    groups,
    repeat,
)
from hgms_core.capabilities import Capabilities, Fixed, JoinsStep, ProposesSome
from hgms_core.validators import not_negative, optional_positive, positive


def check_spread(
    instance: object, attribute: Attribute[Any], value: tuple[float, float] | None
) -> None:
    """Require two factors, 0 < low ≤ high."""
    if value is not None and not 0 < value[0] <= value[1]:
        raise ConfigError(
            "wrong-value",
            f"{attribute.name}={value} must be two positive factors (low, high) with low <= high",
            place=(attribute.name,),
        )


@final
@component
class Diversity:
    """The differences between branches. Branch 0 is always free of noise.

    Parameters
    ----------
    batches
        ``independent`` batches per branch, or ``shared`` batches.
    noise
        Standard deviation of the Gaussian added to the start, as a multiple of ``noise_scale``: 1
        (``absolute``), or the root mean square of each leaf (``relative``).
    whole_batch_noise
        Relative noise that replaces ``noise = 0`` if the branches would be equal: no spread, and
        batches of all rows. In a leaf that is zero, the noise is absolute. 0: the branches stay
        equal in that case.
    lr_spread, decay_spread
        (low, high) factors on learning rate and weight decay, log-spaced over the branches.
    """

    batches: Literal["independent", "shared"] = "independent"
    noise: float = field(default=0.0, validator=not_negative)
    noise_scale: Literal["absolute", "relative"] = "absolute"
    whole_batch_noise: float = field(default=0.1, validator=not_negative)
    lr_spread: tuple[float, float] | None = field(default=None, validator=check_spread)
    decay_spread: tuple[float, float] | None = field(default=None, validator=check_spread)

    def rates(self, count: int) -> list[float]:
        """Return the factor of each branch on the learning rate."""
        return factors(self.lr_spread, count)

    def decays(self, count: int) -> list[float]:
        """Return the factor of each branch on the weight decay."""
        return factors(self.decay_spread, count)

    def are_equal(self, whole: bool, decay: float) -> bool:
        """Return whether branches without noise would be equal.

        ``whole`` is whether a batch contains all rows, and ``decay`` is the weight decay.
        """
        spread = self.lr_spread is not None or (self.decay_spread is not None and decay > 0)
        return whole and not self.noise and not spread

    def noise_of(self, equal: bool) -> float:
        """Return the standard deviation of the noise."""
        return self.whole_batch_noise if equal else self.noise

    def add_noise_(
        self, x: Tree, members: Sequence[int], key: Key, whole: bool, decay: float
    ) -> None:
        """Add Gaussian noise to every row except branch 0.

        Each branch uses a separate key. The arguments ``whole`` and ``decay`` are those of
        :meth:`are_equal`.
        """
        equal = self.are_equal(whole, decay)
        noise = self.noise_of(equal)
        relative = equal or self.noise_scale == "relative"
        device = next(iter(x.values())).device
        for row, member in enumerate(members):
            if not noise or member == 0:
                continue
            generator = key.fold("noise", member).generator(device)
            for leaf in x.values():
                scale: float | Tensor = 1.0
                if relative:
                    scale = leaf[row].square().mean().sqrt()
                    scale = torch.where(scale > 0, scale, float(equal))
                drawn = torch.randn(
                    leaf[row].shape, generator=generator, dtype=leaf.dtype, device=leaf.device
                )
                leaf[row] += noise * scale * drawn


def factors(spread: tuple[float, float] | None, count: int) -> list[float]:
    """Return one factor per branch, evenly spaced in the logarithm.

    Examples
    --------
    >>> factors((0.25, 4.0), 3)
    [0.25, 1.0, 4.0]
    """
    if spread is None or count == 1:
        return [1.0] * count
    low, high = spread
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


@final
@component
class Branches:
    """N runs of an optimiser on the lower loss, K steps each, from a common or a separate start.

    Branch i has separate batches B and a step size η_i. For SGD (AdamW has its usual form with
    decoupled decay)::

        y ← y_start + noise_i,    y ← y − η_i (∇_y g(θ, y; B) clipped + wd_i·y)      K times

    Branch 0 is always free of noise. The candidates differ by the order of their batches, noise at
    the start, and factors on learning rate and weight decay. Use when the lower level is a network
    that is trained by steps, not solved. Avoid when a temperature matters (``ula``).

    Parameters
    ----------
    count
        N.
    steps
        K, lower updates of each branch in one outer step.
    optimizer
        :class:`hgms.optim.SGD`, ``AdamW``, ``Torch``, or ``Clip`` of one of these, with the
        learning rate and its schedule. In a file the name, or a table such as
        ``{ name = "adamw", lr = 0.02 }``.
    batch_size
        Examples per step; None uses all.
    diversity
        The differences between branches (:class:`Diversity`): batches, noise, factors on learning
        rate and weight decay.
    carry_rule
        Start of the next outer step: the ``selected`` branch for all, the noise-free ``base``
        (branch 0) for all, or each branch's end (``per-branch``). :class:`Restarts` adds restarts
        from a newly drawn lower state.
    mode, chunk
        Stacked or looped evaluation, and the number of branches stacked at a time. ``auto`` selects
        by size, and loops if torch.func.vmap cannot evaluate the loss.
    keep_path
        With one branch, keep its run while proposing, so that ``unrolled`` does not replay it:
        saves K lower gradients per outer step. ``graph`` keeps the graphs of its steps; ``states``
        keeps its states, for a backward pass in mixed mode (see ``unrolled``). With several
        branches, the selected branch is still replayed, so the memory is the memory of one branch.

    Notes
    -----
    Cost: N·K lower gradients. Memory: 4N lower states with AdamW, 2N with SGD, activations of
    ``chunk`` branches, kept graphs.

    Source: HG-MS paper, section "HG-MS" (finite-budget branch generator) and the experiment
    appendix.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.full((1,), 4.0)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> branches = Branches(count=3, steps=50, diversity=Diversity(noise=1.0))
    >>> candidates = branches.propose(
    ...     problem, problem.theta0, branches.init(problem, Key(0)), Key(0)
    ... )
    >>> candidates.x["x"].shape, bool((candidates.x["x"].abs() < 1e-3).all())
    (torch.Size([3, 1]), True)
    """

    name: ClassVar[str] = "branches"
    capabilities: ClassVar[Capabilities] = frozenset({JoinsStep, ProposesSome})
    count: int = field(default=4, validator=positive)
    steps: int = field(default=20, validator=positive)
    optimizer: LowerOptimizer = field(factory=SGD)
    batch_size: int | None = field(default=None, validator=optional_positive)
    diversity: Diversity = field(factory=Diversity)
    carry_rule: Literal["selected", "base", "per-branch"] = "selected"
    mode: Mode = "auto"
    chunk: int | None = field(default=None, validator=optional_positive)
    keep_path: KeepPath = "none"
    memory_hints = lowering(same=["chunk"], other=["batch_size", "count"])

    def __attrs_post_init__(self) -> None:
        check_path(self.keep_path, self.optimizer)

    def init(self, problem: Problem, key: Key) -> State:
        x = repeat(problem.x0, self.count if self.carry_rule == "per-branch" else 1)
        return {
            "x": x,
            "moments": self.optimizer.rule(problem.x0).no_moments(x),
            "optimizer_steps": 0,
            "lower_steps": 0,
        }

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
        """Return the candidates with the numbers ``members``.

        They equal the same candidates in a full proposal, because keys are addresses. Replays use
        the numbers of the full proposal.
        """

        def path(index: Tensor, theta: Tree) -> Path:
            # Keys are created on the CPU, so the branch number must be on the CPU too. Read it from
            # the device only if there are several branches: reading waits for the GPU.
            return self._path(problem, start, key, 0 if self.count == 1 else int(index))

        def last_step(index: Tensor) -> LastStep:
            self.optimizer.rule(problem.x0).check_linear()
            return path(index, theta).last_step(theta)

        def next_step(index: Tensor, x: Tree, key: Key) -> LastStep:
            self.optimizer.rule(problem.x0).check_linear()
            rate = self._rates(problem, start)[-1][
                0 if self.diversity.lr_spread is None else int(index)
            ]
            batch, rows = problem.lower_data.sample(key, self.batch_size)
            return LastStep(x=x, batch=batch, rows=rows, rate=rate)

        if self.keep_path != "none" and self.count == 1:
            whole = self._path(problem, start, key, 0)
            x, moments, losses, add_kept = whole.keep(theta, mixed=self.keep_path == "states")
            replay, mixed = replays_of(path, self.optimizer, add_kept)
        else:
            x, moments, losses = self._forward(problem, detach(theta), start, key, members)
            replay, mixed = replays_of(path, self.optimizer)
        calls = len(members) * self.steps
        rows = calls * problem.lower_data.count(self.batch_size)
        cost = Cost(lower_gradients=calls, rows=rows)
        return Candidates(
            x=x,
            aux=moments,
            losses=losses,
            cost=cost,
            last_step=last_step,
            next_step=next_step,
            replay=replay,
            replay_mixed=mixed,
        )

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        x = candidates.x
        moments = candidates.aux
        if self.carry_rule != "per-branch":
            row = (
                index.reshape(1)
                if self.carry_rule == "selected"
                else torch.zeros_like(index).reshape(1)
            )
            x, moments = (
                {name: leaf.index_select(0, row) for name, leaf in tree.items()}
                for tree in (x, moments)
            )
        fresh = self.optimizer.moments == "fresh"
        return {
            "x": x,
            "moments": self.optimizer.rule(problem.x0).no_moments(x) if fresh else moments,
            "optimizer_steps": 0 if fresh else start["optimizer_steps"] + self.steps,
            "lower_steps": start["lower_steps"] + self.steps,
        }

    def _forward(
        self, problem: Problem, theta: Tree, start: State, key: Key, members: Sequence[int]
    ) -> tuple[Tree, Tree, Tensor]:
        """Run the branches ``members`` without a graph; return (ends, moments, last losses)."""
        whole = self._course(problem, start, key, members)
        x = whole.x
        index = whole.index
        rule = whole.rule
        own = self._own_batches(index)
        remember = isinstance(rule, TorchRule) and self.optimizer.moments == "carry"
        losses = next(iter(x.values())).new_empty(len(members))
        memories: list[Tree] = []

        def trial() -> tuple[Tree, Tree]:
            return theta, problem.lower_data.batch(None if index is None else index[..., 0, :])

        for group in groups(
            problem.g,
            x,
            own_batch=own,
            rows=whole.rows,
            mode=self.mode,
            chunk=self.chunk,
            trial=trial,
        ):
            course = whole.part(group.part, group.loss, own)
            losses[group.part], memory = advance(course, theta, self.name, remember)
            memories += memory
        return x, join_memories(memories) if remember else whole.moments, losses

    def operands(
        self, problem: Problem, start: State, key: Key, progress: float
    ) -> dict[str, Any] | Fixed | None:
        rule = self.optimizer.rule(problem.x0, start["optimizer_steps"])
        kept = self.count == 1 and self.keep_path != "none"
        if isinstance(rule, TorchRule) or kept:
            return None
        data = problem.lower_data
        decay = self.optimizer.decay
        equal = self.diversity.are_equal(self._is_whole(data), decay)
        # Without noise, the program computes the starts.
        noisy = self.count > 1 and self.diversity.noise_of(equal) > 0
        x = self._begin(problem, start, key, range(self.count))[0] if noisy else None
        index = self._draw(data, key, range(self.count))
        decays = [decay * factor for factor in self.diversity.decays(self.count)]
        rates = self._rates(problem, start)
        like = next(iter(start["x"].values()))
        numbers = kept_table(problem, rule, rates, decays, like)
        # The program gathers rows of a table: a copy of all batches would take longer.
        table = data.whole or data.batch(index)
        rows = index if data.whole else None
        operands = {"x": x, "table": table, "rows": rows, "numbers": numbers}
        constant = self.optimizer.schedule is None and rule.optimizer == "sgd"
        return Fixed(operands) if constant and x is None and index is None else operands

    def compute(
        self, problem: Problem, theta: Tree, start: State, operands: dict[str, Any]
    ) -> Candidates:
        data = problem.lower_data
        rule = self.optimizer.rule(problem.x0)
        assert not isinstance(rule, TorchRule)
        drawn = self.batch_size is not None and self.batch_size < data.size
        own = drawn and self.diversity.batches == "independent"
        rows = data.count(self.batch_size)
        form = Form(
            rule=rule,
            steps=self.steps,
            decayed=self.optimizer.decay > 0,
            axis=int(own) if drawn else None,
            own=own,
            rows=rows,
            mode=self.mode,
            chunk=self.chunk,
        )
        x, moments = starts(start, self.count, range(self.count))
        x = operands["x"] or x
        x, moments, losses = advance_joined(form, problem, theta, x, moments, operands)
        calls = self.count * self.steps
        cost = Cost(lower_gradients=calls, rows=calls * rows)
        return Candidates(x=x, aux=moments, losses=losses, cost=cost)

    def _path(self, problem: Problem, start: State, key: Key, member: int) -> Path:
        whole = self._course(problem, start, key, [member])
        return whole.part(0, problem.g, self._own_batches(whole.index))

    def _course(self, problem: Problem, start: State, key: Key, members: Sequence[int]) -> Path:
        """Return the run of the branches ``members``, stacked."""
        x, moments, index = self._begin(problem, start, key, members)
        rates = self._rates(problem, start)
        decays = self.diversity.decays(self.count)
        return Path(
            loss=problem.g,
            rule=self.optimizer.rule(problem.x0, start["optimizer_steps"]),
            stacked=True,
            problem=problem,
            x=x,
            moments=moments,
            index=index,
            rates=[[step[member] for member in members] for step in rates],
            decays=[self.optimizer.decay * decays[member] for member in members],
            rows=problem.lower_data.count(self.batch_size),
        )

    def _own_batches(self, index: Tensor | None) -> bool:
        """Return whether ``index`` has a member axis."""
        return self.diversity.batches == "independent" and index is not None

    def _begin(
        self, problem: Problem, start: State, key: Key, members: Sequence[int]
    ) -> tuple[Tree, Tree, Tensor | None]:
        """Return starts, moments and row numbers of the branches ``members``.

        The result depends only on the arguments, so a branch can be replayed.
        """
        data = problem.lower_data
        x, moments = starts(start, self.count, members)
        whole = self._is_whole(data)
        self.diversity.add_noise_(x, members, key, whole, self.optimizer.decay)
        return x, moments, self._draw(data, key, members)

    def _is_whole(self, data: Data) -> bool:
        """Return whether a batch contains all rows."""
        return self.batch_size is None or self.batch_size >= data.size

    def _draw(self, data: Data, key: Key, members: Sequence[int]) -> Tensor | None:
        """Return the row numbers of the branches ``members``; None if a batch has all rows."""
        if self._is_whole(data):
            return None
        key = key.fold("batches")
        if self.diversity.batches == "shared":
            return data.draw(key, self.batch_size, self.steps)
        drawn = [data.draw(key.fold(member), self.batch_size, self.steps) for member in members]
        return torch.stack([numbers for numbers in drawn if numbers is not None])

    def _rates(self, problem: Problem, start: State) -> list[list[float]]:
        return self.optimizer.rates(problem.x0, self.diversity.rates(self.count), self.steps, start)


def starts(start: State, count: int, members: Sequence[int]) -> tuple[Tree, Tree]:
    """Return separate copies of x and of the moments for the ``members`` of ``count`` branches."""
    carried = next(iter(start["x"].values())).shape[0]
    if carried not in (1, count):
        raise ConfigError(
            "wrong-length",
            f"the carried state has {carried} branches, but count={count}",
            place=("generator", "count"),
        )

    def own(tree: Tree) -> Tree:
        # Index with views of rows: a list of row numbers would be copied to the GPU and force a
        # wait.
        if carried == 1:
            return repeat({name: leaf[0] for name, leaf in tree.items()}, len(members))
        return {
            name: torch.stack([leaf[member] for member in members]) for name, leaf in tree.items()
        }

    return own(start["x"]), own(start["moments"])


def advance(course: Course, theta: Tree, name: str, remember: bool) -> tuple[Tensor, list[Tree]]:
    """Run all steps of a group in place; see :meth:`Course.advance`."""
    if course.problem.compiler is not None and isinstance(course.rule, Rule):
        return advance_compiled(name, course, course.rule, theta), []
    return course.advance(theta, 0, len(course.rates), remember)
