"""Outer steps within a user's training loop: shared code of the callbacks for Lightning and the
Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import Attribute, define, field
from torch import Tensor, nn

from hgms.adapters import Nested, Shape, hypergradient
from hgms.arguments import require
from hgms.integrations.training_state import Batches, move_batch, preserve_state
from hgms_core import OuterOptimizer, State, Strategy, Tree, as_solver, clone, norm
from hgms_core.arguments import check_function, reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.validators import at_least, optional, reject

Loss = Callable[[Any, Tree, Any], Tensor]
"""``loss(theta, parameters, batch) -> scalar``; ``parameters`` is a dictionary by name, as for
``torch.func.functional_call``.
"""


def _leaves(theta: Nested) -> Tree:
    return Shape.of(theta, "theta", "theta")[1]


def _loss(_self: object, attribute: Attribute[Any], value: Any) -> None:
    check_function(attribute.name, value, "theta", "x", "batch")


def _iterable(_: object, attribute: Any, value: object) -> None:
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        reject("wrong-type", attribute, value, "an iterable of batches")


def _tensors(_self: object, _attribute: object, value: Any) -> None:
    leaves = _leaves(value)
    require(
        leaves
        and all(
            isinstance(leaf, Tensor) and leaf.is_leaf and leaf.is_floating_point()
            for leaf in leaves.values()
        ),
        "wrong-type",
        "theta must be a floating-point leaf tensor or a dictionary of such tensors, because "
        "it is changed in place",
        place=("theta",),
    )


@reports_errors
@define(kw_only=True, eq=False, field_transformer=read_by_annotation)
class OuterSteps:
    """θ ← outer step on h = ∇_θ f − ∇²_θx g·v at the current weights, during a user's training.

    The lower level is the user's training. Its loss contains θ (example weights, a mixture, a
    penalty), and its steps are unchanged. An outer step takes an upper and a lower batch,
    differentiates there as :func:`hgms_core.hypergradient` does, and changes θ in place. The
    training's next loss therefore uses the new θ.

    Use when a training loop exists and must remain unchanged. Avoid for experiments about methods:
    this class does not propose or select candidates, and the weights are not yet a minimiser, as
    ``lower_gradient_norm`` shows. The formula is more accurate with a larger ``every``.

    During an outer step the model is in evaluation mode (no dropout, running statistics unchanged).
    Afterwards torch's global generators are restored, so the random numbers of the training do not
    change. Lower variables exclude θ and the parameters that do not require a gradient.

    Parameters
    ----------
    f, g
        The upper and the lower loss, ``loss(theta, parameters, batch) -> scalar``; the training
        minimises g.
    upper
        Batches for f, iterated repeatedly (a ``DataLoader``).
    theta
        a tensor or a dictionary of tensors that f, g and the training use; changed in place.
    solver
        a LinearSolver, or any callable ``solve(matvec, b) -> v``.
    optimizer
        An outer optimiser (``hgms.outer.Adam()``); ``hgms.outer.TorchOptimizer`` uses those of
        ``torch.optim``.
    every
        Lower steps between two outer steps, ≥ 1.
    lower
        Batches for g; None: the batch passed to :meth:`step`.
    strategy
        How products with ∇²_xx g are computed, see :func:`hgms_core.curvature`.

    Raises
    ------
    ConfigError
        If ``theta`` cannot be changed in place, ``optimizer`` does not fit it, or batches run out.

    Notes
    -----
    Cost: an outer step is 1 upper gradient, 1 lower gradient, one Hessian product per iteration, 1
    cross product. Memory: the graph of one gradient of g, and the solver's vectors.

    Source: HG-MS paper, equation (3), on one batch of each level and at a state that is not solved
    for.

    Examples
    --------
    >>> from hgms.outer import Sgd
    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> _ = nn.init.constant_(model.weight, 3.0)  # the minimiser of g for θ = 3
    >>> theta = torch.tensor([3.0], dtype=torch.float64)
    >>> steps = OuterSteps(
    ...     f=lambda theta, x, batch: 0.5 * (x["weight"] - batch).square().sum(),
    ...     g=lambda theta, x, batch: 0.5 * (x["weight"] - theta).square().sum(),
    ...     upper=[torch.tensor(1.0)],
    ...     theta=theta,
    ...     every=10,
    ...     solver=lambda matvec, b: b,
    ...     optimizer=Sgd(lr=0.5),
    ... )
    >>> row = steps.step(model, 10, lower=torch.empty(0))  # F(θ) = ½(θ − 1)²
    >>> theta, row["outcome"], row["hypergradient_norm"]
    (tensor([2.], dtype=torch.float64), 'converged', 2.0)
    """

    f: Loss = field(validator=_loss)
    g: Loss = field(validator=_loss)
    upper: Iterable[Any] = field(validator=_iterable)
    theta: Tree | Tensor = field(validator=_tensors, metadata={"own": True})
    solver: Any = field(converter=as_solver)
    optimizer: OuterOptimizer
    every: int = field(default=100, validator=at_least(1))
    lower: Iterable[Any] | None = field(default=None, validator=optional(_iterable))
    strategy: Strategy = "vjp"
    records: list[dict[str, Any]] = field(init=False, factory=list)
    _memory: State | None = field(init=False, default=None)
    _batches: dict[str, Batches] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._batches["upper"] = Batches(self.upper, "upper")
        if self.lower is not None:
            self._batches["lower"] = Batches(self.lower, "lower")

    def due(self, step: int) -> bool:
        """Return whether an outer step follows the lower step with this number (from 1)."""
        return step > 0 and step % self.every == 0

    def step(
        self, model: nn.Module, step: int, lower: Any = None, progress: float = 0.0
    ) -> dict[str, Any]:
        """Take one outer step at the model's current weights; return the new row of ``records``.

        If the hypergradient is not finite, θ is unchanged and ``moved`` is 0. ``progress`` is the
        completed share of the training, for schedules.
        """
        shape, leaves = Shape.of(self.theta, "theta", "theta")
        own = {id(leaf) for leaf in leaves.values()}
        x = {
            name: leaf.detach()
            for name, leaf in model.named_parameters()
            if leaf.requires_grad and id(leaf) not in own
        }
        require(
            x,
            "no-parameters",
            "the model has no parameter that requires a gradient",
            place=("model",),
        )
        device = next(iter(x.values())).device
        with preserve_state(model, device):
            above = move_batch(self._batches["upper"].take(), device)
            own_lower = self._batches.get("lower")
            below = move_batch(lower if own_lower is None else own_lower.take(), device)
            theta = {name: leaf.detach() for name, leaf in leaves.items()}
            estimate = hypergradient(
                lambda theta, at: self.f(theta, at, above),
                lambda theta, at: self.g(theta, at, below),
                shape.restore(theta),
                x,
                solver=self.solver,
                strategy=self.strategy,
            )
        before = clone(theta)
        value = _leaves(estimate.value)
        if all(bool(torch.isfinite(leaf).all()) for leaf in value.values()):
            self._apply(leaves, value, progress)
        assert estimate.solution is not None
        assert estimate.lower_gradient_norm is not None
        row = {
            "step": step,
            "upper_loss": float(estimate.upper_loss),
            "hypergradient_norm": float(norm(value)),
            "lower_gradient_norm": float(estimate.lower_gradient_norm),
            "outcome": estimate.outcome.label,
            "residual": float(estimate.solution.residual),
            "iterations": int(estimate.solution.iterations),
            "moved": float(
                norm({name: leaf.detach() - before[name] for name, leaf in leaves.items()})
            ),
        }
        self.records.append(row)
        return row

    def _apply(self, leaves: Tree, value: Tree, progress: float) -> None:
        theta = {name: leaf.detach() for name, leaf in leaves.items()}
        memory = self.optimizer.init(theta) if self._memory is None else self._memory
        after, self._memory = self.optimizer.step(theta, value, memory, progress)
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.copy_(after[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        It contains θ, the optimiser's memory, the position in the batches, and the records.
        """
        return {
            "theta": clone(_leaves(self.theta)),
            "optimizer": self._memory,
            **{name: batches.taken for name, batches in self._batches.items()},
            "records": [dict(row) for row in self.records],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from this state.

        The order of batches is the same if the iterables always yield the same batches.
        """
        leaves = _leaves(self.theta)
        theta = state["theta"]
        ours, theirs = (
            {name: tuple(leaf.shape) for name, leaf in tree.items()} for tree in (leaves, theta)
        )
        require(
            ours == theirs,
            "other-settings",
            f"theta has the shapes {ours}, but the checkpoint has {theirs}",
            place=("theta",),
        )
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.copy_(theta[name])
        self._memory = move_batch(state["optimizer"], next(iter(leaves.values())).device)
        with torch.random.fork_rng(devices=[]):
            for name, batches in self._batches.items():
                batches.skip(state.get(name, 0))
        self.records[:] = [dict(row) for row in state["records"]]


def ensure_one_process(count: int) -> None:
    """Raise ConfigError if the training has several processes, because each would change θ
    separately.
    """
    require(
        count <= 1,
        "not-supported",
        f"HypergradientCallback supports one process, but the training has {count}",
    )


def logger_row(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's numbers under names for a logger; the outcome is ``hgms/converged``, 1 or 0.

    Examples
    --------
    >>> logger_row({"step": 10, "outcome": "converged", "residual": 1e-7})
    {'hgms/converged': 1.0, 'hgms/residual': 1e-07}
    """
    numbers = {"hgms/converged": float(row["outcome"] == "converged")}
    return numbers | {
        f"hgms/{name}": float(value)
        for name, value in row.items()
        if name not in ("step", "outcome")
    }
