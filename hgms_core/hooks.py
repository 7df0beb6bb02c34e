"""The names of the plugin interface: the marker of hooks, its version, and a run for observers.

``hgms.plugins.hookspecs`` specifies all hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pluggy
from attrs import field, frozen

PLUGIN_API = 2
"""The version of the hooks and protocols; it increases only if a change breaks existing plugins."""

hookimpl = pluggy.HookimplMarker("hgms")
"""Mark a function of a plugin as the implementation of the hook with the same name."""


@frozen(kw_only=True)
class RunInfo:
    """The information about a run that observers receive.

    - ``budget``: ``str(budget)`` is the budget as text.
    - ``folder``: the folder to which the run writes; None if it writes no files.
    - ``resumed_from``: the step from which the run resumes; 0 for a new run.
    - ``config``: the resolved configuration of the run as nested tables.
    - ``state``: the open resources of each observer for this run, under the name of its plugin.

    Examples
    --------
    >>> RunInfo(task="quadratic", method="hg-ms", seed=0, budget="5 steps").resumed_from
    0
    """

    task: str
    method: str
    seed: int
    budget: Any
    folder: Path | None = None
    resumed_from: int = 0
    config: Mapping[str, Any] = field(factory=dict)
    state: dict[str, Any] = field(factory=dict, eq=False, repr=False)
