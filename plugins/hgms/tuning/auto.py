"""The method ``auto``: the search of :func:`hgms.tune` as a method of comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, final

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from hgms.arguments import errors_at
from hgms.config import Budget
from hgms.hyper import PerRow
from hgms.tuning.candidate import Candidate, choose
from hgms.tuning.implicit import LARGEST, Implicit
from hgms.tuning.meter import Meter, NotConvex, Paused, Stage, Stages
from hgms.tuning.online import Online
from hgms.tuning.problem import Space, TuningProblem, join, masks_of
from hgms_core import (
    Batch,
    ConfigError,
    Data,
    Key,
    NumericalError,
    Problem,
    Ravel,
    Record,
    Rows,
    State,
    Tree,
    component,
    hookimpl,
)
from hgms_core.capabilities import Capabilities, Finishes, HasTestingInstance
from hgms_core.validators import optional_positive


@define(eq=False)
class Search:
    """The candidates of a search so far; the state of a step and its result.

    Attributes
    ----------
    engine
        The engine of the candidates.
    candidates
        Judged candidates, in the order of the stages.
    chosen, reference
        The selected candidate and the best baseline; absent at the start.
    w
        The parameters of the selected candidate, ``[d]``.
    is_finished
        Whether all stages are finished.
    """

    problem: TuningProblem
    engine: Implicit | Online | None = None
    candidates: list[Candidate] = field(factory=list)
    chosen: Candidate | None = None
    reference: Candidate | None = None
    w: Tensor | None = None
    is_finished: bool = False

    def choose(self) -> None:
        """Select a candidate by the safeguard."""
        usable = [item for item in self.candidates if item.loss < math.inf]
        if any(item.is_baseline for item in usable):
            self.chosen, self.reference = choose(usable, self.problem.masks.fold)
            self.w = self.chosen.w


@frozen(eq=False)
class Tuning:
    """Extension of a problem: its losses as functions of vectors, for ``auto``."""

    problem: TuningProblem


def _budget(method: object, attribute: Any, value: str) -> None:
    with errors_at(attribute.name):
        Budget(value)


@final
@component
class Auto:
    """Select the hyperparameters and the lower solution by a search with a safeguard::

        baselines:  θ at its start, trained on training, validation, or all rows; the out-of-fold
                    filter for weights of rows; for penalties a shared level
        learned:    Newton-CG, penalties inversely proportional to the (squared) size of their
                    parameters, then implicit hypergradients and RPROP with a prior (small convex
                    losses); or Adam and look-ahead hypergradients with restarts (networks)
        result:     the best learned candidate, if its gain on held-out rows exceeds the noise;
                    else the best baseline

    One outer step runs one stage of the search, such as a baseline or a level of the prior. The
    state contains the results of all stages. Before the last stage, the result is the best
    candidate so far. K + 1 replicas train side by side; replica k is judged on fold k of the
    validation rows, which it has not used. The page *Tune* describes the candidates.

    ``hgms.tune`` runs this method on a module with any kinds of :mod:`hgms.hyper`. In runs and
    comparisons, it applies to problems with one weight per lower row (extension ``Rows``) and
    without other leaves of θ, for which f is the mean of the same losses of validation rows. It
    rejects other problems. Use as a strong reference for learned weights of rows: its baselines
    include the filter. Avoid for data sources, and for models in batches: all rows must fit into
    memory.

    Parameters
    ----------
    budget
        Limit of the search in lower steps of all replicas (``"600 steps"``), seconds, or gradients
        (``"1e5 calls"``). A run may end earlier.
    engine
        ``"auto"`` uses the implicit engine for losses without negative curvature in at most 10,000
        parameters.
    batch_size
        Rows of a lower step in the online engine; None: all up to 1,024, else 256.
    folds
        Number K of folds; None: 4 below 400 lower rows, else 3.
    clock
        Time of a budget in seconds: wall-clock time or processor time.

    Raises
    ------
    ConfigError
        ``not-supported`` for other problems, ``not-convex`` for the engine "implicit" on a loss
        with negative curvature.
    NumericalError
        If no held-out loss is finite.

    Notes
    -----
    Cost: K + 1 gradients per lower step (K² + K + 1 without validation rows). A hypergradient of
    the online engine costs two further gradients and a backward pass through both.

    Source: this project; RPROP (Riedmiller and Braun 1993), implicit hypergradients (Lorraine et
    al. 2020), look-ahead hypergradients (Liu et al. 2019, DARTS), out-of-fold filtering (Northcutt
    et al. 2021, confident learning).

    Examples
    --------
    >>> losses = lambda x, batch: (x["x"] - batch["a"]).square()
    >>> problem = Problem(
    ...     theta0={"logits": torch.zeros(12)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, b: (t["logits"][b["index"]].sigmoid() * losses(x, b)).mean(),
    ...     f=lambda t, x, b: losses(x, b).mean(),
    ...     lower_data=Data.of({"a": torch.tensor([1.0] * 8 + [9.0] * 4)}),
    ...     upper_data=Data.of({"a": torch.linspace(0.9, 1.1, 10)}),
    ...     extensions=(Rows(losses=losses),),
    ... )
    >>> method = Auto(budget="100 steps")
    >>> state = method.init(problem, seed=0)
    >>> while not method.is_finished(state):
    ...     state, record = method.step(problem, state)
    >>> record["selected"], round(float(method.result(state)[1]["x"]), 1)
    ('out-of-fold filter', 1.0)
    """

    name: ClassVar[str] = "auto"
    needs: ClassVar[frozenset[str]] = frozenset({"row-weights", "validation-rows"})
    capabilities: ClassVar[Capabilities] = frozenset({Finishes, HasTestingInstance})

    budget: str = field(default="600 steps", validator=_budget)
    engine: Literal["auto", "implicit", "online"] = "auto"
    batch_size: int | None = field(default=None, validator=optional_positive)
    folds: int | None = field(default=None, validator=optional_positive)
    clock: Literal["wall", "cpu"] = "wall"

    @classmethod
    def testing_instance(cls) -> Auto:
        return cls(budget="200 steps")

    def init(self, problem: Problem, seed: int) -> State:
        self.problem(problem, seed)
        return {
            "seed": seed,
            "step": 0,
            "stages": {},
            "spent": {"seconds": 0.0, "steps": 0, "calls": 0},
            "theta": dict(problem.theta0),
            "x": dict(problem.x0),
            "finished": False,
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        number = state["step"] + 1
        if state["finished"]:
            return {**state, "step": number}, {"step": number, **_counts(state)}
        meter = self.meter(self.problem(problem, state["seed"]))
        stages = Stages(meter, state["stages"], state["spent"], 1)
        search = self.search(problem, state, stages)
        following = {
            **state,
            "step": number,
            "stages": stages.finished,
            "spent": meter.spent(),
            "finished": search.is_finished,
        }
        record: Record = {"step": number, "stage": stages.last, "share": meter.share}
        if search.chosen is not None and search.w is not None:
            space = search.problem.space
            theta = problem.project(space.parts(search.chosen.u.detach()))
            following |= {"theta": theta, "x": search.problem.spec.unravel(search.w.detach())}
            record |= {"selected": search.chosen.name, "held_out_loss": search.chosen.loss}
        return following, {**record, **_counts(following)}

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], state["x"]

    def is_finished(self, state: State) -> bool:
        """Return whether all stages of the search are finished."""
        return bool(state["finished"])

    # --- the search

    def meter(self, problem: TuningProblem) -> Meter:
        return Meter(Budget(self.budget), len(problem.masks.group), self.clock)

    def search(self, problem: Problem, state: State, stages: Stages) -> Search:
        """Repeat the finished stages and run the stages that ``stages`` permits.

        Raises
        ------
        NumericalError
            If the search ends without a finite held-out loss.
        """
        search = Search(self.problem(problem, state["seed"]))
        try:
            for engine, candidate in self._candidates(search.problem, stages, state["seed"]):
                if engine is not search.engine:
                    search.engine = engine
                    search.candidates.clear()
                search.candidates.append(candidate)
            search.choose()
            last, chosen = search.engine, search.chosen
            if last is None or chosen is None:
                raise NumericalError(
                    "not-finite",
                    "the held-out loss of every candidate is infinite or not a number",
                    place=("loss",),
                    hint="scale the inputs, or start from a trained model",
                )
            stages.prefix = ""
            search.w = stages.run("final", lambda: {"w": last.final(chosen)})["w"]
            search.is_finished = True
        except Paused:
            search.choose()
        return search

    def _candidates(
        self, problem: TuningProblem, stages: Stages, seed: int
    ) -> Iterator[tuple[Implicit | Online, Candidate]]:
        """Yield the candidates of the implicit engine; if it fails, of the online engine."""
        suits = problem.is_smooth and len(problem.w0) <= LARGEST and not problem.space.uses("rate")
        if self.engine == "implicit" and problem.space.uses("rate"):
            raise ConfigError(
                "not-supported",
                "the implicit engine has no learning rate to learn",
                place=("learn",),
                hint='use engine="online"',
            )
        if self.engine == "implicit" and not suits:
            raise ConfigError(
                "not-convex",
                "the implicit engine requires at most 10,000 parameters, and no dropout or batch "
                "normalisation in training mode",
                place=("engine",),
                hint='use engine="online", or call model.eval() first',
            )
        if suits and self.engine != "online":
            stages.prefix = "implicit "
            implicit = Implicit(problem, stages.meter)
            try:
                for candidate in implicit.candidates(stages):
                    yield implicit, candidate
            except NotConvex:
                if self.engine == "implicit":
                    raise ConfigError(
                        "not-convex",
                        "the training loss has a direction of negative curvature",
                        place=("engine",),
                        hint='use engine="online"',
                    ) from None
            else:
                return
        stages.prefix = "online "
        online = Online(problem, stages.meter, self.batch_size, Key(seed).fold("online"))
        for candidate in online.candidates(stages):
            yield online, candidate

    # --- problems

    def problem(self, problem: Problem, seed: int) -> TuningProblem:
        """Return the problem as functions of vectors.

        Raises
        ------
        ConfigError
            ``not-supported``.
        """
        own = problem.find(Tuning)
        if own is not None:
            return own.problem
        key = (self.name, seed, self.folds)
        if key not in problem.kept:
            problem.kept[key] = _of_rows(problem, seed, self.folds)
        return problem.kept[key]


def _counts(state: State) -> Stage:
    spent = state["spent"]
    return {"oracle_calls": int(spent["calls"]), "lower_steps": int(spent["steps"])}


def as_problem(tuning: TuningProblem) -> Problem:
    """Return a bilevel problem that contains the problem of :func:`hgms.tune`."""
    space = tuning.space
    first = {name: column[: tuning.train_size] for name, column in tuning.rows.items()}
    columns = {name: column for name, column in first.items() if name != "index"}

    def vector(theta: Tree) -> Tensor:
        return torch.cat([theta[name] for name in space.blocks])

    def g(theta: Tree, x: Tree, batch: Batch) -> Tensor:
        w = tuning.spec.ravel(x)
        return tuning.train_loss(w, vector(theta), torch.ones_like(batch["index"]), batch)

    def f(theta: Tree, x: Tree, batch: Batch) -> Tensor:
        w = tuning.spec.ravel(x)
        return tuning.outer_loss(w, torch.ones_like(batch["index"]), batch) / len(batch["index"])

    return Problem(
        theta0=space.parts(space.start),
        x0=tuning.spec.unravel(tuning.w0),
        g=g,
        f=f,
        lower_data=Data.of(columns),
        extensions=(Tuning(tuning),),
    )


def _rejection(reason: str) -> ConfigError:
    return ConfigError(
        "not-supported",
        f"method 'auto' {reason}",
        place=("method",),
        hint="use hgms.tune for a module with other hyperparameters",
    )


def _of_rows(problem: Problem, seed: int, folds: int | None) -> TuningProblem:
    """Return a problem with one weight per lower row as functions of vectors.

    The validation rows have the roles ``differentiate`` and ``select``.
    """
    rows = problem.find(Rows)
    if rows is None:
        raise _rejection("requires one weight per lower row (extension Rows)")
    if set(problem.theta0) != {rows.leaf}:
        raise _rejection(f"learns the leaf {rows.leaf!r} of θ only")
    above = problem.upper_data["differentiate"]
    second = problem.upper_data["select"]
    validation = above.batch(None)
    if second is not above and second.size:
        validation = join(validation, second.batch(None)) if above.size else second.batch(None)
    lower = problem.lower_data.batch(None)
    if "index" not in validation or set(validation) != set(lower):
        raise _rejection("requires validation rows with the columns of the lower rows")
    spec = Ravel.of(problem.x0)
    w0 = spec.ravel(problem.x0)
    _check_upper(problem, rows, validation, w0, spec)
    start = problem.theta0[rows.leaf]
    block = PerRow().block({}, lower)
    block = evolve(
        block,
        start=start,
        neutral=start,
        low=min(block.low, float(start.min())),
        high=max(block.high, float(start.max())),
        value=torch.sigmoid,
    )
    size = problem.lower_data.size
    count = len(validation["index"])

    def losses(x: Tree, hyper: Mapping[str, Tensor], batch: Batch, training: bool) -> Tensor:
        return rows.losses(x, batch)

    def regulariser(x: Tree, batch: Batch) -> Tensor:
        return 2 * rows.regulariser(problem.theta0, x, batch)  # weights are 2σ(θ), not σ(θ)

    return TuningProblem(
        spec=spec,
        w0=w0,
        space=Space({rows.leaf: block}, w0),
        rows=join(lower, validation),
        train_size=size,
        masks=masks_of(size, count, folds, seed, w0),
        losses=losses,
        regulariser=regulariser,
    )


def _check_upper(problem: Problem, rows: Rows, batch: Batch, w0: Tensor, spec: Ravel) -> None:
    """Require that f is the mean of the losses of the rows, at two points."""
    noise = torch.randn(w0.shape, generator=Key(0).fold("upper").generator()).to(w0)
    for w in (w0, w0 + 0.1 * noise):
        x = spec.unravel(w)
        with torch.no_grad():
            upper = problem.f(problem.theta0, x, batch)
            mean = rows.losses(x, batch).mean()
        if not torch.allclose(upper, mean, rtol=1e-3, atol=1e-6):
            raise _rejection(
                f"requires an upper loss that is the mean of the losses of validation rows; f is "
                f"{float(upper):.4g}, the mean is {float(mean):.4g}"
            )


@hookimpl
def hgms_register_methods() -> list[type]:
    return [Auto]
