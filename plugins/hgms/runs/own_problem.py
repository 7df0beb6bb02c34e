"""Problems from a script or a notebook as tasks.

Runs and comparisons need properties of these problems. The functions here determine the properties
by trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import attrs
import torch
from attrs import field, frozen

from hgms.adapters import evaluate_metrics
from hgms.arguments import require, require_known
from hgms.config.fingerprinting import fingerprint, fingerprints
from hgms.runs.held_out_rows import ONE_OF, distinct, hold_out, loss_on
from hgms.store import describe_error
from hgms_core import ConfigError, Data, Problem, Rows, Sources, Tree
from hgms_core.arguments import check_function, kind_of
from hgms_core.capabilities import GivesRepresentations, find

LOSS = "upper_loss"
"""The metric of a problem without metrics: f on rows that no method sees.

These are validation rows.
"""

_UP = {
    "accuracy",
    "acc",
    "auc",
    "auroc",
    "ap",
    "f1",
    "precision",
    "recall",
    "score",
    "r2",
    "reward",
    "closeness",
    "correct",
    "iou",
}
_DOWN = {
    "loss",
    "error",
    "err",
    "distance",
    "rmse",
    "mse",
    "mae",
    "nll",
    "perplexity",
    "ppl",
    "regret",
    "risk",
    "gap",
    "residual",
    "bias",
    "calibration",
    "ece",
    "brier",
    "entropy",
    "divergence",
    "seconds",
    "cost",
}


def higher_is_better(name: str) -> bool | None:
    """Return whether higher values of a metric are better, by the words in its name.

    The result is ``None`` if the words do not determine it.

    Examples
    --------
    >>> (
    ...     higher_is_better("test_accuracy"),
    ...     higher_is_better("val/loss"),
    ...     higher_is_better("weight of class 3"),
    ... )
    (True, False, None)
    """
    words = "".join(letter if letter.isalnum() else " " for letter in name.casefold()).split()
    for word in reversed(words):  # an accuracy loss is a loss
        if word in _UP or word in _DOWN:
            return word in _UP
    return None


@frozen(kw_only=True, eq=False)
class OwnProblem:
    """A problem of this process, or a function ``seed -> Problem``, as a task.

    ``identity`` identifies the problem (:func:`hgms.config.fingerprinting.fingerprints`), or the
    code of the function. Configurations store it, so a run resumes only with the problem that it
    started with. ``make`` returns the problem of a seed. The problem determines ``device`` and
    ``dtype``.

    ``metrics`` are the metrics of ``evaluate`` with a known better direction. If ``measured`` is
    True, a problem without metrics uses its upper loss. This is f on a quarter of the validation
    rows, which are excluded from all roles (:func:`hgms.runs.held_out_rows.hold_out`).
    ``held_out`` is the number of these rows, and the number of all validation rows. :meth:`of`
    determines these properties.
    """

    name: ClassVar[str] = "problem"
    version: ClassVar[str] = ""

    identity: Mapping[str, str]
    make: Callable[[int], Problem] = field(metadata={"toml": False}, repr=False)
    metrics: Mapping[str, bool] = field(factory=dict, metadata={"toml": False})
    traits: frozenset[str] = field(default=frozenset(), metadata={"toml": False})
    device: torch.device = field(default=torch.device("cpu"), metadata={"toml": False})
    dtype: torch.dtype = field(default=torch.float32, metadata={"toml": False})
    measured: bool = field(default=False, metadata={"toml": False})
    held_out: tuple[int, int] = field(default=(0, 0), metadata={"toml": False})
    _latest: dict[int, Problem] = field(factory=dict, init=False, repr=False)
    _instances: dict[int, dict[str, str]] = field(factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        problem: Problem | Callable[[int], Problem],
        label: str = "problem",
        *,
        seed: int = 0,
        metric: str | None = None,
        higher: bool | Mapping[str, bool] | None = None,
        measured: bool = False,
    ) -> OwnProblem:
        """Create the task of ``problem`` and determine its properties.

        To determine them, the evaluation and the losses (on a few rows) are called at the start.

        ``label`` is the name of the problem in messages. If ``problem`` is a function, ``seed``
        selects the problem that is inspected. ``metric`` is the metric to compare by. ``higher``
        states whether higher is better, for this metric or by name for several metrics.

        Raises
        ------
        ConfigError
            If a function does not return a Problem, or if a metric is invalid.
        """
        try:
            made = _make_problem(problem, seed, label)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                "function-failed",
                f"the function raised {describe_error(error)} for seed {seed}",
                place=(label,),
            ) from error
        # before any call, because calls may change the state of a module
        parts = fingerprints(made)
        names = _metrics(made, label)
        directions: dict[str, bool] = dict(higher) if isinstance(higher, Mapping) else {}
        if measured:
            metric = metric or next(iter(names), LOSS)
            require_known("metric", metric, [*names, LOSS], (label, "metric"))
            if isinstance(higher, bool):
                directions[metric] = higher
        known = {
            name: directions.get(name, higher_is_better(name))
            for name in dict.fromkeys([*([metric] if metric else []), *names])
        }
        if measured and metric is not None and known[metric] is None:
            others = ", ".join(name for name in (*names, LOSS) if name != metric)
            raise ConfigError(
                "missing-option",
                f"the better direction of metric {metric!r} is unknown",
                place=(label, "higher_is_better"),
                hint=f"set higher_is_better=True or False, or metric to one of {others}",
            )
        identity = parts if isinstance(problem, Problem) else {"make": fingerprint(problem)}
        rows = (0, 0)
        if metric == LOSS and LOSS not in names:
            held = sum(part.size for part in hold_out(made)[1])
            rows = held, sum(part.size for part in distinct(made))
            if held:
                identity = {**identity, "held_out": f"1/{ONE_OF}"}
        own = cls(
            identity=identity,
            make=lambda seed: _make_problem(problem, seed, label),
            traits=traits_of_problem(made),
            metrics={name: up for name, up in known.items() if up is not None},
            measured=metric == LOSS and LOSS not in names,
            held_out=rows,
            device=next(iter(made.x0.values())).device,
            dtype=next(iter(made.x0.values())).dtype,
        )
        own._latest[seed], own._instances[seed] = made, parts
        return own

    @property
    def metric_rows(self) -> dict[str, str]:
        """The rows on which the upper loss is measured."""
        held, total = self.held_out
        return {LOSS: "held-out" if held else "validation"} if total else {}

    @property
    def varies(self) -> bool:
        """Whether each seed has a separate problem."""
        return "make" in self.identity

    def problem_of(self, seed: int) -> Problem:
        """Return the problem of a seed.

        It is created once for all methods that use it in succession.
        """
        if seed not in self._latest:
            problem = self.make(seed)
            self._latest.clear()
            self._latest[seed] = problem
            self._instances.setdefault(seed, fingerprints(problem))
        return self._latest[seed]

    def instance(self, seed: int) -> dict[str, str]:
        """Return the fingerprints of the problem of a seed.

        The result is empty unless each seed has a separate problem.
        """
        if self.varies and seed not in self._instances:
            self.problem_of(seed)
        return self._instances[seed] if self.varies else {}

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        """Return the problem of the seed. It stays on its device."""
        problem = self.problem_of(seed)
        if not self.measured:
            return attrs.evolve(problem)  # a copy: methods store data of one run with it
        fewer, held = hold_out(problem)
        evaluate = problem.evaluate
        rows = held or [validation_rows(problem)]

        def with_loss(theta: Tree, x: Tree) -> Mapping[str, float]:
            loss = loss_on(problem, rows, theta, x)
            return {**evaluate(theta, x), LOSS: loss}

        return attrs.evolve(fewer, evaluate=with_loss)


def validation_rows(problem: Problem) -> Data:
    """Return the rows of the role ``stop``.

    If there are no such rows, return the rows of ``differentiate``.
    """
    parts = [problem.upper_data.get(role, Data()) for role in ("stop", "differentiate")]
    return next((part for part in parts if part.size), parts[-1])


def _make_problem(problem: Problem | Callable[[int], Problem], seed: int, label: str) -> Problem:
    if isinstance(problem, Problem):
        return problem
    require(
        not isinstance(problem, torch.nn.Module),
        "wrong-type",
        "a comparison requires a Problem, but the value is a module",
        hint="use hgms.from_module(model, loss, train, validation)",
        place=(label,),
    )
    check_function(label, problem, "seed")
    made = problem(seed)
    require(
        isinstance(made, Problem),
        "wrong-result",
        f"the function returns {kind_of(made)} for seed {seed}, but must return a Problem",
        hint="return hgms.from_losses(theta0=…, x0=…, g=…, f=…), or hgms.from_module(…)",
        place=(label,),
    )
    return made


def _metrics(problem: Problem, label: str) -> list[str]:
    """Return the names of the metrics that ``evaluate`` returns at the start."""
    try:
        return list(evaluate_metrics(problem, problem.theta0, problem.x0))
    except ConfigError as error:
        raise error.at(label) from None
    except Exception as error:
        raise ConfigError(
            "function-failed",
            f"evaluate(theta0, x0) raised {describe_error(error)}",
            place=(label, "evaluate"),
            hint="use the signature evaluate(theta, x), or evaluate(theta, model) for a module"
            if isinstance(error, TypeError)
            else None,
        ) from error


def traits_of_problem(problem: Problem) -> frozenset[str]:
    """Return the traits of a problem (:data:`hgms.runs.TRAITS`).

    Derivatives are not tried. A loss without a second derivative is an error of the first step. A
    hypergradient of 0, because f does not depend on θ directly, gives a warning after five steps.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.ones(1)},
    ...     f=lambda t, x, _: x["x"].sum(),
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ... )
    >>> sorted(traits_of_problem(problem))
    ['direct-upper', 'few-upper', 'smooth-lower', 'stop-rows']
    """
    traits = {f"reference:{name}" for name in problem.references}
    traits |= {"smooth-lower", "direct-upper"}
    if sum(leaf.numel() for leaf in problem.theta0.values()) <= 1000:
        traits.add("few-upper")
    if "stop" in problem.upper_data:
        traits.add("stop-rows")
    if any(
        problem.upper_data[role].size
        for role in ("differentiate", "select")
        if role in problem.upper_data
    ):
        traits.add("validation-rows")
    sources = problem.find(Sources)
    if sources is not None:
        traits |= {"sources", "per-example-losses"}
        if find(sources.examples, GivesRepresentations):
            traits.add("representations")
    if problem.find(Rows) is not None:
        traits |= {"row-weights", "per-example-losses"}
    return frozenset(traits)
