"""The tilted lower level: a pipeline with the lower loss g + εf."""

from __future__ import annotations

from typing import Any, ClassVar, final

import attrs
from attrs import evolve, field
from torch import Tensor

from hgms.facts import around_a_pipeline, innermost
from hgms.gauss_newton import Composite
from hgms.methods.inner_pipeline import Wrapper, another
from hgms.rows import trained_on
from hgms_core import (
    Batch,
    Cost,
    Data,
    Key,
    Loss,
    Method,
    Problem,
    Record,
    Rows,
    State,
    Tree,
    component,
    hookimpl,
)
from hgms_core.capabilities import HasOutputs, find
from hgms_core.validators import at_least

UPPER = "upper."
"""The prefix of the names of validation leaves in a tilted lower batch."""


@final
@component
class Tilted(Wrapper):
    """A pipeline that minimises g + εf in its lower level, f on validation rows.

    The validation rows have the role `differentiate`. A reference pipeline does not learn θ
    (``fixed``) and does not select (``first``), so its rows of the role `select` would be unused.
    In a reference, f therefore also uses these rows, as in ``validation-only``.

    Candidates are thus drawn from the minimisers of g that validation favours. The hypergradient is
    the hypergradient of the tilted problem. In a configuration, set the field in the table of the
    pipeline: ``tilt = 1.0``.

    Use if the lower level has many minimisers and validation rows are to spare. Compare with
    references that train on the same rows. Avoid if the lower level has one minimiser: the error is
    of order ε.

    Parameters
    ----------
    method
        a pipeline, or a wrapper around one.
    tilt
        ε ≥ 0. As ε → 0 the minimisers of g + εf tend to the minimisers of g with the lowest f.

    Notes
    -----
    Cost: the cost of the method. Each oracle call on g also counts for f.

    Source: Tikhonov's viscosity selection; value-function penalties (V-PBGD, ScaleBiO) minimise the
    same sum with ε = 1/γ.

    Examples
    --------
    >>> import torch
    >>> def g(theta, x, batch):
    ...     return x["x"].sum()
    >>> def f(theta, x, batch):
    ...     return 2 * x["x"].sum()
    >>> problem = tilt_problem(Problem(theta0={}, x0={"x": torch.zeros(1)}, g=g, f=f), 0.5)
    >>> float(problem.g({}, {"x": torch.ones(1)}, {}))
    2.0
    """

    name: ClassVar[str] = "tilted"

    method: Method = field(metadata={"flat": True}, validator=around_a_pipeline)
    tilt: float = field(validator=at_least(0))

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        following, record = self.method.step(self.changed_problem(problem), state, progress)
        cost = _of_both(Cost(**state["cost"]), Cost(**following["cost"]))
        counts = cost.numbers()
        record = (
            record
            | {f"cost_{name}": count for name, count in counts.items()}
            | {"oracle_calls": cost.calls}
        )
        return {**following, "cost": counts}, record

    def changed_problem(self, problem: Problem) -> Problem:
        inner = innermost(self.method)
        learns = (inner.hypergradient.name, inner.selector.name) != ("fixed", "first")
        return tilt_problem(problem, self.tilt, learns=learns)


def _of_both(before: Cost, after: Cost) -> Cost:
    """Count a call of g + εf as one call of g and one call of f.

    The count of the data already includes the rows of both.
    """
    return evolve(
        after,
        upper_gradients=after.upper_gradients + after.lower_gradients - before.lower_gradients,
        products=2 * after.products - before.products,
        cross_products=2 * after.cross_products - before.cross_products,
    )


def tilt_problem(problem: Problem, tilt: float, *, learns: bool = True) -> Problem:
    """Return the same problem with the lower loss g + tilt·f.

    Each lower batch also contains an equal number of validation rows, with leaves named
    ``upper.<name>``. These rows have the role `differentiate`. If ``learns`` is False, rows of the
    role `select` are included. The loss provides its outputs if both g and f provide them.
    """
    key = ("tilted", tilt, learns)
    return another(problem, key, lambda: _tilt(problem, tilt, problem.g, problem.f, learns))


def _tilt(problem: Problem, tilt: float, g: Loss, f: Loss, learns: bool) -> Problem:
    def both(theta: Tree, x: Tree, batch: Batch) -> Tensor:
        below, above = _parts(batch)
        return g(theta, x, below) + tilt * f(theta, x, above)

    def rows(index: Tensor) -> Batch:
        return _join(lower.rows(index % lower.size), upper.rows(index // lower.size))

    lower = problem.lower_data
    shared = not learns and "select" in problem.upper_data
    upper = trained_on(problem) if shared else problem.upper_data["differentiate"]
    data = Beside(
        size=lower.size,
        rows=rows,
        device=lower.device,
        strata=lower.strata,
        lower=lower,
        upper=upper,
    )
    changed = evolve(problem, g=_composite(g, f, tilt, both), lower_data=data)
    weighted = problem.find(Rows)
    return changed if weighted is None else changed.with_extensions(_rows(weighted, f, tilt))


def _rows(rows: Rows, f: Loss, tilt: float) -> Rows:
    """Return the same weights of lower rows, for tilted batches.

    The validation rows in a tilted lower batch contribute to the regulariser.
    """

    def regulariser(theta: Tree, x: Tree, batch: Batch) -> Tensor:
        below, above = _parts(batch)
        return rows.regulariser(theta, x, below) + tilt * f(theta, x, above)

    return evolve(
        rows, losses=lambda x, batch: rows.losses(x, _parts(batch)[0]), regulariser=regulariser
    )


def _composite(g: Loss, f: Loss, tilt: float, value: Loss) -> Loss:
    """Return ``value``, which is g + tilt·f, with the outputs of both losses.

    If g or f does not provide outputs, ``value`` is returned unchanged.
    """
    lower = find(g, HasOutputs)
    upper = find(f, HasOutputs)
    if lower is None or upper is None:
        return value

    def outputs(x: Tree, batch: Batch) -> tuple[Any, Any]:
        below, above = _parts(batch)
        return lower.outputs(x, below), upper.outputs(x, above)

    def criterion(theta: Tree, x: Tree, z: tuple[Any, Any], batch: Batch) -> Tensor:
        below, above = _parts(batch)
        penalty = tilt * upper.criterion(theta, x, z[1], above)
        return lower.criterion(theta, x, z[0], below) + penalty

    return Composite(outputs=outputs, criterion=criterion, value=value)


def _parts(batch: Batch) -> tuple[Batch, Batch]:
    """Split a tilted batch into its lower rows and its validation rows."""
    below = {name: leaf for name, leaf in batch.items() if not name.startswith(UPPER)}
    above = {
        name.removeprefix(UPPER): leaf for name, leaf in batch.items() if name.startswith(UPPER)
    }
    return below, above


@attrs.frozen(kw_only=True)
class Beside(Data):
    """Lower rows with an equal number of validation rows in each batch.

    A batch of all lower rows contains all validation rows. One key draws both, so that a branch can
    be replayed. Within one draw, no validation row occurs twice before every validation row has
    occurred once.

    The number of a row is the pair ``lower + size · upper``. Both rows pass through a loss, so both
    are counted.
    """

    lower: Data
    upper: Data

    def numbers(self, key: Key, batch_size: int, steps: int) -> Tensor:
        numbers = self.lower.numbers(key, batch_size, steps)
        if not self.upper.size:
            return numbers
        above = self.upper.numbers(key.fold("companion"), batch_size, steps)
        return numbers + self.size * above.to(self.device, non_blocking=True)

    def batch(self, index: Tensor | None) -> Batch:
        return (
            self.rows(index)
            if index is not None
            else _join(self.lower.batch(None), self.upper.batch(None))
        )

    def count(self, batch_size: int | None) -> int:
        if batch_size is None or batch_size >= self.size:
            return max(1, self.size + self.upper.size)
        return max(1, batch_size + batch_size * (self.upper.size > 0))


def _join(below: Batch, above: Batch) -> Batch:
    return {**below, **{UPPER + name: leaf for name, leaf in above.items()}}


@hookimpl
def hgms_register_methods() -> list[type]:
    return [Tilted]
