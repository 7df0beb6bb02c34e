"""HGMS: bilevel optimization when the lower level has many minimisers.

``import hgms`` loads neither torch nor a component: the first use of a name imports its module.
"""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms.adapters": "as_data fresh_parameters from_losses from_module hypergradient trainable",
    "hgms.comparison": "Comparison compare",
    "hgms.config": "Budget",
    "hgms.integrations": "OuterSteps lower_solution",
    "hgms.runs": "RunFolder RunResult run",
    "hgms.tuning": "TuneResult tune",
    "hgms_core": "Data HgmsError Key Pipeline Problem Rows Sources",
}
"""Nouns and verbs. No module of ``hgms`` may have one of these names: importing it would replace
the function.
"""

MODULES = (
    "contrib",
    "diagnosis",
    "generators",
    "hyper",
    "hypergradients",
    "methods",
    "optim",
    "outer",
    "report",
    "results",
    "selectors",
    "sklearn",
    "solvers",
    "tasks",
    "testing",
)
"""One namespace for each kind of component, and what users need in addition to a run."""

__getattr__, __dir__, __all__ = attach(__name__, PLACES, MODULES)
