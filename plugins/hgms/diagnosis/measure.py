"""One diagnosed outer step: all measures in one row, with their cost."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import attrs
import torch
from attrs import define, field
from torch import Tensor

from hgms.diagnosis.capture import Seen, capture, pipeline_of
from hgms.diagnosis.choice import choice
from hgms.diagnosis.float64 import in_double, to_double
from hgms.diagnosis.spectrum import FLAT, spectrum
from hgms.diagnosis.stationarity import bias, cosine_and_ratio, flat
from hgms.facts import innermost, settings_of
from hgms_core import (
    Batch,
    Branch,
    ConfigError,
    Cost,
    HgmsError,
    Key,
    Linearization,
    Method,
    Problem,
    Ravel,
    State,
    Strategy,
    Tree,
    curvature,
    values,
)
from hgms_core.torch_errors import first_line, out_of_memory

ROWS = 8192
"""Maximum number of rows for losses and ∇ₓg."""
HESSIAN_ROWS = 1024
"""Maximum number of rows for products with the lower Hessian."""
LONGER = 4
"""Length of the longer lower run, as a multiple of the normal length."""


@define(eq=False, kw_only=True)
class Diagnosing:
    """Measures outer steps of ``method`` on ``problem`` without changing either.

    The step is repeated from the state before it, with the same keys. Additional random draws use
    separate keys. ``build`` creates the problem in float64 (``None``: float64 is only available by
    converting its losses). A measure that fails is omitted from the row, and ``skipped`` contains
    the reason.
    """

    method: Method
    problem: Problem = field(converter=lambda problem: attrs.evolve(problem, compiler=None))
    seed: int

    def row(self, before: State, after: State, step: int, progress: float) -> dict[str, Any]:
        """Diagnose the step that led from ``before`` to ``after``.

        ``step`` is its number, and ``progress`` is the used share of the budget at its start.
        """
        key = Key(self.seed).fold("diagnose", step)
        kind = "result" if pipeline_of(self.method) is None else "pipeline"
        measured = Measured({"step": step, "of": kind})

        def measure() -> dict[str, Any]:
            if kind == "result":
                _of_point(measured, self.problem, *self.method.result(after), key)
            else:
                _of_step(measured, capture(self.method, self.problem, before, progress), key)
            return {}

        measured.add("step", measure)
        return measured.as_row()


@define
class Measured:
    """A row under construction, with its cost and the omitted measures."""

    row: dict[str, Any]
    cost: Cost = field(factory=Cost)
    skipped: dict[str, str] = field(factory=dict)

    def add(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Add the values that ``measure`` returns, or the first line of its error.

        A failed diagnosis never ends a run.
        """
        try:
            self.row.update(measure())
        except (
            HgmsError,
            RuntimeError,
            ValueError,
            TypeError,
            AttributeError,
            ArithmeticError,
            LookupError,
            MemoryError,
        ) as error:
            memory = out_of_memory(error)
            if memory and torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.skipped[name] = (
                "not enough memory"
                if memory
                else error.message
                if isinstance(error, HgmsError)
                else first_line(error)
            )

    def as_row(self) -> dict[str, Any]:
        counts = {f"cost_{name}": count for name, count in self.cost.numbers().items()}
        return {**self.row, **counts, "oracle_calls": self.cost.calls, "skipped": self.skipped}


# --- measures of a pipeline's step
# --------------------------------------------------------------------------------------------------


def _of_step(measured: Measured, seen: Seen, key: Key) -> None:
    measured.cost += seen.cost
    estimate = seen.estimate
    h = flat(seen.estimate.value)
    measured.row |= {
        "hypergradient_norm": float(torch.linalg.vector_norm(h)),
        "selected": int(seen.selection.index),
    }
    if (solution := estimate.solution) is not None:
        measured.row |= {
            "residual": float(solution.residual.max()),
            "curvature": float(solution.curvature.min()),
            "outcome": estimate.outcome.label,
        }
    settings = settings_of(seen.pipeline.hypergradient)
    ridge = settings_of(settings.get("solver")).get("ridge")
    strategy = settings.get("strategy", "vjp")
    _of_point(measured, seen.problem, seen.theta, seen.branch.x, key, ridge, strategy)
    temperature = settings_of(seen.pipeline.generator).get("temperature")
    if isinstance(temperature, float) and "normal_inverses" in measured.row:
        measured.row["tube"] = math.sqrt(temperature * measured.row["normal_inverses"])
    measured.add("longer", lambda: _longer(measured, seen, h, key))
    measured.add("double", lambda: _double(measured, seen, h))
    measured.add("gain", lambda: _gain(measured, seen, key))
    if seen.candidates.count > 1:
        measured.add(
            "choice", lambda: _choice(measured, seen, *_upper(seen.problem, "select", key))
        )
        if "flat_dimension" in measured.row and "score_mean" in measured.row:
            measured.add("bound", lambda: _bound(measured, seen.candidates.count))


def _longer(measured: Measured, seen: Seen, h: Tensor, key: Key) -> dict[str, Any]:
    """Compute the hypergradient after LONGER times as many lower steps from the same start.

    The keys are the same, so the same candidate continues. A generator without ``steps`` proposes
    again from its end point, at the same θ.
    """
    generator = innermost(seen.pipeline.generator, "generator")
    index = seen.selection.index
    start = seen.start
    steps = settings_of(generator).get("steps")
    if type(steps) is int:
        more: Any = attrs.evolve(generator, steps=LONGER * steps)
        candidates = more.propose(seen.problem, seen.theta, start, seen.proposing, seen.progress)
        measured.cost += candidates.cost
    else:
        candidates = seen.candidates
        for turn in range(1, LONGER):
            start = generator.carry(start, candidates, index, key.fold("carry", turn), seen.problem)
            candidates = generator.propose(
                seen.problem, seen.theta, start, key.fold("propose", turn), seen.progress
            )
            measured.cost += candidates.cost
            index = index.clamp_max(candidates.count - 1)
    estimate = seen.estimate_at(candidates.branch(index))
    measured.cost += estimate.cost
    cosine, ratio = cosine_and_ratio(h, flat(estimate.value))
    return {"longer_cosine": cosine, "longer_ratio": ratio}


def _double(measured: Measured, seen: Seen, h: Tensor) -> dict[str, Any]:
    problem = in_double(seen.problem, seen.theta, seen.branch.x)
    if problem is seen.problem:
        return {"double": "already"}
    theta = to_double(seen.theta)
    memory = to_double(seen.memory)
    estimator = seen.pipeline.hypergradient
    branch = Branch(x=to_double(seen.branch.x), aux=to_double(seen.branch.aux))
    again = seen.estimate.cost.calls == 0  # carried, so converting shows no rounding
    if not again:
        try:
            estimate = estimator.estimate(
                problem, theta, *branch.as_candidates(), seen.estimating, memory
            )[0]
        except (HgmsError, TypeError, AttributeError):
            again = True  # the estimate differentiates through the branch
    if again:
        candidates = seen.pipeline.generator.propose(
            problem, theta, to_double(seen.start), seen.proposing, seen.progress
        )
        branch = candidates.branch(seen.selection.index)
        away = flat(branch.x) - flat(seen.branch.x)
        measured.cost += candidates.cost
        if torch.linalg.vector_norm(away) > 0.1 * torch.linalg.vector_norm(flat(seen.branch.x)):
            raise ConfigError(
                "not-supported",
                "in float64 the branch ends at another point, because its random numbers depend on "
                "the dtype",
            )
        estimate = estimator.estimate(
            problem, theta, *branch.as_candidates(), seen.estimating, memory
        )[0]
    measured.cost += estimate.cost
    cosine, ratio = cosine_and_ratio(h, flat(estimate.value))
    return {"double": "cast", "double_cosine": cosine, "double_ratio": ratio}


def _gain(measured: Measured, seen: Seen, key: Key) -> dict[str, Any]:
    """Compute upper values on independent rows, if the problem has any.

    Neither selection nor differentiation used independent rows. There are values of the first
    candidate, the mean over candidates, and the selected candidate. A further value is of the
    selected candidate after another lower solve at the next θ. This solve uses the same start and
    the same keys.
    """
    role = next(
        name for name in ("stop", "differentiate", "select") if name in seen.problem.upper_data
    )
    batch, rows = _upper(seen.problem, role, key)
    index = int(seen.selection.index)
    f = seen.problem.f
    found = values(f, seen.theta, seen.candidates.x, batch, rows=rows).double()
    again = seen.pipeline.generator.propose(
        seen.problem, seen.theta_after, seen.start, seen.proposing, seen.progress
    )
    with torch.no_grad():
        after = float(f(seen.theta_after, again.at(index), batch))
    measured.cost += again.cost + Cost(upper_values=len(found) + 1, rows=rows * (len(found) + 1))
    selection = float(found.mean() - found[index])
    differentiation = float(found[index]) - after
    total = abs(selection) + abs(differentiation)
    return {
        "gain_rows": role,
        "value_first": float(found[0]),
        "value_mean": float(found.mean()),
        "value_selected": float(found[index]),
        "value_after": after,
        "gain_selection": selection,
        "gain_differentiation": differentiation,
        "selection_share": abs(selection) / total if total else None,
    }


def _choice(measured: Measured, seen: Seen, batch: Batch, rows: int) -> dict[str, Any]:
    """Compare the chosen candidate with the best other candidate, on the selection rows."""
    problem = seen.problem
    chosen = int(seen.selection.index)
    scores = values(problem.f, seen.theta, seen.candidates.x, batch, rows=rows).double()
    measured.cost += Cost(upper_values=len(scores), rows=rows * len(scores))
    best = scores.clone()
    best[chosen] = torch.inf
    other = int(best.argmin())
    measured.row |= {
        "candidates": len(scores),
        "score_mean": float(scores.mean()),
        "score_chosen": float(scores[chosen]),
        "choice_gap": float(scores[other] - scores[chosen]),
    }
    data = problem.upper_data["select"]
    with_rows = choice(
        problem.f,
        seen.theta,
        seen.candidates.at(chosen),
        seen.candidates.at(other),
        batch,
        min(rows, data.size),
    )
    measured.cost += Cost(upper_values=4, rows=4 * rows)
    return with_rows


def _bound(measured: Measured, count: int) -> dict[str, Any]:
    """Derive statements about N from the selection term C₁N^(−1/k) of the paper's bound.

    The statements assume that the bound is tight. The distance from the mean score to the chosen
    score is (1 − N^(−1/k)) C₁, which determines C₁. The row contains C₁, the remaining error, and
    two values of N (as logarithms to base 10): the N that would halve the error, and the N at which
    the error equals the noise of the choice.
    """
    dimension = float(measured.row["flat_dimension"])
    if dimension < 0.5:
        return {}
    k = max(1.0, round(dimension))
    lead = measured.row["score_mean"] - measured.row["score_chosen"]
    row: dict[str, Any] = {"log10_candidates_to_halve": math.log10(count) + k * math.log10(2)}
    if lead <= 0:
        return row
    constant = lead / -math.expm1(-math.log(count) / k)
    row |= {"selection_constant": constant, "selection_error": constant * count ** (-1 / k)}
    if error := measured.row.get("choice_error"):
        row["log10_candidates_to_noise"] = (
            max(0.0, k * math.log10(constant / error)) if constant > 0 else 0.0
        )
    return row


def _upper(problem: Problem, role: str, key: Key) -> tuple[Batch, int]:
    return problem.upper_data[role].sample(key.fold("upper", role), ROWS)


# --- measures of a point
# --------------------------------------------------------------------------------------------------


def _of_point(
    measured: Measured,
    problem: Problem,
    theta: Tree,
    x: Tree,
    key: Key,
    ridge: float | None = None,
    strategy: str = "vjp",
) -> None:
    """Measure ∇ₓg, the flat directions and the bias at (θ, x).

    The measures use float64 if the problem is available in float64.
    """
    reference = problem
    # without a problem in float64, measure in the dtype of the problem
    with contextlib.suppress(HgmsError, RuntimeError, TypeError):
        reference = in_double(problem, theta, x)
        theta = to_double(theta)
        x = to_double(x)
    batch, rows = reference.lower_data.sample(key.fold("lower"), ROWS)
    below, fewer = reference.lower_data.sample(key.fold("hessian"), HESSIAN_ROWS)
    above, upper_rows = _upper(reference, "differentiate", key)
    spec = Ravel.of(x)

    @functools.cache
    def lower_gradient() -> Tensor:
        measured.cost += Cost(lower_gradients=1, rows=rows)
        return curvature(lambda x: reference.g(theta, x, batch), x, "difference").gradient

    def slope() -> dict[str, float]:
        return {
            "lower_gradient": float(torch.linalg.vector_norm(lower_gradient())),
            "x_norm": float(torch.linalg.vector_norm(spec.ravel(x))),
        }

    exact: Any = strategy if strategy in get_args(Strategy) else "vjp"

    def linearize(x: Tree) -> Linearization:
        return Linearization.of(
            lambda theta, x: reference.f(theta, x, above),
            lambda theta, x: reference.g(theta, x, below),
            theta,
            x,
            exact,
            reference.precision,
        )

    def flatness() -> dict[str, Any]:
        hessian = curvature(
            lambda x: reference.g(theta, x, below), x, exact, precision=reference.precision
        )
        start = spec.ravel(x)
        row, products = spectrum(hessian.matvec, start, ridge or 0.0, key.fold("spectrum"))
        measured.cost += Cost(products=products, rows=products * fewer)
        return row

    def bias_at_x() -> dict[str, Any]:
        used = FLAT * measured.row["largest"] if ridge is None else ridge
        row, cost = bias(linearize, x, lower_gradient(), used, (upper_rows, fewer))
        measured.cost += cost
        return {"ridge": used, **row}

    measured.add("lower_gradient", slope)
    measured.add("spectrum", flatness)
    measured.add("bias", bias_at_x)
