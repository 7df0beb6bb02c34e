"""HGMS core: protocols, pipeline, hypergradient calculus, plugin host and registry.

Everything a plugin needs is here, listed in ``__all__``. Programs (the command line, runs, comparisons, reports) are packages
of their own on top of it, and may also import ``hgms_core.host`` and ``hgms_core.registry``."""

from __future__ import annotations

import sys

from hgms_core.budget import Budget
from hgms_core.display import as_html, as_text, sizes
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
    choice,
    closest,
    once_differentiable,
    one_of,
    out_of_memory,
    shortened,
    unknown,
)
from hgms_core.hookspecs import PLUGIN_API, RunInfo, hookimpl
from hgms_core.hypergrad import (
    Linearization,
    Strategy,
    cross_product,
    curvature,
    differences_named,
    hypergradient,
    implicit,
    twice_differentiable_attention,
    upper_gradients,
)
from hgms_core.linear import CallableSolver, LinearSystem, as_solver
from hgms_core.pipeline import Composition, Pipeline, overlay
from hgms_core.problem import ROLES, Batch, Data, Loss, Problem, Sources, check_floating, pure, roles
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
from hgms_core.records import Branch, Candidates, Cost, Estimate, LastStep, Outcome, Record, Selection, Solution
from hgms_core.seeding import Key
from hgms_core.stacking import Group, Mode, gradient, groups, values
from hgms_core.trees import Ravel, Tree, clone, detach, norm, repeat, slopes, stack, trainable

__version__ = "0.4.0"

__all__ = [
    "PLUGIN_API", "ROLES", "Batch", "Branch", "Budget", "CallableSolver", "CandidateGenerator", "Candidates",
    "CheckpointError", "Composition", "ConfigError", "Cost", "Data", "DataError", "Estimate", "Group", "HgmsError",
    "HyperGradient", "Key", "LastStep", "LinearSolver", "LinearSystem", "Linearization", "Loss", "MatVec", "Method",
    "MissingExtra", "Mode", "NumericalError", "OutOfMemory", "Outcome", "OuterOptimizer", "Pipeline", "PluginError",
    "Problem", "Ravel", "Record", "RunInfo", "Selection", "Selector", "Solution", "Sources", "State", "Strategy", "Task",
    "Tree", "UnknownComponent", "as_html", "as_solver", "as_text", "check_floating", "choice", "clone", "closest",
    "cross_product", "curvature", "detach", "differences_named", "gradient", "groups", "hookimpl", "hypergradient",
    "implicit", "norm", "once_differentiable", "one_of", "out_of_memory", "overlay", "pure", "repeat", "roles", "shortened",
    "sizes", "slopes", "stack", "trainable", "twice_differentiable_attention", "unknown", "upper_gradients", "values",
]  # fmt: skip

_MOVED = {
    "hgms_core": "composition",
    "hgms_core.Estimate": "Hypergradient",
    "hgms_core.host": "plugins",
    "hgms_cli": "cli terminal __main__",
    "hgms_compare": "compare grid grid_file resources scale space sweep workers",
    "hgms_demo": "demo plots",
    "hgms_fields": "check_memory validation_shares",
    "hgms_graphs": "RecordedProduct graphs recorded",
    "hgms_graphs.Recording": "Replay",
    "hgms_images": "Images image_set images load_images",
    "hgms_loops": "lower_solution solution",
    "hgms_loops and hgms_solvers": "/hgms_interop",
    "hgms_methods": "learned_start without_start",
    "hgms_new": "template",
    "hgms_report": "report",
    "hgms_results": "columns results statistics table",
    "hgms_run": "code compat config folder launch load_state progress remarks runner save_state structure untrusted",
    "hgms_run, hgms_results, hgms_compare, hgms_cli": "commands running",
    "hgms_solvers": "/hgms_cg /hgms_identity /hgms_minres /hgms_neumann",
    "hgms_testing": "check gradient_check testing",
}
"""The new place of names of version 0.2: names and modules of hgms_core, and packages (with a /)."""


class _Moved:
    """The last of Python's finders, asked for what nothing else has: a name that moved fails with its new place."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        parent, dot, old = name.rpartition(".")
        if dot and parent != "hgms_core":
            return
        for place, words in _MOVED.items():
            if (old if dot else f"/{old}") in words.split():
                raise ImportError(f"there is no {name} since version 0.3: see {place}", name=name)


sys.meta_path.append(_Moved)
