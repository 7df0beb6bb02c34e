"""A bilevel problem: two losses, their data, and where to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, cast

import torch
from attrs import Factory, field, frozen
from torch import Tensor

from hgms_core.display import as_html, as_text, changed, sizes
from hgms_core.errors import DRAWS, ConfigError
from hgms_core.seeding import Key, global_states
from hgms_core.shapes import Nested, Shape, check_floating
from hgms_core.trees import Tree, detach, require_grad

Batch = Tree
"""Rows of a data set by the names of their columns, each ``[B, …]``."""
Loss = Callable[[Tree, Tree, Batch], Tensor]
"""``loss(theta, x, batch) -> scalar``: a pure function of tensors, so that it can be differentiated, stacked and replayed.

.. versionadded:: 0.2"""


@frozen
class Data:
    """The rows a loss is computed on.

    ``rows(index)`` is the batch of the rows numbered by an integer tensor of any shape, whose axes lead every leaf of the
    result; ``whole`` the batch of all ``size`` rows, left empty where it is better made when it is asked for (by
    ``batch(None)``, from all numbers). ``Data.none()`` is for a loss without data.

    ``strata`` are the names and sizes of consecutive groups of rows (the sources of a mixture). A batch then holds equally many
    rows of each, up to one; which groups get the odd rows is drawn anew for each batch. A group's rows are drawn by its name,
    not by where it stands, and within one call none comes twice before all of the group have come.

    >>> table = torch.arange(10.0)
    >>> data = Data(size=10, whole={"t": table}, rows=lambda index: {"t": table[index]})
    >>> data.batch(data.draw(Key(0), batch_size=4, steps=3))["t"].shape
    torch.Size([3, 4])
    """

    size: int
    whole: Batch = Factory(dict)
    rows: Callable[[Tensor], Batch] = field(default=lambda index: {}, eq=False)
    device: torch.device = torch.device("cpu")
    strata: tuple[tuple[str, int], ...] | None = None

    __repr__, _repr_html_ = as_text, as_html

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "rows", f"{self.size:,}" + (f" in {len(self.strata)} groups" if self.strata else "")
        columns = [f"{name} {str(leaf.dtype)[6:]} {[*leaf.shape[1:]] or ''}".strip() for name, leaf in self.whole.items()]
        yield "columns", ", ".join(columns[:9] + ["…"] * (len(columns) > 9)) or "those that a batch has"

    @classmethod
    def none(cls) -> Data:
        return cls(0)

    @classmethod
    def of(cls, table: Mapping[str, Tensor]) -> Data:
        """Rows of tensors that share their first axis; the batch also holds each row's number as ``index``.

        Errors: ConfigError where they do not share it, where something is no tensor, and where there is none."""
        for name, leaf in table.items():
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                shown = "a tensor without rows" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise ConfigError(f"a table's columns are tensors whose first axis counts the rows, and {name!r} is {shown}")
        counts = {name: leaf.shape[0] for name, leaf in table.items()}
        if len(set(counts.values())) != 1:
            known = ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
            hint = "" if counts else "\n  a loss without data takes `Data.none()`"
            raise ConfigError(f"a table's columns must have the same number of rows: {known}{hint}")
        first = next(iter(table.values()))
        size, device = first.shape[0], first.device
        whole = {**table, "index": torch.arange(size, device=device)}

        def rows(index: Tensor) -> Batch:
            flat = index.reshape(-1)  # index_select copies whole rows, three times as fast as table[index]
            return {name: leaf.index_select(0, flat).reshape(index.shape + leaf.shape[1:]) for name, leaf in whole.items()}

        return cls(size, whole, rows, device)

    def draw(self, key: Key, batch_size: int | None, steps: int) -> Tensor | None:
        """What ``rows`` takes, ``[steps, batch_size]``, or None where each step sees the whole data."""
        if batch_size is None or batch_size >= self.size:
            return None
        return self.numbers(key, batch_size, steps)

    def numbers(self, key: Key, batch_size: int, steps: int) -> Tensor:
        """Numbers of rows, ``[steps, batch_size]``, also where a batch is larger than the data."""
        if self.strata is None:
            return key.indices(self.size, batch_size, steps, self.device)
        return self._stratified(key, batch_size, steps, self.strata).to(self.device, non_blocking=True)

    def _stratified(self, key: Key, batch_size: int, steps: int, strata: tuple[tuple[str, int], ...]) -> Tensor:
        even, odd = divmod(batch_size, len(strata))
        # By name, so that the same rows are drawn in whichever order the groups stand.
        names, generator = sorted(name for name, _ in strata), key.fold("odd").generator()
        luck = [torch.randperm(len(names), generator=generator)[:odd].tolist() if odd else [] for _ in range(steps)]
        chosen = [[names[i] for i in sorted(step)] for step in luck]
        own, first = {}, 0
        for name, size in strata:
            counts = [even + (name in step) for step in chosen]
            numbers = key.fold("stratum", name).indices(size, max(1, sum(counts)), 1)[0, : sum(counts)]
            own[name] = torch.split(first + numbers, counts)
            first += size
        batches = [
            [*(own[name][step][:even] for name, _ in strata), *(own[name][step][even:] for name in more)]
            for step, more in enumerate(chosen)
        ]
        return torch.stack([torch.cat(parts) for parts in batches])

    def batch(self, index: Tensor | None) -> Batch:
        if index is not None:
            return self.rows(index)
        return self.whole or (self.rows(torch.arange(self.size, device=self.device)) if self.size else {})

    def sample(self, key: Key, size: int | None) -> tuple[Batch, int]:
        """One batch of ``size`` rows drawn by ``key`` (all if None), and how many rows it counts (:meth:`count`).

        >>> batch, rows = Data.of({"t": torch.arange(10.0)}).sample(Key(0), 4)
        >>> batch["t"].shape, rows
        (torch.Size([4]), 4)

        .. versionadded:: 0.3"""
        numbers = self.draw(key, size, 1)
        return self.batch(None if numbers is None else numbers[0]), self.count(size)

    def count(self, batch_size: int | None) -> int:
        """Rows in a batch of the asked size; a loss without data counts one."""
        return max(1, self.size if batch_size is None else min(batch_size, self.size))


ROLES = ("differentiate", "select", "stop")
"""What validation data is used for: differentiating f, selecting a candidate, deciding when a state is the best so far."""


def roles(validation: Tree, shares: tuple[float, ...]) -> dict[str, Data]:
    """The validation rows each role sees: consecutive parts (views, not copies), or all of them for shares (1, 1, 1).

    >>> {role: data.size for role, data in roles({"a": torch.zeros(10)}, (0.6, 0.2, 0.2)).items()}
    {'differentiate': 6, 'select': 2, 'stop': 2}

    .. versionadded:: 0.2"""
    whole = Data.of(validation)
    if all(share == 1 for share in shares):
        return dict.fromkeys(ROLES, whole)
    ends = [round(whole.size * sum(shares[:i])) for i in range(len(ROLES) + 1)]
    parts = {}
    for role, first, end in zip(ROLES, ends, ends[1:], strict=False):
        if first == end:
            raise ConfigError(
                f"validation_split = {shares} leaves the role {role!r} none of the {whole.size} validation rows\n"
                "  raise its share or validation_size"
            )
        parts[role] = Data.of({name: leaf[first:end] for name, leaf in validation.items()})
    return parts


@frozen(kw_only=True, eq=False)
class Sources:
    """The named data sources whose losses g mixes::

        g(θ, x; batch) = Σ_s ω_s(θ) ℓ_s(x; batch),      ω(θ) on the simplex

    ``names`` are in the order of ω; ``weights(θ)`` gives ω, ``[S]``, and ``theta(weights by name)`` an upper variable with
    these weights. ``losses(x, batch)`` are the ℓ_s, ``[S]``, each an unbiased estimate of its source's mean loss whatever the
    batch holds of it; ``examples(x, batch)`` is the loss of each row, ``[B]``, without anything random. ``pooled(θ, x, batch)``
    is the loss of training on lower rows as they come, whatever their sources: each row counts as it does in its source's mean
    (by its tokens, where that is a mean over tokens), nothing is random, and θ does not matter. ``parts`` name the validation
    sets, where there are several. A batch has the leaf ``source``: each row's position in ``names`` (of validation rows, in
    ``parts``).

    .. versionadded:: 0.2"""

    names: tuple[str, ...]
    weights: Callable[[Tree], Tensor]
    theta: Callable[[Mapping[str, float]], Tree]
    losses: Callable[[Tree, Batch], Tensor]
    examples: Callable[[Tree, Batch], Tensor]
    pooled: Loss = Factory(lambda self: lambda theta, x, batch: self.examples(x, batch).mean(-1), takes_self=True)
    parts: tuple[str, ...] = ("validation",)


def _nested(value: Nested) -> Tree:
    return cast("Tree", value)  # for callers' type checkers; :class:`Problem` makes it flat


@frozen(kw_only=True, eq=False)
class Problem:
    """min_θ f(θ, x) over x ∈ argmin_x g(θ, x), ready to run.

    ``theta0`` and ``x0`` are where a run starts; ``g`` and ``f`` the lower and upper loss; ``lower_data`` what g is computed on
    and ``upper_data`` what f is computed on, by role, so that selection, differentiation and stopping can use different
    validation rows; ``project`` maps θ onto Θ; ``evaluate(theta, x)`` gives the metrics that are reported (outside the budget's
    clock, and outside every decision). ``fresh(key)`` draws another initial lower state; ``references`` names special upper
    variables, such as the weights that know which labels are right. ``sources`` is there where θ weights named data sources.
    ``counters()`` gives numbers that only grow, such as tokens processed: every step records by how much they grew.
    ``start(theta)`` is there where the lower level's start is learned: the state to start from, as a differentiable function of
    θ. ``precision`` is the type the losses are computed in where that is coarser than x's (adapters in float32 on a base in
    bfloat16): finite differences are then taken over a length that fits it. ``compiler`` makes programs of what components
    run often (None: none). ``kept`` is for what they keep as long as the problem; ``attrs.evolve`` leaves it behind.

    θ and x may be nested (:data:`Nested`); ``g``, ``f``, ``project``, ``evaluate``, ``fresh``, ``start`` and ``references``
    then take and give that shape. The attributes of the problem, which methods and ``attrs.evolve`` take, are flat all the
    same; ``shapes`` leads back (:meth:`restore`)."""

    theta0: Tree = field(converter=_nested)
    x0: Tree = field(converter=_nested)
    g: Loss
    f: Loss
    lower_data: Data = Factory(Data.none)
    upper_data: Mapping[str, Data] = Factory(lambda: {role: Data.none() for role in ROLES})
    project: Callable[[Tree], Tree] = lambda theta: theta
    evaluate: Callable[[Tree, Tree], Mapping[str, float]] = lambda theta, x: {}
    fresh: Callable[[Key], Tree] | None = None
    references: Mapping[str, Tree] = Factory(dict)
    sources: Sources | None = None
    counters: Callable[[], Mapping[str, int]] | None = None
    start: Callable[[Tree], Tree] | None = None
    precision: torch.dtype | None = None
    compiler: Any = None
    shapes: tuple[Shape, Shape] | None = field(default=None, repr=False)
    kept: dict[Any, Any] = field(init=False, factory=dict, repr=False)

    __repr__, _repr_html_ = as_text, as_html

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield from (("θ", sizes(self.theta0)), ("x", sizes(self.x0)), ("lower rows", f"{self.lower_data.size:,}"))
        yield "upper rows", ", ".join(f"{role} {data.size:,}" for role, data in self.upper_data.items())
        always = ("theta0", "x0", "g", "f", "lower_data", "upper_data")
        more = [name for name, differs in changed(self).items() if differs and name not in always]
        yield "also has", ", ".join(more) or "nothing"

    def __attrs_post_init__(self) -> None:
        for name, value in self._changed().items():
            object.__setattr__(self, name, value)
        check_floating("'theta0'", self.theta0)
        check_floating("'x0'", self.x0)

    def _changed(self) -> dict[str, Any]:
        """What has to be another where θ or x is no flat dictionary: the tree, and the functions that a person wrote for it."""
        if self.shapes is not None:  # of attrs.evolve: all is flat already
            return {}
        theta, theta0 = Shape.of(self.theta0, "'theta0'", "theta")
        x, x0 = Shape.of(self.x0, "'x0'", "x")
        if theta.flat and x.flat:
            return {}
        if self.sources is not None:
            raise ConfigError("a problem with `sources` takes flat dictionaries of tensors for θ and x")
        g, f, project, evaluate, fresh, start = self.g, self.f, self.project, self.evaluate, self.fresh, self.start
        return {
            "shapes": (theta, x),
            "theta0": theta0,
            "x0": x0,
            "g": wraps(g)(lambda a, b, batch: g(theta.restore(a), x.restore(b), batch)),
            "f": wraps(f)(lambda a, b, batch: f(theta.restore(a), x.restore(b), batch)),
            "project": lambda a: theta.flatten(project(theta.restore(a)), "what `project` returns"),
            "evaluate": lambda a, b: evaluate(theta.restore(a), x.restore(b)),
            "fresh": None if fresh is None else lambda key: x.flatten(fresh(key), "what `fresh` returns"),
            "start": None if start is None else lambda a: x.flatten(start(theta.restore(a)), "what `start` returns"),
            "references": {name: theta.flatten(value, f"references[{name!r}]") for name, value in self.references.items()},
        }

    def restore(self, theta: Tree, x: Tree) -> tuple[Nested, Nested]:
        """θ and x, flat as a method has them, in the shapes in which ``theta0`` and ``x0`` were given.

        >>> loss = lambda theta, x, batch: (x[0] - theta).square().sum()
        >>> problem = Problem(theta0=torch.zeros(2), x0=[torch.ones(2)], g=loss, f=loss)
        >>> problem.x0, problem.restore(problem.theta0, problem.x0)
        ({'0': tensor([1., 1.])}, (tensor([0., 0.]), [tensor([1., 1.])]))

        .. versionadded:: 0.5"""
        return (theta, x) if self.shapes is None else (self.shapes[0].restore(theta), self.shapes[1].restore(x))

    def initial(self, key: Key) -> Tree:
        """A lower state to start from: ``x0``, or a fresh draw where the problem has one."""
        return self.x0 if self.fresh is None else self.fresh(key)


def check_used(losses: Sequence[Callable[[Tree, Tree], Tensor]], theta: Tree, x: Tree) -> None:
    """ConfigError where no loss depends on θ. Cost: a value and a first-order gradient of each loss until one does; to be asked
    where h is zero, which alone says nothing: at an optimum it is zero too."""
    for loss in losses:
        leaves = require_grad(theta)
        with torch.enable_grad():
            value = loss(leaves, detach(x))
            grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True) if value.requires_grad else ()
        if any(grad is not None for grad in grads):
            return
    raise ConfigError(
        f"neither loss depends on θ ({', '.join(theta)}), so there is nothing to learn\n"
        "  use its leaves in g or f; a copy of θ that was made before (`.detach()`, `.item()`) is no longer θ"
    )


def check_repeats(loss: Callable[[Tree, Tree], Tensor], theta: Tree, x: Tree) -> None:
    """ConfigError where a loss has another value the second time. Cost: two values."""
    with torch.no_grad():
        if not torch.allclose(loss(theta, x), loss(theta, x), rtol=1e-5, atol=0.0, equal_nan=True):
            raise ConfigError(DRAWS)


def pure(loss: Callable[[Tree, Tree], Tensor]) -> Callable[[Tree, Tree], Tensor]:
    """The loss, refused where its first call draws from torch's global generators and a second one has another value."""
    called = False

    def watched(theta: Tree, x: Tree) -> Tensor:
        nonlocal called
        if called:
            return loss(theta, x)
        called, device = True, next(iter(x.values())).device
        before = global_states(device)
        value = loss(theta, x)
        if any(not torch.equal(a, b) for a, b in zip(before, global_states(device), strict=True)):
            check_repeats(loss, theta, x)
        return value

    return watched


def check_losses(problem: Problem, theta: Tree, x: Tree, key: Key, *, repeat: bool, use: bool) -> None:
    """ConfigError, on a few rows of each loss, where it does not ``repeat`` its value, and where none makes ``use`` of θ."""

    def on_few_rows(loss: Loss, data: Data) -> Callable[[Tree, Tree], Tensor]:
        batch, _ = data.sample(key.fold("few"), 8)
        return lambda theta, x: loss(theta, x, batch)

    if not (repeat or use):
        return
    losses = [on_few_rows(problem.f, problem.upper_data["differentiate"]), on_few_rows(problem.g, problem.lower_data)]
    for loss in losses if repeat else ():
        check_repeats(loss, theta, x)
    if use:
        check_used(losses, theta, x)
