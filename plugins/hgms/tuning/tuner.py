"""``hgms.tune``: learn many hyperparameters by gradient, with a safeguard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from torch import Tensor, nn

from hgms.adapters import check_options, read_table
from hgms.config import Budget
from hgms.hyper import Hyper
from hgms.tuning.auto import Auto, Search, as_problem
from hgms.tuning.candidate import Candidate, judgements
from hgms.tuning.implicit import Implicit
from hgms.tuning.meter import Stages
from hgms.tuning.online import Online
from hgms.tuning.problem import ModuleProblem, TuningProblem, build, check_effects, check_learn
from hgms.tuning.result import TuneResult
from hgms.tuning.stage_folder import StageFolder
from hgms_core import Problem


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
        ``loss(model, batch)`` or ``loss(model, batch, hyper)``: one loss per row, ``[B]``, or their
        mean. A mean is evaluated on single rows, which is slower. ``hyper`` contains the values of
        ``learn`` by name.
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
        ``progress(stage, share)`` receives the name of each finished stage and the spent share of
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
        ``wrong-shape`` for a loss that combines rows, such as a weighted mean; ``random-loss`` for
        random numbers other than the masks of dropout layers; ``not-convex`` for
        ``engine="implicit"`` on a loss with negative curvature; the codes of
        :func:`hgms.from_module` for the module.

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
    check_options(tune, options, TuneOptions)
    check_learn(learn)
    limit = Budget(budget)
    names = ("engine", "batch_size", "folds", "clock")
    settings: Any = {name: value for name, value in options.items() if name in names}
    method = Auto(budget=str(limit), **settings)
    seed = options.get("seed", 0)
    module = build(model, loss, train, validation, learn, method.folds, seed)
    problem = module.problem
    check_effects(module)
    keeper = None
    if (folder := options.get("folder")) is not None:
        rows = (problem.rows, problem.train_size)
        numbers = (method.engine, method.batch_size, method.folds, seed)
        inputs = (loss, module.parts.module, problem.w0, rows, learn, str(limit), numbers)
        keeper = StageFolder(folder, *inputs)
    with contextlib.nullcontext() if keeper is None else keeper.folder.lease():
        search, spent = _run(method, as_problem(problem), seed, keeper, options.get("progress"))
    chosen, reference = search.chosen, search.reference
    assert chosen is not None
    assert reference is not None
    assert search.w is not None
    assert search.engine is not None
    space = problem.space
    values = {name: value.detach() for name, value in space.values(chosen.u).items()}
    usable = [item for item in search.candidates if item.loss < math.inf]
    tests = _test_losses(problem, search.engine, usable, options.get("test"))
    return TuneResult(
        model=module.model_at(search.w, values),
        values=values,
        starts={name: value.detach() for name, value in space.values(space.start).items()},
        selected=chosen.name,
        table=judgements(usable, reference, tests),
        engine="implicit" if isinstance(search.engine, Implicit) else "online",
        spent={name: spent[name] for name in ("seconds", "steps")},
        budget=str(limit).replace("outer step", "lower step").replace("oracle call", "gradient"),
        judged_rows=len(chosen.judged),
        test_loss=tests.get(chosen.name),
        warnings=tuple(_warnings(module, search, spent["share"])),
    )


def _run(
    method: Auto,
    problem: Problem,
    seed: int,
    keeper: StageFolder | None,
    progress: Callable[[str, float], None] | None,
) -> tuple[Search, dict[str, float]]:
    """Run the method to its end; return the search, and its counts with their share."""
    state = method.init(problem, seed)
    if keeper is not None:
        stages = keeper.stages()
        spent = [stage["spent"] for stage in stages.values()]
        latest = max(spent, key=lambda counts: float(counts["seconds"]), default=state["spent"])
        state = {**state, "stages": stages, "spent": latest}
    if progress is not None:
        progress("start", 0.0)
    while not method.is_finished(state):
        state, record = method.step(problem, state)
        name = str(record["stage"])
        if keeper is not None and name:
            keeper.save(name, state["stages"][name])
        if progress is not None:
            progress(name, min(1.0, float(record["share"])))
    meter = method.meter(method.problem(problem, seed))
    meter.restore(state["spent"])
    share = meter.share
    finished = Stages(meter, state["stages"], state["spent"], 0)
    return method.search(problem, state, finished), {**state["spent"], "share": share}


def _test_losses(
    problem: TuningProblem, engine: Implicit | Online, candidates: list[Candidate], test: Any
) -> dict[str, float]:
    """Return the mean loss of the test rows of each candidate by name."""
    if test is None:
        return {}
    rows = read_table(test, "test", problem.w0)
    return {
        candidate.name: problem.mean_loss(engine.final(candidate), rows) for candidate in candidates
    }


def _warnings(module: ModuleProblem, search: Search, share: float) -> Iterator[str]:
    candidates = search.candidates
    uses_all_rows = isinstance(search.engine, Online) and search.engine.uses_all_rows
    if module.parts.has_dropout and uses_all_rows:
        yield "each lower step used all rows and the same dropout masks; set a smaller batch_size"
    if share > 1.05:
        yield f"the budget was exceeded by {100 * (share - 1):.0f} %"
    if all(item.is_baseline for item in candidates):
        yield "the budget ended before a hyperparameter was learned; use a larger budget"
    judged = len(candidates[0].judged)
    if judged < 50:
        yield f"only {judged} rows judge the candidates, so small gains cannot be seen"
