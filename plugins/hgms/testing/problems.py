"""The problems of the conformance kit: small, with sizes and curvatures of order 1.

Every quantity is also known by other means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from hgms.arguments import require
from hgms.testing.kit import F64, normal, numbers, place
from hgms_core import (
    ROLES,
    Branch,
    Cost,
    Data,
    LastStep,
    Problem,
    Rows,
    Sources,
    Tree,
    detach,
    gradient,
)
from hgms_core.capabilities import GivesRepresentations


@frozen
class Known:
    """A problem, a θ, the solution x*(θ), and F near θ.

    x* is computed by other means than the losses of the problem.
    """

    problem: Problem
    theta: Tree
    solution: Callable[[Tree], Tree]

    def value(self, theta: Tree) -> Tensor:
        """Return F(θ) = f(θ, x*(θ))."""
        problem = self.problem
        return problem.f(theta, self.solution(theta), problem.upper_data["differentiate"].whole)

    def gradient(self) -> Tree:
        """Return ∇F(θ), through the closed form of x*."""
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in self.theta.items()}
        with torch.enable_grad():
            grads = torch.autograd.grad(self.value(leaves), list(leaves.values()))
        return dict(zip(leaves, grads, strict=True))

    def branch(self, steps: int = 300, rate: float = 0.4) -> Branch:
        """Return a branch that ended at x*, by gradient descent from x*.

        The last step has rate 1, as the next step would have. The branch contains ∇F.
        """
        problem = self.problem
        x = {name: leaf.detach() for name, leaf in self.solution(self.theta).items()}
        batch = problem.lower_data.whole
        rows = problem.lower_data.count(None)

        def replay(theta: Tree, last: int | None) -> tuple[Tree, Cost]:
            within = steps if last is None else min(last, steps)
            at = dict(x)
            fixed = detach(theta)
            # At the θ of the branch, gradient descent stays at x*. At another θ, it moves from x*
            # towards the solution at that θ.
            moved = any(not torch.equal(leaf, self.theta[name]) for name, leaf in fixed.items())
            for _ in range(steps - within if moved else 0):
                slopes, _ = gradient(problem.g, fixed, at, batch)
                at = {
                    name: leaf - rate * slope
                    for (name, leaf), slope in zip(at.items(), slopes, strict=True)
                }
            with torch.enable_grad():
                for _ in range(within):
                    leaves = {
                        name: leaf if leaf.requires_grad else leaf.requires_grad_()
                        for name, leaf in at.items()
                    }
                    grads = torch.autograd.grad(
                        problem.g(theta, leaves, batch), list(leaves.values()), create_graph=True
                    )
                    at = {
                        name: leaf - rate * grad
                        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
                    }
            graph = within if any(leaf.requires_grad for leaf in theta.values()) else 0
            cost = Cost(
                lower_gradients=steps,
                products=graph,
                cross_products=graph,
                rows=rows * (steps + 2 * graph),
            )
            return (at if graph else detach(at)), cost

        loss = problem.f(self.theta, x, problem.upper_data["differentiate"].whole).detach()
        aux = {f"theta.{name}": leaf for name, leaf in self.gradient().items()}
        last_step = LastStep(x=x, batch=batch, rows=rows, rate=1.0)
        aux["upper_loss"] = loss
        return Branch(
            x=x,
            replay=replay,
            aux=aux,
            last_step=lambda: last_step,
            next_step=lambda key: last_step,
        )


def _data(table: Callable[[int], Tree], dtype: torch.dtype) -> tuple[Data, dict[str, Data]]:
    """Return the training rows (table 0) and the validation rows per role (the tables after it)."""
    train, *parts = (
        Data.of({name: leaf.to(dtype) for name, leaf in table(i).items()})
        for i in range(1 + len(ROLES))
    )
    return train, dict(zip(ROLES, parts, strict=True))


def ridge(dtype: torch.dtype = F64, seed: int = 0) -> Known:
    """Ridge regression with an intercept; the upper variables are penalties e^θ and the
    intercept's centre.
    """

    def table(number: int) -> Tree:
        rows = 10 if number else 12
        first = 1000 * seed + number
        a = normal(rows, 3, seed=first)
        return {"a": a, "y": a @ _truth() + 0.7 + 0.3 * normal(rows, seed=first + 50)}

    train, data = _data(table, dtype)

    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        fit = 0.5 * (batch["a"] @ x["w"] + x["b"] - batch["y"]).square().mean()
        return (
            fit
            + 0.5 * (theta["penalty"].exp() * x["w"].square()).sum()
            + 0.25 * (x["b"] - theta["centre"]).square()
        )

    def f(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        return (
            0.5 * (batch["a"] @ x["w"] + x["b"] - batch["y"]).square().mean()
            + 0.05 * theta["centre"].square()
        )

    def solution(theta: Tree) -> Tree:
        a = train.whole["a"]
        y = train.whole["y"]
        design = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        weights = torch.cat([theta["penalty"].exp(), torch.full_like(theta["penalty"][:1], 0.5)])
        pull = torch.cat([torch.zeros_like(theta["penalty"]), 0.5 * theta["centre"].reshape(1)])
        x = torch.linalg.solve(
            design.T @ design / len(y) + torch.diag(weights), design.T @ y / len(y) + pull
        )
        return {"w": x[:3], "b": x[3]}

    theta = {"penalty": numbers([-1.0, 0.0, -0.5], dtype), "centre": numbers(0.2, dtype)}
    x0 = {"w": 2.0 + normal(3, seed=seed + 90).to(dtype), "b": numbers(-1.5, dtype)}

    def fresh(key: object) -> Tree:
        draw = key.generator()  # type: ignore[attr-defined]
        return {
            name: torch.randn(leaf.shape, generator=draw, dtype=F64).to(leaf)
            for name, leaf in x0.items()
        }

    return Known(
        Problem(theta0=theta, x0=x0, g=g, f=f, lower_data=train, upper_data=data, fresh=fresh),
        theta,
        solution,
    )


Of = Callable[[Tensor], Tensor]
OfBoth = Callable[[Tensor, Tensor], Tensor]


def _of_tensors(t: Tensor, x: Tensor, g: OfBoth, f: OfBoth, solution: Of) -> Known:
    """Return a problem without data; θ is one tensor t, the lower state one tensor x."""
    problem = Problem(
        theta0={"t": t},
        x0={"x": x},
        g=lambda theta, x, batch: g(theta["t"], x["x"]),
        f=lambda theta, x, batch: f(theta["t"], x["x"]),
    )
    return Known(problem, {"t": t}, lambda theta: {"x": solution(theta["t"])})


def bowl(dtype: torch.dtype = F64) -> Known:
    """x*(θ) = θ + sin(θ)/3 at the bottom of a round bowl, H = I: one lower step of rate 1 solves
    it.
    """
    target = numbers([1.0, -0.5], dtype)

    def bottom(t: Tensor) -> Tensor:
        return t + t.sin() / 3

    return _of_tensors(
        numbers([0.3, 0.8], dtype),
        numbers([0.0, 0.0], dtype),
        g=lambda t, x: 0.5 * (x - bottom(t)).square().sum(),
        f=lambda t, x: 0.5 * (x - target).square().sum() + 0.05 * t.square().sum(),
        solution=bottom,
    )


def blend(dtype: torch.dtype = F64, seed: int = 0) -> Known:
    """Rows of three named sources around three points, with round losses (H = I).

    x*(θ) = Σ_s ω_s(θ) · mean of source s.
    """
    centres = numbers([[1.0, 0.0], [-0.5, 0.8], [0.2, -1.0]])

    def around(number: int, rows: int) -> Tree:
        return {
            "a": (centres[number % 3] + 0.3 * normal(rows, 2, seed=1000 * seed + 700 + number)).to(
                dtype
            )
        }

    tables = {
        name: around(number, 4 + number) for number, name in enumerate(("east", "west", "south"))
    }
    upper = [around(3, 8)] * len(ROLES)
    x0 = {"x": numbers([0.5, 0.5], dtype)}
    problem = _of_sources(tables, upper, _distance, x0, {"east": 0.5, "west": 0.3, "south": 0.2})
    means = torch.stack([table["a"].mean(0) for table in tables.values()])
    return Known(problem, problem.theta0, lambda theta: {"x": theta["logits"].softmax(0) @ means})


def sphere(dtype: torch.dtype = F64) -> Known:
    """Lower minimisers on the unit sphere around θ: H is singular along the sphere.

    x* is the point nearest to a target.
    """
    target = numbers([2.0, 0.5, -1.0], dtype)
    return _of_tensors(
        numbers([0.1, -0.2, 0.4], dtype),
        numbers([0.9, 0.6, 0.4], dtype),
        g=lambda t, x: ((x - t).square().sum() - 1).square() / 8,
        f=lambda t, x: 0.5 * (x - target).square().sum(),
        solution=lambda t: t + (target - t) / torch.linalg.vector_norm(target - t),
    )


def curved_level() -> Known:
    """A lower level that is neither quadratic in x nor linear in θ.

    x* is computed by Newton's method with an explicit Hessian.
    """
    mix = numbers([[0.9, 0.2], [-0.3, 0.7], [0.1, 0.4]])

    def g(t: Tensor, x: Tensor) -> Tensor:
        return (
            torch.nn.functional.softplus(2 * (x - mix @ t)).sum() / 2
            + 0.5 * (x + t.prod()).square().sum()
        )

    def newton(x: Tensor, t: Tensor) -> Tensor:
        """Compute one step with the exact (diagonal) Hessian as a constant.

        The derivative of the step by θ is the derivative of x*(θ).
        """
        inside = torch.sigmoid(2 * (x - mix @ t))
        flat = inside.detach()
        return x - (inside + x + t.prod()) / (2 * flat * (1 - flat) + 1)

    def solution(t: Tensor) -> Tensor:
        x = torch.zeros_like(mix[:, 0])
        for _ in range(40):
            x = newton(x, t.detach())
        return newton(x, t)

    return _of_tensors(
        numbers([0.4, -0.7]),
        numbers([0.0, 0.0, 0.0]),
        g,
        lambda t, x: x.sin().sum() + 0.1 * (t * x[:2]).sum(),
        solution,
    )


def wells() -> Problem:
    """g = Σ (x² − 1)²/4 in one dimension, from the maximum between its two minimisers −1 and 1."""
    return _of_x(1, lambda x: (x.square() - 1).square().sum() / 4)


def _of_x(size: int, loss: Of) -> Problem:
    """A lower loss of x only, from x = 0, with f = Σ x."""
    x = numbers([0.0] * size)
    return _of_tensors(
        numbers([0.0]),
        x,
        lambda t, x: loss(x) + 0 * t.sum(),
        lambda t, x: x.sum() + 0 * t.sum(),
        lambda t: x,
    ).problem


def _cloud(centre: Tensor, rows: int, seed: int, size: float = 0.05) -> Tensor:
    """Return rows around a point; their mean is the point."""
    noise = size * normal(rows, 2, seed=seed)
    return centre + noise - noise.mean(0)


def _distance(x: Tree, batch: Tree) -> Tensor:
    """Return ½‖x − a‖² for each row."""
    return 0.5 * (x["x"] - batch["a"]).square().sum(-1)


def tracking(dtype: torch.dtype = F64, seed: int = 0) -> Problem:
    """A problem for whole methods: simple, with data and a known optimum.

    x*(θ) = θ on noisy rows and f = ½‖x − c‖² on other rows. F is minimal at θ = c minus the error
    of the row mean.
    """
    centre = numbers([1.0, -0.5])

    def table(number: int) -> Tree:
        around = centre if number else 0 * centre
        return {"a": _cloud(around, 16, 1000 * seed + 200 + number, size=0.1)}

    train, data = _data(table, dtype)
    return Problem(
        theta0={"t": numbers([0.0, 0.0], dtype)},
        x0={"x": numbers([0.5, 0.5], dtype)},
        g=lambda theta, x, batch: 0.5 * (x["x"] - theta["t"] - batch["a"]).square().sum(-1).mean(),
        f=lambda theta, x, batch: _distance(x, batch).mean(),
        lower_data=train,
        upper_data=data,
        evaluate=lambda theta, x: {"distance": float((theta["t"].double() - centre).norm())},
        references={"clean": {"t": centre.to(dtype)}},
    )


def mixture(dtype: torch.dtype = F64, seed: int = 0) -> Problem:
    """Rows of two named sources around two points, validation rows around one of them.

    The best weight of the source around that point is 1.
    """
    corners = torch.eye(2, dtype=F64, device=place())
    first = 1000 * seed + 300
    tables = {
        name: {"a": _cloud(corners[i], 12, first + i).to(dtype)}
        for i, name in enumerate(("near", "far"))
    }
    upper = [
        {"a": _cloud(corners[0], 8, first + 10 + number).to(dtype)} for number in range(len(ROLES))
    ]
    x0 = {"x": numbers([0.5, 0.5], dtype)}
    problem = _of_sources(tables, upper, _distance, x0, {"near": 0.5, "far": 0.5})
    sources = problem.find(Sources)
    assert sources is not None
    weights = sources.weights
    return evolve(problem, evaluate=lambda theta, x: {"far": float(weights(theta)[1])})


def weighted_rows(dtype: torch.dtype = F64, seed: int = 0) -> Problem:
    """Rows around two points, each with a separate weight σ(θ_i), and validation rows around the
    first.

    The best weight of a row around the second point is 0.
    """
    corners = torch.eye(2, dtype=F64, device=place())
    first = 1000 * seed + 600

    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        return (theta["logits"][batch["index"]].sigmoid() * _distance(x, batch)).mean()

    train = torch.cat([_cloud(corners[i], 12, first + i).to(dtype) for i in range(2)])
    return Problem(
        theta0={"logits": torch.zeros_like(train[:, 0])},
        x0={"x": numbers([0.5, 0.5], dtype)},
        g=g,
        f=lambda theta, x, batch: _distance(x, batch).mean(),
        lower_data=Data.of({"a": train}),
        upper_data={
            role: Data.of({"a": _cloud(corners[0], 8, first + 10 + number).to(dtype)})
            for number, role in enumerate(ROLES)
        },
        evaluate=lambda theta, x: {"far": float(theta["logits"][12:].double().sigmoid().mean())},
        extensions=(Rows(losses=_distance),),
    )


def _of_sources(
    tables: Mapping[str, Tree],
    upper: Sequence[Tree],
    examples: Callable[[Tree, Tree], Tensor],
    x0: Tree,
    start: Mapping[str, float],
) -> Problem:
    """g = Σ_s ω_s · mean loss of source s, ω = softmax(θ), from the weights ``start``.

    f = mean loss of the validation rows.
    """
    names = tuple(tables)
    sizes = [len(next(iter(table.values()))) for table in tables.values()]
    pool = {key: torch.cat([table[key] for table in tables.values()]) for key in tables[names[0]]}
    like = next(iter(x0.values()))
    pool["source"] = torch.cat(
        [torch.full((size,), i, device=like.device) for i, size in enumerate(sizes)]
    )

    def losses(x: Tree, batch: Tree) -> Tensor:
        per_row = examples(x, batch)
        share = torch.nn.functional.one_hot(batch["source"], len(names)).to(per_row)
        return (per_row @ share) / share.sum(0).clamp_min(1)

    def each(x: Tree, batch: Tree) -> Tensor:
        return examples(x, batch)

    each.representations = lambda _, batch: batch["a"]  # type: ignore[attr-defined]
    each.capabilities = frozenset({GivesRepresentations})  # type: ignore[attr-defined]

    def theta(weights: Mapping[str, float]) -> Tree:
        require(
            set(weights) <= set(names) and sum(weights.values()) > 0,
            "wrong-value",
            f"mixture={dict(weights)} must give weights to {' and '.join(names)} only, and "
            "at least one must be positive",
            place=("mixture",),
        )
        omega = torch.tensor(
            [weights.get(name, 0.0) for name in names], dtype=F64, device=like.device
        )
        return {"logits": (omega / omega.sum()).clamp_min(1e-12).log().to(like.dtype)}

    def weights(theta: Tree) -> Tensor:
        return torch.softmax(theta["logits"], 0)

    def part(table: Tree) -> Data:
        rows = len(next(iter(table.values())))
        return Data.of(
            {**table, "source": torch.zeros(rows, dtype=torch.int64, device=like.device)}
        )

    return Problem(
        theta0=theta(start),
        x0=x0,
        g=lambda theta, x, batch: weights(theta) @ losses(x, batch),
        f=lambda _, x, batch: examples(x, batch).mean(),
        lower_data=evolve(Data.of(pool), strata=tuple(zip(names, sizes, strict=True))),
        upper_data={role: part(table) for role, table in zip(ROLES, upper, strict=True)},
        extensions=(
            Sources(names=names, weights=weights, theta=theta, losses=losses, examples=each),
        ),
    )


def _truth() -> Tensor:
    return numbers([1.0, -2.0, 0.5])
