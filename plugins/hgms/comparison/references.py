"""References: the trivial baselines that a comparison adds to its methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hgms.comparison.grid import Entry
from hgms.plugins import Registry

ON_VALIDATION = frozenset({"validation-rows"})
BASELINES: Mapping[str, frozenset[str]] = {
    "uniform": frozenset(),
    "validation-only": ON_VALIDATION,
    "uniform-tilted": ON_VALIDATION,
}
"""The trivial baselines of every comparison, with the traits that each requires of a task. Without
validation rows a tilted lower level minimises f itself, so its x is no lower minimiser.
"""


def with_baselines(methods: Sequence[Entry], registry: Registry) -> list[Entry]:
    """Return ``methods`` and each baseline that they do not include under any label."""
    known = {entry.name for entry in methods} | {entry.label for entry in methods}
    known |= {"uniform"} if "theta0" in known else set()
    return [
        *methods,
        *(
            Entry(kind="method", label=name, table={"name": name}, added=True)
            for name in BASELINES
            if name not in known and registry.find("method", name) is not None
        ),
    ]
