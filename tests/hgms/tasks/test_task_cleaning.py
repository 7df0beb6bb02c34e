"""Data hyper-cleaning: the split, the wrong labels, the losses, the hypergradient and what is
measured.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import F64, assert_same
from torch import Tensor
from torch.nn.functional import cross_entropy

from hgms.adapters import hypergradient
from hgms.tasks.cleaning import HyperCleaning, Start
from hgms_core import MatVec, Problem, Ravel, Tree

CPU = torch.device("cpu")
THIRDS = (1, 1, 1)
"""All validation rows for each role."""
LOGITS = {"logits": torch.linspace(-1, 1, 30, dtype=F64)}


def problem_of(seed: int = 0, **fields: Any) -> Problem:
    return HyperCleaning(**fields).problem(seed, CPU, F64)


def small(folder: Path, seed: int = 0, **fields: Any) -> Problem:
    """60 random 4 × 3 images in an .npz file: fast, and small enough for dense linear algebra."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 4, 3), np.uint8)
    np.savez(folder / "small.npz", images=pixels, labels=np.arange(60) % 3)
    sizes = {"train_size": 30, "validation_size": 10, "test_size": 20, "hidden": 4, "classes": 3}
    return problem_of(seed, dataset=f"npz:{folder / 'small.npz'}", **(sizes | fields))


def rows_of(problem: Problem) -> list[Tensor]:
    return [data.whole["pixels"] for data in (problem.lower_data, *problem.upper_data.values())]


# --- the split and the labels
# --------------------------------------------------------------------------------------------------


def test_all_parts_are_disjoint_and_the_roles_cover_the_validation_images(tmp_path: Path) -> None:
    # an image is its own number
    pixels = np.stack([np.arange(2000) // 256, np.arange(2000) % 256, *np.zeros((2, 2000))], 1)
    path = tmp_path / "numbered.npz"
    np.savez(path, images=pixels.reshape(-1, 2, 2).astype(np.uint8), labels=np.arange(2000) % 10)
    sizes = {"train_size": 900, "validation_size": 101, "test_size": 999}
    found = rows_of(problem_of(dataset=f"npz:{path}", **sizes))
    parts = [{tuple((255 * row[:2]).round().tolist()) for row in part} for part in found]
    assert [len(part) for part in parts] == [900, 61, 20, 20]
    assert len(set.union(*parts)) == 900 + 101
    shared = rows_of(problem_of(dataset=f"npz:{path}", **sizes, validation_split=THIRDS))
    assert_same(shared, [found[0], *[torch.cat(found[1:])] * 3])


@pytest.mark.parametrize("corruption", [0.0, 0.25, 1.0])
def test_exactly_the_asked_share_of_labels_is_wrong(corruption: float) -> None:
    problem, clean = (problem_of(3, corruption=share) for share in (corruption, 0.0))
    noisy, true = (each.lower_data.whole["label"] for each in (problem, clean))
    assert torch.equal(rows_of(problem)[0], rows_of(clean)[0])
    assert int((noisy != true).sum()) == round(600 * corruption)
    assert torch.equal(problem.references["clean"]["logits"] > 0, noisy == true)
    numbers = problem.evaluate(problem.theta0, problem.x0)
    assert numbers["wrong_labels"] == round(600 * corruption) / 600
    assert 0 <= int(noisy.min()) <= int(noisy.max()) <= 9


def labels_of(noise: str, corruption: float = 1.0) -> tuple[Tensor, Tensor, float]:
    """True and noisy labels, and the share of wrong ones that is reported."""
    sizes = {"train_size": 1600, "validation_size": 50, "test_size": 100}
    problem = problem_of(corruption=corruption, noise=noise, **sizes)
    true = problem_of(corruption=0.0, **sizes).lower_data.whole["label"]
    noisy = problem.lower_data.whole["label"]
    wrong = problem.evaluate(problem.theta0, problem.x0)["wrong_labels"]
    kept = problem.references["clean"]["logits"] > 0
    assert int((noisy != true).sum()) == round(1600 * wrong) == int((~kept).sum())
    return true, noisy, wrong


def test_each_noise_turns_labels_as_its_name_says() -> None:
    true, noisy, wrong = labels_of("uniform")
    turns = torch.bincount((noisy - true) % 10, minlength=10)
    # chi-square, 8 degrees of freedom, p = 0.001
    assert float(((turns[1:] - 1600 / 9) ** 2 / (1600 / 9)).sum()) < 26.1
    assert wrong == 1
    true, noisy, wrong = labels_of("pair", 0.3)
    assert torch.equal(noisy[true != noisy], (true[true != noisy] + 1) % 10)
    assert wrong == 0.3
    # a tenth stays right
    assert abs(labels_of("uniform-including-true")[2] - 0.9) < 4 * math.sqrt(0.09 / 1600)


# --- the losses
# --------------------------------------------------------------------------------------------------


def test_the_losses_are_those_of_a_module_written_down_plainly(tmp_path: Path) -> None:
    problem = small(tmp_path, omega=0.03)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 4), torch.nn.Sigmoid(), torch.nn.Linear(4, 3)
    ).double()
    names = ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]
    x = {name: leaf.detach() for name, leaf in zip(names, model.parameters(), strict=True)}
    index = torch.tensor([4, 29, 4, 11])
    rows = {name: leaf[index] for name, leaf in problem.lower_data.whole.items()}
    each = cross_entropy(model(rows["pixels"]), rows["label"], reduction="none")
    expected = (LOGITS["logits"][index].sigmoid() * each).mean() + 0.03 * sum(
        leaf.square().sum() for leaf in model.parameters()
    )
    batch = problem.lower_data.batch(index)
    assert_same(problem.g(LOGITS, x, batch), expected.detach(), rtol=1e-12)
    above = problem.upper_data["select"].whole
    upper = cross_entropy(model(above["pixels"]), above["label"]).detach()
    assert_same(problem.f(LOGITS, x, above), upper, rtol=1e-12)


def test_without_a_hidden_layer_it_is_softmax_regression_on_standardised_pixels(
    tmp_path: Path,
) -> None:
    noise = {"noise": "uniform-including-true", "validation_split": THIRDS}
    problem = small(tmp_path, hidden=0, standardise=True, omega=0.2, **noise)
    x, rows = problem.x0, problem.lower_data.whole
    shapes = {name: tuple(leaf.shape) for name, leaf in x.items()}
    assert shapes == {"output.weight": (3, 12), "output.bias": (3,)}
    assert float(x["output.weight"].abs().max()) <= 12**-0.5
    raw, *validation = rows_of(small(tmp_path))
    mean, std = raw.mean(0), raw.std(0, correction=0)
    assert_same(rows["pixels"], (raw - mean) / std, atol=1e-12)
    above = problem.upper_data["stop"].whole["pixels"]
    assert_same(above, (torch.cat(validation) - mean) / std, atol=1e-12)
    fit = cross_entropy(rows["pixels"] @ x["output.weight"].T + x["output.bias"], rows["label"])
    expected = 0.5 * fit + 0.2 * sum(leaf.square().sum() for leaf in x.values())
    assert_same(problem.g(problem.theta0, x, rows), expected, rtol=1e-12)
    elsewhere = small(tmp_path, hidden=0, start=Start(lower="zeros", theta0=-2.0))
    assert elsewhere.theta0["logits"].unique().tolist() == [-2]
    zeros = (*elsewhere.x0.values(), elsewhere.references["uniform"]["logits"])
    assert not any(leaf.any() for leaf in zeros)


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
def test_the_implicit_hypergradient_is_one_product_with_each_example_gradient(
    tmp_path: Path, strategy: Any
) -> None:
    problem = small(tmp_path)
    spec = Ravel.of(problem.x0)
    at = spec.ravel(problem.x0)
    below, above = problem.lower_data, problem.upper_data["differentiate"].whole
    hessian = torch.func.hessian(lambda y: problem.g(LOGITS, spec.unravel(y), below.whole))(at)
    slope = torch.func.grad(lambda y: problem.f(LOGITS, spec.unravel(y), above))(at)
    v = torch.linalg.solve(hessian + 0.5 * torch.eye(len(at), dtype=F64), slope)

    def example_loss(y: Tensor, i: int) -> Tensor:
        flat = {"logits": torch.full((30,), 40.0, dtype=F64)}  # weight 1
        return problem.g(flat, spec.unravel(y), below.batch(torch.tensor([i])))

    weight = LOGITS["logits"].sigmoid()
    decay = 2e-4 * at @ v
    products = [torch.func.grad(example_loss)(at, i) @ v - decay for i in range(30)]
    found = hypergradient(
        lambda t, x: problem.f(t, x, above),
        lambda t, x: problem.g(t, x, below.whole),
        LOGITS,
        problem.x0,
        solver=lambda matvec, b: v,
        strategy=strategy,
    )
    rtol, atol = (1e-5, 1e-9) if strategy == "difference" else (1e-10, 1e-14)
    expected = -weight * (1 - weight) / 30 * torch.stack(products)
    assert_same(found.value["logits"], expected, rtol=rtol, atol=atol)


def test_softmax_cleaning_hypergradient_is_the_slope_of_the_re_solved_upper_loss(
    tmp_path: Path,
) -> None:
    problem = small(tmp_path, hidden=0, standardise=True, omega=0.05, validation_split=THIRDS)
    spec = Ravel.of(problem.x0)
    below, above = problem.lower_data.whole, problem.upper_data["differentiate"].whole

    def solved(theta: Tree) -> Tree:
        def loss(y: Tensor) -> Tensor:
            return problem.g(theta, spec.unravel(y), below)

        y = torch.zeros(spec.size, dtype=F64)
        for _ in range(8):
            y = y - torch.linalg.solve(torch.func.hessian(loss)(y), torch.func.grad(loss)(y))
        assert torch.func.grad(loss)(y).norm() < 1e-13
        return spec.unravel(y)

    def dense(matvec: MatVec, b: Tensor) -> Tensor:
        columns = [matvec(column) for column in torch.eye(len(b), dtype=F64)]
        return torch.linalg.solve(torch.stack(columns, dim=1), b)

    found = hypergradient(
        lambda t, x: problem.f(t, x, above),
        lambda t, x: problem.g(t, x, below),
        LOGITS,
        solved(LOGITS),
        solver=dense,
    ).value["logits"]
    assert float(found.norm()) > 1e-4
    for i, step in zip((0, 11, 29), 1e-4 * torch.eye(30, dtype=F64)[[0, 11, 29]], strict=True):
        ends = [{"logits": LOGITS["logits"] + sign * step} for sign in (1, -1)]
        upper = [float(problem.f(theta, solved(theta), above)) for theta in ends]
        assert (upper[0] - upper[1]) / 2e-4 == pytest.approx(float(found[i]), rel=1e-5, abs=1e-10)


# --- what is measured
# --------------------------------------------------------------------------------------------------


def test_evaluate_counts_what_it_says(tmp_path: Path) -> None:
    problem, clean = (small(tmp_path, corruption=share) for share in (0.5, 0.0))
    noisy, true = (each.lower_data.whole["label"] for each in (problem, clean))
    x = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
    x["output.bias"][2] = 1.0  # always says class 2
    kept, wrong = torch.arange(30) < 12, noisy != true
    theta = {"logits": torch.where(kept, 1.0, -1.0).double()}
    right = int((kept & ~wrong).sum())
    f1 = 2 * right / int(kept.sum() + (~wrong).sum())
    data = problem.upper_data.values()
    upper = sum(float(problem.f(theta, x, rows.whole)) * rows.size for rows in data)
    expected = {
        "train_accuracy": float((true == 2).double().mean()),
        "memorised": float((noisy[wrong] == 2).double().mean()),
        "validation_loss": upper / sum(rows.size for rows in data),
        "cleaning_f1": f1,
        "cleaning_f1_redrawn": f1,  # each redrawn label is wrong here
    }
    weights = theta["logits"].sigmoid().numpy()
    for name, group in (("clean", weights[~wrong]), ("corrupted", weights[wrong])):
        expected[f"weight_{name}"] = group.mean()
        for percent in (10, 50, 90):
            expected[f"weight_{name}_q{percent}"] = np.percentile(group, percent)
    numbers = problem.evaluate(theta, x)
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)
