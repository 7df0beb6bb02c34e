"""The long-tailed task: its split, its views, its losses against a plain module, its
hypergradient.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.helpers import rejects
from torch import Tensor, nn

from hgms.tasks.imbalanced import ImbalancedLoss
from hgms.tasks.imbalanced.rows import views
from hgms_core import DataError, Key

CPU = torch.device("cpu")
DOUBLE = torch.float64


def tiny(tmp_path: Path) -> ImbalancedLoss:
    """118 parameters and 58 rows: small enough for dense Hessians."""
    pixels = np.random.default_rng(0).integers(0, 256, (120, 4, 4), np.uint8)
    np.savez(tmp_path / "tiny.npz", images=pixels, labels=np.arange(120) % 10)
    return ImbalancedLoss(
        dataset=f"npz:{tmp_path / 'tiny.npz'}",
        channels=(1, 2),
        hidden=2,
        least=2,
        views=2,
        validation_size=25,
        test_size=20,
        validation_split=(1, 1, 1),
        smooth=True,
        omega=0.02,
    )


def numbered(path: Path, images: int = 1000) -> str:
    """Images of 4 × 5 pixels that carry their own number in the two middle pixels; class i mod
    10.
    """
    pixels = np.zeros((images, 4, 5), np.uint8)
    pixels[:, 1, 2], pixels[:, 2, 2] = np.arange(images) // 256, np.arange(images) % 256
    np.savez(path, images=pixels, labels=np.arange(images) % 10)
    return f"npz:{path}"


def numbers_of(pixels: Tensor) -> list[int]:
    return [
        round(255 * float(a)) * 256 + round(255 * float(b))
        for a, b in zip(pixels[:, 0, 1, 2], pixels[:, 0, 2, 2], strict=True)
    ]


def test_the_parts_are_disjoint_the_tail_is_long_and_the_rest_balanced(tmp_path: Path) -> None:
    task = ImbalancedLoss(
        dataset=numbered(tmp_path / "n.npz"),
        validation_size=103,
        test_size=200,
        ratio=0.5,
        least=3,
        views=0,
        channels=(1, 1),
        hidden=2,
    )
    problem = task.problem(0, CPU, torch.float32)
    train = problem.lower_data.whole
    # 100 images a class; 11 of 0, 1, 2 and 10 of the others validate; 20 test
    assert torch.bincount(train["label"]).tolist() == [69, 34, 17, 9, 4, 3, 3, 3, 3, 3]
    parts = [train, *(data.whole for data in problem.upper_data.values())]
    found = [numbers_of(part["pixels"]) for part in parts]
    assert [len(set(each)) for each in found] == [148, 62, 20, 21]
    assert len(set().union(*found)) == 148 + 103
    for part, each in zip(parts, found, strict=True):
        assert part["label"].tolist() == [number % 10 for number in each]
    for data in problem.upper_data.values():
        counts = torch.bincount(data.whole["label"], minlength=10)
        assert int(counts.max() - counts.min()) <= 1
    weights = {c: 103 / (10 * (11 if c < 3 else 10)) for c in range(10)}
    select = problem.upper_data["select"].whole
    assert select["weight"].tolist() == pytest.approx(
        [weights[c] for c in select["label"].tolist()]
    )


def test_the_letter_of_the_formula_drops_rare_classes_and_the_training_figure_ignores_them(
    tmp_path: Path,
) -> None:
    task = ImbalancedLoss(
        dataset=numbered(tmp_path / "n.npz"),
        validation_size=20,
        test_size=20,
        least=0,
        views=0,
        channels=(1, 1),
        hidden=2,
    )
    problem = task.problem(0, CPU, DOUBLE)
    assert torch.bincount(problem.lower_data.whole["label"], minlength=10).tolist() == [
        96,
        29,
        9,
        3,
        1,
        0,
        0,
        0,
        0,
        0,
    ]
    x = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
    x["output.bias"][1] = 1.0  # always says class 1
    figures = problem.evaluate(problem.theta0, x)
    assert list(figures) == list(ImbalancedLoss.metrics)
    assert figures["train_balanced_accuracy"] == pytest.approx(1 / 5)
    assert figures["test_balanced_accuracy"] == pytest.approx(1 / 10)
    assert [figures[f"recall_{c}"] for c in range(10)] == [0, 1] + [0] * 8


def test_a_raised_class_shows_in_the_adjusted_figure_only(tmp_path: Path) -> None:
    problem = tiny(tmp_path).problem(0, CPU, DOUBLE)
    x = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
    x["output.bias"][1] = 0.1
    theta = {"delta_raw": torch.zeros(10, dtype=DOUBLE), "gamma_raw": torch.zeros(10, dtype=DOUBLE)}
    theta["delta_raw"][0] = 5.0
    figures = problem.evaluate(theta, x)
    assert figures["recall_1"] == 1
    assert figures["test_balanced_accuracy"] == pytest.approx(0.1)
    assert figures["test_balanced_accuracy_adjusted"] == pytest.approx(0.1)
    assert figures["validation_loss"] == pytest.approx(
        float(problem.f(theta, x, problem.upper_data["stop"].whole))
    )


def test_views_are_shifts_without_wrapping_and_keep_their_labels() -> None:
    pixels = torch.rand(30, 1, 6, 5, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    label = torch.arange(30)
    seen, said = views(pixels, label, 3, 2, 0.0, Key(1))
    assert seen.shape == (90, 1, 6, 5)
    assert said.tolist() == list(range(30)) * 3
    moves = set()
    for view, original in zip(seen, said.tolist(), strict=True):
        fits = []
        for down in range(-2, 3):
            for right in range(-2, 3):
                shifted = torch.zeros(6, 5, dtype=DOUBLE)
                for i in range(6):
                    for j in range(5):
                        if 0 <= i - down < 6 and 0 <= j - right < 5:
                            shifted[i, j] = pixels[original, 0, i - down, j - right]
                if torch.equal(shifted, view[0]):
                    fits.append((down, right))
        assert len(fits) == 1
        moves.add(fits[0])
    assert len(moves) > 15  # of 25
    again, _ = views(pixels, label, 3, 2, 0.0, Key(1))
    assert torch.equal(seen, again)
    assert views(pixels, label, 0, 2, 0.0, Key(1))[0] is pixels


def test_no_view_of_a_validation_image_is_drawn_and_epochs_cover_the_views() -> None:
    plain = ImbalancedLoss(views=0).problem(3, CPU, torch.float32)
    problem = ImbalancedLoss(views=3, rotation=10.0).problem(3, CPU, torch.float32)
    for role in ("differentiate", "select", "stop"):
        assert torch.equal(
            problem.upper_data[role].whole["pixels"], plain.upper_data[role].whole["pixels"]
        )
    assert problem.lower_data.size == 3 * plain.lower_data.size
    assert torch.equal(problem.lower_data.whole["label"], plain.lower_data.whole["label"].repeat(3))
    assert (problem.lower_data.whole["pixels"].min(), problem.lower_data.whole["pixels"].max()) >= (
        0,
        0,
    )


@pytest.mark.parametrize("smooth", [False, True])
def test_the_losses_are_those_of_a_module_written_down_plainly(smooth: bool) -> None:
    task = ImbalancedLoss(
        channels=(3, 4),
        hidden=5,
        smooth=smooth,
        omega=0.03,
        omega_delta=0.2,
        omega_gamma=0.7,
        validation_size=37,
    )
    problem = task.problem(0, CPU, DOUBLE)
    act, pool = (nn.SiLU, nn.AvgPool2d) if smooth else (nn.ReLU, nn.MaxPool2d)
    torch_order = [
        nn.Conv2d(1, 3, 5, padding=2),
        nn.Conv2d(3, 4, 5, padding=2),
        nn.Linear(16, 5),
        nn.Linear(5, 10),
    ]
    first, second, hidden, output = (layer.double() for layer in torch_order)
    # activation before or after mean-pooling differs for SiLU: the task pools first
    block = [pool(2), act()] if smooth else [act(), pool(2)]
    model = nn.Sequential(first, *block, second, *block, nn.Flatten(), hidden, act(), output)
    for layer, name in (
        (first, "conv1"),
        (second, "conv2"),
        (hidden, "hidden"),
        (output, "output"),
    ):
        layer.load_state_dict({part: problem.x0[f"{name}.{part}"] for part in ("weight", "bias")})
    theta = {
        "delta_raw": torch.linspace(-1, 1, 10, dtype=DOUBLE),
        "gamma_raw": torch.linspace(2, -1, 10, dtype=DOUBLE),
    }
    delta = 0.5 * torch.tanh(theta["delta_raw"])
    gamma = 1 + 0.15 * torch.tanh(theta["gamma_raw"])
    batch = problem.lower_data.batch(torch.tensor([0, 7, 7, 31]))
    fit = nn.functional.cross_entropy(model(batch["pixels"]) * gamma + delta, batch["label"])
    expected = fit + 0.015 * sum(leaf.square().sum() for leaf in model.parameters())
    assert float(problem.g(theta, problem.x0, batch)) == pytest.approx(
        float(expected.detach()), rel=1e-12
    )
    above = problem.upper_data["differentiate"].whole
    each = nn.functional.cross_entropy(
        model(above["pixels"]) * gamma + delta, above["label"], reduction="none"
    )
    weight = torch.tensor(
        [37 / 40 if c < 7 else 37 / 30 for c in above["label"].tolist()], dtype=DOUBLE
    )
    upper = (weight * each).mean() + 0.1 * delta.square().sum() + 0.35 * (gamma - 1).square().sum()
    assert float(problem.f(theta, problem.x0, above)) == pytest.approx(
        float(upper.detach()), rel=1e-12
    )


def test_images_that_do_not_suffice_or_fit_are_explained(tmp_path: Path) -> None:
    with rejects("too-few-rows", str(tmp_path / "n.npz"), of=DataError):
        ImbalancedLoss(
            dataset=numbered(tmp_path / "n.npz", 30), validation_size=20, test_size=10
        ).problem(0, CPU, DOUBLE)
    with rejects("missing-column", str(tmp_path / "n.npz"), of=DataError):
        ImbalancedLoss(dataset=numbered(tmp_path / "n.npz", 400), validation_size=20).problem(
            0, CPU, DOUBLE
        )
    np.savez(
        tmp_path / "flat.npz", images=np.zeros((400, 20), np.uint8), labels=np.arange(400) % 10
    )
    with rejects("wrong-shape", str(tmp_path / "flat.npz"), of=DataError):
        ImbalancedLoss(
            dataset=f"npz:{tmp_path / 'flat.npz'}", validation_size=20, test_size=20
        ).problem(0, CPU, DOUBLE)


def test_colour_images_have_their_colours_first(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 8, 4, 3), np.uint8)
    np.savez(
        tmp_path / "c.npz",
        x_train=pixels,
        y_train=np.arange(200) % 10,
        x_test=pixels[:50],
        y_test=np.arange(50) % 10,
    )
    task = ImbalancedLoss(
        dataset=f"npz:{tmp_path / 'c.npz'}", validation_size=20, views=0, channels=(2, 2), hidden=3
    )
    problem = task.problem(0, CPU, DOUBLE)
    assert problem.lower_data.whole["pixels"].shape[1:] == (3, 8, 4)
    assert problem.x0["hidden.weight"].shape == (3, 2 * 2 * 1)
    assert np.isfinite(list(problem.evaluate(problem.theta0, problem.x0).values())).all()
