"""The task: one L2 penalty per feature of a linear model, learned from validation rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

import torch
from attrs import Attribute, field
from torch import Tensor

from hgms.config import validation_shares
from hgms_core import Batch, ConfigError, Data, Key, Problem, Tree, component, roles
from hgms_core.validators import at_least, at_most, positive
from hgms_feature_penalties.tables import load, split, with_noise

MOST = 900
"""The maximum number of noise features, for fewer than 1,000 penalties (trait `few-upper`)."""


def predictions(x: Tree, a: Tensor, classes: int) -> Tensor:
    """Return ``[rows, classes]`` scores, or ``[rows]`` numbers without classes.

    The first class's intercept is 0, and with two classes also the first class's weights. Otherwise
    a shift of all scores would change no probability, and the minimiser would not be unique.
    """
    scores = a @ x["weight"].T
    if not classes:
        return scores.squeeze(-1) + x["intercept"]
    first = torch.zeros_like(x["intercept"][:1])
    if classes == 2:
        scores = torch.cat([torch.zeros_like(scores), scores], dim=-1)
    return scores + torch.cat([first, x["intercept"]])


def loss(x: Tree, batch: Batch, classes: int) -> Tensor:
    """The mean over rows of the cross-entropy, or of half the squared error."""
    fitted = predictions(x, batch["a"], classes)
    if not classes:
        return 0.5 * (fitted - batch["y"]).square().mean()
    return -fitted.log_softmax(-1).gather(-1, batch["y"].unsqueeze(-1)).mean()


def score(x: Tree, batch: Batch, classes: int) -> Tensor:
    """Return the ``score`` of scikit-learn's estimators: the accuracy, or R²."""
    fitted = predictions(x, batch["a"], classes)
    if classes:
        return (fitted.argmax(-1) == batch["y"]).to(fitted.dtype).mean()
    return 1 - (fitted - batch["y"]).square().mean() / batch["y"].var(correction=0)


def separation(penalties: Tensor, noise: int) -> Tensor:
    """Return P(noise penalty > real penalty) + ½ P(equal penalties): the area under the ROC curve.

    Examples
    --------
    >>> separation(torch.tensor([0.0, 1.0, 1.0, 2.0]), noise=2)
    tensor(0.8750)
    """
    real = penalties[:-noise]
    other = penalties[-noise:, None]
    return ((other > real).to(penalties.dtype) + 0.5 * (other == real).to(penalties.dtype)).mean()


def _shares(instance: object, attribute: Attribute[Any], value: tuple[float, ...]) -> None:
    if len(value) != 3 or min(value) <= 0 or sum(value) > 1 + 1e-9:
        raise ConfigError(
            "out-of-range",
            f"{attribute.name}={value} must be three positive shares (train, validation, test) "
            "with a sum of at most 1",
            place=(attribute.name,),
        )


@final
@component
class FeaturePenalties:
    """One L2 penalty per feature of a linear model with known noise features.

    With ℓ the cross-entropy of the softmax of the scores x_cᵀa + b_c (``diabetes``: half the
    squared error of xᵀa + b)::

        g(θ, (x, b)) = (1/n) Σ_i ℓ(x, b; a_i, y_i) + ½ Σ_j e^{θ_j} Σ_c x_cj²,
            f(x, b) = (1/m) Σ_i ℓ(x, b; a'_i, y'_i)

    over θ_j in [log ``low``, log ``high``], by projection. The set's own features come first, then
    ``noise_features`` irrelevant ones, which should get large penalties. The reference `clean` of
    the problem is the known result: ``high`` for noise, ``penalty`` for the rest.

    Use when you judge a method by its results for single upper variables, on real data and in
    seconds. Avoid for the effect of selection among lower minimisers: g has one minimiser.

    Metrics: ``test_loss``; ``test_score`` (accuracy, or R² for ``diabetes``); ``noise_auc``, the
    probability that a noise feature has a larger penalty than a feature of the set (0.5: no
    effect).

    Parameters
    ----------
    dataset
        Of scikit-learn's embedded ones ``breast-cancer`` (569 × 30, 2 classes), ``wine`` (178 × 13,
        3), ``digits`` (1797 × 61, 10) or ``diabetes`` (442 × 10, a number).
    noise_features
        The number of noise features, 1 to 900.
    noise
        ``permuted`` copies of the set's features, or ``gaussian``.
    shares
        Of the rows that train, validate and test, drawn from the seed.
    validation_split
        Shares of the validation rows for the roles differentiate, select and stop.
    penalty
        The start of every penalty.
    low, high
        Bounds of a penalty. In units of the mean loss per squared coefficient of a feature with
        standard deviation 1.

    Raises
    ------
    ConfigError
        For settings out of range.
    DataError
        For shares that leave a part without rows.
    MissingExtra
        Without scikit-learn.

    Notes
    -----
    Source: MacKay (1994), automatic relevance determination; with validation rows instead of
    evidence as in Bengio (2000).

    Examples
    --------
    >>> task = FeaturePenalties(dataset="wine", noise_features=7)
    >>> problem = task.problem(0, torch.device("cpu"), torch.float64)
    >>> problem.theta0["log_penalty"].shape, problem.x0["weight"].shape
    (torch.Size([20]), torch.Size([3, 20]))
    >>> problem.evaluate(problem.references["clean"], problem.x0)["noise_auc"]
    1.0
    """

    name: ClassVar[str] = "feature-penalties"
    version: ClassVar[str] = "1"
    metrics: ClassVar[Mapping[str, bool]] = {
        "test_loss": False,
        "test_score": True,
        "noise_auc": True,
    }
    traits: ClassVar[frozenset[str]] = frozenset(
        {
            "smooth-lower",
            "few-upper",
            "per-example-losses",
            "stop-rows",
            "validation-rows",
            "reference:clean",
        }
    )

    dataset: Literal["breast-cancer", "wine", "digits", "diabetes"] = "breast-cancer"
    noise_features: int = field(default=30, validator=[at_least(1), at_most(MOST)])
    noise: Literal["permuted", "gaussian"] = "permuted"
    shares: tuple[float, float, float] = field(default=(0.25, 0.45, 0.3), validator=_shares)
    validation_split: tuple[float, float, float] = field(
        default=(0.6, 0.2, 0.2), validator=validation_shares
    )
    penalty: float = field(default=0.1, validator=positive)
    low: float = field(default=0.01, validator=positive)
    high: float = 10.0

    def __attrs_post_init__(self) -> None:
        if not self.low <= self.penalty <= self.high:
            raise ConfigError(
                "out-of-range",
                f"penalty={self.penalty} must be in [low, high] = [{self.low}, {self.high}]",
                place=("penalty",),
            )

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        key = Key(seed).fold("feature-penalties")
        table = with_noise(load(self.dataset), self.noise_features, self.noise, key.fold("noise"))
        # Rows are created in float64 on the CPU, so that every device and precision gets the same
        # ones.
        train, validation, test = (
            {
                "a": part["a"].to(device, dtype),
                "y": part["y"].to(device, dtype if not table.classes else torch.int64),
            }
            for part in split(table, self.shares, key.fold("split"))
        )
        classes = table.classes
        size = table.features.shape[1]
        own = torch.full((size,), math.log(self.penalty), dtype=torch.float64)
        knowing = own.clone()
        knowing[-table.noise :] = math.log(self.high)

        def lower(theta: Tree, x: Tree, batch: Batch) -> Tensor:
            return (
                loss(x, batch, classes)
                + 0.5 * (theta["log_penalty"].exp() * x["weight"].square()).sum()
            )

        @torch.no_grad()
        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            numbers = [
                loss(x, test, classes),
                score(x, test, classes),
                separation(theta["log_penalty"], table.noise),
            ]
            return dict(zip(self.metrics, torch.stack(numbers).tolist(), strict=True))

        vectors = classes if classes > 2 else 1
        return Problem(
            theta0={"log_penalty": own.to(device, dtype)},
            x0={
                "weight": torch.zeros(vectors, size, dtype=dtype, device=device),
                "intercept": torch.zeros(max(classes - 1, 1), dtype=dtype, device=device),
            },
            g=lower,
            f=lambda theta, x, batch: loss(x, batch, classes),
            lower_data=Data.of(train),
            upper_data=roles(validation, self.validation_split),
            project=lambda theta: {
                "log_penalty": theta["log_penalty"].clamp(math.log(self.low), math.log(self.high))
            },
            evaluate=evaluate,
            references={"clean": {"log_penalty": knowing.to(device, dtype)}},
        )
