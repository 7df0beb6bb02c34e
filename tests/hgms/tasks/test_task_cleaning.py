"""Data hyper-cleaning: the split, the wrong labels, the losses, and every way the data can be
wrong.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import random
import struct
import sys
import tracemalloc
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.helpers import rejects

import hgms_core
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.images import load_images
from hgms_core import ConfigError, DataError, Key, MissingExtra

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


@pytest.mark.parametrize("corruption", [0.0, 0.25, 0.8, 1.0])
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


def test_wrong_labels_are_spread_over_the_nine_others() -> None:
    problem = HyperCleaning(
        corruption=1.0, train_size=1600, validation_size=50, test_size=100
    ).problem(0, CPU, DOUBLE)
    clean = HyperCleaning(
        corruption=0.0, train_size=1600, validation_size=50, test_size=100
    ).problem(0, CPU, DOUBLE)
    turns = torch.bincount(
        (problem.lower_data.whole["label"] - clean.lower_data.whole["label"]) % 10, minlength=10
    )
    assert turns[0] == 0
    # chi-square, 8 degrees of freedom, p = 0.001
    assert float(((turns[1:] - 1600 / 9) ** 2 / (1600 / 9)).sum()) < 26.1


def labels_of(
    noise: str, seed: int = 0, corruption: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, hgms_core.Problem]:
    sizes = {"train_size": 1600, "validation_size": 50, "test_size": 100}
    problem = HyperCleaning(corruption=corruption, noise=noise, **sizes).problem(seed, CPU, DOUBLE)
    true = (
        HyperCleaning(corruption=0.0, **sizes).problem(seed, CPU, DOUBLE).lower_data.whole["label"]
    )
    return true, problem.lower_data.whole["label"], problem


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
    assert int(wrong.sum()) == 480
    assert torch.equal(noisy[wrong], (true[wrong] + 1) % 10)
    assert problem.evaluate(problem.theta0, problem.x0)["wrong_labels"] == 0.3


@pytest.mark.parametrize("noise", ["class-conditional", "pair"])
def test_no_noise_is_no_noise_whatever_its_kind(noise: str) -> None:
    true, noisy, _ = labels_of(noise, corruption=0.0)
    assert torch.equal(true, noisy)


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


def test_one_seed_is_one_problem_and_the_global_generators_are_left_alone() -> None:
    numpys = np.random.get_state()[1].copy()  # noqa: NPY002
    before = torch.random.get_rng_state(), random.getstate(), numpys
    first, again, other = (HyperCleaning().problem(seed, CPU, torch.float32) for seed in (5, 5, 6))
    for name in ("pixels", "label"):
        assert torch.equal(first.lower_data.whole[name], again.lower_data.whole[name])
        assert not torch.equal(first.lower_data.whole[name], other.lower_data.whole[name])
    assert torch.equal(first.x0["hidden.weight"], again.x0["hidden.weight"])
    assert not torch.equal(first.x0["hidden.weight"], other.x0["hidden.weight"])
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()  # noqa: NPY002


def test_a_fresh_start_has_the_distribution_of_a_linear_layer() -> None:
    problem = HyperCleaning(hidden=200).problem(0, CPU, torch.float32)
    x = problem.initial(Key(1))
    for layer, fan_in in (("hidden", 64), ("output", 200)):
        for leaf in (x[f"{layer}.weight"], x[f"{layer}.bias"]):
            assert leaf.abs().max() <= 1 / math.sqrt(fan_in)
            assert leaf.dtype is torch.float32
        weight = x[f"{layer}.weight"]
        assert float(weight.std()) == pytest.approx(1 / math.sqrt(3 * fan_in), rel=0.05)
        assert weight.abs().max() > 0.98 / math.sqrt(fan_in)
    shapes = {
        "hidden.weight": (200, 64),
        "hidden.bias": (200,),
        "output.weight": (10, 200),
        "output.bias": (10,),
    }
    assert {name: tuple(leaf.shape) for name, leaf in x.items()} == shapes
    same = problem.initial(Key(1))
    assert all(torch.equal(x[name], same[name]) for name in x)


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


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
def test_the_implicit_hypergradient_is_one_product_with_each_example_gradient(
    tmp_path: Path, strategy: str
) -> None:
    problem = small(tmp_path).problem(0, CPU, DOUBLE)
    theta = {"logits": torch.linspace(-1, 1, 30, dtype=DOUBLE)}
    spec = hgms_core.Ravel.of(problem.x0)
    ridge = 0.5
    at = spec.ravel(problem.x0)
    hessian = torch.func.hessian(
        lambda y: problem.g(theta, spec.unravel(y), problem.lower_data.whole)
    )(at)
    validation = problem.upper_data["differentiate"].whole
    slope = torch.func.grad(lambda y: problem.f(theta, spec.unravel(y), validation))(at)
    v = torch.linalg.solve(hessian + ridge * torch.eye(len(at), dtype=DOUBLE), slope)

    def example_loss(y: torch.Tensor, i: int) -> torch.Tensor:
        flat = {"logits": torch.full((30,), 40.0, dtype=DOUBLE)}  # weight 1
        decay = problem.lower_data.batch(torch.tensor([i]))
        return problem.g(flat, spec.unravel(y), decay)

    decay = 2e-4 * at @ v
    weight = torch.sigmoid(theta["logits"])
    expected = [
        -weight[i] * (1 - weight[i]) / 30 * (torch.func.grad(example_loss)(at, i) @ v - decay)
        for i in range(30)
    ]
    found = hgms_core.hypergradient(
        lambda t, x: problem.f(t, x, validation),
        lambda t, x: problem.g(t, x, problem.lower_data.whole),
        theta,
        problem.x0,
        solver=lambda matvec, b: v,
        strategy=strategy,
    )
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-9} if strategy == "difference" else {"rtol": 1e-10, "atol": 1e-14}
    )
    assert torch.allclose(found.value["logits"], torch.stack(expected), **tolerance)


@pytest.mark.parametrize("own_batch", [False, True])
def test_stacked_models_have_the_losses_and_gradients_of_single_ones(
    tmp_path: Path, own_batch: bool
) -> None:
    problem = small(tmp_path).problem(0, CPU, DOUBLE)
    models = [problem.initial(Key(0).fold(i)) for i in range(3)]
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    index = torch.arange(15).reshape(3, 5) if own_batch else torch.arange(5)
    batch = problem.lower_data.batch(index)
    grads, losses = torch.func.vmap(
        torch.func.grad_and_value(problem.g, argnums=1), (None, 0, 0 if own_batch else None)
    )(problem.theta0, stacked, batch)
    for i, model in enumerate(models):
        own = {name: leaf[i] for name, leaf in batch.items()} if own_batch else batch
        grad, loss = torch.func.grad_and_value(problem.g, argnums=1)(problem.theta0, model, own)
        assert torch.isclose(losses[i], loss, rtol=1e-13)
        assert all(
            torch.allclose(grads[name][i], grad[name], rtol=1e-10, atol=1e-15) for name in model
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


def test_without_wrong_labels_their_figures_are_nan_and_the_rest_is_not() -> None:
    problem = HyperCleaning(corruption=0.0).problem(0, CPU, torch.float32)
    numbers = problem.evaluate(problem.theta0, problem.x0)
    missing = {name for name, value in numbers.items() if math.isnan(value)}
    assert missing == {"memorised"} | {
        name for name in numbers if name.startswith("weight_corrupted")
    }


def test_clean_weights_train_a_better_classifier_than_uniform_ones() -> None:
    problem = HyperCleaning(corruption=0.6).problem(0, CPU, torch.float32)
    accuracy = {}
    for name, theta in problem.references.items():
        x = {key: leaf.clone().requires_grad_() for key, leaf in problem.x0.items()}
        optimiser = torch.optim.Adam(x.values(), lr=0.05)
        for _ in range(300):
            optimiser.zero_grad()
            problem.g(theta, x, problem.lower_data.whole).backward()
            optimiser.step()
        accuracy[name] = problem.evaluate(theta, {key: leaf.detach() for key, leaf in x.items()})[
            "test_accuracy"
        ]
    assert accuracy["clean"] > 0.85
    assert accuracy["clean"] > accuracy["uniform"] + 0.1


# --- the data
# --------------------------------------------------------------------------------------------------


def write_idx(path: Path, magic: int, sizes: list[int], content: bytes) -> None:
    data = struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def idx_folder(folder: Path, images: int = 40, labels: int = 40, ending: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, images * 6, np.uint8).tobytes()
    write_idx(folder / f"train-images-idx3-ubyte{ending}", 0x803, [images, 2, 3], pixels)
    write_idx(
        folder / f"train-labels-idx1-ubyte{ending}",
        0x801,
        [labels],
        bytes(i % 10 for i in range(labels)),
    )
    return folder


def problem_of(dataset: str, **fields: object) -> hgms_core.Problem:
    usual = {"train_size": 20, "validation_size": 10, "test_size": 10}
    return HyperCleaning(dataset=dataset, **(usual | fields)).problem(0, CPU, DOUBLE)


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
    images = load_images("mnist")
    assert images.pixels.shape == (60000, 28, 28)
    assert np.bincount(images.labels).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]


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


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_plain_and_compressed_from_a_folder_and_from_hgms_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    folder = idx_folder(tmp_path / "mnist", ending=ending)
    expected = np.random.default_rng(0).integers(0, 256, 40 * 6, np.uint8).reshape(40, 2, 3)
    monkeypatch.setenv("HGMS_DATA", str(tmp_path))
    for dataset in (f"idx:{folder}", "mnist"):
        images = load_images(dataset)
        assert (images.pixels == expected).all()
        assert images.labels.tolist() == [i % 10 for i in range(40)]
    pixels = problem_of("mnist").lower_data.whole["pixels"]
    assert pixels.shape == (20, 6)
    assert {round(255 * value) for value in pixels.flatten().tolist()} <= set(
        expected.flatten().tolist()
    )


def test_a_folder_without_the_files_says_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HGMS_DATA", str(tmp_path))
    with rejects("missing-file", str(tmp_path / "mnist"), of=DataError) as caught:
        load_images("mnist")
    for part in (
        "train-images-idx3-ubyte[.gz], train-labels-idx1-ubyte[.gz]",
        "HGMS_DATA",
        "hub:ylecun/mnist",
        "pip install 'hgms[hub]'",
    ):
        assert part in str(caught.value.hint)
    idx_folder(tmp_path / "half")
    (tmp_path / "half" / "train-labels-idx1-ubyte").unlink()
    with rejects("missing-file", str(tmp_path / "half"), of=DataError) as caught:
        load_images(f"idx:{tmp_path / 'half'}")
    assert "train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz" in caught.value.message


@pytest.mark.parametrize("keep", [5, 60, -4])
def test_a_truncated_or_damaged_gzip_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = idx_folder(tmp_path, ending=".gz")
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with rejects("damaged-file", str(path), of=DataError):
        load_images(f"idx:{folder}")


def test_a_file_that_only_pretends_to_be_gzip_is_named(tmp_path: Path) -> None:
    folder = idx_folder(tmp_path, ending=".gz")
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(b"<html>not found</html>")
    with rejects("damaged-file", str(path), of=DataError):
        load_images(f"idx:{folder}")


def test_a_wrong_magic_number_is_shown_with_the_expected_one(tmp_path: Path) -> None:
    folder = idx_folder(tmp_path)
    labels = folder / "train-labels-idx1-ubyte"
    images = folder / "train-images-idx3-ubyte"
    content = images.read_bytes()
    images.write_bytes(labels.read_bytes() + bytes(20))
    with rejects("wrong-format", str(images), of=DataError) as caught:
        load_images(f"idx:{folder}")
    assert "0x00000801" in caught.value.message
    assert "0x00000803" in caught.value.message
    assert "exchanged" in str(caught.value.hint)
    images.write_bytes(b"P5 28 28" + content)
    with rejects("wrong-format", str(images), of=DataError) as caught:
        load_images(f"idx:{folder}")
    assert "0x50352032" in caught.value.message
    assert "exchanged" not in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "held", "word"), [(-7, "233", "truncated"), (3, "more", "damaged")]
)
def test_a_size_that_does_not_match_the_header_is_counted(
    tmp_path: Path, change: int, held: str, word: str
) -> None:
    folder = idx_folder(tmp_path)
    path = folder / "train-images-idx3-ubyte"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    with rejects("damaged-file", str(path), of=DataError) as caught:
        load_images(f"idx:{folder}")
    assert f"is {word}" in caught.value.message
    assert f"40 × 2 × 3 = 240 bytes, but {held} follow" in caught.value.message


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_sizes_whose_product_overflows_are_not_taken_for_none(tmp_path: Path, ending: str) -> None:
    """2³² · 2³¹ · 2 is 0 in 64 bits: an empty file would do."""
    folder = idx_folder(tmp_path, ending=ending)
    path = folder / f"train-images-idx3-ubyte{ending}"
    write_idx(path, 0x803, [1 << 31, 1 << 31, 4], b"")
    with rejects("damaged-file", str(path), of=DataError) as caught:
        load_images(f"idx:{folder}")
    assert "= 18446744073709551616 bytes, but 0 follow" in caught.value.message


def test_a_file_without_images_says_so(tmp_path: Path) -> None:
    path = idx_folder(tmp_path) / "train-images-idx3-ubyte"
    write_idx(path, 0x803, [40, 0, 3], b"")
    with rejects("no-rows", str(path), of=DataError):
        load_images(f"idx:{tmp_path}")


def test_no_more_is_decompressed_than_the_header_promises(tmp_path: Path) -> None:
    """64 MB of zeros in 64 kB behind a sound header: what is kept of them is less than a tenth."""
    folder = idx_folder(tmp_path, ending=".gz")
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x803, 40, 2, 3) + bytes(1 << 26)))
    tracemalloc.start()
    with rejects("damaged-file", str(path), of=DataError) as caught:
        load_images(f"idx:{folder}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 22
    assert "but more follow" in caught.value.message


def test_a_file_shorter_than_its_header_is_named(tmp_path: Path) -> None:
    folder = idx_folder(tmp_path)
    path = folder / "train-labels-idx1-ubyte"
    path.write_bytes(b"\0\0")
    with rejects("damaged-file", str(path), of=DataError) as caught:
        load_images(f"idx:{folder}")
    assert "a header of 8 bytes, but the file has 2" in caught.value.message


def test_counts_that_differ_are_both_given(tmp_path: Path) -> None:
    folder = idx_folder(tmp_path, labels=39)
    with rejects("wrong-shape", str(folder), "labels", of=DataError) as caught:
        load_images(f"idx:{folder}")
    assert "(39,)" in caught.value.message
    assert "40" in caught.value.message


def test_a_label_out_of_range_is_located(tmp_path: Path) -> None:
    folder = idx_folder(tmp_path)
    write_idx(folder / "train-labels-idx1-ubyte", 0x801, [40], bytes([1] * 17 + [12] + [1] * 22))
    with rejects("out-of-range", str(folder), "labels", of=DataError) as caught:
        problem_of(f"idx:{folder}")
    assert caught.value.message.startswith("label 12 of image 17 must be between 0 and 9")
    assert problem_of(f"idx:{folder}", classes=13).x0["output.bias"].shape == (13,)


def test_too_few_examples_for_the_split_are_counted(tmp_path: Path) -> None:
    with rejects("too-few-rows", str(tmp_path), of=DataError) as caught:
        problem_of(f"idx:{idx_folder(tmp_path)}", validation_size=11)
    assert "20 + 11 + 10 = 41 exceeds the 40 images" in caught.value.message


def test_a_role_without_images_is_named(tmp_path: Path) -> None:
    with rejects("no-rows-for-role", "validation_split", of=ConfigError):
        problem_of(
            f"idx:{idx_folder(tmp_path)}", validation_size=2, validation_split=(0.9, 0.05, 0.05)
        )


def test_npz_files_are_read_under_both_pairs_of_names_and_both_pixel_types(tmp_path: Path) -> None:
    labels = np.arange(40, dtype=np.uint8) % 10
    grey = np.random.default_rng(1).integers(0, 256, (40, 3, 2), np.uint8)
    np.savez(tmp_path / "a.npz", images=grey, labels=labels)
    np.savez_compressed(
        tmp_path / "b.npz", x_train=grey / 255, y_train=labels, x_test=grey, y_test=labels
    )
    first, second = (problem_of(f"npz:{tmp_path / name}.npz") for name in "ab")
    assert torch.allclose(
        first.lower_data.whole["pixels"], second.lower_data.whole["pixels"], atol=1e-15
    )
    assert torch.equal(first.lower_data.whole["label"], second.lower_data.whole["label"])


@pytest.mark.parametrize(
    ("arrays", "code", "column"),
    [
        ({"data": np.zeros(3)}, "missing-column", ""),
        ({"images": np.zeros((3, 2)), "labels": np.eye(3)}, "wrong-type", "labels"),
        ({"images": np.full((3, 2), 7.0), "labels": np.arange(3)}, "wrong-type", "pixels"),
        (
            {"images": np.zeros((3, 2), np.uint8), "labels": np.eye(3, dtype=int)},
            "wrong-shape",
            "labels",
        ),
        (
            {"images": np.array([None, 1], dtype=object), "labels": np.arange(2)},
            "unreadable-file",
            "",
        ),
        ({"images": np.uint8(3), "labels": np.arange(2)}, "wrong-shape", "pixels"),
        ({"images": np.zeros((3, 0), np.uint8), "labels": np.arange(3)}, "wrong-shape", "pixels"),
        ({"images": np.zeros(3, np.uint8), "labels": np.arange(3)}, "wrong-shape", "pixels"),
        ({"images": np.zeros((3, 2), ">f4"), "labels": np.arange(3)}, "wrong-type", "pixels"),
        (
            {"images": np.zeros((3, 2), np.longdouble), "labels": np.arange(3)},
            "wrong-type",
            "pixels",
        ),
    ],
)
def test_an_npz_file_with_other_contents_is_explained(
    tmp_path: Path, arrays: dict[str, np.ndarray], code: str, column: str
) -> None:
    path = tmp_path / "odd.npz"
    np.savez(path, **arrays)
    with rejects(code, str(path), *filter(None, [column]), of=DataError):
        load_images(f"npz:{path}")


def test_test_splits_are_read_where_a_set_has_one(tmp_path: Path) -> None:
    grey = np.random.default_rng(1).integers(0, 256, (40, 3, 2), np.uint8)
    np.savez(
        tmp_path / "a.npz",
        x_train=grey,
        y_train=np.arange(40) % 10,
        x_test=grey[:7] // 2,
        y_test=np.arange(7),
    )
    images = load_images(f"npz:{tmp_path / 'a.npz'}", "test")
    assert (images.pixels == grey[:7] // 2).all()
    assert problem_of(f"npz:{tmp_path / 'a.npz'}", test_size=0, train_size=30).lower_data.size == 30
    np.savez(tmp_path / "b.npz", images=grey, labels=np.arange(40) % 10)
    with rejects("missing-column", str(tmp_path / "b.npz"), of=DataError) as caught:
        load_images(f"npz:{tmp_path / 'b.npz'}", "test")
    assert "x_test" in str(caught.value.hint)
    folder = idx_folder(tmp_path / "idx")
    with rejects("missing-file", str(folder), of=DataError) as caught:
        load_images(f"idx:{folder}", "test")
    assert "t10k-images-idx3-ubyte.gz" in caught.value.message
    for kind in ("images-idx3", "labels-idx1"):
        (folder / f"train-{kind}-ubyte").rename(folder / f"t10k-{kind}-ubyte")
    assert load_images(f"idx:{folder}", "test").pixels.shape == (40, 2, 3)
    with rejects("not-supported", "test_size", of=DataError):
        load_images("digits", "test")


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_pixels_that_are_not_finite_are_named(tmp_path: Path, number: float) -> None:
    pixels = np.full((40, 2, 2), 0.5)
    pixels[3, 1, 0] = number
    path = tmp_path / "a.npz"
    np.savez(path, images=pixels, labels=np.arange(40) % 10)
    with rejects("not-finite", str(path), "pixels", of=DataError) as caught:
        load_images(f"npz:{path}")
    assert "1" in caught.value.message


def test_a_missing_or_damaged_npz_file_is_named(tmp_path: Path) -> None:
    with rejects("unreadable-file", str(tmp_path / "absent.npz"), of=DataError):
        load_images(f"npz:{tmp_path / 'absent.npz'}")
    path = tmp_path / "cut.npz"
    np.savez(path, images=np.zeros((9, 4), np.uint8), labels=np.arange(9))
    whole = path.read_bytes()
    locked = bytearray(whole)
    locked[6] |= 1  # says that it is encrypted, as its entry in the directory does
    locked[whole.index(b"PK\x01\x02") + 8] |= 1
    promise = np.lib.format.magic(1, 0) + struct.pack("<H", 118)
    promise += (
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (90000000000000, 9), }".ljust(117)
        + b"\n"
    )
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as stored:
        stored.writestr("images.npy", promise)  # 810 TB
        stored.writestr("labels.npy", promise)
    odd = [bytes(locked), archive.getvalue()]
    for content in (
        whole[: len(whole) // 2],
        b"",
        b"no zip",
        whole[:70] + b"\xff" * 20 + whole[90:],
        *odd,
    ):
        path.write_bytes(content)
        with rejects("unreadable-file", str(path), of=DataError):
            load_images(f"npz:{path}")
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with rejects("missing-column", str(path), of=DataError):
        load_images(f"npz:{path}")


# --- optional packages
# --------------------------------------------------------------------------------------------------


class Image:
    """Stands for datasets.Image: columns are recognised by their feature's type."""


class ClassLabel:
    """Stands for datasets.ClassLabel."""


class FakeRows:
    def __init__(self, table: dict[str, object], features: dict[str, object]) -> None:
        self.table = table
        self.features = features
        self.format = None

    def with_format(self, kind: str) -> FakeRows:
        assert kind == "numpy"
        return self

    def __getitem__(self, index: slice) -> dict[str, object]:
        assert index == slice(None)
        return self.table


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for the `datasets` module that remembers what was asked of it."""
    stand = types.SimpleNamespace(asked=[], answer=None)

    def load_dataset(name: str, *, split: str, revision: str | None) -> FakeRows:
        stand.asked.append((name, split, revision))
        if isinstance(stand.answer, Exception):
            raise stand.answer
        return stand.answer

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return stand


PIXELS = np.random.default_rng(2).integers(0, 256, (40, 2, 2), np.uint8)


def test_mnist_comes_from_the_hub_at_a_pinned_revision_where_hgms_data_is_not_set(
    hub: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HGMS_DATA", raising=False)
    hub.answer = FakeRows(
        {"image": PIXELS, "label": np.arange(40) % 10}, {"image": Image(), "label": ClassLabel()}
    )
    images = load_images("mnist")
    assert hub.asked == [("ylecun/mnist", "train", "77f3279092a1c1579b2250db8eafed0ad422088c")]
    assert (images.pixels == PIXELS).all()
    assert (images.scale, images.labels.tolist()) == (255.0, [i % 10 for i in range(40)])


def test_any_image_set_of_the_hub_is_mapped_by_its_features(hub: types.SimpleNamespace) -> None:
    table = {"id": np.arange(40), "fine": np.arange(40) % 7, "img": list(PIXELS)}
    hub.answer = FakeRows(table, {"id": object(), "fine": ClassLabel(), "img": Image()})
    problem = problem_of("hub:someone/pictures@v2")
    assert hub.asked == [("someone/pictures", "train", "v2")]
    assert problem.lower_data.whole["pixels"].shape == (20, 4)
    load_images("hub:someone/pictures")
    assert hub.asked[1] == ("someone/pictures", "train", None)


@pytest.mark.parametrize(
    ("answer", "code", "part"),
    [
        (ConnectionError("no route"), "cannot-download", "ConnectionError: no route"),
        (FakeRows({}, {"text": object()}), "missing-column", "Image"),
        (FakeRows({}, {"image": Image(), "text": object()}), "missing-column", "ClassLabel"),
        (
            FakeRows(
                {"image": [PIXELS[0], PIXELS[0][:1]], "label": np.arange(2)},
                {"image": Image(), "label": ClassLabel()},
            ),
            "wrong-shape",
            "2 different shapes",
        ),
    ],
)
def test_what_the_hub_cannot_give_is_explained(
    hub: types.SimpleNamespace, answer: object, code: str, part: str
) -> None:
    hub.answer = answer
    with rejects(code, "hub:a/b", of=DataError) as caught:
        load_images("hub:a/b")
    assert part in caught.value.message


def test_a_missing_extra_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HGMS_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    for name, extra in (("mnist", "hub"), ("digits", "sklearn")):
        with rejects("missing-package", "dataset", of=MissingExtra) as caught:
            load_images(name)
        assert caught.value.install == f"pip install 'hgms[{extra}]'"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"dataset": "minst"}, "wrong-value"),
        ({"dataset": "idx:"}, "wrong-value"),
        ({"corruption": 1.2}, "out-of-range"),
        ({"noise": "flip"}, "unknown-choice"),
        ({"train_size": 0}, "out-of-range"),
        ({"validation_split": (0.5, 0.5)}, "wrong-length"),
        ({"validation_split": (0.5, 0.5, 0.5)}, "wrong-value"),
        ({"validation_split": (1.5, -0.25, -0.25)}, "wrong-value"),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict[str, object], code: str) -> None:
    with rejects(code, *fields, of=ConfigError):
        HyperCleaning(**fields)
