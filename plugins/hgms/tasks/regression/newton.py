"""The solved lower level of a penalised logistic regression.

Minimiser, value function and hypergradient.
"""

from __future__ import annotations

from typing import final

import attrs
import torch
from torch import Tensor

from hgms.tasks.regression.tables import penalty
from hgms_core import NumericalError, Tree


def scores(x: Tree, a: Tensor) -> Tensor:
    """Return the scores ``[rows, classes]``.

    Two classes share one vector of coefficients: the score of the first class is 0.
    """
    linear = a @ x["x"].T
    return (
        torch.cat([torch.zeros_like(linear), linear], dim=-1) if x["x"].shape[-2] == 1 else linear
    )


def criterion(z: Tensor, batch: Tree) -> Tensor:
    return -z.log_softmax(-1).gather(-1, batch["label"].unsqueeze(-1)).mean()


def fit(x: Tree, batch: Tree) -> Tensor:
    return criterion(scores(x, batch["a"]), batch)


@final
@attrs.frozen(eq=False)
class LogisticClosedForm:
    """x*(θ) by Newton's method, and F(θ) and ∇F(θ) by one dense solve, in float64.

    g is strongly convex with constant μ = min_j e^{θ_j}, so Newton's method stops at ‖∇_x g‖ ≤ μ ·
    ``tolerance``. Then ‖x − x*(θ)‖ ≤ ``tolerance``. A problem of k = features × scores coefficients
    takes about ten k × k solves. Raises NumericalError if the tolerance is not reached (for
    penalties that are small compared with the rounding of the losses).
    """

    train: Tree
    validation: Tree
    vectors: int
    tolerance: float = 1e-8
    max_steps: int = 100

    def _derivatives(self, theta: Tree, x: Tree) -> tuple[Tensor, Tensor]:
        """Return (∇_x g, ∇²_xx g) as a vector and a matrix over the flattened coefficients."""
        a = self.train["a"]
        size = self.vectors
        chance = scores(x, a).softmax(-1)
        hit = torch.nn.functional.one_hot(self.train["label"], chance.shape[-1]).to(a.dtype)
        drop = chance.shape[-1] - size  # of two classes, the first has no coefficients
        chance = chance[:, drop:]
        hit = hit[:, drop:]
        weights = theta["log_penalty"].exp()
        gradient = (chance - hit).T @ a / len(a) + weights * x["x"]
        d = a.shape[1]
        hessian = a.new_empty(size, d, size, d)
        for i in range(size):
            for j in range(i + 1):
                weight = chance[:, i] * (int(i == j) - chance[:, j])
                block = (a * weight[:, None]).T @ a / len(a)
                hessian[i, :, j, :] = hessian[j, :, i, :] = block  # each block is symmetric
        hessian = hessian.reshape(size * d, size * d)
        return gradient.flatten(), hessian + torch.diag(weights.expand(size, d).flatten())

    @torch.no_grad()
    def solution(self, theta: Tree) -> Tree:
        """Return x*(θ), computed from the start 0."""
        x = {"x": self.train["a"].new_zeros(self.vectors, self.train["a"].shape[1])}
        value = fit(x, self.train) + penalty(theta, x)
        target = self.tolerance * theta["log_penalty"].min().exp()
        for _ in range(self.max_steps):
            gradient, hessian = self._derivatives(theta, x)
            if torch.linalg.vector_norm(gradient) <= target:
                return x
            step = torch.linalg.solve(hessian, gradient)
            decrement = gradient @ step
            length = 1.0
            # Halve the step until g decreases by a fraction of the predicted decrease, or rounding
            # dominates.
            while True:
                moved = {"x": x["x"] - length * step.reshape(x["x"].shape)}
                after = fit(moved, self.train) + penalty(theta, moved)
                if (
                    after <= value - 0.25 * length * decrement
                    or decrement <= 1e-12 * (1 + value.abs())
                    or length < 1e-10
                ):
                    break
                length /= 2
            x = moved
            value = after
        norm = float(torch.linalg.vector_norm(self._derivatives(theta, x)[0]))
        raise NumericalError(
            "not-converged",
            f"after {self.max_steps} Newton steps ‖∇_x g‖ = {norm:.3g}, but must be at most "
            f"{float(target):.3g}",
            place=("max_steps",),
            hint="increase the penalties",
        )

    def value(self, theta: Tree) -> Tensor:
        """F(θ) = f(x*(θ))."""
        return fit(self.solution(theta), self.validation)

    def hypergradient(self, theta: Tree) -> Tree:
        """Return ∂F/∂θ_k = −e^{θ_k} Σ x*_{cj} v_{cj} with ∇²_xx g v = ∇f(x*).

        The sum is over the coefficients that θ_k penalises.
        """
        return self.exactly(theta)[2]

    def exactly(self, theta: Tree) -> tuple[Tree, Tensor, Tree]:
        """Return (x*(θ), F(θ), ∇F(θ)) with a single solve of the lower level."""
        x = self.solution(theta)
        leaf = x["x"].clone().requires_grad_()
        with torch.enable_grad():
            value = fit({"x": leaf}, self.validation)
            slope = torch.autograd.grad(value, leaf)[0]
        v = torch.linalg.solve(self._derivatives(theta, x)[1], slope.flatten()).reshape(slope.shape)
        above = -theta["log_penalty"].exp() * (x["x"] * v).sum_to_size(theta["log_penalty"].shape)
        return x, value.detach(), {"log_penalty": above}
