"""HGMS core: hooks, protocols, pipeline and hypergradient calculus.

This package exports everything that a plugin needs (``__all__``). ``hgms.plugins`` finds and loads
plugins; the programs (the command line, runs, comparisons, reports) depend on both.
"""

from __future__ import annotations

from hgms_core.components import component
from hgms_core.composition import Composition
from hgms_core.data import ROLES, Batch, Data, roles
from hgms_core.errors import ConfigError, HgmsError, NumericalError
from hgms_core.hooks import PLUGIN_API, RunInfo, hookimpl
from hgms_core.hypergrad import (
    Bound,
    Linearization,
    Strategy,
    cross_product,
    curvature,
    upper_gradients,
)
from hgms_core.linear import CallableSolver, Inexact, LinearSystem, as_solver
from hgms_core.pipeline import Pipeline
from hgms_core.problem import Loss, Problem, Rows, Sources
from hgms_core.protocols import (
    CandidateGenerator,
    HyperGradient,
    LinearSolver,
    MatVec,
    Method,
    OuterOptimizer,
    Selector,
    State,
    Task,
)
from hgms_core.records import (
    Branch,
    Candidates,
    Cost,
    Estimate,
    LastStep,
    Outcome,
    Record,
    Selection,
    Solution,
)
from hgms_core.seeding import Key
from hgms_core.stacking import Group, Mode, gradient, groups, values
from hgms_core.trees import Ravel, Tree, clone, detach, norm, repeat, slopes, stack

__version__ = "0.9.0.dev0"

__all__ = [
    "PLUGIN_API",
    "ROLES",
    "Batch",
    "Bound",
    "Branch",
    "CallableSolver",
    "CandidateGenerator",
    "Candidates",
    "Composition",
    "ConfigError",
    "Cost",
    "Data",
    "Estimate",
    "Group",
    "HgmsError",
    "HyperGradient",
    "Inexact",
    "Key",
    "LastStep",
    "LinearSolver",
    "LinearSystem",
    "Linearization",
    "Loss",
    "MatVec",
    "Method",
    "Mode",
    "NumericalError",
    "Outcome",
    "OuterOptimizer",
    "Pipeline",
    "Problem",
    "Ravel",
    "Record",
    "Rows",
    "RunInfo",
    "Selection",
    "Selector",
    "Solution",
    "Sources",
    "State",
    "Strategy",
    "Task",
    "Tree",
    "as_solver",
    "clone",
    "component",
    "cross_product",
    "curvature",
    "detach",
    "gradient",
    "groups",
    "hookimpl",
    "norm",
    "repeat",
    "roles",
    "slopes",
    "stack",
    "upper_gradients",
    "values",
]
