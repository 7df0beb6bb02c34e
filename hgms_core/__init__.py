"""HGMS core: protocols, pipeline, hypergradient calculus, plugin host, registry, config and runs.

Everything a plugin needs is here, listed in ``__all__``; names that are not are private to the core. The heavy parts
(configuration, runs, command line) live in their own modules and are imported when first used.
"""

from __future__ import annotations

from hgms_core.budget import Budget
from hgms_core.composition import Composition
from hgms_core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HgmsError,
    MissingExtra,
    NumericalError,
    OutOfMemory,
    PluginError,
    UnknownComponent,
    check_memory,
    choice,
    closest,
    out_of_memory,
    unknown,
)
from hgms_core.folder import load_state, save_state
from hgms_core.graphs import RecordedProduct, Replay, recorded
from hgms_core.hookspecs import PLUGIN_API, RunInfo, hookimpl
from hgms_core.hypergrad import (
    CallableSolver,
    Linearization,
    Strategy,
    cross_product,
    curvature,
    hypergradient,
    implicit,
    twice_differentiable_attention,
    upper_gradients,
)
from hgms_core.images import Images, image_set, load_images
from hgms_core.linear import LinearSystem
from hgms_core.pipeline import Pipeline
from hgms_core.problem import Batch, Data, Loss, Problem, Sources, learned_start, roles, validation_shares, without_start
from hgms_core.protocols import (
    Branch,
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
from hgms_core.records import Candidates, Cost, Hypergradient, LastStep, Outcome, Record, Selection, Solution
from hgms_core.seeding import Key
from hgms_core.solution import lower_solution
from hgms_core.stacking import Group, Mode, gradient, groups, values
from hgms_core.trees import Ravel, Tree, clone, detach, norm, repeat, stack, trainable

__version__ = "0.2.0"

__all__ = [
    "PLUGIN_API",
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
    "Group",
    "HgmsError",
    "HyperGradient",
    "Hypergradient",
    "Images",
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
    "NumericalError",
    "OutOfMemory",
    "Outcome",
    "OuterOptimizer",
    "Pipeline",
    "PluginError",
    "Problem",
    "Ravel",
    "Record",
    "RecordedProduct",
    "Replay",
    "RunInfo",
    "Selection",
    "Selector",
    "Solution",
    "Sources",
    "State",
    "Strategy",
    "Task",
    "Tree",
    "UnknownComponent",
    "check_memory",
    "choice",
    "clone",
    "closest",
    "cross_product",
    "curvature",
    "detach",
    "gradient",
    "groups",
    "hookimpl",
    "hypergradient",
    "image_set",
    "implicit",
    "learned_start",
    "load_images",
    "load_state",
    "lower_solution",
    "norm",
    "out_of_memory",
    "recorded",
    "repeat",
    "roles",
    "save_state",
    "stack",
    "trainable",
    "twice_differentiable_attention",
    "unknown",
    "upper_gradients",
    "validation_shares",
    "values",
    "without_start",
]
