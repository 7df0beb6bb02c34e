"""The kit's checks of linear solvers: a sound one passes them all, and a mutant for each (asked
in test_testing_mutants.py).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, field, frozen, validators
from torch import Tensor

from hgms.testing import CheckFailed, check_component, checks_of, parametrize_with_checks
from hgms_core import Key, LinearSystem, MatVec, Outcome, Solution


@frozen(kw_only=True)
class MinimalResidual:
    """v ← v + α r with the α that makes the next residual smallest: a sound solver to break in many
    ways.

    >>> MinimalResidual().solve(lambda v: 2 * v, torch.ones(2)).outcome.label
    'converged'

    Source: Saad, "Iterative Methods for Sparse Linear Systems" (2003), section 5.3.2.
    """

    name: ClassVar[str] = "minimal-residual"
    ridge: float = field(default=0.0, validator=validators.ge(0))
    rtol: float = field(default=1e-8, validator=validators.gt(0))
    max_steps: int = field(default=100, validator=validators.ge(1))
    clip: float | None = None

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)
        x, r = system.start(x0)
        count = torch.zeros(system.size.shape, dtype=torch.int64)
        for _ in range(self.max_steps):
            active = system.norm(r) > system.target
            if not active.any():
                break
            product = system.apply(r)
            length = system.dot(product, product)
            rate = torch.where(active & (length > 0), system.dot(r, product) / length, 0.0)
            x = x + system.rows(rate) * r
            r = r - system.rows(rate) * product
            count = count + active
        done = system.norm(r) <= system.target
        codes = torch.where(
            done, system.codes(Outcome.CONVERGED), system.codes(Outcome.ITERATION_LIMIT)
        )
        return system.solution(
            x, system.norm(r), codes, count, torch.full_like(system.size, math.inf), self.clip
        )


@frozen(kw_only=True)
class Seeded(MinimalResidual):
    """Begins along a random vector of a seed of its own: what it draws is the same in every call.

    >>> Seeded().solve(lambda v: 2 * v, torch.ones(2)).outcome.label
    'converged'

    Source: randomised subspace methods in their smallest form.
    """

    name: ClassVar[str] = "seeded"
    seed: int = 0

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        if x0 is not None:
            return super().solve(matvec, b, x0)
        draw = torch.randn(
            b.shape[-1], generator=Key(self.seed).fold("start").generator(), dtype=b.dtype
        )
        along = matvec(draw.expand_as(b))
        product = matvec(along) + self.ridge * along
        length = LinearSystem.dot(product, b) / LinearSystem.dot(product, product)
        start = length[..., None] * along
        answer = super().solve(matvec, b, start if bool(start.isfinite().all()) else None)
        return evolve(answer, products=answer.products + 2)


def invented(**values: float) -> Any:
    """A solver that tells other numbers than it found."""

    class Invents(MinimalResidual):
        def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
            answer = super().solve(matvec, b, x0)
            return evolve(
                answer,
                **{
                    name: torch.full_like(getattr(answer, name), value)
                    for name, value in values.items()
                },
            )

    return Invents()


class Boastful(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        return evolve(answer, residual=0.1 * answer.residual)


class Rash(MinimalResidual):
    """Says converged whatever came out."""

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        return evolve(answer, codes=torch.full_like(answer.codes, Outcome.CONVERGED.code))


class WrongSign(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        return evolve(answer, value=-answer.value)


class ForgottenRidge(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return MinimalResidual(rtol=self.rtol, max_steps=self.max_steps, clip=self.clip).solve(
            matvec, b, x0
        )


class Rolled(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        value = torch.roll(super().solve(matvec, b, x0).value, 1, -1)
        left = torch.linalg.vector_norm(b - matvec(value) - self.ridge * value, dim=-1)
        size = torch.linalg.vector_norm(b, dim=-1)
        residual = left / torch.where(size > 0, size, torch.ones_like(size))
        codes = torch.full(left.shape, Outcome.NOT_SOLVED.code)
        return evolve(super().solve(matvec, b, x0), value=value, residual=residual, codes=codes)


class DividesByRhs(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        size = torch.linalg.vector_norm(b, dim=-1, keepdim=True)
        return evolve(answer, value=answer.value / size * size)


class StartsAtOne(MinimalResidual):
    """Leaves in the answer what H does not see of its start."""

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        ones = torch.ones_like(b)
        # the best along it
        length = LinearSystem.dot(b, matvec(ones)) / LinearSystem.dot(matvec(ones), matvec(ones))
        return super().solve(matvec, b, length[..., None] * ones if x0 is None else x0)


class Strict(MinimalResidual):
    """Raises where H is not positive definite."""

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        if (b * matvec(b)).sum() < 0 or (x := super().solve(matvec, b, x0)).residual.max() > 0.05:
            raise ValueError("H is not positive definite")
        return x


class Nan(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        return evolve(answer, value=answer.value + 0 * matvec(b))


class FiniteInBatches(MinimalResidual):
    """Takes numbers that are not finite for 0, of several systems at once."""

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        if b.dim() == 1:
            return super().solve(matvec, b, x0)
        return super().solve(lambda v: matvec(v).nan_to_num(), b.nan_to_num(), x0)


class Endless(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return (
            evolve(self, max_steps=1000).solve(matvec, b, x0)
            if self.max_steps < 100
            else super().solve(matvec, b, x0)
        )


class Impatient(MinimalResidual):
    """Raises at the limit of iterations."""

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        if answer.outcome is Outcome.ITERATION_LIMIT and self.max_steps == 1:
            raise RuntimeError("no convergence")
        return answer


class AddsStart(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        return answer if x0 is None else evolve(answer, value=answer.value + x0)


class DropsStart(MinimalResidual):
    """Counts as if it began at zero and went beyond: a start makes it slower."""

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, None)
        return answer if x0 is None else evolve(answer, iterations=answer.iterations + 1)


class WrongAxis(MinimalResidual):
    """Measures all systems as one."""

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        return evolve(answer, residual=answer.residual.max()) if b.dim() == 2 else answer


class OneForAll(MinimalResidual):
    """Solves the last system for all."""

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        return evolve(answer, value=answer.value[-1].expand_as(b)) if b.dim() == 2 else answer


class Absolute(MinimalResidual):
    """Adds 1e-12 to what it divides by."""

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        largest = b.abs().amax(-1, keepdim=True)
        small = evolve(self, rtol=1.0 - 1e-6) if bool((largest < 1e-12).all()) and b.any() else None
        if small is None:
            return super().solve(matvec, b, x0)
        value = torch.zeros_like(b)
        return evolve(
            super().solve(matvec, b, x0),
            value=value,
            residual=torch.ones(b.shape[:-1], dtype=b.dtype),
            codes=torch.full(b.shape[:-1], Outcome.STAGNATED.code),
        )


class Miscounted(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = super().solve(matvec, b, x0)
        return evolve(answer, products=answer.products - 1)


class Unclipped(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return (
            evolve(self, clip=None).solve(matvec, b, x0)
            if self.clip
            else super().solve(matvec, b, x0)
        )


class Tuple(MinimalResidual):
    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Any:
        return super().solve(matvec, b, x0).value


@frozen(kw_only=True)
class Keyed(Seeded):
    """Begins along a random vector that a key may decide.

    >>> Keyed().with_key(Key(1)).solve(lambda v: 2 * v, torch.ones(2)).outcome.label
    'converged'

    Source: randomised subspace methods in their smallest form.
    """

    name: ClassVar[str] = "keyed"

    def with_key(self, key: Key) -> Any:
        return evolve(self, seed=key.derive())


class Deaf(Keyed):
    """Draws the same numbers whatever the key."""

    def with_key(self, key: Key) -> Any:
        return evolve(self, seed=1)


class Forgetful(Keyed):
    """With a key it draws others in every call."""

    times: ClassVar[list[int]] = []

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        self.times.append(len(self.times))
        return Keyed(seed=self.seed + len(self.times)).solve(matvec, b, x0)


class OnlyKey(Keyed):
    def with_key(self, key: Key) -> Any:
        return key


MUTANTS: list[tuple[str, Any, str]] = [
    ("key", Deaf(), "with two keys it draws the same 1 tensors"),
    ("key", Forgetful(), "solved again with the same key,"),
    ("key", OnlyKey(), "with_key returns Key; return a solver"),
    ("residual", Boastful(), "it claims the residual"),
    ("residual", Rash(), "it says converged with a residual of"),
    ("residual", Tuple(), "solve returns Tensor"),
    ("dense-solve", WrongSign(), "it claims the residual"),
    ("dense-solve", MinimalResidual(max_steps=2), "the outcome iteration-limit"),
    ("ridge", ForgottenRidge(), "b − (H + 0.4·I)v"),
    ("identity", Rolled(), "across b"),
    ("zero-rhs", DividesByRhs(), "not finite: [nan"),
    ("singular", StartsAtOne(), "from H⁺b"),
    (
        "indefinite",
        Strict(),
        "it raised ValueError: H is not positive definite (test_testing_solvers.py:",
    ),
    ("nonfinite", Nan(), "with NaN products the value is [nan"),
    (
        "nonfinite",
        FiniteInBatches(),
        "in a batch with NaN products of the second system the outcomes are ['converged', ",
    ),
    ("iteration-limit", Endless(), "with max_steps = 1 it took"),
    ("iteration-limit", Impatient(), "it raised RuntimeError: no convergence"),
    ("warm-start", AddsStart(), "it claims the residual"),
    ("warm-start", DropsStart(), "iterations, from zero"),
    ("batch", WrongAxis(), "residual has the shape []; one number per system is [3]"),
    ("batch", OneForAll(), "it claims the residual"),
    ("scaling", Absolute(), "for 1e-30·b"),
    ("products", Miscounted(), "products and made"),
    ("iterations", invented(iterations=1000), "it says 1000 iterations and made"),
    ("iterations", invented(iterations=0), "it says 0 iterations, made"),
    (
        "curvature",
        invented(curvature=0.0),
        "it says 0, the eigenvalues of H + ridge·I are from 0.7 to 0.7",
    ),
    (
        "curvature",
        invented(curvature=1.0),
        "it says 1, the eigenvalues of H + ridge·I are from 0.7 to 0.7",
    ),
    ("clip", Unclipped(), "with clip = 0.1 the value has the length"),
]


@parametrize_with_checks(
    [
        MinimalResidual(),
        MinimalResidual(ridge=0.3),
        MinimalResidual(clip=5.0, rtol=1e-4),
        Seeded(),
        Keyed(),
    ]
)
def test_a_sound_solver(component: Any, check: Any) -> None:
    check(component)


def test_a_failure_says_which_check_what_was_expected_what_came_and_where_to_read_more() -> None:
    (check,) = (item for item in checks_of(ForgottenRidge()) if item.name == "ridge")
    with pytest.raises(CheckFailed) as caught:
        check(ForgottenRidge())
    first, expected, got, which, more = str(caught.value).splitlines()
    assert first == "solver 'minimal-residual' fails the check ridge"
    assert expected == "  expected: A field `ridge` is added to H: the answer is (H + ridge·I)⁻¹ b."
    assert got.startswith("  got: it claims the residual ")
    assert which.startswith("  component: ForgottenRidge(")
    assert more == "  read more: docs/reference/kit.md#linear-solvers"


def test_all_faults_at_once() -> None:
    assert list(check_component(ForgottenRidge())) == ["docstring", "source", "ridge"]
