"""The long-tailed task: its split, its views, its losses against a plain module, its
hypergradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import F64, finite_differences, normal
from torch import Tensor, nn

import hgms_core
from hgms.adapters import hypergradient
from hgms.tasks.imbalanced import Adjustment, ImbalancedLoss, Layers
from hgms.tasks.imbalanced.rows import views
from hgms_core import Key, Problem, Ravel, Tree

CPU = torch.device("cpu")


def problem_of(seed: int = 0, **fields: Any) -> Problem:
    return ImbalancedLoss(**fields).problem(seed, CPU, F64)


def tiny(folder: Path) -> Problem:
    """118 parameters and 58 rows: small enough for dense Hessians."""
    pixels = np.random.default_rng(0).integers(0, 256, (120, 4, 4), np.uint8)
    np.savez(folder / "tiny.npz", images=pixels, labels=np.arange(120) % 10)
    return problem_of(
        dataset=f"npz:{folder / 'tiny.npz'}",
        network=Layers(channels=(1, 2), hidden=2, smooth=True),
        least=2,
        views=2,
        validation_size=25,
        test_size=20,
        validation_split=(1, 1, 1),
        omega=0.02,
    )


def numbered(folder: Path, images: int = 1000, **fields: Any) -> Problem:
    """Of images of 4 × 5 pixels that carry their own number in the two middle pixels; class i mod
    10.
    """
    pixels = np.zeros((images, 4, 5), np.uint8)
    pixels[:, 1, 2], pixels[:, 2, 2] = np.arange(images) // 256, np.arange(images) % 256
    np.savez(folder / "n.npz", images=pixels, labels=np.arange(images) % 10)
    small = {
        "views": 0,
        "network": Layers(channels=(1, 1), hidden=2),
        "validation_size": 20,
        "test_size": 20,
    }
    return problem_of(dataset=f"npz:{folder / 'n.npz'}", **(small | fields))


def test_the_parts_are_disjoint_the_tail_is_long_and_the_rest_balanced(tmp_path: Path) -> None:
    problem = numbered(tmp_path, validation_size=103, test_size=200, ratio=0.5, least=3)
    train, *above = (data.whole for data in (problem.lower_data, *problem.upper_data.values()))
    # 100 images a class; 11 of 0, 1, 2 and 10 of the others validate; 20 test
    assert torch.bincount(train["label"]).tolist() == [69, 34, 17, 9, 4, 3, 3, 3, 3, 3]
    found = []
    for part in (train, *above):
        high, low = (255 * part["pixels"][:, 0, [1, 2], 2]).round().long().unbind(1)
        assert torch.equal(part["label"], (256 * high + low) % 10)
        found.append(set((256 * high + low).tolist()))
    assert [len(each) for each in found] == [148, 62, 20, 21]
    assert len(set().union(*found)) == 148 + 103
    for part in above:
        counts = torch.bincount(part["label"], minlength=10)
        assert int(counts.max() - counts.min()) <= 1
        weights = 103 / (10 * torch.where(part["label"] < 3, 11.0, 10.0)).double()
        assert torch.allclose(part["weight"], weights)


def always(problem: Problem, theta: Tree, bias: float) -> list[float]:
    """The figures of a network that always says class 1: train, test, and test adjusted."""
    x = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
    x["output.bias"][1] = bias
    loss = problem.f(theta, x, problem.upper_data["stop"].whole)
    figures = problem.evaluate(theta, x)
    assert figures["validation_loss"] == pytest.approx(float(loss))
    assert [figures[f"recall_{c}"] for c in range(10)] == [0, 1] + [0] * 8
    names = ("train_balanced_accuracy", "test_balanced_accuracy", "test_balanced_accuracy_adjusted")
    return [figures[name] for name in names]


def test_figures_are_means_over_classes_with_and_without_the_raised_ones(tmp_path: Path) -> None:
    """The letter of the formula drops rare classes, and the training figure ignores them."""
    problem = numbered(tmp_path, least=0, validation_split=(1, 1, 1))
    counts = torch.bincount(problem.lower_data.whole["label"], minlength=10)
    assert counts.tolist() == [96, 29, 9, 3, 1, 0, 0, 0, 0, 0]
    assert always(problem, problem.theta0, 1.0) == pytest.approx([1 / 5, 1 / 10, 1 / 10])
    problem = tiny(tmp_path)
    theta = {name: torch.zeros(10, dtype=F64) for name in ("delta_raw", "gamma_raw")}
    theta["delta_raw"][0] = 5.0
    assert always(problem, theta, 0.1)[1:] == pytest.approx([0.1, 0.1])


def test_views_are_shifts_without_wrapping_and_keep_their_labels() -> None:
    pixels = torch.rand(30, 1, 6, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    seen, said = views(pixels, torch.arange(30), 3, 2, 0.0, Key(1))
    assert said.tolist() == list(range(30)) * 3
    padded = nn.functional.pad(pixels, (2, 2, 2, 2))[said]
    moves = torch.stack(
        [
            (padded[..., down : down + 6, right : right + 5] == seen).flatten(1).all(1)
            for down in range(5)
            for right in range(5)
        ]
    )
    assert (moves.sum(0) == 1).all()
    assert int(moves.any(1).sum()) > 15  # of 25
    again, _ = views(pixels, torch.arange(30), 3, 2, 0.0, Key(1))
    assert torch.equal(seen, again)
    assert views(pixels, torch.arange(30), 0, 2, 0.0, Key(1))[0] is pixels


def test_no_view_of_a_validation_image_is_drawn_and_epochs_cover_the_views() -> None:
    plain, problem = (problem_of(3, views=count, rotation=10.0) for count in (0, 3))
    for role, data in problem.upper_data.items():
        assert torch.equal(data.whole["pixels"], plain.upper_data[role].whole["pixels"])
    rows = problem.lower_data.whole
    assert torch.equal(rows["label"], plain.lower_data.whole["label"].repeat(3))
    assert len(rows["pixels"]) == len(rows["label"])


@pytest.mark.parametrize("smooth", [False, True])
def test_the_losses_are_those_of_a_module_written_down_plainly(smooth: bool) -> None:
    problem = problem_of(
        network=Layers(channels=(3, 4), hidden=5, smooth=smooth),
        validation_size=37,
        omega=0.03,
        adjustment=Adjustment(omega_delta=0.2, omega_gamma=0.7),
    )
    act, pool = (nn.SiLU, nn.AvgPool2d) if smooth else (nn.ReLU, nn.MaxPool2d)
    layers = {
        "conv1": nn.Conv2d(1, 3, 5, padding=2),
        "conv2": nn.Conv2d(3, 4, 5, padding=2),
        "hidden": nn.Linear(16, 5),
        "output": nn.Linear(5, 10),
    }
    for name, layer in layers.items():
        own = {part: problem.x0[f"{name}.{part}"] for part in ("weight", "bias")}
        layer.double().load_state_dict(own)
    first, second, hidden, output = layers.values()
    # activation before or after mean-pooling differs for SiLU: the task pools first
    block = [pool(2), act()] if smooth else [act(), pool(2)]
    model = nn.Sequential(first, *block, second, *block, nn.Flatten(), hidden, act(), output)
    theta = {
        "delta_raw": torch.linspace(-1, 1, 10, dtype=F64),
        "gamma_raw": torch.linspace(2, -1, 10, dtype=F64),
    }
    delta = 0.5 * torch.tanh(theta["delta_raw"])
    gamma = 1 + 0.15 * torch.tanh(theta["gamma_raw"])

    def fits(rows: Tree) -> Tensor:
        scores = model(rows["pixels"]) * gamma + delta
        return nn.functional.cross_entropy(scores, rows["label"], reduction="none")

    batch = problem.lower_data.batch(torch.tensor([0, 7, 7, 31]))
    decay = 0.015 * sum(leaf.square().sum() for leaf in model.parameters())
    expected = float((fits(batch).mean() + decay).detach())
    assert float(problem.g(theta, problem.x0, batch)) == pytest.approx(expected, rel=1e-12)
    above = problem.upper_data["differentiate"].whole
    weight = 37 / torch.where(above["label"] < 7, 40.0, 30.0).double()
    bounds = 0.1 * delta.square().sum() + 0.35 * (gamma - 1).square().sum()
    expected = float(((weight * fits(above)).mean() + bounds).detach())
    assert float(problem.f(theta, problem.x0, above)) == pytest.approx(expected, rel=1e-12)


# --- derivatives
# --------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_the_implicit_hypergradient_is_the_slope_of_the_re_solved_upper_loss(
    tmp_path: Path,
) -> None:
    problem = tiny(tmp_path)
    theta = {name: 0.3 * normal(10, seed=i) for i, name in enumerate(problem.theta0)}
    below, above = problem.lower_data.whole, problem.upper_data["differentiate"].whole
    spec = Ravel.of(problem.x0)

    def newton(theta: Tree, y: Tensor) -> Tensor:
        """The stationary point next to ``y``; damped while far away."""
        loss = lambda y: problem.g(theta, spec.unravel(y), below)  # noqa: E731
        for _ in range(60):
            slope = torch.func.grad(loss)(y)
            if slope.norm() < 1e-12:
                return y
            damping = 0.0 if slope.norm() < 1e-5 else 0.3 * float(slope.norm()) ** 0.5
            hessian = torch.func.hessian(loss)(y) + damping * torch.eye(len(y), dtype=F64)
            y = y - torch.linalg.solve(hessian, slope)
        raise AssertionError(f"not solved: {float(slope.norm())}")

    solution = newton(theta, spec.ravel(problem.x0))

    def dense(matvec: hgms_core.MatVec, b: Tensor) -> Tensor:
        hessian = torch.stack([matvec(column) for column in torch.eye(len(b), dtype=F64)], dim=1)
        assert float(torch.linalg.eigvalsh(hessian).min()) > 0
        return torch.linalg.solve(hessian, b)

    upper = lambda t, x: problem.f(t, x, above)  # noqa: E731
    x = spec.unravel(solution)
    found = hypergradient(upper, lambda t, x: problem.g(t, x, below), theta, x, solver=dense)
    direction = {name: normal(10, seed=5 + i) for i, name in enumerate(theta)}

    def along(shift: Tree) -> Tensor:
        moved = {name: theta[name] + shift["s"] * direction[name] for name in theta}
        return upper(moved, spec.unravel(newton(moved, solution)))

    slope = finite_differences(along, {"s": torch.zeros((), dtype=F64)}, step=1e-4)["s"]
    expected = sum(float((found.value[name] * direction[name]).sum()) for name in theta)
    assert float(slope) == pytest.approx(expected, rel=1e-5)
    direct = hgms_core.upper_gradients(upper, theta, x)[1]
    assert all(float(leaf.norm()) > 1e-4 for leaf in direct.values())  # θ enters f directly
