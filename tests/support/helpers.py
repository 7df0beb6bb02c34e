"""Small problems in float64 whose every quantity can be computed another way, and counters of
what was really called.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hgms.adapters import from_losses
from hgms_core import Data, HgmsError, Key, Problem, Sources, Tree

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    """A float64 Gaussian tensor from a seed of its own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def load_script(name: str, path: Path) -> ModuleType:
    """A script that belongs to no package, as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def spd(size: int, seed: int = 0, low: float = 0.5) -> Tensor:
    """A symmetric matrix with eigenvalues between ``low`` and a few."""
    root = normal(size, size, seed=seed)
    return root @ root.T / size + low * torch.eye(size, dtype=F64)


def network_loss(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """Weighted logistic regression through one hidden layer, with an L2 term: nonlinear in θ and
    in x.
    """
    hidden = torch.tanh(batch["a"] @ x["w"] + x["b"])
    losses = torch.nn.functional.softplus(-batch["y"] * (hidden @ x["v"]))
    weights = torch.sigmoid(theta["weights"][batch["index"]]) * torch.exp(theta["scale"])
    return (weights * losses).mean() + 1e-2 * sum(leaf.square().sum() for leaf in x.values())


def network_upper(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """The unweighted loss on validation rows, and a direct term in θ."""
    hidden = torch.tanh(batch["a"] @ x["w"] + x["b"])
    fit = torch.nn.functional.softplus(-batch["y"] * (hidden @ x["v"])).mean()
    return fit + 0.01 * theta["weights"].square().mean() + 0.05 * theta["scale"].square()


def table(rows: int, features: int, seed: int) -> Data:
    a = normal(rows, features, seed=seed)
    return Data.of({"a": a, "y": torch.sign(a.sum(1) + normal(rows, seed=seed + 1))})


def network_problem(rows: int = 24, features: int = 3, hidden: int = 4) -> Problem:
    """A small non-convex problem with data, three leaves in x and two in θ."""
    return from_losses(
        theta0={"weights": 0.3 * normal(rows, seed=5), "scale": torch.tensor(0.2, dtype=F64)},
        x0={
            "w": 0.5 * normal(features, hidden, seed=1),
            "b": 0.1 * normal(hidden, seed=2),
            "v": 0.5 * normal(hidden, seed=3),
        },
        g=network_loss,
        f=network_upper,
        lower_data=table(rows, features, seed=10),
        upper_data={
            "differentiate": table(15, features, seed=20),
            "select": table(14, features, seed=30),
            "stop": table(13, features, seed=40),
        },
        fresh=lambda key: {
            "w": torch.randn(features, hidden, generator=key.generator(), dtype=F64),
            "b": torch.zeros(hidden, dtype=F64),
            "v": torch.randn(hidden, generator=key.fold("v").generator(), dtype=F64),
        },
        references={
            "even": {"weights": torch.ones(rows, dtype=F64), "scale": torch.zeros((), dtype=F64)}
        },
    )


def moved(problem: Problem, device: torch.device) -> Problem:
    """The same problem with its tables, θ0 and x0 on another device; what it could draw anew
    there is left out.
    """

    def tree(leaves: Tree) -> Tree:
        return {name: leaf.to(device) for name, leaf in leaves.items()}

    def data(found: Data) -> Data:
        return Data.of(
            {name: leaf.to(device) for name, leaf in found.whole.items() if name != "index"}
        )

    return evolve(
        problem,
        theta0=tree(problem.theta0),
        x0=tree(problem.x0),
        lower_data=data(problem.lower_data),
        upper_data={role: data(rows) for role, rows in problem.upper_data.items()},
        fresh=None,
        references={},
    )


def counted(problem: Problem) -> tuple[Problem, Counter[str]]:
    """The same problem, and how often its losses were really evaluated (``g``, ``f``,
    ``pooled``) and on how many rows.
    """
    calls: Counter[str] = Counter()

    def count(
        name: str, loss: Callable[[Tree, Tree, Tree], Tensor]
    ) -> Callable[[Tree, Tree, Tree], Tensor]:
        def counting(theta: Tree, x: Tree, batch: Tree) -> Tensor:
            calls[name] += 1
            calls[f"{name}_rows"] += batch["index"].shape[0]
            return loss(theta, x, batch)

        return counting

    sources = problem.find(Sources)
    if sources is not None:
        problem = problem.with_extensions(evolve(sources, pooled=count("pooled", sources.pooled)))
    return evolve(problem, g=count("g", problem.g), f=count("f", problem.f)), calls


def assert_same(actual: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equality of nested states; bit for bit unless tolerances are given."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_same(actual[name], expected[name], rtol, atol)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, rtol, atol)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    else:
        assert actual == expected


def finite_differences(value: Callable[[Tree], Tensor], theta: Tree, step: float = 1e-5) -> Tree:
    """∇ of ``value`` by central differences, one entry at a time: the slowest and safest way
    there is.
    """
    found = {}
    for name, leaf in theta.items():
        slopes = torch.zeros(leaf.numel(), dtype=leaf.dtype)
        for i in range(leaf.numel()):
            ends = []
            for sign in (1, -1):
                moved = leaf.clone().reshape(-1)
                moved[i] += sign * step
                ends.append(value({**theta, name: moved.reshape(leaf.shape)}))
            slopes[i] = (ends[0] - ends[1]) / (2 * step)
        found[name] = slopes.reshape(leaf.shape)
    return found


KEY = Key(7)


class LiveMemory(TorchDispatchMode):
    """Bytes of all tensor storages that came into being inside and are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def _forget(self, pointer: int, size: int) -> None:
        self.live -= size
        self.known.discard(pointer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):  # what was there before is not ours
            if isinstance(leaf, Tensor):
                self.known.add(leaf.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.known:
                    size = storage.nbytes()
                    self.known.add(storage._cdata)
                    self.live += size
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._forget, storage._cdata, size)
        return result


def run_files(path: Path) -> dict[str, bytes]:
    """Everything in a run's folder that has to be the same for every run of one seed."""
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.name.startswith(("checkpoint", "steps", "summary"))
    }


@contextlib.contextmanager
def rejects(
    code: str, *place: str | int, of: type[HgmsError] = HgmsError
) -> Iterator[pytest.ExceptionInfo[HgmsError]]:
    """Require an error ``of`` that class with the code and, if one is given, the place."""
    with pytest.raises(of) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}: {error}"
    if place:
        assert error.place == place, f"{error.place}: {error}"
