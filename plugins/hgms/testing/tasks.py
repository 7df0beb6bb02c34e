"""Checks of tasks: reproducible problems, twice differentiable losses and declared metrics."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from os.path import isfile
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hgms.config.fingerprinting import is_library_file
from hgms.facts import traits_of
from hgms.runs import suggest_trait
from hgms.store import cache_folder
from hgms.testing import oracle
from hgms.testing.kit import (
    F64,
    ask_if,
    demand,
    demand_equal,
    difference,
    differences,
    fail,
    near,
    normal,
    place,
    snapshot,
)
from hgms_core import (
    ROLES,
    Batch,
    Data,
    Mode,
    Problem,
    cross_product,
    curvature,
    gradient,
    stack,
    values,
)
from hgms_core.capabilities import HasData, NotStackable, find

MODES: tuple[Mode, Mode] = ("loop", "stacked")
SECONDS = 10.0
ROWS = 64
"""The maximum number of rows for the evaluation of the losses."""
MOST = 20_000
"""The maximum number of rows for the comparison of splits."""


def exercise(task: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    used = task.problem(variant, place(), dtype)
    tables = {
        role: data.whole for role, data in {"lower": used.lower_data, **used.upper_data}.items()
    }

    def call() -> Any:
        _losses(used)
        used.project(used.theta0)
        used.evaluate(used.theta0, used.x0)
        problem = task.problem(variant, place(), dtype)
        return {"theta0": problem.theta0, "x0": problem.x0, "losses": _losses(problem)}

    return {"theta": used.theta0, "x": used.x0, "data": tables}, call


def _losses(problem: Problem) -> list[Tensor]:
    """Return g and f at the start, on the first rows."""
    return [
        problem.g(problem.theta0, problem.x0, batch(problem.lower_data)),
        problem.f(problem.theta0, problem.x0, batch(problem.upper_data["differentiate"])),
    ]


def batch(data: Data) -> Batch:
    """Return the first rows of the data."""
    return data.batch(
        torch.arange(min(data.size, ROWS), device=data.device) if data.size > ROWS else None
    )


def build(task: Any, seed: int = 0) -> Problem:
    problem: Problem = task.problem(seed, place(), F64)
    demand(
        isinstance(problem, Problem),
        f"problem returns {type(problem).__name__}; return a hgms_core.Problem",
    )
    return problem


def check_smoke(task: Any) -> None:
    """The problem is built, and both losses and all metrics are computed once, in 10 s and
    without network access.
    """
    began = time.process_time()
    with mock.patch.object(
        socket.socket, "connect", side_effect=OSError("no network while a task is checked")
    ):
        problem = build(task)
        problem.g(problem.theta0, problem.x0, batch(problem.lower_data))
        problem.f(problem.theta0, problem.x0, batch(problem.upper_data["differentiate"]))
        problem.evaluate(problem.theta0, problem.x0)
    seconds = time.process_time() - began
    demand(
        seconds <= SECONDS, f"it took {seconds:.1f} s; make the settings that are checked smaller"
    )


def check_seed(task: Any) -> None:
    """One seed gives one problem: a second build has the same start, data and losses bit for
    bit.
    """
    demand_equal(_content(build(task, 3)), _content(build(task, 3)), "built again,")


def check_other_seed(task: Any) -> None:
    """With two seeds the problems differ, or no number is drawn: a task draws all numbers from
    its seed.
    """
    first, second = (
        oracle.record_draws(lambda at: _content(build(task, at)), seed) for seed in (5, 6)
    )
    same = (
        f"with two seeds it draws the same {len(first[0])} tensors of random numbers and "
        "builds the same problem"
    )
    demand(difference(first[1], second[1]) or not oracle.same_draws(first[0], second[0]), same)


def check_files(task: Any) -> None:
    """A task that reads files has a data fingerprint (`data_fingerprint`), which is the same in two
    calls.
    """
    with opened_files() as files:
        build(task)
    own = sorted(path for path in files if not _belongs_to_python(path))
    ask_if(own, "it reads no file")
    known = find(task, HasData)
    first = {} if known is None else known.data_fingerprint()
    hint = "declare HasData, and return data_fingerprint(paths) of hgms.config"
    demand(first, f"it reads {own[0]}, but data_fingerprint is missing or empty; {hint}")
    demand_equal(first, known and known.data_fingerprint(), "data_fingerprint called twice:")


_opened: list[set[str]] = []
"""One set of names of opened files per running check."""
_hooks: list[Callable[[str, Any], None]] = []
"""The audit hook after its installation: Python cannot remove an audit hook."""


@contextlib.contextmanager
def opened_files() -> Iterator[set[str]]:
    """Collect the names of the regular files that Python opens for reading inside."""

    def hook(event: str, arguments: Any) -> None:
        if event != "open" or not _opened:
            return
        path, mode, flags = arguments
        reads = "r" in mode if isinstance(mode, str) else not flags & (os.O_WRONLY | os.O_RDWR)
        if reads and isinstance(path, str | os.PathLike):
            for names in _opened:
                names.add(os.path.abspath(os.fspath(path)))

    if not _hooks:
        _hooks.append(hook)
        sys.addaudithook(hook)
    names: set[str] = set()
    _opened.append(names)
    try:
        yield names
    finally:
        _opened.remove(names)


def _belongs_to_python(path: str) -> bool:
    """Whether a file belongs to the system, Python, an installed package or a cache."""
    system = ("/proc/", "/sys/", "/etc/", "/usr/", str(cache_folder("")))
    code = path.endswith((".py", ".pyc")) or is_library_file(path)
    return code or path.startswith(system) or not isfile(path)


def _content(problem: Problem) -> Any:
    data = {
        role: batch(rows)
        for role, rows in {"lower": problem.lower_data, **problem.upper_data}.items()
    }
    losses = problem.g(problem.theta0, problem.x0, data["lower"])
    return snapshot({"theta0": problem.theta0, "x0": problem.x0, "data": data, "losses": losses})


def check_losses(task: Any) -> None:
    """f and g are finite scalars. f is evaluated on the rows of every role: `differentiate`,
    `select` and `stop`.
    """
    problem = build(task)
    absent = [role for role in ROLES if role not in problem.upper_data]
    demand(not absent, f"there are no validation rows for the roles {absent}")
    losses = {
        role: problem.f(problem.theta0, problem.x0, batch(problem.upper_data[role]))
        for role in ROLES
    }
    losses["lower"] = problem.g(problem.theta0, problem.x0, batch(problem.lower_data))
    for role, loss in losses.items():
        demand(
            isinstance(loss, Tensor) and loss.dim() == 0,
            f"the loss on {role!r} rows is no scalar: {loss!r}",
        )
        demand(torch.isfinite(loss), f"the loss on {role!r} rows is {float(loss)}")


def check_coupling(task: Any) -> None:
    """∇_x g depends on θ. Otherwise the lower solution is the same for every θ, and h has no
    implicit part.
    """
    problem = build(task)
    rows = batch(problem.lower_data)
    x = near(problem.x0, 0.01, seed=90)
    at = [near(problem.theta0, step, seed=92) for step in (0.0, 0.5, -0.5, 2.0)]
    first, *others = (list(gradient(problem.g, problem.project(theta), x, rows)[0]) for theta in at)
    moved = any(difference(first, other) for other in others)
    demand(
        moved,
        (
            "∇_x g is the same at four different θ: g does not depend on θ, or only by what x does "
            "not see"
        ),
    )


def check_metrics(task: Any) -> None:
    """`evaluate` returns the metrics declared in `metrics`, as finite numbers. No name in
    `traits` is a misspelt trait.
    """
    for trait in traits_of(task) or ():
        demand(
            not suggest_trait(trait),
            f"no method requires its trait {trait!r}; did you mean {suggest_trait(trait)!r}?",
        )
    problem = build(task)
    metrics = problem.evaluate(problem.theta0, problem.x0)
    demand(
        set(metrics) == set(task.metrics),
        f"evaluate gives {sorted(metrics)}, declared are {sorted(task.metrics)}",
    )
    bad = {
        name: value
        for name, value in metrics.items()
        if not isinstance(value, float | int) or not math.isfinite(value)
    }
    demand(not bad, f"these are no finite numbers: {bad}")


def check_splits(task: Any) -> None:
    """No training row is a validation row, and two roles share either all their rows or no row."""
    problem = build(task)
    seen = {
        name: _rows(data)
        for name, data in {"lower": problem.lower_data, **problem.upper_data}.items()
    }
    for role, another in combinations(seen, 2):
        shared = seen[role] & seen[another]
        if "lower" not in (role, another) and seen[role] == seen[another]:
            continue
        own = f"the {len(seen[role])} rows of {role!r}"
        others = f"the {len(seen[another])} of {another!r}"
        demand(not shared, f"{len(shared)} of {own} are among {others}")


def _rows(data: Data) -> set[bytes]:
    """Return the rows as bytes, without their row numbers."""
    if not data.size:
        return set()
    rows = data.batch(torch.arange(min(data.size, MOST), device=data.device))
    leaves = [
        leaf.reshape(len(leaf), -1)
        for name, leaf in sorted(rows.items())
        if name not in ("index", "source", "seed")
    ]
    tables = [leaf.cpu().contiguous().view(torch.uint8).numpy() for leaf in leaves]
    return {
        hashlib.blake2b(b"".join(table[i] for table in tables), digest_size=16).digest()
        for i in range(len(tables[0]))
    }


def check_twice_differentiable(task: Any) -> None:
    """∇²_xx g·v is finite, symmetric and equal to differences of ∇_x g, and ∇²_θx g·v exists,
    unless `traits` declare less.
    """
    traits = traits_of(task)
    ask_if(traits is None or "smooth-lower" in traits, "its traits do not have smooth-lower")
    problem = build(task)
    rows = batch(problem.lower_data)
    x = near(problem.x0, 0.01, seed=90)
    at = curvature(lambda point: problem.g(problem.theta0, point, rows), x)
    v, w = (normal(at.spec.size, seed=91 + i) for i in range(2))
    product = at.matvec(v)
    other = at.matvec(w)
    demand(torch.isfinite(product).all(), "∇²_xx g·v is not finite")
    gap = float((w @ product - v @ other).abs())
    size = float(product.norm() * w.norm())
    demand(gap <= 1e-8 * (1 + size), f"wᵀ(Hv) and vᵀ(Hw) differ by {gap:.1e}")
    spec = at.spec
    flat = spec.ravel(x)

    def slope(step: float) -> Tensor:
        return curvature(
            lambda point: problem.g(problem.theta0, point, rows), spec.unravel(flat + step * v)
        ).gradient

    error = float(
        (differences(slope, 1e-5 / float(v.norm())) - product).norm() / (1 + product.norm())
    )
    demand(
        error <= 1e-3,
        (
            f"∇²_xx g·v is off by {error:.1e} from differences of ∇_x g: g has a kink or is not in "
            "x's precision"
        ),
    )
    mixed = cross_product(
        lambda t, point: problem.g(t, point, rows), problem.theta0, x, spec.unravel(v)
    )
    broken = [name for name, leaf in mixed.items() if not torch.isfinite(leaf).all()]
    demand(not broken, f"∇²_θx g·v is not finite in {broken}")


def check_stacked(task: Any) -> None:
    """Three stacked lower states have the same losses as each state separately: losses are pure
    functions that support vmap.
    """
    problem = build(task)
    x = stack([{name: leaf + 0.01 * i for name, leaf in problem.x0.items()} for i in range(3)])
    for name, loss, data in (
        ("g", problem.g, problem.lower_data),
        ("f", problem.f, problem.upper_data["select"]),
    ):
        if find(loss, NotStackable):
            continue
        alone, together = (
            values(loss, problem.theta0, x, batch(data), mode=mode) for mode in MODES
        )
        differs = difference(alone, together, name, rtol=1e-8)
        demand(not differs, f"stacked, {differs}")


def check_projection(task: Any) -> None:
    """θ0 is in Θ: `project` does not change it, and a second projection has no effect."""
    problem = build(task)
    demand_equal(problem.theta0, problem.project(problem.theta0), "project moves θ0:", rtol=1e-9)
    once = problem.project(near(problem.theta0, 10.0, seed=95))
    demand_equal(once, problem.project(once), "projected twice,", rtol=1e-9)
    if set(once) != set(problem.theta0):
        fail(f"project gives the leaves {sorted(once)}, θ has {sorted(problem.theta0)}")
