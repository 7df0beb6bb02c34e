"""What others have made, as components: solvers of SciPy and of linear_operator, the optimisers of torch; and callbacks."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_interop.gpytorch_solver import LinearOperatorSolver as LinearOperatorSolver
from hgms_interop.outer_steps import OuterSteps as OuterSteps
from hgms_interop.scipy_solver import ScipySolver as ScipySolver
from hgms_interop.torch_outer import TorchOptimizer as TorchOptimizer


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [ScipySolver, LinearOperatorSolver]


@hookimpl
def hgms_register_outer_optimizers() -> list[type]:
    return [TorchOptimizer]
