"""HGMS core: protocols, pipeline, hypergradient calculus, plugin host, registry, config and runs.

Everything a plugin needs is here; names that are not here are private to the core. The heavy parts (configuration, runs, command
line) live in their own modules and are imported when first used.
"""

from __future__ import annotations

from hgms_core.errors import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    HgmsError as HgmsError,
    MissingExtra as MissingExtra,
    NumericalError as NumericalError,
    PluginError as PluginError,
    UnknownComponent as UnknownComponent,
)
from hgms_core.hookspecs import hookimpl as hookimpl
from hgms_core.hypergrad import (
    CallableSolver as CallableSolver,
    Strategy as Strategy,
    cross_product as cross_product,
    curvature as curvature,
    hypergradient as hypergradient,
    implicit as implicit,
    upper_gradients as upper_gradients,
)
from hgms_core.pipeline import Pipeline as Pipeline
from hgms_core.problem import Data as Data, Problem as Problem
from hgms_core.protocols import (
    Branch as Branch,
    CandidateGenerator as CandidateGenerator,
    HyperGradient as HyperGradient,
    LinearSolver as LinearSolver,
    MatVec as MatVec,
    Method as Method,
    OuterOptimizer as OuterOptimizer,
    Selector as Selector,
    State as State,
    Task as Task,
)
from hgms_core.records import (
    Candidates as Candidates,
    Cost as Cost,
    Hypergradient as Hypergradient,
    Outcome as Outcome,
    Record as Record,
    Selection as Selection,
    Solution as Solution,
)
from hgms_core.seeding import Key as Key
from hgms_core.stacking import Mode as Mode, gradients as gradients, values as values
from hgms_core.trees import Ravel as Ravel, Tree as Tree

__version__ = "0.1.0"

PLUGIN_API = 1
"""The version of hooks and protocols that plugins are written against; it grows only when an old plugin would break."""
