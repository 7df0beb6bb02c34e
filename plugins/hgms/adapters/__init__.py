"""Conversion of user input to the strict form of the core: nested variables, modules, tables,
loaders, and checks of losses. No function of this package runs in an outer step.
"""

from __future__ import annotations

from hgms.adapters.checks import check_losses, evaluate_metrics, global_states, pure
from hgms.adapters.display import as_text, sizes
from hgms.adapters.losses import Hypergradient, check_options, from_losses, hypergradient
from hgms.adapters.modules import ModuleParts, fresh_parameters, from_module, trainable
from hgms.adapters.shapes import Nested, Shape, check_floating
from hgms.adapters.tables import as_data
from hgms.adapters.tables import read_table as read_table

__all__ = [
    "Hypergradient",
    "ModuleParts",
    "Nested",
    "Shape",
    "as_data",
    "as_text",
    "check_floating",
    "check_losses",
    "check_options",
    "evaluate_metrics",
    "fresh_parameters",
    "from_losses",
    "from_module",
    "global_states",
    "hypergradient",
    "pure",
    "sizes",
    "trainable",
]
