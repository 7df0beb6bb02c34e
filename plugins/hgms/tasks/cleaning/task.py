"""Data hyper-cleaning: learn one weight per training example, to reduce the effect of wrong
labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F
from attrs import field
from torch import Tensor

from hgms.config import check_memory, validation_shares
from hgms.gauss_newton import Composite
from hgms.tasks.cleaning.rows import corrupt, draw, redrawn, standardise
from hgms.tasks.images import contents, cross_entropy, image_set, load_images
from hgms_core import Data, Key, Problem, Rows, Tree, component, roles
from hgms_core.capabilities import Capabilities, HasData
from hgms_core.validators import at_least, at_most, optional

QUANTILES = {"q10": 0.1, "q50": 0.5, "q90": 0.9}


def logits(x: Tree, pixels: Tensor) -> Tensor:
    """Return the outputs of the classifier, a pure function of its parameters ``x``.

    The classifier is a sigmoid MLP with one hidden layer, or linear without a hidden layer.
    """
    if "hidden.weight" in x:
        pixels = torch.sigmoid(F.linear(pixels, x["hidden.weight"], x["hidden.bias"]))
    return F.linear(pixels, x["output.weight"], x["output.bias"])


def _outputs(x: Tree, batch: Tree) -> Tensor:
    return logits(x, batch["pixels"])


def _mean(theta: Tree, x: Tree, scores: Tensor, batch: Tree) -> Tensor:
    return cross_entropy(scores, batch["label"]).mean()


UPPER = Composite(outputs=_outputs, criterion=_mean)


@component
class Start:
    """The start of a run: every entry of θ0, and y0.

    ``lower``: y0 is a ``fresh`` draw, or ``zeros`` (for ``hidden`` = 0: a hidden layer of zeros
    stays symmetric).
    """

    shorthand: ClassVar[str] = "lower"
    """The field that a string in place of the table sets."""

    lower: Literal["fresh", "zeros"] = "fresh"
    theta0: float = 0.0


@final
@component
class HyperCleaning:
    """A classifier of images with some wrong training labels; a few clean validation images
    determine the weights of the examples.

    With w = σ(θ), h_y the MLP d → hidden → classes with sigmoid activation, CE the cross-entropy
    and c̃ the noisy labels::

        g(θ, y) = (1/n) Σ_i w_i CE(h_y(x_i), c̃_i) + ω ‖y‖²
            (a minibatch: its mean, and the same ω‖y‖²; not halved)
        f(y)    = (1/m) Σ_j CE(h_y(x_j), c_j)                       on clean validation images

    Train, validation and test images are all drawn from the *training* split, as in the paper.
    Exactly round(ρn) labels are redrawn. Only ``evaluate`` and ``references["clean"]`` use the
    positions of the redrawn labels.

    Use when methods must be compared on a real, non-convex lower level. Avoid for checking a
    hypergradient: there is no closed form (``quadratic``, ``sphere``).

    Parameters
    ----------
    dataset
        ``digits`` (scikit-learn's, 8 × 8), ``mnist`` (IDX files in $HGMS_DATA/mnist; without
        HGMS_DATA from the Hub), ``idx:FOLDER``, ``npz:FILE`` (images and labels) or
        ``hub:NAME@REVISION``.
    corruption
        ρ.
    noise
        Redrawn labels are ``uniform`` over the other classes; ``class-conditional``: over the other
        classes with probabilities per true class, drawn from the seed; ``pair``: the next class; or
        ``uniform-including-true`` over all (then 1 in ``classes`` stays right). ``wrong_labels``
        reports the true rate.
    train_size, validation_size, test_size, hidden
        None for 600, 100, 1097, 32 on digits and 5000, 500, 10000, 300 (the paper's) for other
        sets. A test size of 0 is the test split of the set. A hidden size of 0 is softmax
        regression, whose lower level is convex (strongly, if ω > 0).
    classes
        Labels are 0 … classes − 1.
    omega
        ω.
    start
        The initial lower state and θ, see :class:`Start`.
    standardise
        Pixels with the mean and standard deviation of the training images, per pixel.
    validation_split
        Shares of the validation images for the roles differentiate, select and stop, in disjoint
        parts; (1, 1, 1): every role uses all images (as in the paper).

    Raises
    ------
    DataError
        For missing, damaged or too few images.
    MissingExtra
        Without scikit-learn or datasets.
    ConfigError
        For a role without images.

    Notes
    -----
    Cost of ``evaluate``: one forward pass over each of test, train and validation.

    Source: HG-MS paper, appendix "Data hyper-cleaning (MNIST label noise)"; Franceschi et al.
    (2017).

    Examples
    --------
    >>> problem = HyperCleaning(corruption=0.5).problem(0, torch.device("cpu"), torch.float32)
    >>> numbers = problem.evaluate(problem.references["clean"], problem.x0)
    >>> numbers["cleaning_f1"], numbers["wrong_labels"]
    (1.0, 0.5)
    """

    name: ClassVar[str] = "hyper-cleaning"
    capabilities: ClassVar[Capabilities] = frozenset({HasData})
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = frozenset(
        {
            "smooth-lower",
            "per-example-losses",
            "row-weights",
            "stop-rows",
            "validation-rows",
            "reference:clean",
        }
    )
    metric_rows: ClassVar[Mapping[str, str]] = {
        "train_accuracy": "train",
        "memorised": "train",
        "validation_loss": "validation",
    }
    metrics: ClassVar[Mapping[str, bool]] = {
        "test_accuracy": True,
        "train_accuracy": True,
        "memorised": False,
        "validation_loss": False,
        "cleaning_f1": True,
        **dict.fromkeys(
            ("weight_clean", *(f"weight_clean_{quantile}" for quantile in QUANTILES)), True
        ),
        **dict.fromkeys(
            ("weight_corrupted", *(f"weight_corrupted_{quantile}" for quantile in QUANTILES)), False
        ),
        "wrong_labels": False,
        "cleaning_f1_redrawn": True,
    }

    dataset: str = field(default="digits", validator=image_set)
    corruption: float = field(default=0.4, validator=[at_least(0), at_most(1)])
    noise: Literal["uniform", "uniform-including-true", "class-conditional", "pair"] = "uniform"
    train_size: int | None = field(default=None, validator=optional(at_least(1)))
    validation_size: int | None = field(default=None, validator=optional(at_least(1)))
    test_size: int | None = field(default=None, validator=optional(at_least(0)))
    hidden: int | None = field(default=None, validator=optional(at_least(0)))
    classes: int = field(default=10, validator=at_least(2))
    omega: float = field(default=1e-4, validator=at_least(0))
    standardise: bool = False
    start: Start = Start()
    validation_split: tuple[float, float, float] = field(
        default=(0.6, 0.2, 0.2), validator=validation_shares
    )

    def data_fingerprint(self) -> dict[str, list[str]]:
        """The checksums of the files of the image set."""
        return contents(self.dataset)

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        images = load_images(self.dataset).check_labels(self.classes)
        key = Key(seed).fold("hyper-cleaning")
        usual = (600, 100, 1097, 32) if self.dataset == "digits" else (5000, 500, 10000, 300)
        fields = (self.train_size, self.validation_size, self.test_size, self.hidden)
        *sizes, hidden = (
            size if own is None else own for own, size in zip(fields, usual, strict=True)
        )
        parts = draw(images, sizes, key.fold("split"), device, dtype)
        if not sizes[2]:
            own = load_images(self.dataset, "test").check_labels(self.classes)
            parts[2] = draw(own, [len(own.labels)], Key(0), device, dtype)[0]
        train, validation, test = standardise(parts) if self.standardise else parts
        width = train["pixels"].shape[1]
        check_memory("(hidden + classes) × pixels", hidden + self.classes, width)
        check_memory("hidden × classes", hidden, self.classes)
        true_label = train["label"]
        train = {
            **train,
            "label": corrupt(
                true_label, self.corruption, self.classes, self.noise, key.fold("labels")
            ),
        }
        wrong = train["label"] != true_label
        untouched = torch.ones_like(true_label, dtype=torch.bool)
        untouched[
            redrawn(len(true_label), self.corruption, key.fold("labels").generator()).to(device)
        ] = False

        def decay(theta: Tree, x: Tree, batch: Tree) -> Tensor:
            # Use leaf·leaf, not leaf²: the second derivative of leaf² is again a power.
            return self.omega * torch.stack([(leaf * leaf).sum() for leaf in x.values()]).sum()

        def weighted_loss(theta: Tree, x: Tree, scores: Tensor, batch: Tree) -> Tensor:
            weights = theta["logits"][batch["index"]].sigmoid()
            # The fit comes first: gradients are added in the reverse order of the terms.
            fit = (weights * cross_entropy(scores, batch["label"])).mean()
            return fit + decay(theta, x, batch)

        def fresh(key: Key) -> Tree:
            """Draw the default initialisation of nn.Linear, U(±1/√fan_in) for weights and biases.

            The numbers are the same in every precision.
            """
            generator = key.generator()

            def uniform(fan_in: int, *shape: int) -> Tensor:
                unit = torch.rand(*shape, generator=generator, dtype=torch.float64)
                return ((2 * unit - 1) / fan_in**0.5).to(device, dtype)

            below = (
                {
                    "hidden.weight": uniform(width, hidden, width),
                    "hidden.bias": uniform(width, hidden),
                }
                if hidden
                else {}
            )
            inside = hidden or width
            classes = self.classes
            return below | {
                "output.weight": uniform(inside, classes, inside),
                "output.bias": uniform(inside, classes),
            }

        @torch.no_grad()
        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            answer = logits(x, train["pixels"]).argmax(-1)
            weights = theta["logits"].double().sigmoid()
            kept = weights >= 0.5
            numbers = [
                (logits(x, test["pixels"]).argmax(-1) == test["label"]).double().mean(),
                (answer == true_label).double().mean(),
                (answer == train["label"])[wrong].double().mean(),
                UPPER(theta, x, validation),
                _f1(kept, ~wrong),
                *_spread(weights[~wrong]),
                *_spread(weights[wrong]),
                wrong.double().mean(),
                _f1(kept, untouched),
            ]
            return dict(
                zip(
                    self.metrics,
                    torch.stack([number.double() for number in numbers]).tolist(),
                    strict=True,
                )
            )

        uniform_weights = torch.zeros(len(true_label), dtype=dtype, device=device)
        x0 = fresh(key.fold("x0"))
        if self.start.lower == "zeros":
            x0 = {name: torch.zeros_like(leaf) for name, leaf in x0.items()}
        return Problem(
            theta0={"logits": uniform_weights + self.start.theta0},
            x0=x0,
            g=Composite(outputs=_outputs, criterion=weighted_loss),
            f=UPPER,
            lower_data=Data.of(train),
            upper_data=roles(validation, self.validation_split),
            evaluate=evaluate,
            fresh=fresh,
            extensions=(
                Rows(
                    losses=lambda x, batch: cross_entropy(_outputs(x, batch), batch["label"]),
                    regulariser=decay,
                ),
            ),
            references={
                "clean": {"logits": torch.where(wrong, -30.0, 30.0).to(dtype)},
                "uniform": {"logits": uniform_weights},
            },
        )


def _f1(kept: Tensor, clean: Tensor) -> Tensor:
    return 2 * (kept & clean).sum() / (kept.sum() + clean.sum()).clamp_min(1)


def _spread(weights: Tensor) -> list[Tensor]:
    """Return mean and quantiles; NaN for no weights (no example of that kind)."""
    if not len(weights):
        return [weights.new_tensor(math.nan)] * 4
    return [weights.mean(), *torch.quantile(weights, weights.new_tensor(list(QUANTILES.values())))]
