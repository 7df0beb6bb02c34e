"""``hgms.tune``: learn many hyperparameters by gradient, with a safeguard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from attrs import field, frozen
from torch import Tensor, nn

from hgms.config import Budget
from hgms.hyper import Hyper
from hgms.tuning.candidate import Candidate, choose, judgements
from hgms.tuning.implicit import LARGEST, Implicit, NotConvex
from hgms.tuning.meter import Meter, Stages
from hgms.tuning.online import Online
from hgms.tuning.problem import TuningProblem, build, check_effects, check_learn, rows_of
from hgms.tuning.result import TuneResult
from hgms.tuning.stored import StageFolder
from hgms_core import ConfigError, Key, NumericalError
from hgms_core.arguments import reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.validators import optional_positive

STATISTICS_ROWS = 256
"""Rows per batch when the running statistics of batch normalisation are set."""


class TuneOptions(TypedDict, total=False):
    """Further arguments of :func:`tune`."""

    test: Any
    engine: Literal["auto", "implicit", "online"]
    batch_size: int | None
    folds: int | None
    seed: int
    clock: Literal["wall", "cpu"]
    folder: str | Path | None
    progress: Callable[[str, float], None] | None


@reports_errors
@frozen(kw_only=True, field_transformer=read_by_annotation)
class Options:
    """The checked options of one call."""

    test: Any = None
    engine: Literal["auto", "implicit", "online"] = "auto"
    batch_size: int | None = field(default=None, validator=optional_positive)
    folds: int | None = field(default=None, validator=optional_positive)
    seed: int = 0
    clock: Literal["wall", "cpu"] = "wall"
    folder: Any = None
    progress: Callable[[str, float], None] | None = None


def tune(
    model: nn.Module,
    loss: Callable[..., Tensor],
    train: Any,
    validation: Any = None,
    *,
    learn: Mapping[str, Hyper],
    budget: str | Budget = "60s",
    **options: Unpack[TuneOptions],
) -> TuneResult:
    """Learn hyperparameters by gradient, and train the model with them.

    The lower level trains the model, the upper level is the loss of validation rows::

        min over u of  mean_j ℓ_j(w(u)),
        w(u) = argmin_w  mean_i ω_i(u) ℓ_i(w, u) + ½ Σ_k λ_k(u) w_k²

    Baselines are candidates. A learned candidate is returned only if its loss on rows that it has
    not used is lower than the loss of the best baseline. The difference must exceed the standard
    error of the paired differences, and must remain if two more rows have the largest difference.

    Parameters
    ----------
    model
        A module; its parameters are the start of each training, and it is not changed.
    loss
        ``loss(model, batch)`` or ``loss(model, batch, hyper)``, one loss per row, ``[B]``.
        ``hyper`` contains the values of ``learn`` by name.
    train, validation
        Tables as for :func:`hgms.as_data`. Without validation rows, a nested cross-validation of
        the training rows judges the candidates.
    learn
        Kinds of hyperparameters of :mod:`hgms.hyper` by name.
    budget
        Seconds (``"60s"``), lower steps of all replicas (``"500 steps"``), or gradients
        (``"1e5 calls"``). Baselines use at most 40 % of it.
    test
        Rows of the test set, only for the test losses of the result. The implicit engine then
        trains every candidate once more, outside the budget.
    engine
        ``"implicit"``: Newton's method and implicit hypergradients, for convex losses with at most
        10,000 parameters. ``"online"``: Adam and look-ahead hypergradients, for networks.
        ``"auto"`` tests whether the implicit engine is suitable.
    batch_size
        Rows of a lower step in the online engine; by default all rows up to 1,024, else 256.
    folds
        Number K of folds; K + 1 replicas are trained. By default 4 below 400 training rows, else 3.
    seed
        Seed of the folds and batches.
    clock
        Time of a budget in seconds: wall-clock time, or processor time.
    folder
        Folder for the finished stages. A call with the same arguments resumes there.
    progress
        ``progress(stage, share)`` receives the name of each started stage and the spent share of
        the budget.

    Returns
    -------
    TuneResult
        ``print(result)`` shows values, candidates and a recommendation.

    Raises
    ------
    ConfigError
        ``no-effect`` for a hyperparameter that does not change the training loss;
        ``loss-ignores-hyper`` for a loss without the parameter ``hyper``; ``not-differentiable``;
        ``wrong-shape`` for a loss that is not per row; ``not-convex`` for ``engine="implicit"`` on
        a loss with negative curvature; the codes of :func:`hgms.from_module` for the module.

    Notes
    -----
    Cost: one lower step computes one gradient per replica. A hypergradient of the online engine
    costs about four gradients; the implicit engine needs one Newton solve and one CG solve.

    Examples
    --------
    >>> import torch, hgms
    >>> draw = torch.Generator().manual_seed(0)
    >>> a = torch.randn(60, 5, generator=draw)
    >>> rows = {"a": a, "y": a[:, :1] + 0.5 * torch.randn(60, 1, generator=draw)}
    >>> model = torch.nn.Linear(5, 1)
    >>> result = tune(
    ...     model,
    ...     lambda model, batch: (model(batch["a"]) - batch["y"]).square().squeeze(1),
    ...     rows,
    ...     learn={"decay": hgms.hyper.PerInput(init=0.1)},
    ...     budget="200 steps",
    ... )
    >>> result.engine, result.values["decay"].shape
    ('implicit', torch.Size([5]))
    """
    check_learn(learn)
    chosen_options = Options(**options)
    limit = Budget(budget)
    problem = build(
        model, loss, train, validation, learn, chosen_options.folds, chosen_options.seed
    )
    check_effects(problem)
    meter = Meter(limit, len(problem.masks.group), chosen_options.clock)
    keeper = _keeper(problem, loss, learn, limit, chosen_options)
    stages = Stages(meter, keeper, chosen_options.progress)
    with contextlib.nullcontext() if keeper is None else keeper.folder.lease():
        chosen_engine, candidates = _candidates(problem, stages, chosen_options)
    usable = [item for item in candidates if item.loss < float("inf")]
    if not usable:
        raise NumericalError(
            "not-finite",
            "the held-out loss of every candidate is infinite or not a number",
            place=("loss",),
            hint="scale the inputs, or start from a trained model",
        )
    chosen, reference = choose(usable, problem.masks.fold)
    w = chosen_engine.final(chosen)
    spent = meter.spent()
    warnings = tuple(_warnings(problem, meter, candidates))
    space = problem.space
    values = {name: value.detach() for name, value in space.values(chosen.u).items()}
    trained = _copy_with(problem, w, values)
    tests = _test_losses(problem, chosen_engine, usable, chosen_options.test)
    return TuneResult(
        model=trained,
        values=values,
        starts={name: value.detach() for name, value in space.values(space.start).items()},
        selected=chosen.name,
        table=judgements(usable, reference, tests),
        engine="implicit" if isinstance(chosen_engine, Implicit) else "online",
        spent=spent,
        budget=str(limit).replace("outer step", "lower step").replace("oracle call", "gradient"),
        judged_rows=len(chosen.judged),
        test_loss=tests.get(chosen.name),
        warnings=warnings,
    )


def _keeper(
    problem: TuningProblem, loss: Any, learn: Any, limit: Budget, options: Options
) -> StageFolder | None:
    """Return the folder of the stages; its key is the digest of all inputs of the numbers."""
    if options.folder is None:
        return None
    rows = (problem.rows, problem.train_size)
    numbers = (options.engine, options.batch_size, options.folds, options.seed)
    inputs = (loss, problem.parts.module, problem.w0, rows, learn, str(limit), numbers)
    return StageFolder(options.folder, *inputs)


def _candidates(
    problem: TuningProblem, stages: Stages, options: Options
) -> tuple[Implicit | Online, list[Candidate]]:
    """Return the engine and its candidates."""
    engine = options.engine
    if engine == "implicit" and problem.space.has_rates:
        raise ConfigError(
            "not-supported",
            "the implicit engine has no learning rate to learn",
            place=("learn",),
            hint='use engine="online"',
        )
    suits = problem.is_smooth and len(problem.w0) <= LARGEST and not problem.space.has_rates
    if engine == "implicit" and not suits:
        raise ConfigError(
            "not-convex",
            "the implicit engine requires at most 10,000 parameters, and no dropout or batch "
            "normalisation in training mode",
            place=("engine",),
            hint='use engine="online", or call model.eval() first',
        )
    if engine == "implicit" or (engine == "auto" and suits):
        implicit = Implicit(problem, stages.meter)
        try:
            return implicit, list(implicit.candidates(stages.of("implicit")))
        except NotConvex:
            if engine == "implicit":
                raise ConfigError(
                    "not-convex",
                    "the training loss has a direction of negative curvature",
                    place=("engine",),
                    hint='use engine="online"',
                ) from None
    key = Key(options.seed).fold("online")
    online = Online(problem, stages.meter, options.batch_size, key)
    return online, list(online.candidates(stages.of("online")))


def _copy_with(problem: TuningProblem, w: Tensor, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the module with the parameters w.

    The running statistics of batch normalisation are the means over the training rows.
    """
    trained = problem.parts.with_parameters(problem.spec.unravel(w))
    modes = {module: module.training for module in trained.modules()}
    norms = [
        module
        for module in modes
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.training
        and module.running_mean is not None
    ]
    momenta = [norm.momentum for norm in norms]
    trained.eval()
    for norm in norms:
        norm.train().reset_running_stats()
        norm.momentum = None  # the mean over batches
    rows = torch.arange(problem.train_size, device=w.device)
    with torch.no_grad():
        for numbers in rows.split(STATISTICS_ROWS) if norms else ():
            problem.user_loss(trained, problem.batch(numbers), values)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    for module, mode in modes.items():
        module.training = mode
    return trained


def _test_losses(
    problem: TuningProblem, engine: Implicit | Online, candidates: list[Candidate], test: Any
) -> dict[str, float]:
    """Return the mean loss of the test rows of each candidate by name."""
    if test is None:
        return {}
    rows = rows_of(test, "test", problem.w0)
    return {
        candidate.name: problem.mean_loss(engine.final(candidate), rows) for candidate in candidates
    }


def _warnings(problem: TuningProblem, meter: Meter, candidates: list[Candidate]) -> Iterator[str]:
    if meter.share > 1.05:
        yield f"the budget was exceeded by {100 * (meter.share - 1):.0f} %"
    if all(item.is_baseline for item in candidates):
        yield "the budget ended before a hyperparameter was learned; use a larger budget"
    judged = len(candidates[0].judged)
    if judged < 50:
        yield f"only {judged} rows judge the candidates, so small gains cannot be seen"
