"""The problem of :func:`hgms.tune` in vectors: parameters w, hyperparameters u, and rows by role.

K + 1 replicas of the model train side by side. Replica k < K never uses fold k of the validation
rows and is judged on it. The last replica uses all folds and becomes the result. Without validation
rows, replica k runs a nested cross-validation on the training rows: fold k is judged, and the other
folds differentiate the hyperparameters in turn, so a replica is a group of K models.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.func import vmap

from hgms.adapters import ModuleParts, read_table
from hgms.arguments import errors_at
from hgms.hyper import Block, Hyper
from hgms.tuning.shared_inputs import SharedInputs
from hgms_core import Batch, ConfigError, Data, Key, Ravel, Tree, slopes
from hgms_core.arguments import check_function

FEW_ROWS = 400
"""Below this number of training rows there are four folds, otherwise three."""

STATISTICS_ROWS = 256
"""Rows per batch when the running statistics of batch normalisation are set."""

CHUNK = 2048
"""Rows of one pass when losses are judged."""

PROBED = 16
"""Rows on which a loss that returns one number is compared with its values on single rows."""


@frozen(eq=False)
class Space:
    """All hyperparameters as one vector u ``[m]``.

    ``start``, ``neutral``, ``low``, ``high`` and ``unit`` are ``[m]``.
    """

    blocks: Mapping[str, Block]
    like: Tensor

    @cached_property
    def sizes(self) -> list[int]:
        return [len(block.start) for block in self.blocks.values()]

    def _join(self, numbers: Callable[[Block], Tensor]) -> Tensor:
        return torch.cat([numbers(block) for block in self.blocks.values()]).to(self.like)

    def _fill(self, number: Callable[[Block], float]) -> Tensor:
        return self._join(lambda block: torch.full((len(block.start),), number(block)))

    @cached_property
    def start(self) -> Tensor:
        return self._join(lambda block: block.start)

    @cached_property
    def neutral(self) -> Tensor:
        return self._join(lambda block: block.neutral)

    @cached_property
    def low(self) -> Tensor:
        return self._fill(lambda block: block.low)

    @cached_property
    def high(self) -> Tensor:
        return self._fill(lambda block: block.high)

    @cached_property
    def unit(self) -> Tensor:
        return self._fill(lambda block: block.unit)

    @cached_property
    def is_penalty(self) -> Tensor:
        return self._fill(lambda block: float(block.index is not None)) > 0

    def uses(self, part: str) -> bool:
        """Return whether a hyperparameter has this part of :class:`hgms.hyper.Block`."""
        return any(getattr(block, part) is not None for block in self.blocks.values())

    @cached_property
    def is_per_row(self) -> bool:
        return any(block.is_per_row for block in self.blocks.values())

    def parts(self, u: Tensor) -> dict[str, Tensor]:
        """Return the slices of u by name; the last axis is split."""
        return dict(zip(self.blocks, u.split(self.sizes, -1), strict=True))

    def values(self, u: Tensor) -> dict[str, Tensor]:
        """Return the values by name that the loss receives."""
        return {name: self.blocks[name].value(part) for name, part in self.parts(u).items()}

    def with_part(self, u: Tensor, part: str) -> Iterator[tuple[Any, Tensor]]:
        """Yield the hyperparameters that have this part, with their slices of u."""
        for name, values in self.parts(u).items():
            if getattr(self.blocks[name], part) is not None:
                yield self.blocks[name], values

    def decay(self, u: Tensor, size: int) -> Tensor:
        """Return the weight decay of each parameter, ``[d]``."""
        total = self.like.new_zeros(size)
        for block, part in self.with_part(u, "index"):
            index = block.index.to(u.device)
            total = total + torch.where(index >= 0, block.value(part)[index], 0.0)
        return total

    def rates(self, u: Tensor, size: int) -> Tensor:
        """Return the factor of the lower rate of each parameter, ``[d]``."""
        total = self.like.new_ones(size)
        for block, part in self.with_part(u, "rate"):
            total = total * block.value(part)[block.rate.to(u.device)]
        return total

    def initial(self, u: Tensor, w0: Tensor) -> Tensor:
        """Return the parameters at the start of a training, ``[d]``."""
        for block, part in self.with_part(u, "anchor"):
            w0 = block.anchor(part)
        return w0

    def attraction(self, u: Tensor, w: Tensor) -> Tensor:
        """Return the penalty ½ s ‖w − c(u)‖²."""
        total = w.new_zeros(())
        for block, part in self.with_part(u, "anchor"):
            total = total + block.strength * (w - block.anchor(part)).square().sum() / 2
        return total

    def curvature(self, u: Tensor, size: int) -> Tensor:
        """Return the diagonal of the Hessian of all penalties, ``[d]``."""
        return self.decay(u, size) + sum(block.strength for block in self.blocks.values())

    def row_weights(self, u: Tensor, batch: Batch) -> Tensor | float:
        """Return the factor of each training row of the batch."""
        weight: Tensor | float = 1.0
        for block, part in self.with_part(u, "weigh"):
            weight = weight * block.weigh(part, batch)
        return weight


@frozen(eq=False, kw_only=True)
class Masks:
    """Rows by role for R models, ``[R, rows]`` of 0 and 1.

    Attributes
    ----------
    group
        The replica of each model, ``[R]``.
    fit, outer, held
        Rows that a model trains on, that differentiate its hyperparameters, and that judge it. The
        three do not overlap.
    count
        The number of outer rows of each replica, ``[K + 1]``.
    """

    group: Tensor
    fit: Tensor
    outer: Tensor
    held: Tensor
    count: Tensor
    folds: int

    @classmethod
    def of(cls, train: int, validation: int, folds: int, key: Key, like: Tensor) -> Masks:
        total = train + validation
        position = torch.arange(total)
        base = (position < train).to(like)
        pool = position >= train if validation else position >= 0
        fold = torch.full((total,), -1)
        size = int(pool.sum())
        fold[pool] = torch.randperm(size, generator=key.generator()) % folds
        parts = [(fold == k).to(like) for k in range(folds)]
        every = pool.to(like)
        none = torch.zeros_like(base)
        models: list[tuple[int, Tensor, Tensor, Tensor]] = []
        if validation:
            models += [(k, base, every - parts[k], parts[k]) for k in range(folds)]
            models.append((folds, base, every, none))
        else:
            for k in range(folds):
                others = [j for j in range(folds) if j != k]
                models += [(k, base - parts[k] - parts[j], parts[j], none) for j in others]
                models.append((k, base - parts[k], none, parts[k]))
            models += [(folds, base - parts[j], parts[j], none) for j in range(folds)]
            models.append((folds, base, none, none))
        group = torch.tensor([model[0] for model in models])
        fit = torch.stack([model[1] for model in models])
        outer = torch.stack([model[2] for model in models])
        held = torch.stack([model[3] for model in models])
        count = torch.stack([outer[group == k].sum() for k in range(folds + 1)])
        return cls(group=group, fit=fit, outer=outer, held=held, count=count, folds=folds)

    @cached_property
    def fold(self) -> Tensor:
        """The fold of each judged row."""
        is_judged = self.held.any(0)
        return self.group.to(self.held.device)[self.held.argmax(0)][is_judged]


@frozen(eq=False, kw_only=True)
class TuningProblem:
    """Training and validation losses as functions of vectors.

    Attributes
    ----------
    spec
        Maps w ``[d]`` to the parameters by name.
    w0
        The parameters of the module, ``[d]``.
    space
        The hyperparameters.
    rows
        The training rows, then the validation rows.
    train_size
        The number of training rows.
    masks
        The roles of the rows.
    losses
        ``(x, hyper, batch, training) -> [B]``.
    regulariser
        ``(x, batch) -> scalar``, a part of the training loss without hyperparameters.
    is_smooth
        Whether training has no dropout or batch normalisation.
    """

    spec: Ravel
    w0: Tensor
    space: Space
    rows: Batch
    train_size: int
    masks: Masks
    losses: Callable[[Tree, Mapping[str, Tensor], Batch, bool], Tensor] = field(repr=False)
    regulariser: Callable[[Tree, Batch], Tensor] | None = field(default=None, repr=False)
    is_smooth: bool = True

    @property
    def total(self) -> int:
        return len(self.rows["index"])

    @property
    def has_validation(self) -> bool:
        return self.total > self.train_size

    def batch(self, numbers: Tensor | None) -> Batch:
        """Return the rows with these numbers; None: all rows."""
        if numbers is None:
            return self.rows
        return {name: column[numbers] for name, column in self.rows.items()}

    def row_losses(self, w: Tensor, u: Tensor, batch: Batch, training: bool) -> Tensor:
        """Return the loss of each row of the batch, ``[B]``."""
        with SharedInputs():
            return self.losses(self.spec.unravel(w), self.space.values(u), batch, training)

    def train_loss(self, w: Tensor, u: Tensor, mask: Tensor, batch: Batch) -> Tensor:
        """Return Σ_i m_i ω_i(u) ℓ_i(w, u) / Σ_i m_i + ½ Σ_j λ_j(u) w_j² + ½ s ‖w − c(u)‖²."""
        weight = mask
        if self.space.uses("weigh"):
            is_training = batch["index"] < self.train_size
            own = {**batch, "index": batch["index"].clamp_max(self.train_size - 1)}
            weight = mask * torch.where(is_training, self.space.row_weights(u, own), 1.0)
        losses = self.row_losses(w, u, batch, True)
        data = (weight * losses).sum() / mask.sum().clamp_min(1.0)
        total = data
        if self.space.uses("index"):
            total = total + (self.space.decay(u, len(w)) * w * w).sum() / 2
        if self.regulariser is not None:
            total = total + self.regulariser(self.spec.unravel(w), batch)
        return total + self.space.attraction(u, w) if self.space.uses("anchor") else total

    def used(self, masks: Tensor) -> Tensor:
        """Return the numbers of the rows that a mask contains, ``[rows]``.

        These are all rows if layers may combine rows (batch normalisation).
        """
        rows = masks.any(0) if self.is_smooth else torch.ones_like(masks[0])
        return rows.nonzero()[:, 0]

    def initial(self, u: Tensor) -> Tensor:
        """Return the parameters at the start of a training for each row of u, ``[R, d]``."""
        return vmap(partial(self.space.initial, w0=self.w0))(u)

    def slope(self, w: Tensor, u: Tensor, masks: Tensor, batch: Batch) -> Tensor:
        """Return the gradients of the training losses of R models in their w, ``[R, d]``.

        One backward pass of the sum; it is differentiable in w and u if one of them requires a
        gradient.
        """
        is_differentiable = w.requires_grad or u.requires_grad
        leaf = w if w.requires_grad else w.detach().requires_grad_()
        losses = vmap(self.train_loss, in_dims=(0, 0, 0, None))(leaf, u, masks, batch)
        (found,) = torch.autograd.grad(losses.sum(), leaf, create_graph=is_differentiable)
        return found

    def outer_loss(self, w: Tensor, mask: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the validation losses of the rows in the mask, at neutral values."""
        return (self.row_losses(w, self.space.neutral, batch, False) * mask).sum()

    def held_out(self, w: Tensor) -> Tensor:
        """Return the loss of each judged row under the replica that has not used it."""
        return self.losses_under(w, self.masks.held)

    def losses_under(self, w: Tensor, masks: Tensor) -> Tensor:
        """Return the loss of each row of the masks under the replica whose mask contains it."""
        parts = []
        for numbers in self.used(masks).split(CHUNK):
            batch = self.batch(numbers)
            with torch.no_grad():
                each = vmap(partial(self._neutral, batch))(w)
            own = masks[:, numbers]
            losses = torch.where(own > 0, each, 0.0).sum(0)
            parts.append(losses[own.any(0)])
        return torch.cat(parts)

    def mean_loss(self, w: Tensor, rows: Data) -> float:
        """Return the mean loss of other rows, at neutral values."""
        total = 0.0
        for numbers in torch.arange(rows.size, device=self.w0.device).split(CHUNK):
            with torch.no_grad():
                total += float(self._neutral(rows.batch(numbers), w).sum())
        return total / rows.size

    def _neutral(self, batch: Batch, w: Tensor) -> Tensor:
        return self.row_losses(w, self.space.neutral, batch, False)


@frozen(eq=False)
class ModuleProblem:
    """The problem of a module, with the functions that the result needs.

    Attributes
    ----------
    problem
        Training and validation losses as functions of vectors.
    parts
        The module as functions of its parameters.
    user_loss
        ``(model, batch, hyper) -> [B]``, the loss of the user.
    """

    problem: TuningProblem
    parts: ModuleParts
    user_loss: Callable[[nn.Module, Batch, Mapping[str, Tensor]], Tensor] = field(repr=False)

    def model_at(self, w: Tensor, values: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of the module with the parameters w.

        The running statistics of batch normalisation are the means over the training rows.
        """
        problem = self.problem
        copy = self.parts.with_parameters(problem.spec.unravel(w))
        modes = {module: module.training for module in copy.modules()}
        norms = [
            module
            for module in modes
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.training
            and module.running_mean is not None
        ]
        momenta = [norm.momentum for norm in norms]
        copy.eval()
        for norm in norms:
            norm.train().reset_running_stats()
            norm.momentum = None  # the mean over batches
        rows = torch.arange(problem.train_size, device=w.device)
        with torch.no_grad():
            for numbers in rows.split(STATISTICS_ROWS) if norms else ():
                self.user_loss(copy, problem.batch(numbers), values)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
        return copy


def build(
    model: nn.Module,
    loss: Callable[..., Any],
    train: Any,
    validation: Any,
    learn: Mapping[str, Hyper],
    folds: int | None,
    seed: int,
) -> ModuleProblem:
    """Return the problem on a module and its rows."""
    parts = ModuleParts.of(model)
    x = parts.x0
    like = next(iter(x.values()))
    training = read_table(train, "train", like)
    columns = training.batch(None)
    size = training.size
    rows = columns
    if validation is not None:
        rows = join(training.batch(None), read_table(validation, "validation", like).batch(None))
    total = len(rows["index"])
    spec = Ravel.of(x)
    space = Space({name: _block(name, kind, x, columns) for name, kind in learn.items()}, like)
    takes_hyper = _takes_hyper(loss, space)

    def call(model: nn.Module, batch: Batch, hyper: Mapping[str, Tensor]) -> Any:
        return loss(model, batch, hyper) if takes_hyper else loss(model, batch)

    few = {name: column[:PROBED] for name, column in columns.items()}
    evaluate = _each_row(call) if _is_mean(parts, call, few, space.values(space.start)) else call

    def user_loss(model: nn.Module, batch: Batch, hyper: Mapping[str, Tensor]) -> Tensor:
        return _per_row(evaluate(model, batch, hyper), len(batch["index"]))

    def losses(x: Tree, hyper: Mapping[str, Tensor], batch: Batch, training: bool) -> Tensor:
        view = parts.fitting if training else parts.judging
        return view.at(x, lambda model, rows: user_loss(model, rows, hyper), batch)

    problem = TuningProblem(
        spec=spec,
        w0=spec.ravel(x),
        space=space,
        rows=rows,
        train_size=size,
        masks=masks_of(size, total - size, folds, seed, like),
        losses=losses,
        is_smooth=not (parts.has_dropout or parts.has_batch_statistics),
    )
    return ModuleProblem(problem, parts, user_loss)


def masks_of(train: int, validation: int, folds: int | None, seed: int, like: Tensor) -> Masks:
    """Return the roles of the rows; by default four folds below 400 training rows, else three."""
    amount = (4 if train < FEW_ROWS else 3) if folds is None else folds
    pool = validation or train
    least = 2 if validation else 3  # a nested cross-validation trains on the other folds
    if not least <= amount <= pool:
        raise ConfigError(
            "out-of-range",
            f"folds={amount} must be between {least} and the number of rows to judge on, {pool}",
            place=("folds",),
        )
    return Masks.of(train, validation, amount, Key(seed).fold("folds"), like)


def join(first: Batch, second: Batch) -> Batch:
    """Return the training rows, then the validation rows, numbered through."""
    if set(first) != set(second):
        missing = sorted(set(first) ^ set(second))
        raise ConfigError(
            "missing-column",
            f"train and validation must have the same columns; only one has {', '.join(missing)}",
            place=("validation",),
        )
    rows = {name: torch.cat([column, second[name].to(column)]) for name, column in first.items()}
    return {**rows, "index": torch.arange(len(rows["index"]), device=rows["index"].device)}


def _block(name: str, kind: Any, x: Tree, rows: Batch) -> Block:
    with errors_at("learn", name):
        return kind.block(x, rows)


def _takes_hyper(loss: Callable[..., Any], space: Space) -> bool:
    """Return whether the loss has the parameter ``hyper``; require it if a kind is for the loss.

    Raises
    ------
    ConfigError
        ``wrong-type``, ``wrong-signature`` for a loss with other parameters.
    """
    try:
        takes = len(inspect.signature(loss).parameters) > 2
    except (TypeError, ValueError):  # builtins may have no signature; check_function reports others
        takes = False
    check_function("loss", loss, "model", "batch", *["hyper"] * takes)
    for name, block in space.blocks.items():
        if block.is_for_loss and not takes:
            raise ConfigError(
                "loss-ignores-hyper",
                f"the loss has no parameter for hyper[{name!r}]",
                place=("learn", name),
                hint=f"write loss(model, batch, hyper), and use hyper[{name!r}] in it",
            )
    return takes


def _each_row(call: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a loss that evaluates another loss on each row."""

    def losses(model: nn.Module, batch: Batch, hyper: Mapping[str, Tensor]) -> Tensor:
        def of_row(row: Batch) -> Tensor:
            return call(model, {name: leaf[None] for name, leaf in row.items()}, hyper)

        return vmap(of_row)(batch)

    return losses


def _is_mean(
    parts: ModuleParts, call: Callable[..., Any], rows: Batch, hyper: Mapping[str, Tensor]
) -> bool:
    """Return whether a loss is the mean of its values on single rows.

    Layers that combine or mask rows exclude this.
    """
    if parts.has_dropout or parts.has_batch_statistics:
        return False
    with torch.no_grad():
        at = partial(parts.judging.at, parts.x0, batch=rows)
        value = at(lambda model, batch: call(model, batch, hyper))
        if not isinstance(value, Tensor) or value.dim():
            return False
        try:
            each = at(lambda model, batch: _each_row(call)(model, batch, hyper))
        except (RuntimeError, ValueError):
            return False
    return each.dim() == 1 and torch.allclose(each.mean(), value, rtol=1e-4, atol=1e-6)


def _per_row(value: Any, rows: int) -> Tensor:
    """Require one loss per row."""
    if not isinstance(value, Tensor) or value.shape not in ((rows,), (rows, 1)):
        shown = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and value.shape == (rows, rows):
            hint = "call .squeeze(1) on the outputs, which have another shape than the labels"
        elif isinstance(value, Tensor) and value.shape[:1] == (rows,):
            hint = "average over the outputs of a row: losses.flatten(1).mean(1)"
        else:
            hint = 'use reduction="none"'
        raise ConfigError(
            "wrong-shape",
            f"the loss returns {shown} for {rows} rows, but must return one loss per row",
            place=("loss",),
            hint=hint,
        )
    return value.reshape(rows)


def check_effects(module: ModuleProblem) -> None:
    """Require that each hyperparameter changes the training loss.

    Raises
    ------
    ConfigError
        ``no-effect``, ``not-differentiable``, ``random-loss``.

    Notes
    -----
    Cost: one gradient.
    """
    problem = module.problem
    generator = Key(0).fold("effects").generator()
    noise = torch.randn(problem.w0.shape, generator=generator).to(problem.w0)
    w = problem.w0 + 0.1 * noise * problem.w0.abs().mean().clamp_min(0.1)
    u = problem.space.start.detach().clone().requires_grad_()
    numbers = torch.arange(min(problem.total, CHUNK), device=w.device)
    mask = problem.masks.fit[-1][numbers]
    loss = partial(problem.train_loss, batch=problem.batch(numbers))
    try:
        value = vmap(loss)(w[None], u[None], mask[None])[0]
        (slope,) = slopes(value, [u])
    except RuntimeError as error:
        if "randomness error mode" in str(error):
            raise module.parts.randomness_error() from error
        raise ConfigError(
            "not-differentiable",
            f"the training loss has no gradient in the hyperparameters: {error}",
            place=("loss",),
            hint="use hyper without .item(), .numpy(), .detach(), torch.no_grad() or comparisons",
        ) from error
    for name, part in problem.space.parts(slope).items():
        if problem.space.blocks[name].rate is None and not bool(part.any()):
            raise ConfigError(
                "no-effect",
                f"hyperparameter {name!r} has no effect on the training loss",
                place=("learn", name),
                hint="use it in the loss, without .detach(), torch.no_grad() or comparisons",
            )
    if not math.isfinite(float(value.detach())):
        raise ConfigError("not-finite", "the training loss is not finite", place=("loss",))


def check_learn(learn: object) -> None:
    """Require hyperparameters by name."""
    if not isinstance(learn, Mapping) or not learn:
        raise ConfigError(
            "wrong-type",
            "learn must be a dictionary of hyperparameters, such as "
            '{"decay": hgms.hyper.PerLayer()}',
            place=("learn",),
        )
    for name, kind in learn.items():
        if isinstance(kind, type) or not isinstance(kind, Hyper):
            hint = f"create it: {kind.__name__}()" if isinstance(kind, type) else None
            raise ConfigError(
                "wrong-part",
                f"learn[{name!r}] must be a kind of hyperparameter of hgms.hyper",
                place=("learn", str(name)),
                hint=hint,
            )
