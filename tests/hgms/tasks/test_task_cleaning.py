"""Data hyper-cleaning: the split, the wrong labels, the losses, and every way the data can be
wrong.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import hgms_core
from hgms.tasks.cleaning import HyperCleaning
from hgms_core import Key

CPU = torch.device("cpu")
DOUBLE = torch.float64

mnist = pytest.mark.skipif(
    "HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no MNIST files to test with"
)


def small(tmp_path: Path, **fields: object) -> HyperCleaning:
    """A task on 60 random 4 × 3 images in an .npz file: fast, and small enough for dense linear
    algebra.
    """
    generator = np.random.default_rng(0)
    path = tmp_path / "small.npz"
    np.savez(
        path, images=generator.integers(0, 256, (60, 4, 3), np.uint8), labels=np.arange(60) % 3
    )
    usual = {"train_size": 30, "validation_size": 10, "test_size": 20, "hidden": 4, "classes": 3}
    return HyperCleaning(dataset=f"npz:{path}", **(usual | fields))


def rows_of(problem: hgms_core.Problem) -> list[torch.Tensor]:
    return [data.whole["pixels"] for data in (problem.lower_data, *problem.upper_data.values())]


# --- the split and the labels
# --------------------------------------------------------------------------------------------------


def test_all_parts_are_disjoint_and_the_roles_cover_the_validation_images(tmp_path: Path) -> None:
    pixels = np.zeros((2000, 2, 2), np.uint8)
    # an image is its own number
    pixels[:, 0, 0], pixels[:, 0, 1] = (np.arange(2000) // 256, np.arange(2000) % 256)
    np.savez(tmp_path / "numbered.npz", images=pixels, labels=np.arange(2000) % 10)
    task = HyperCleaning(
        dataset=f"npz:{tmp_path / 'numbered.npz'}",
        train_size=900,
        validation_size=101,
        test_size=999,
    )
    problem = task.problem(0, CPU, DOUBLE)
    parts = [
        {(round(255 * row[0].item()), round(255 * row[1].item())) for row in part}
        for part in rows_of(problem)
    ]
    assert [len(part) for part in parts] == [900, 61, 20, 20]
    assert len(set.union(*parts)) == 900 + 101
    shared = HyperCleaning(
        dataset=task.dataset,
        train_size=900,
        validation_size=101,
        test_size=999,
        validation_split=(1, 1, 1),
    ).problem(0, CPU, DOUBLE)
    whole = torch.cat(rows_of(problem)[1:])
    assert all(torch.equal(part, whole) for part in rows_of(shared)[1:])
    assert torch.equal(shared.lower_data.whole["pixels"], problem.lower_data.whole["pixels"])


@pytest.mark.parametrize("corruption", [0.0, 0.25, 1.0])
def test_exactly_the_asked_share_of_labels_is_wrong(corruption: float) -> None:
    problem = HyperCleaning(corruption=corruption).problem(3, CPU, torch.float32)
    clean = HyperCleaning(corruption=0.0).problem(3, CPU, torch.float32)
    assert torch.equal(problem.lower_data.whole["pixels"], clean.lower_data.whole["pixels"])
    noisy = problem.lower_data.whole["label"]
    true = clean.lower_data.whole["label"]
    assert int((noisy != true).sum()) == round(600 * corruption)
    assert torch.equal(problem.references["clean"]["logits"] > 0, noisy == true)
    assert (
        problem.evaluate(problem.theta0, problem.x0)["wrong_labels"]
        == round(600 * corruption) / 600
    )
    assert 0 <= int(noisy.min()) <= int(noisy.max()) <= 9


def labels_of(
    noise: str, seed: int = 0, corruption: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, hgms_core.Problem]:
    sizes = {"train_size": 1600, "validation_size": 50, "test_size": 100}
    problem = HyperCleaning(corruption=corruption, noise=noise, **sizes).problem(seed, CPU, DOUBLE)
    true = (
        HyperCleaning(corruption=0.0, **sizes).problem(seed, CPU, DOUBLE).lower_data.whole["label"]
    )
    return true, problem.lower_data.whole["label"], problem


def test_wrong_labels_are_spread_over_the_nine_others() -> None:
    true, noisy, _ = labels_of("uniform")
    turns = torch.bincount((noisy - true) % 10, minlength=10)
    assert turns[0] == 0
    # chi-square, 8 degrees of freedom, p = 0.001
    assert float(((turns[1:] - 1600 / 9) ** 2 / (1600 / 9)).sum()) < 26.1


def test_class_conditional_noise_confuses_each_class_in_its_own_way() -> None:
    from hgms.tasks.cleaning.rows import confusion

    true, noisy, problem = labels_of("class-conditional")
    assert bool((true != noisy).all())
    assert problem.evaluate(problem.theta0, problem.x0)["wrong_labels"] == 1
    counts = torch.zeros(10, 9, dtype=DOUBLE)
    for one, other in zip(true.tolist(), noisy.tolist(), strict=True):
        counts[one, (other - one) % 10 - 1] += 1
    chances = confusion(10, Key(0).fold("hyper-cleaning").fold("labels").fold("confusion"))
    assert torch.allclose(chances.sum(1), torch.ones(10, dtype=DOUBLE))
    expected = counts.sum(1, keepdim=True) * chances
    likely = expected > 5
    statistic = float(((counts - expected) ** 2 / expected)[likely].sum())
    assert (
        statistic
        < torch.distributions.Chi2(float(likely.sum())).mean + 4 * (2 * float(likely.sum())) ** 0.5
    )
    uniform = counts.sum(1, keepdim=True) / 9
    # far from uniform: 80 ± 13 if it were
    assert float(((counts - uniform) ** 2 / uniform).sum()) > 500
    assert torch.equal(noisy, labels_of("class-conditional")[1])
    assert not torch.allclose(chances, confusion(10, Key(1)), atol=0.1)


def test_pair_noise_is_the_next_class() -> None:
    true, noisy, problem = labels_of("pair", corruption=0.3)
    wrong = true != noisy
    assert torch.equal(noisy[wrong], (true[wrong] + 1) % 10)
    assert problem.evaluate(problem.theta0, problem.x0)["wrong_labels"] == 0.3


def test_including_the_true_label_leaves_a_tenth_right_and_says_so() -> None:
    task = HyperCleaning(
        corruption=1.0,
        noise="uniform-including-true",
        train_size=1600,
        validation_size=50,
        test_size=100,
    )
    problem = task.problem(0, CPU, DOUBLE)
    wrong = problem.evaluate(problem.theta0, problem.x0)["wrong_labels"]
    assert 0.9 - 4 * math.sqrt(0.09 / 1600) < wrong < 0.9 + 4 * math.sqrt(0.09 / 1600)
    assert int((problem.references["clean"]["logits"] < 0).sum()) == round(1600 * wrong)


# --- the losses
# --------------------------------------------------------------------------------------------------


def test_the_losses_are_those_of_a_module_written_down_plainly(tmp_path: Path) -> None:
    problem = small(tmp_path, omega=0.03).problem(0, CPU, DOUBLE)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 4), torch.nn.Sigmoid(), torch.nn.Linear(4, 3)
    ).double()
    names = ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]
    x = {name: leaf.detach() for name, leaf in zip(names, model.parameters(), strict=True)}
    theta = {"logits": torch.linspace(-3, 3, 30, dtype=DOUBLE)}
    index = torch.tensor([4, 29, 4, 11])
    batch = problem.lower_data.batch(index)
    expected = 0.0
    for i in index.tolist():
        row = problem.lower_data.whole["pixels"][i]
        log_probability = model(row).log_softmax(0)[problem.lower_data.whole["label"][i]]
        expected += float((-torch.sigmoid(theta["logits"][i]) * log_probability).detach()) / 4
    expected += 0.03 * sum(float(leaf.detach().square().sum()) for leaf in model.parameters())
    assert float(problem.g(theta, x, batch)) == pytest.approx(expected, rel=1e-12)
    validation = problem.upper_data["select"].whole
    upper = torch.nn.functional.cross_entropy(
        model(validation["pixels"]), validation["label"]
    ).detach()
    assert float(problem.f(theta, x, validation)) == pytest.approx(float(upper), rel=1e-12)


def test_without_a_hidden_layer_it_is_softmax_regression_on_standardised_pixels(
    tmp_path: Path,
) -> None:
    task = small(
        tmp_path,
        hidden=0,
        standardise=True,
        omega=0.2,
        noise="uniform-including-true",
        validation_split=(1, 1, 1),
    )
    problem = task.problem(0, CPU, DOUBLE)
    plain = small(tmp_path).problem(0, CPU, DOUBLE)
    assert {name: tuple(leaf.shape) for name, leaf in problem.x0.items()} == {
        "output.weight": (3, 12),
        "output.bias": (3,),
    }
    assert float(problem.x0["output.weight"].abs().max()) <= 12**-0.5
    pixels = problem.lower_data.whole["pixels"]
    raw = plain.lower_data.whole["pixels"]
    assert torch.allclose(pixels.mean(0), torch.zeros(12, dtype=DOUBLE), atol=1e-12)
    assert torch.allclose(pixels.square().mean(0), torch.ones(12, dtype=DOUBLE))
    above = problem.upper_data["stop"].whole
    validation = torch.cat(
        [plain.upper_data[role].whole["pixels"] for role in ("differentiate", "select", "stop")]
    )
    assert torch.allclose(above["pixels"], (validation - raw.mean(0)) / raw.std(0, correction=0))
    said = pixels @ problem.x0["output.weight"].T + problem.x0["output.bias"]
    fit = torch.nn.functional.cross_entropy(said, problem.lower_data.whole["label"])
    expected = 0.5 * fit + 0.2 * sum(leaf.square().sum() for leaf in problem.x0.values())
    assert torch.isclose(
        problem.g(problem.theta0, problem.x0, problem.lower_data.whole), expected, rtol=1e-12
    )
    elsewhere = small(tmp_path, hidden=0, theta0=-2.0, start="zeros").problem(0, CPU, DOUBLE)
    assert elsewhere.theta0["logits"].unique().tolist() == [-2]
    assert not any(leaf.any() for leaf in elsewhere.x0.values())
    assert not elsewhere.references["uniform"]["logits"].any()


def test_softmax_cleaning_hypergradient_is_the_slope_of_the_re_solved_upper_loss(
    tmp_path: Path,
) -> None:
    problem = small(
        tmp_path, hidden=0, standardise=True, omega=0.05, validation_split=(1, 1, 1)
    ).problem(0, CPU, DOUBLE)
    spec = hgms_core.Ravel.of(problem.x0)
    theta = {"logits": torch.linspace(-1, 1, 30, dtype=DOUBLE)}
    above = problem.upper_data["differentiate"].whole

    def solved(theta: dict[str, torch.Tensor]) -> torch.Tensor:
        def loss(y: torch.Tensor) -> torch.Tensor:
            return problem.g(theta, spec.unravel(y), problem.lower_data.whole)

        y = torch.zeros(spec.size, dtype=DOUBLE)
        for _ in range(12):
            y = y - torch.linalg.solve(torch.func.hessian(loss)(y), torch.func.grad(loss)(y))
        assert torch.func.grad(loss)(y).norm() < 1e-13
        return y

    solution = spec.unravel(solved(theta))

    def dense(matvec: hgms_core.MatVec, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(
            torch.stack([matvec(column) for column in torch.eye(len(b), dtype=DOUBLE)], dim=1), b
        )

    found = hgms_core.hypergradient(
        lambda t, x: problem.f(t, x, above),
        lambda t, x: problem.g(t, x, problem.lower_data.whole),
        theta,
        solution,
        solver=dense,
    ).value["logits"]
    assert float(found.norm()) > 1e-4
    for i in (0, 11, 29):
        ends = []
        for sign in (1, -1):
            moved = theta["logits"].clone()
            moved[i] += sign * 1e-4
            ends.append(problem.f(theta, spec.unravel(solved({"logits": moved})), above))
        assert float((ends[0] - ends[1]) / 2e-4) == pytest.approx(
            float(found[i]), rel=1e-5, abs=1e-10
        )


def test_evaluate_counts_what_it_says(tmp_path: Path) -> None:
    task = small(tmp_path, corruption=0.5)
    problem = task.problem(0, CPU, DOUBLE)
    true = small(tmp_path, corruption=0.0).problem(0, CPU, DOUBLE).lower_data.whole["label"]
    noisy = problem.lower_data.whole["label"]
    x = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
    x["output.bias"][2] = 1.0  # always says class 2
    theta = {"logits": torch.where(torch.arange(30) < 12, 1.0, -1.0).double()}
    numbers = problem.evaluate(theta, x)
    assert list(numbers) == list(task.metrics)
    wrong = noisy != true
    kept = torch.arange(30) < 12
    assert numbers["train_accuracy"] == pytest.approx(float((true == 2).double().mean()))
    assert numbers["memorised"] == pytest.approx(float((noisy[wrong] == 2).double().mean()))
    assert numbers["validation_loss"] == pytest.approx(
        float(
            sum(problem.f(theta, x, data.whole) * data.size for data in problem.upper_data.values())
            / sum(data.size for data in problem.upper_data.values())
        )
    )
    precision = float((kept & ~wrong).sum() / kept.sum())
    recall = float((kept & ~wrong).sum() / (~wrong).sum())
    assert numbers["cleaning_f1"] == pytest.approx(
        2 * precision * recall / (precision + recall), rel=1e-6
    )
    # each redrawn label is wrong here
    assert numbers["cleaning_f1_redrawn"] == numbers["cleaning_f1"]
    weights = torch.sigmoid(theta["logits"])
    for name, group in (("clean", weights[~wrong]), ("corrupted", weights[wrong])):
        assert numbers[f"weight_{name}"] == pytest.approx(float(group.mean()))
        for percent in (10, 50, 90):
            assert numbers[f"weight_{name}_q{percent}"] == pytest.approx(
                float(np.percentile(group.numpy(), percent))
            )


def test_labels_redrawn_to_the_true_one_count_as_wrong_in_the_published_measure(
    tmp_path: Path,
) -> None:
    """Of n labels exactly ρn are redrawn; one that keeps all right labels keeps the lucky ones
    among them.
    """
    task = small(tmp_path, corruption=0.5, noise="uniform-including-true")
    lucky = 0
    for seed in range(3):
        problem = task.problem(seed, CPU, DOUBLE)
        n = problem.lower_data.size
        numbers = problem.evaluate(problem.references["clean"], problem.x0)
        right = round(n * (1 - numbers["wrong_labels"]))
        assert numbers["cleaning_f1"] == 1
        assert numbers["cleaning_f1_redrawn"] == pytest.approx(
            2 * (n / 2) / (right + n / 2), rel=1e-6
        )
        lucky += right - n // 2
    assert lucky > 0


@pytest.mark.extended
@mnist
def test_mnist_has_the_papers_sizes_and_pixels_in_the_unit_interval() -> None:
    task = HyperCleaning(dataset="mnist")
    problem = task.problem(0, CPU, torch.float32)
    pixels = problem.lower_data.whole["pixels"]
    assert pixels.shape == (5000, 784)
    assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)
    assert [data.size for data in problem.upper_data.values()] == [300, 100, 100]
    assert problem.x0["hidden.weight"].shape == (300, 784)
    assert problem.evaluate(problem.references["clean"], problem.x0)["cleaning_f1"] == 1


@pytest.mark.extended
@mnist
def test_the_fields_benchmark_is_one_configuration() -> None:
    task = HyperCleaning(
        dataset="mnist",
        corruption=0.7,
        noise="uniform-including-true",
        hidden=0,
        omega=0.2,
        standardise=True,
        theta0=-2.0,
        start="zeros",
        train_size=20_000,
        validation_size=5_000,
        test_size=0,
        validation_split=(1, 1, 1),
    )
    problem = task.problem(0, CPU, torch.float32)
    assert problem.lower_data.size == 20_000
    assert [data.size for data in problem.upper_data.values()] == [5_000] * 3
    x = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
    x["output.bias"][4] = 1.0
    figures = problem.evaluate(problem.theta0, x)
    assert figures["test_accuracy"] == pytest.approx(0.0982)  # 982 fours in MNIST's own test split
    assert figures["wrong_labels"] == pytest.approx(0.63, abs=0.005)
