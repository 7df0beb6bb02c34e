"""Task `many-minima`: a network whose lower level has many minima that differ in upper value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from attrs import field
from torch import Tensor

from hgms.config import check_memory, validation_shares
from hgms.gauss_newton import Composite
from hgms_core import Data, Key, Problem, Tree, component, hookimpl, roles
from hgms_core.validators import at_least, at_most, not_negative, positive, share

LOW = math.log(1e-5)
HIGH = math.log(1.0)
"""Θ = [LOW, HIGH]^M: from a hundredth of the default penalty to a penalty that makes all weights
vanish.
"""


def outputs(x: Tree, batch: Tree) -> Tensor:
    """h_x(u) = oᵀ tanh(Σ_j W_j u_j + b) + o₀ of every row, ``[B]``."""
    inside = torch.tanh(
        F.linear(batch["views"].flatten(1), x["views.weight"].flatten(1), x["views.bias"])
    )
    return inside @ x["output.weight"] + x["output.bias"]


def losses(scores: Tensor, batch: Tree) -> Tensor:
    """log(1 + e^{−c h}) of every row, ``[B]``."""
    return F.softplus(-batch["label"] * scores)


def _upper(theta: Tree, x: Tree, scores: Tensor, batch: Tree) -> Tensor:
    return losses(scores, batch).mean()


@final
@component
class ManyMinima:
    """Several views of a row explain its label, but only one view is correct: minima with equal fit
    and different validation loss.

    A row has a label c = ±1 and M views u_j ∈ R². A view *explains* the row if the signs of its two
    numbers multiply to c (an exclusive or, so that no linear map finds it). Otherwise the view is
    noise, independent of c. The first view explains every row. The other views explain the
    ``ambiguous`` share a of the training rows, and no validation or test row::

        u_ij = s_ij + σ ξ_ij,  s_ij ∈ {±1}²,  s_ij1 s_ij2 = c_i
            where view j explains row i, else independent of c_i
        h_x(u) = oᵀ tanh(Σ_j W_j u_j + b) + o₀,       x = (W_1 … W_M, b, o, o₀)
        g(θ, x) = (1/n) Σ_i log(1 + e^{−c_i h_x(u_i)}) + Σ_j e^{θ_j} ‖W_j‖² + ω ‖o‖²
            θ ∈ [log 1e-5, 0]^M
        f(x)    = (1/m) Σ_i log(1 + e^{−c_i h_x(u_i)})    on validation rows

    At a = 1 and equal penalties, the distribution of the training rows is invariant under exchange
    of two views. Every mixture of explanations fits, and only the start determines which is
    learned. θ can still select: a penalty on the other views leaves the correct view. With ``tied``
    penalties, Θ is the diagonal θ_1 = … = θ_M and θ cannot select: only selection of candidates
    can. At a = 0 the other views are noise in all rows, the minima hardly differ in f, and
    selection has no effect.

    Use when the gain from more candidates is the question. Avoid as a test of gradients: there is
    no closed form.

    Parameters
    ----------
    ambiguous
        a, the share of training rows that every view explains.
    views
        M.
    noise
        σ.
    hidden
        units.
    penalty
        e^{θ0}, of every view.
    omega
        ω.
    tied
        One penalty for all views (θ is projected onto its mean).
    train_size, validation_size, test_size
        rows.
    validation_split
        Shares of the validation rows for the roles differentiate, select and stop, in disjoint
        parts; (1, 1, 1): every role uses all rows.

    Raises
    ------
    ConfigError
        For a role without rows, and for sizes beyond the machine's memory.

    Notes
    -----
    Cost of ``evaluate``: one forward pass over each of test, train and validation rows.

    Source: this project; the views model spurious features, which a network may use in place of
    the intended features.

    Examples
    --------
    >>> problem = ManyMinima(ambiguous=0.5).problem(0, torch.device("cpu"), torch.float64)
    >>> signs = (
    ...     problem.lower_data.whole["views"].sign().prod(-1)
    ...     == problem.lower_data.whole["label"][:, None]
    ... )
    >>> [f"{float(share):.2f}" for share in signs.double().mean(0)]
    ['1.00', '0.73', '0.77', '0.74']
    """

    name: ClassVar[str] = "many-minima"
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = frozenset(
        {"smooth-lower", "few-upper", "per-example-losses", "stop-rows", "reference:clean"}
    )
    metric_rows: ClassVar[Mapping[str, str]] = {
        "train_accuracy": "train",
        "validation_loss": "validation",
    }
    metrics: ClassVar[Mapping[str, bool]] = {
        "test_accuracy": True,
        "validation_loss": False,
        "train_accuracy": True,
        "true_share": True,
    }

    ambiguous: float = field(default=1.0, validator=share)
    views: int = field(default=4, validator=at_least(2))
    noise: float = field(default=0.3, validator=not_negative)
    hidden: int = field(default=8, validator=positive)
    penalty: float = field(default=1e-3, validator=[at_least(1e-5), at_most(1)])
    omega: float = field(default=1e-3, validator=positive)
    tied: bool = False
    train_size: int = field(default=200, validator=positive)
    validation_size: int = field(default=200, validator=positive)
    test_size: int = field(default=2000, validator=positive)
    validation_split: tuple[float, float, float] = field(
        default=(0.6, 0.2, 0.2), validator=validation_shares
    )

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        key = Key(seed).fold("many-minima")
        check_memory(
            "rows × views × 2",
            self.train_size + self.validation_size + self.test_size,
            self.views,
            2,
        )
        check_memory("hidden × views × 2", self.hidden, self.views, 2)

        def rows(count: int, ambiguous: float, key: Key) -> Tree:
            """Draw rows in float64 on the CPU, so that every device and precision has the same
            problem.
            """
            generator = key.generator()
            label = 2.0 * torch.randint(2, (count,), generator=generator) - 1
            sign = 2.0 * torch.randint(2, (count, self.views, 2), generator=generator) - 1
            explains = torch.zeros(count, self.views, dtype=torch.bool)
            explains[torch.randperm(count, generator=generator)[: round(ambiguous * count)]] = True
            explains[:, 0] = True
            sign[..., 1] = torch.where(explains, label[:, None] * sign[..., 0], sign[..., 1])
            views = sign + self.noise * torch.randn(
                count, self.views, 2, generator=generator, dtype=torch.float64
            )
            return {"views": views.to(device, dtype), "label": label.to(device, dtype)}

        train = rows(self.train_size, self.ambiguous, key.fold("train"))
        validation = rows(self.validation_size, 0.0, key.fold("validation"))
        test = rows(self.test_size, 0.0, key.fold("test"))

        def fresh(key: Key) -> Tree:
            """Draw weights of variance 1/fan_in; biases are 0."""
            generator = key.generator()

            def normal(fan_in: int, *shape: int) -> Tensor:
                draw = torch.randn(*shape, generator=generator, dtype=torch.float64) / fan_in**0.5
                return draw.to(device, dtype)

            return {
                "views.weight": normal(2 * self.views, self.hidden, self.views, 2),
                "views.bias": torch.zeros(self.hidden, dtype=dtype, device=device),
                "output.weight": normal(self.hidden, self.hidden),
                "output.bias": torch.zeros((), dtype=dtype, device=device),
            }

        def lower(theta: Tree, x: Tree, scores: Tensor, batch: Tree) -> Tensor:
            weight = x["views.weight"]
            output = x["output.weight"]
            penalties = theta["penalty"].exp() @ (weight * weight).sum((0, 2))
            return losses(scores, batch).mean() + penalties + self.omega * (output * output).sum()

        @torch.no_grad()
        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            sizes = x["views.weight"].double().square().sum((0, 2))
            numbers = [
                (outputs(x, test) * test["label"] > 0).double().mean(),
                losses(outputs(x, validation), validation).mean(),
                (outputs(x, train) * train["label"] > 0).double().mean(),
                sizes[0] / sizes.sum(),
            ]
            return dict(
                zip(
                    self.metrics,
                    torch.stack([number.double() for number in numbers]).tolist(),
                    strict=True,
                )
            )

        def project(theta: Tree) -> Tree:
            penalty = theta["penalty"]
            return {
                "penalty": (penalty.mean().expand(self.views) if self.tied else penalty).clamp(
                    LOW, HIGH
                )
            }

        theta0 = torch.full((self.views,), math.log(self.penalty), dtype=dtype, device=device)
        truth = theta0.clone()
        truth[1:] = HIGH
        return Problem(
            theta0={"penalty": theta0},
            x0=fresh(key.fold("x0")),
            g=Composite(outputs=outputs, criterion=lower),
            f=Composite(outputs=outputs, criterion=_upper),
            lower_data=Data.of(train),
            upper_data=roles(validation, self.validation_split),
            project=project,
            evaluate=evaluate,
            fresh=fresh,
            references={"clean": {"penalty": truth}, "uniform": {"penalty": theta0}},
        )


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [ManyMinima]
