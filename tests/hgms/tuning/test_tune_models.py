"""Models of Hugging Face, mean losses, and losses without a derivative in ``hgms.tune``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

import hgms
from hgms_core import ConfigError

DECAY = {"decay": hgms.hyper.PerLayer(init=1e-3)}
SCALE = {"scale": hgms.hyper.Scalar(1.0)}


def token_rows(rows: int, seed: int) -> dict[str, Tensor]:
    """Sequences of six tokens; the third token determines the class."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 20, (rows, 6), generator=draw)
    y = torch.randint(0, 2, (rows,), generator=draw)
    tokens[:, 2] = 1 + y
    return {"tokens": tokens, "y": y}


def of_tokens(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["tokens"]).logits
    return cross_entropy(logits, batch["y"], reduction="none")


def bert(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
        max_position_embeddings=8,
        attn_implementation="eager",
        **changes,
    )
    return transformers.BertForSequenceClassification(config)


def test_a_hugging_face_model_is_tuned_by_the_online_engine() -> None:
    model = bert(attention_probs_dropout_prob=0.0)
    before = {name: leaf.clone() for name, leaf in model.state_dict().items()}
    result = hgms.tune(
        model,
        of_tokens,
        token_rows(60, 0),
        token_rows(40, 1),
        learn=DECAY,
        budget="200 steps",
        batch_size=50,
        folds=2,
    )
    assert result.engine == "online"
    assert type(result.model) is type(model)
    for name, leaf in model.state_dict().items():
        assert torch.equal(leaf, before[name]), name
    test = token_rows(200, 2)
    right = result.model.eval()(input_ids=test["tokens"]).logits.argmax(1) == test["y"]
    assert float(right.float().mean()) > 0.9
    assert not any("dropout" in warning for warning in result.warnings)


def test_dropout_in_a_kernel_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        hgms.tune(bert(), of_tokens, token_rows(20, 0), learn=DECAY, budget="10 steps")
    assert caught.value.code == "random-loss"


def test_equal_masks_of_dropout_in_all_steps_give_a_warning() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2))
    result = hgms.tune(model, of_rows, class_rows(30, 0), learn=DECAY, budget="20 steps")
    assert sum("batch_size" in warning for warning in result.warnings) == 1


# --- means


def class_rows(rows: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, 3, generator=draw)
    return {"a": a, "y": (a[:, 0] > 0).long(), "z": (a[:, :2] > 0).float()}


def of_rows(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["a"]), batch["y"], reduction="none")


def mean(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["a"]), batch["y"])


def labels(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return binary_cross_entropy_with_logits(model(batch["a"]), batch["z"], reduction="none")


def averaged_labels(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return labels(model, batch).flatten(1).mean(1)


def broadcast(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return mse_loss(model(batch["a"])[:, :1], batch["z"][:, 0], reduction="none")


def squeezed(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    outputs = model(batch["a"])[:, :1].squeeze(1)
    return mse_loss(outputs, batch["z"][:, 0], reduction="none")


@pytest.mark.parametrize("engine", ["implicit", "online"])
def test_a_mean_is_evaluated_on_single_rows(engine: Any) -> None:
    def call(loss: Any) -> Any:
        torch.manual_seed(0)
        learn = {"rows": hgms.hyper.PerRow()}
        train, validation = class_rows(24, 0), class_rows(20, 1)
        return hgms.tune(
            nn.Linear(3, 2), loss, train, validation, learn=learn, budget="30 steps", engine=engine
        )

    first, second = call(of_rows), call(mean)
    assert [row.name for row in first.table] == [row.name for row in second.table]
    for own, other in zip(first.table, second.table, strict=True):
        assert own.loss == pytest.approx(other.loss, rel=1e-3)


def weighted_mean(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["a"]), batch["y"], weight=torch.tensor([1.0, 3.0]))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "remedy", "remedied"),
    [
        (weighted_mean, 'use reduction="none"', of_rows),
        (labels, ".flatten(1).mean(1)", averaged_labels),
        (broadcast, ".squeeze(1)", squeezed),
    ],
)
def test_a_loss_that_is_not_per_row_is_rejected_with_a_remedy(
    loss: Any, remedy: str, remedied: Any
) -> None:
    def call(loss: Any) -> Any:
        torch.manual_seed(0)
        learn = {"decay": hgms.hyper.PerInput(init=0.1)}
        return hgms.tune(nn.Linear(3, 2), loss, class_rows(24, 0), learn=learn, budget="30 steps")

    with pytest.raises(ConfigError) as caught:
        call(loss)
    assert (caught.value.code, caught.value.place) == ("wrong-shape", ("loss",))
    assert caught.value.hint is not None
    assert remedy in caught.value.hint
    assert all(row.loss < 2.0 for row in call(remedied).table)


# --- derivatives


def without_gradients(
    model: Any, batch: Mapping[str, Tensor], hyper: Mapping[str, Tensor]
) -> Tensor:
    with torch.no_grad():
        return hyper["scale"] * of_rows(model, batch)


def by_numpy(model: Any, batch: Mapping[str, Tensor], hyper: Mapping[str, Tensor]) -> Tensor:
    return float(hyper["scale"].numpy()) * of_rows(model, batch)


def by_item(model: Any, batch: Mapping[str, Tensor], hyper: Mapping[str, Tensor]) -> Tensor:
    return hyper["scale"].item() * of_rows(model, batch)


@pytest.mark.parametrize(
    ("loss", "code", "place", "remedy"),
    [
        (by_numpy, "not-differentiable", ("loss",), ".numpy()"),
        (by_item, "not-differentiable", ("loss",), ".item()"),
        (without_gradients, "no-effect", ("learn", "scale"), "torch.no_grad()"),
    ],
)
def test_a_loss_without_a_derivative_in_hyper_is_rejected(
    loss: Any, code: str, place: tuple[str, ...], remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        hgms.tune(nn.Linear(3, 2), loss, class_rows(24, 0), learn=SCALE, budget="10 steps")
    assert (caught.value.code, caught.value.place) == (code, place)
    assert caught.value.hint is not None
    assert remedy in caught.value.hint
