"""HGMS core: protocols, pipeline, hypergradient calculus, plugin host, registry, config and runs.

Everything a plugin needs is here; names that are not here are private to the core. The heavy parts (configuration, runs,
command line) live in their own modules and are imported when first used.
"""

from __future__ import annotations

from hgms_core.budget import Budget as Budget
from hgms_core.errors import (
    CheckpointError as CheckpointError,
)
from hgms_core.errors import (
    ConfigError as ConfigError,
)
from hgms_core.errors import (
    DataError as DataError,
)
from hgms_core.errors import (
    HgmsError as HgmsError,
)
from hgms_core.errors import (
    MissingExtra as MissingExtra,
)
from hgms_core.errors import (
    NumericalError as NumericalError,
)
from hgms_core.errors import (
    OutOfMemory as OutOfMemory,
)
from hgms_core.errors import (
    PluginError as PluginError,
)
from hgms_core.errors import (
    UnknownComponent as UnknownComponent,
)
from hgms_core.errors import (
    out_of_memory as out_of_memory,
)
from hgms_core.errors import (
    unknown as unknown,
)
from hgms_core.hookspecs import hookimpl as hookimpl
from hgms_core.hypergrad import (
    CallableSolver as CallableSolver,
)
from hgms_core.hypergrad import (
    Strategy as Strategy,
)
from hgms_core.hypergrad import (
    cross_product as cross_product,
)
from hgms_core.hypergrad import (
    curvature as curvature,
)
from hgms_core.hypergrad import (
    hypergradient as hypergradient,
)
from hgms_core.hypergrad import (
    implicit as implicit,
)
from hgms_core.hypergrad import (
    twice_differentiable_attention as twice_differentiable_attention,
)
from hgms_core.hypergrad import (
    upper_gradients as upper_gradients,
)
from hgms_core.images import Images as Images
from hgms_core.images import image_set as image_set
from hgms_core.images import load_images as load_images
from hgms_core.linear import LinearSystem as LinearSystem
from hgms_core.pipeline import Pipeline as Pipeline
from hgms_core.problem import Batch as Batch
from hgms_core.problem import Data as Data
from hgms_core.problem import Problem as Problem
from hgms_core.problem import Sources as Sources
from hgms_core.problem import learned_start as learned_start
from hgms_core.problem import roles as roles
from hgms_core.problem import validation_shares as validation_shares
from hgms_core.problem import without_start as without_start
from hgms_core.protocols import (
    Branch as Branch,
)
from hgms_core.protocols import (
    CandidateGenerator as CandidateGenerator,
)
from hgms_core.protocols import (
    HyperGradient as HyperGradient,
)
from hgms_core.protocols import (
    LinearSolver as LinearSolver,
)
from hgms_core.protocols import (
    MatVec as MatVec,
)
from hgms_core.protocols import (
    Method as Method,
)
from hgms_core.protocols import (
    OuterOptimizer as OuterOptimizer,
)
from hgms_core.protocols import (
    Selector as Selector,
)
from hgms_core.protocols import (
    State as State,
)
from hgms_core.protocols import (
    Task as Task,
)
from hgms_core.records import (
    Candidates as Candidates,
)
from hgms_core.records import (
    Cost as Cost,
)
from hgms_core.records import (
    Hypergradient as Hypergradient,
)
from hgms_core.records import (
    LastStep as LastStep,
)
from hgms_core.records import (
    Outcome as Outcome,
)
from hgms_core.records import (
    Record as Record,
)
from hgms_core.records import (
    Selection as Selection,
)
from hgms_core.records import (
    Solution as Solution,
)
from hgms_core.registry import Composition as Composition
from hgms_core.seeding import Key as Key
from hgms_core.stacking import Group as Group
from hgms_core.stacking import Mode as Mode
from hgms_core.stacking import gradient as gradient
from hgms_core.stacking import groups as groups
from hgms_core.stacking import values as values
from hgms_core.trees import Ravel as Ravel
from hgms_core.trees import Tree as Tree
from hgms_core.trees import clone as clone
from hgms_core.trees import detach as detach
from hgms_core.trees import norm as norm
from hgms_core.trees import repeat as repeat
from hgms_core.trees import stack as stack

__version__ = "0.1.0"

PLUGIN_API = 1
"""The version of hooks and protocols that plugins are written against; it grows only when an old plugin would break."""
