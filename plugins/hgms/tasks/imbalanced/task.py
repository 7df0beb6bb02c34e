"""Loss tuning for a long-tailed training set: a shift and a scale per logit, tuned on balanced
images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from attrs import Attribute, field
from torch import Tensor

from hgms.config import check_memory, validation_shares
from hgms.gauss_newton import Composite
from hgms.tasks.images import contents, cross_entropy, image_set, load_images
from hgms.tasks.imbalanced.network import Network
from hgms.tasks.imbalanced.rows import class_weights, maps, split, views
from hgms_core import ConfigError, Data, Key, Problem, Tree, component, roles
from hgms_core.capabilities import Capabilities, HasData
from hgms_core.validators import at_least, at_most, greater_than, less_than, optional

CLASSES = 10
CHUNK = 1000
"""The number of images per forward pass of ``evaluate``."""

count = optional(at_least(1))


def _two(
    instance: object, attribute: Attribute[tuple[int, int] | None], value: tuple[int, int] | None
) -> None:
    if value is not None and (len(value) != 2 or min(value) < 1):
        message = f"channels={value} must be two numbers of at least 1"
        raise ConfigError("wrong-value", message, place=("channels",))


@component
class Layers:
    """The network's sizes; None for (8, 16), 32 on digits and (32, 64), 256 (the paper's) for other
    sets.

    ``smooth``: SiLU and mean pooling instead of ReLU and maximum pooling; g is then smooth
    everywhere, not almost everywhere.
    """

    channels: tuple[int, int] | None = field(default=None, validator=_two)
    hidden: int | None = field(default=None, validator=count)
    smooth: bool = False


@component
class Adjustment:
    """The bounds B_δ, B_γ of the shift and the scale, and their penalties ω_δ, ω_γ in f."""

    bound_delta: float = field(default=0.5, validator=at_least(0))
    bound_gamma: float = field(default=0.15, validator=[at_least(0), less_than(1)])
    omega_delta: float = field(default=1e-2, validator=at_least(0))
    omega_gamma: float = field(default=1e-2, validator=at_least(0))


@final
@component
class ImbalancedLoss:
    """A classifier trained on a long tail of ten classes; its loss's class-wise shifts and scales
    are tuned on balanced images.

    With θ = (δ̃, γ̃) ∈ R¹⁰ × R¹⁰, δ = B_δ tanh δ̃, γ = 1 + B_γ tanh γ̃, h_y a convolutional network
    and x̃ augmented images::

        ℓ(y; x, c) = CE(h_y(x) ⊙ γ + δ, c)
        g(θ, y) = (1/n) Σ_i ℓ(y; x̃_i, c_i) + (ω/2) ‖y‖²    θ0 = 0
        f(θ, y) = (1/m) Σ_j u_{c_j} ℓ(y; x_j, c_j) + (ω_δ/2) ‖δ‖² + (ω_γ/2) ‖γ − 1‖²
            u_c = m / (10 m_c)

    The balanced accuracy is the mean of the ten recalls of the logits h_y, or with the suffix
    ``_adjusted`` of h_y ⊙ γ + δ.

    Use when f has a direct θ term and the lower level is a real network. Avoid on a CPU with the
    paper's sizes: a step on 64 MNIST images is 2 · 10⁹ multiply-adds (decrease ``network``, or use
    the digits).

    Parameters
    ----------
    dataset
        ``digits`` (scikit-learn's, 8 × 8), ``mnist`` (IDX files in $HGMS_DATA/mnist; without
        HGMS_DATA from the Hub), ``idx:FOLDER``, ``npz:FILE`` or ``hub:NAME@REVISION``; grey or
        colour, labels 0 … 9.
    ratio
        b. Of the m training images of class c that remain after validation and test, round(bᶜ m)
        are kept, but at least ``least`` (or all m); None for 10 on digits, 50 for other sets.
        ``least`` = 0 is the exact formula of the paper: at b = 0.3, MNIST then keeps one image of
        class 7 and no image of 8 and 9, and the maximum is 80 %.
    validation_size, test_size
        None for 200, 500 on digits; for other sets 1000 and the whole test split. Validation images
        are drawn from the training split, equally many per class; so are test images if
        ``test_size`` is given.
    validation_split
        Disjoint shares for the roles differentiate, select and stop; (1, 1, 1): every role sees all
        images.
    views, shift, rotation
        Each training image is replaced by ``views`` views (0: the unchanged image), drawn once from
        the seed: shifted by up to ``shift`` pixels (None for 1 on digits, 2 for other sets) and
        turned by up to ``rotation`` degrees.
    network
        ``channels`` and ``hidden``, its sizes, and ``smooth``: see :class:`Layers`.
    omega
        ω.
    adjustment
        ``bound_delta``, ``bound_gamma``, ``omega_delta`` and ``omega_gamma``, which are B_δ, B_γ,
        ω_δ, ω_γ.

    Raises
    ------
    DataError
        (missing, damaged or too few images).
    MissingExtra
        (scikit-learn or datasets).

    Notes
    -----
    Cost of ``evaluate``: one forward pass over each of test, validation and (unaugmented) training
    images.

    Source: HG-MS paper, appendix "Parametric loss tuning for imbalanced data (MNIST)"; Li et al.,
    *AutoBalance* (2021).

    Examples
    --------
    >>> problem = ImbalancedLoss().problem(0, torch.device("cpu"), torch.float32)
    >>> torch.bincount(problem.lower_data.whole["label"][: problem.lower_data.size // 4]).tolist()
    [108, 34, 10, 10, 10, 10, 10, 10, 10, 10]
    """

    name: ClassVar[str] = "imbalanced-loss"
    capabilities: ClassVar[Capabilities] = frozenset({HasData})
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = frozenset(
        {
            "smooth-lower",
            "direct-upper",
            "few-upper",
            "per-example-losses",
            "stop-rows",
            "validation-rows",
        }
    )
    metric_rows: ClassVar[Mapping[str, str]] = {
        "train_balanced_accuracy": "train",
        "validation_loss": "validation",
    }
    metrics: ClassVar[Mapping[str, bool]] = {
        "test_balanced_accuracy": True,
        "test_balanced_accuracy_adjusted": True,
        "test_accuracy": True,
        "train_balanced_accuracy": True,
        "validation_loss": False,
        **{f"recall_{c}": True for c in range(CLASSES)},
    }

    dataset: str = field(default="digits", validator=image_set)
    ratio: float = field(default=0.3, validator=[greater_than(0), at_most(1)])
    least: int | None = field(default=None, validator=optional(at_least(0)))
    validation_size: int | None = field(default=None, validator=count)
    test_size: int | None = field(default=None, validator=count)
    validation_split: tuple[float, float, float] = field(
        default=(0.6, 0.2, 0.2), validator=validation_shares
    )
    views: int = field(default=4, validator=at_least(0))
    shift: int | None = field(default=None, validator=optional(at_least(0)))
    rotation: float = field(default=0.0, validator=[at_least(0), at_most(180)])
    network: Layers = Layers()
    omega: float = field(default=5e-4, validator=at_least(0))
    adjustment: Adjustment = Adjustment()

    def data_fingerprint(self) -> dict[str, list[str]]:
        """The checksums of the files of the image set."""
        return contents(self.dataset)

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        images = load_images(self.dataset).check_labels(CLASSES)
        key = Key(seed).fold("imbalanced-loss")
        digits = self.dataset == "digits"
        validation_size = self.validation_size or (200 if digits else 1000)
        test_size = self.test_size or (500 if digits else 0)
        least = self.least if self.least is not None else (10 if digits else 50)
        label = torch.from_numpy(images.labels)
        rows = split(
            label,
            CLASSES,
            validation_size,
            test_size,
            self.ratio,
            least,
            key.fold("split"),
            images.where,
        )

        train, validation, test = (
            maps(images, part, device, dtype) for part in (rows.train, rows.validation, rows.test)
        )
        if not test_size:
            own = load_images(self.dataset, "test").check_labels(CLASSES)
            test = maps(own, torch.arange(len(own.labels)), device, dtype)
        validation["weight"] = class_weights(validation["label"], CLASSES).to(dtype)
        shift = self.shift if self.shift is not None else (1 if digits else 2)
        colours, height, width = train["pixels"].shape[1:]
        padded = (height + 2 * shift, width + 2 * shift)
        check_memory(
            "training images × colours × (height + 2 shift) × (width + 2 shift)",
            len(rows.train),
            colours,
            *padded,
        )
        check_memory(
            "views × training images × pixels",
            self.views,
            len(rows.train),
            colours * height * width,
        )
        pixels, labels = views(
            train["pixels"], train["label"], self.views, shift, self.rotation, key.fold("views")
        )
        network = Network(
            shape=(colours, height, width),
            channels=self.network.channels or ((8, 16) if digits else (32, 64)),
            hidden=self.network.hidden or (32 if digits else 256),
            classes=CLASSES,
            smooth=self.network.smooth,
        )

        by = self.adjustment

        def adjust(theta: Tree) -> tuple[Tensor, Tensor]:
            delta = by.bound_delta * theta["delta_raw"].tanh()
            return delta, by.bound_gamma * theta["gamma_raw"].tanh()

        def losses(delta: Tensor, scale: Tensor, own: Tensor, batch: Tree) -> Tensor:
            return cross_entropy(own * (1 + scale) + delta, batch["label"])

        def penalty(delta: Tensor, scale: Tensor) -> Tensor:
            of_delta = by.omega_delta * (delta * delta).sum()
            return 0.5 * (of_delta + by.omega_gamma * (scale * scale).sum())

        def lower(theta: Tree, x: Tree, own: Tensor, batch: Tree) -> Tensor:
            return losses(*adjust(theta), own, batch).mean() + 0.5 * self.omega * _square(x)

        def in_order(theta: Tree, x: Tree, batch: Tree) -> Tensor:
            # The first term: gradients are added in the reverse order of the terms.
            decay = 0.5 * self.omega * _square(x)
            return losses(*adjust(theta), network.outputs(x, batch), batch).mean() + decay

        def upper(theta: Tree, x: Tree, own: Tensor, batch: Tree) -> Tensor:
            delta, scale = adjust(theta)
            # The first term: gradients are added in the reverse order of the terms.
            penalised = penalty(delta, scale)
            return (batch["weight"] * losses(delta, scale, own, batch)).mean() + penalised

        def logits(x: Tree, pixels: Tensor) -> Tensor:
            return torch.cat([network.logits(x, chunk) for chunk in pixels.split(CHUNK)])

        @torch.no_grad()
        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            delta, scale = adjust(theta)
            own = logits(x, test["pixels"])
            recalls = recall(own, test["label"])
            parts = [
                {name: leaf[i : i + CHUNK] for name, leaf in validation.items()}
                for i in range(0, validation_size, CHUNK)
            ]
            fit = torch.cat(
                [
                    part["weight"] * losses(delta, scale, network.outputs(x, part), part)
                    for part in parts
                ]
            ).mean()
            numbers = [
                recalls.nanmean(),
                recall(own * (1 + scale) + delta, test["label"]).nanmean(),
                (own.argmax(-1) == test["label"]).double().mean(),
                recall(logits(x, train["pixels"]), train["label"]).nanmean(),
                fit + penalty(delta, scale),
                *recalls,
            ]
            return dict(
                zip(
                    self.metrics,
                    torch.stack([number.double() for number in numbers]).tolist(),
                    strict=True,
                )
            )

        zero = torch.zeros(CLASSES, dtype=dtype, device=device)
        return Problem(
            theta0={"delta_raw": zero, "gamma_raw": zero.clone()},
            x0=network.fresh(key.fold("x0"), device, dtype),
            g=Composite(outputs=network.outputs, criterion=lower, value=in_order),
            f=Composite(outputs=network.outputs, criterion=upper),
            lower_data=Data.of({"pixels": pixels, "label": labels}),
            upper_data=roles(validation, self.validation_split),
            evaluate=evaluate,
            fresh=lambda key: network.fresh(key, device, dtype),
        )


def _square(x: Tree) -> Tensor:
    """‖x‖²."""
    return torch.stack([(leaf * leaf).sum() for leaf in x.values()]).sum()


def recall(logits: Tensor, label: Tensor) -> Tensor:
    """Return, per class, the share of its images that are recognised; NaN for a class without
    images.
    """
    right = (logits.argmax(-1) == label).double()
    hits, counts = (
        torch.bincount(label, weights=marks, minlength=CLASSES)
        for marks in (right, torch.ones_like(right))
    )
    return hits / counts
