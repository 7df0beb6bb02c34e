"""The closed form of ridge regression, for the tasks `quadratic` and `ridge-cv`."""

from __future__ import annotations

from typing import final

import attrs
import torch
from torch import Tensor

from hgms_core import Tree


def squared_loss(x: Tree, batch: Tree) -> Tensor:
    """Return half the mean squared residual of the predictions ``a @ x``."""
    return 0.5 * (batch["a"] @ x["x"] - batch["b"]).square().mean()


@final
@attrs.frozen(eq=False)
class RidgeClosedForm:
    """x*(θ), F(θ) and ∇F(θ) of a ridge regression, from its rows.

    θ has one log-penalty per feature, or one for all. Dense linear algebra: O(d³) each.
    """

    a: Tensor
    b: Tensor
    validation_a: Tensor
    validation_b: Tensor

    def _hessian(self, theta: Tree) -> Tensor:
        penalty = theta["log_penalty"].exp().expand(self.a.shape[1])
        return self.a.T @ self.a / self.a.shape[0] + torch.diag(penalty)

    def solution(self, theta: Tree) -> Tree:
        """x*(θ) = (AᵀA/n + diag e^θ)⁻¹ Aᵀb/n."""
        return {"x": torch.linalg.solve(self._hessian(theta), self.a.T @ self.b / self.a.shape[0])}

    def value(self, theta: Tree) -> Tensor:
        """F(θ) = f(x*(θ))."""
        return squared_loss(self.solution(theta), {"a": self.validation_a, "b": self.validation_b})

    def hypergradient(self, theta: Tree) -> Tree:
        """∂F/∂θ_j = −e^{θ_j} x*_j v_j with (AᵀA/n + diag e^θ) v = ∇f(x*); for one shared θ, the
        sum over j.
        """
        x = self.solution(theta)["x"]
        slope = (
            self.validation_a.T
            @ (self.validation_a @ x - self.validation_b)
            / self.validation_a.shape[0]
        )
        per_feature = (
            -theta["log_penalty"].exp() * x * torch.linalg.solve(self._hessian(theta), slope)
        )
        shared = theta["log_penalty"].numel() == 1
        return {"log_penalty": per_feature.sum().reshape(1) if shared else per_feature}
