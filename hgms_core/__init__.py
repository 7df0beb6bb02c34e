"""HGMS core: protocols, pipeline, hypergradient calculus, plugin host and registry.

Everything a plugin needs is here, listed in ``__all__``. Programs (the command line, runs,
comparisons, reports) are packages of their own on top of it, and may also import ``hgms_core.host``
and ``hgms_core.registry``.
"""

from __future__ import annotations

from hgms_core.adapters.arguments import check_function, check_part
from hgms_core.adapters.checks import check_losses, pure
from hgms_core.adapters.display import as_html, as_text, sizes
from hgms_core.adapters.modules import fresh_parameters, trainable
from hgms_core.adapters.shapes import Nested, Shape, check_floating
from hgms_core.budget import Budget
from hgms_core.data import ROLES, Batch, Data, Rows, roles
from hgms_core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ErrorGroup,
    HgmsError,
    MissingExtra,
    NumericalError,
    OutOfMemory,
    Place,
    PluginError,
    choice,
    closest,
    dotted,
    one_of,
    raise_all,
    unknown_name,
)
from hgms_core.hookspecs import PLUGIN_API, RunInfo, hookimpl
from hgms_core.hypergrad import (
    Linearization,
    Strategy,
    cross_product,
    curvature,
    difference_step,
    hypergradient,
    implicit,
    twice_differentiable_attention,
    upper_gradients,
)
from hgms_core.linear import CallableSolver, Inexact, LinearSystem, as_solver
from hgms_core.pipeline import Composition, Pipeline, overlay
from hgms_core.problem import Loss, Problem, Sources
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
    "Branch",
    "Budget",
    "CallableSolver",
    "CandidateGenerator",
    "Candidates",
    "CheckpointError",
    "Composition",
    "ConfigError",
    "Cost",
    "Data",
    "DataError",
    "ErrorGroup",
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
    "MissingExtra",
    "Mode",
    "Nested",
    "NumericalError",
    "OutOfMemory",
    "Outcome",
    "OuterOptimizer",
    "Pipeline",
    "Place",
    "PluginError",
    "Problem",
    "Ravel",
    "Record",
    "Rows",
    "RunInfo",
    "Selection",
    "Selector",
    "Shape",
    "Solution",
    "Sources",
    "State",
    "Strategy",
    "Task",
    "Tree",
    "as_html",
    "as_solver",
    "as_text",
    "check_floating",
    "check_function",
    "check_losses",
    "check_part",
    "choice",
    "clone",
    "closest",
    "cross_product",
    "curvature",
    "detach",
    "difference_step",
    "dotted",
    "fresh_parameters",
    "gradient",
    "groups",
    "hookimpl",
    "hypergradient",
    "implicit",
    "norm",
    "one_of",
    "overlay",
    "pure",
    "raise_all",
    "repeat",
    "roles",
    "sizes",
    "slopes",
    "stack",
    "trainable",
    "twice_differentiable_attention",
    "unknown_name",
    "upper_gradients",
    "values",
]
