"""Kinds of hyperparameters that :func:`hgms.tune` learns.

Each kind stores its numbers as a vector u without constraints, or in a box. Steps in u are relative
to its unit, so one outer rate fits all kinds.

A kind acts in one of four ways:

- :class:`Scalar` and :class:`Values` reach the loss as ``hyper[name]``: label smoothing, a
  temperature, logit shifts, weights of loss terms, the strength of an augmentation.
- :class:`PerParameter`, :class:`PerLayer` and :class:`PerInput` are weight decays. ``tune`` adds
  ½ Σ_i λ_i w_i² to the training loss.
- :class:`PerRow` and :class:`PerClass` multiply the losses of the training rows.
- :class:`LearningRate` and :class:`Initialisation` change the training: its rates and its start.

Examples
--------
>>> import hgms
>>> hgms.hyper.Scalar(0.1, low=0.0, high=0.5)
Scalar(init=0.1, low=0.0, high=0.5, neutral=None)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, dataclass_transform, runtime_checkable

import attrs
import torch
from attrs import field, frozen
from torch import Tensor

from hgms_core import Batch, ConfigError, Tree
from hgms_core.arguments import reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.validators import at_least, greater_than, positive

__all__ = [
    "Block",
    "Hyper",
    "Initialisation",
    "LearningRate",
    "PerClass",
    "PerInput",
    "PerLayer",
    "PerParameter",
    "PerRow",
    "Scalar",
    "Values",
]

Class = TypeVar("Class")

LOG_RANGE = 4.0
"""Class weights stay within exp(±4) of their start."""


@frozen(eq=False, kw_only=True)
class Block:
    """One kind of hyperparameter on one problem: a slice of the vector u.

    Attributes
    ----------
    start, neutral
        u at the start, and u that validation losses use, ``[size]``.
    low, high
        The box of u.
    unit
        The length of a typical step in u.
    value
        Maps u to the value that the loss receives and users read.
    index
        The entry of u that penalises each parameter, ``[d]``; -1 for no penalty.
    weigh
        Maps ``(u, batch)`` to one factor per training row of the batch.
    rate
        The entry of u that scales the lower rate of each parameter, ``[d]``.
    anchor
        Maps u to the start c of the lower parameters, ``[d]``.
    strength
        The factor s of the penalty ½ s ‖w − c‖².
    is_per_row
        Whether each training row has an entry of u.
    """

    start: Tensor
    neutral: Tensor
    low: float
    high: float
    unit: float = 1.0
    value: Callable[[Tensor], Tensor]
    index: Tensor | None = None
    weigh: Callable[[Tensor, Batch], Tensor] | None = None
    rate: Tensor | None = None
    anchor: Callable[[Tensor], Tensor] | None = None
    strength: float = 0.0
    is_per_row: bool = False

    @property
    def is_for_loss(self) -> bool:
        """Whether only the loss of the user can use the values."""
        uses = (self.index, self.weigh, self.rate, self.anchor)
        return all(use is None for use in uses)


@runtime_checkable
class Hyper(Protocol):
    """A kind of hyperparameter."""

    def block(self, x: Tree, rows: Batch) -> Block:
        """Return the block for a model with the parameters x and these training rows."""
        ...


@dataclass_transform(frozen_default=True, field_specifiers=(attrs.field,))
def _kind(cls: type[Class]) -> type[Class]:
    """Make a frozen class that checks its arguments; the first may be passed by position."""
    built: Any = attrs.frozen(cls, field_transformer=read_by_annotation)
    return reports_errors(built)


def _identity(u: Tensor) -> Tensor:
    return u


# --- values that the loss receives


@_kind
class Scalar:
    """One number, ``hyper[name]``, in a box.

    Parameters
    ----------
    init
        Value at the start.
    low, high
        Box. Steps are relative to its width, or to 1 without a box.
    neutral
        Value in validation losses; by default ``init``. A loss without smoothing, for example, has
        the neutral value 0. Otherwise the tuner would change the metric instead of the model.

    Raises
    ------
    ConfigError
        ``out-of-range`` if ``init`` or ``neutral`` is outside the box.

    Examples
    --------
    >>> block = Scalar(0.1, low=0.0, high=0.5, neutral=0.0).block({}, {})
    >>> block.value(block.start), block.value(block.neutral)
    (tensor(0.1000), tensor(0.))
    """

    init: float = 0.0
    low: float | None = None
    high: float | None = None
    neutral: float | None = None

    def __attrs_post_init__(self) -> None:
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        for name in ("init", "neutral"):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(
                    "out-of-range",
                    f"{name}={value} must be between low={low} and high={high}",
                    place=(name,),
                )

    def block(self, x: Tree, rows: Batch) -> Block:
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        width = high - low
        neutral = self.init if self.neutral is None else self.neutral
        return Block(
            start=torch.tensor([self.init]),
            neutral=torch.tensor([neutral]),
            low=low,
            high=high,
            unit=width / 8 if math.isfinite(width) else 1.0,
            value=lambda u: u.reshape(()),
        )


def _floats(instance: object, attribute: Any, value: object) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ConfigError(
            "wrong-type",
            f"{attribute.name} must be a floating-point tensor",
            place=(attribute.name,),
        )


FORWARD: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": _identity,
    "log": torch.exp,
    "logit": torch.sigmoid,
    "softmax": lambda u: torch.softmax(u.reshape(-1), 0).reshape(u.shape),
}
BACKWARD: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": _identity,
    "log": torch.log,
    "logit": torch.logit,
    "softmax": torch.log,
}


@_kind
class Values:
    """A tensor of any shape, ``hyper[name]``, with a transform.

    Parameters
    ----------
    init
        Values at the start.
    transform
        ``"none"``; ``"log"`` for positive values; ``"logit"`` for values in (0, 1); ``"softmax"``
        for values that sum to 1.
    low, high
        Box of the untransformed numbers u.
    neutral
        Values in validation losses; by default ``init``.

    Raises
    ------
    ConfigError
        ``out-of-range`` for an ``init`` or ``neutral`` that the transform cannot produce.

    Examples
    --------
    >>> block = Values(torch.tensor([1.0, 3.0]) / 4, transform="softmax").block({}, {})
    >>> block.value(block.start)
    tensor([0.2500, 0.7500])
    """

    init: Any = field(validator=_floats, eq=attrs.cmp_using(eq=torch.equal))
    transform: Literal["none", "log", "logit", "softmax"] = "none"
    low: float = -8.0
    high: float = 8.0
    neutral: Any = field(
        default=None,
        validator=attrs.validators.optional(_floats),
        eq=attrs.cmp_using(eq=torch.equal),
    )

    def __attrs_post_init__(self) -> None:
        for name, value in (("init", self.init), ("neutral", self.neutral)):
            if value is None:
                continue
            u = BACKWARD[self.transform](value.detach())
            if not bool(((u >= self.low) & (u <= self.high)).all()):
                raise ConfigError(
                    "out-of-range",
                    f"{name} cannot be written as {self.transform} of numbers between "
                    f"low={self.low} and high={self.high}",
                    place=(name,),
                )

    def block(self, x: Tree, rows: Batch) -> Block:
        forward = FORWARD[self.transform]
        backward = BACKWARD[self.transform]
        neutral = self.init if self.neutral is None else self.neutral
        shape = self.init.shape
        plain = self.transform == "none"
        return Block(
            start=backward(self.init.detach()).reshape(-1),
            neutral=backward(neutral.detach()).expand(shape).reshape(-1),
            low=self.low,
            high=self.high,
            unit=(self.high - self.low) / 8 if plain else 1.0,
            value=lambda u: forward(u.reshape(shape)),
        )


# --- weight decays


@_kind
class PerParameter:
    """One weight decay per parameter: ½ Σ_i λ_i w_i² is added to the training loss.

    Parameters
    ----------
    init
        λ at the start.
    low, high
        Bounds of λ. The tuner uses log λ.

    Raises
    ------
    ConfigError
        ``out-of-range`` if 0 < low ≤ init ≤ high does not hold.

    Examples
    --------
    >>> PerParameter(init=1e-4).block({"w": torch.zeros(3, 2), "b": torch.zeros(3)}, {}).index
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8])
    """

    init: float = field(default=1e-3, validator=positive)
    low: float = field(default=1e-6, validator=positive)
    high: float = field(default=1e3, validator=positive)

    def __attrs_post_init__(self) -> None:
        if not self.low <= self.init <= self.high:
            raise ConfigError(
                "out-of-range",
                f"init={self.init} must be between low={self.low} and high={self.high}",
                place=("init",),
            )

    def block(self, x: Tree, rows: Batch) -> Block:
        index = self.indices(x)
        size = int(index.max()) + 1
        start = torch.full((size,), math.log(self.init))
        return Block(
            start=start,
            neutral=start,
            low=math.log(self.low),
            high=math.log(self.high),
            value=torch.exp,
            index=index,
        )

    def indices(self, x: Tree) -> Tensor:
        """Return the entry of λ for each parameter, ``[d]``; -1 for no penalty."""
        return torch.arange(sum(leaf.numel() for leaf in x.values()))


class PerLayer(PerParameter):
    """One weight decay per named parameter of the module, such as ``0.weight``.

    Examples
    --------
    >>> PerLayer(init=1e-4).block({"w": torch.zeros(3, 2), "b": torch.zeros(3)}, {}).index
    tensor([0, 0, 0, 0, 0, 0, 1, 1, 1])
    """

    def indices(self, x: Tree) -> Tensor:
        return _layers(x)


def _layers(x: Tree) -> Tensor:
    """Return the number of the named parameter of each entry, ``[d]``."""
    sizes = torch.tensor([leaf.numel() for leaf in x.values()])
    return torch.arange(len(sizes)).repeat_interleave(sizes)


@_kind
class PerInput(PerParameter):
    """One weight decay per input of the first matrix of the model: per feature, or per group.

    Parameters
    ----------
    groups
        The group of each feature, numbered from 0. By default each feature is a group.

    Raises
    ------
    ConfigError
        ``wrong-length`` if ``groups`` does not match the first matrix, ``not-supported`` if the
        model has no matrix.

    Examples
    --------
    >>> PerInput(groups=(0, 1, 1)).block({"w": torch.zeros(2, 3), "b": torch.zeros(2)}, {}).index
    tensor([ 0,  1,  1,  0,  1,  1, -1, -1])
    """

    groups: Sequence[int] | None = None

    def indices(self, x: Tree) -> Tensor:
        first = next((name for name, leaf in x.items() if leaf.dim() > 1), None)
        if first is None:
            raise ConfigError(
                "not-supported",
                "PerInput requires a model with a matrix",
                hint="use PerParameter or PerLayer",
            )
        shape = x[first].shape
        groups = range(shape[1]) if self.groups is None else self.groups
        if len(groups) != shape[1]:
            raise ConfigError(
                "wrong-length",
                f"groups has {len(groups)} entries, but {first} has {shape[1]} inputs",
                place=("groups",),
            )
        column = torch.tensor(list(groups)).reshape(1, -1, *[1] * (len(shape) - 2))
        parts = [
            column.expand(shape).flatten() if name == first else torch.full((leaf.numel(),), -1)
            for name, leaf in x.items()
        ]
        return torch.cat(parts)


# --- the lower training


@_kind
class LearningRate:
    """Factors of the learning rate of the lower optimiser, 1 at the start.

    The hypergradient differentiates through five lower steps. Only the online engine has a
    learning rate.

    Parameters
    ----------
    per
        ``"layer"``: one factor per named parameter of the module. ``"model"``: one factor.
    limit
        Factors stay between 1/limit and limit.

    Raises
    ------
    ConfigError
        ``out-of-range`` if ``limit`` is not greater than 1.

    Examples
    --------
    >>> block = LearningRate().block({"w": torch.zeros(3, 2), "b": torch.zeros(3)}, {})
    >>> block.rate
    tensor([0, 0, 0, 0, 0, 0, 1, 1, 1])
    >>> block.value(block.start)
    tensor([1., 1.])
    """

    per: Literal["layer", "model"] = "layer"
    limit: float = field(default=10.0, validator=greater_than(1))

    def block(self, x: Tree, rows: Batch) -> Block:
        layers = _layers(x)
        index = layers if self.per == "layer" else torch.zeros_like(layers)
        start = torch.zeros(int(index.max()) + 1)
        return Block(
            start=start,
            neutral=start,
            low=-math.log(self.limit),
            high=math.log(self.limit),
            unit=0.5,
            value=torch.exp,
            rate=index,
        )


@_kind
class Initialisation:
    """The initial parameters c of each training, which also attract the parameters.

    ``tune`` adds ½ strength ‖w − c‖² to the training loss, so the trained parameters depend on c
    smoothly. c starts at the parameters of the module. Its value is the vector of all parameters.

    Use if validation rows come from another source than training rows. Avoid with few validation
    rows: c has one entry per parameter, and fits them. Compare with the baseline "validation rows
    only".

    Parameters
    ----------
    strength
        Factor of the penalty. With a small strength, c has little effect.
    width
        Typical step of an entry of c.

    Notes
    -----
    Source: Rajeswaran, Finn, Kakade, Levine, *Meta-learning with implicit gradients*, NeurIPS 2019
    (arXiv 1909.04630), equation 3, here with one task.

    Examples
    --------
    >>> block = Initialisation().block({"w": torch.tensor([[1.0, 2.0]])}, {})
    >>> block.value(block.start)
    tensor([1., 2.])
    >>> block.value(torch.tensor([1.0, 0.0]))
    tensor([1.1000, 2.0000])
    """

    strength: float = field(default=1.0, validator=positive)
    width: float = field(default=0.1, validator=positive)

    def block(self, x: Tree, rows: Batch) -> Block:
        initial = torch.cat([leaf.detach().flatten() for leaf in x.values()])
        start = torch.zeros_like(initial)
        width = self.width

        def value(u: Tensor) -> Tensor:
            return initial.to(u) + width * u

        return Block(
            start=start,
            neutral=start,
            low=-math.inf,
            high=math.inf,
            value=value,
            anchor=value,
            strength=self.strength,
        )


# --- weights of training rows


@_kind
class PerRow:
    """One weight per training row, 2σ(u), 1 at the start.

    Examples
    --------
    >>> PerRow().block({}, {"index": torch.arange(3)}).start
    tensor([0., 0., 0.])
    """

    def block(self, x: Tree, rows: Batch) -> Block:
        start = torch.zeros(len(rows["index"]))
        return Block(
            start=start,
            neutral=start,
            low=-6.0,
            high=3.0,
            value=lambda u: 2 * torch.sigmoid(u),
            weigh=lambda u, batch: (2 * torch.sigmoid(u))[batch["index"]],
            is_per_row=True,
        )


@_kind
class PerClass:
    """One weight per class, source or other group of training rows, with mean 1 over the rows.

    Parameters
    ----------
    column
        The column of integers from 0 that contains the class or source of each row.
    count
        The number of classes; by default the largest number in the column plus 1.

    Raises
    ------
    ConfigError
        ``missing-column``, or ``wrong-column`` if the column does not contain integers from 0.

    Examples
    --------
    >>> block = PerClass("y").block({}, {"y": torch.tensor([0, 1, 1])})
    >>> block.value(block.start), block.weigh(block.start, {"y": torch.tensor([1])})
    (tensor([1., 1.]), tensor([1.]))
    """

    column: str
    count: int | None = field(default=None, validator=attrs.validators.optional(at_least(1)))

    def block(self, x: Tree, rows: Batch) -> Block:
        if self.column not in rows:
            raise ConfigError(
                "missing-column",
                f"the training rows have no column {self.column!r}",
                place=("column",),
                hint=f"available: {', '.join(name for name in rows if name != 'index')}",
            )
        labels = rows[self.column]
        if labels.is_floating_point() or labels.dim() != 1 or int(labels.min()) < 0:
            raise ConfigError(
                "wrong-column",
                f"the column {self.column!r} must contain integers from 0, one per row",
                place=("column",),
            )
        count = max(int(labels.max()) + 1, self.count or 0)
        share = torch.bincount(labels, minlength=count).to(torch.get_default_dtype()) / len(labels)
        start = torch.zeros(count)

        def value(u: Tensor) -> Tensor:
            return u.exp() / (share.to(u) * u.exp()).sum()

        return Block(
            start=start,
            neutral=start,
            low=-LOG_RANGE,
            high=LOG_RANGE,
            value=value,
            weigh=lambda u, batch: value(u)[batch[self.column]],
        )
