"""Who may import whom: `python tests/project/contracts.py` (tox -e lint). import-linter checks
the text of the modules.

The packages are read from the folders, so that a new one is under the contracts at once. Imports
for types only do not count.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins"


def packages() -> list[str]:
    """The packages in those of the wheel, by their dotted names."""
    inits = PLUGINS.glob("*/**/*/__init__.py")
    return sorted(".".join(path.parent.relative_to(PLUGINS).parts) for path in inits)


WHEEL = [["hgms_mix"], ["hgms"], ["hgms_core"]]
"""What is in the wheel, a layer a line: each may import what stands below it."""

PROGRAMS = [
    ["__main__"],
    ["demo", "testing"],
    ["sklearn"],
    ["tuning"],
    ["comparison", "report"],
    ["executors", "integrations", "uncertainty"],
    ["results"],
    ["runs"],
    ["cli", "diagnosis", "distributed"],
]
COMPONENTS = [
    ["contrib", "methods"],
    ["generators", "hypergradients", "outer", "selectors", "solvers", "tasks"],
]
LIBRARIES = [
    ["compiled", "gauss_newton", "optim", "rows"],
    ["config"],
    ["adapters", "plugins", "store"],
    ["arguments", "facts", "hyper", "lazy", "packages", "torch_errors"],
]
"""What several components share, and the host of the plugins."""

MIX = [["exchange", "surface"], ["stages"], ["contrib"], ["methods"], ["lm"]]
PUBLIC_FILES = ("__init__", "__main__", "adam", "ridge_closed_form", "rule", "torch_rule")
"""Files that other packages import: the steps of optimisers in ``hgms.optim``, the closed form that
two tasks share, and entry points.
"""

FAMILIES = ("hgms.generators", "hgms.methods", "hgms.tasks", "hgms_mix.methods")
"""Packages whose folders are families of components."""

SHARED = (
    "arguments",
    "capabilities",
    "components",
    "errors",
    "hypergrad",
    "torch_errors",
    "trees",
    "validators",
)
"""Modules of the core with names for plugins."""

CORE = [
    "hooks | composition",
    "pipeline",
    "stacking",
    "hypergrad | components",
    "annotations",
    "linear",
    "protocols",
    "problem | records",
    "data",
    "seeding | arguments | capabilities | torch_errors | trees | validators",
    "errors",
]
"""The core's own layers."""


def layers(name: str, *rows: Iterable[str], **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "layers", "layers": [" | ".join(row) for row in rows], **more}


def independent(name: str, modules: list[str]) -> dict[str, Any]:
    return {"name": name, "type": "independence", "modules": modules}


def forbidden(name: str, sources: list[str], targets: list[str], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": "forbidden",
        "source_modules": sources,
        "forbidden_modules": targets,
        **more,
    }


def inside(top: str, rows: list[list[str]]) -> list[str]:
    return [f"{top}.{name}" for row in rows for name in row]


def contracts() -> Iterator[dict[str, Any]]:
    programs = inside("hgms", PROGRAMS)
    components = [name for name in inside("hgms", COMPONENTS) if name != "hgms.contrib"]
    yield layers("The packages of the wheel are layers", *WHEEL)
    yield layers(
        "hgms is made of layers",
        *PROGRAMS,
        *COMPONENTS,
        *LIBRARIES,
        containers=["hgms"],
        exhaustive=True,
    )
    yield layers("hgms_mix is made of layers", *MIX, containers=["hgms_mix"], exhaustive=True)
    yield independent("Kinds of components import no other", components)
    folders = [
        name
        for name in packages()
        if name.rpartition(".")[0] in FAMILIES and name != "hgms.tasks.images"
    ]
    yield independent("Families of components import no other", folders)
    # a run takes compiled and config
    libraries = [f"hgms.{name}" for name in ("gauss_newton", "optim", "rows")]
    yield forbidden("Programs name components as strings", programs, [*components, *libraries])
    language = inside("hgms_mix", [["exchange", "stages", "surface"]])
    yield forbidden(
        "The stages of a mix know language models only", language, [*components, "hgms_mix.methods"]
    )
    every = [name for name in packages() if name != "hgms.config"]
    for name in every:
        # contrib continues the kinds of components, so it may use the files that they share
        others = [
            other
            for other in every
            if not f"{name}.".startswith(f"{other}.") and "contrib" not in other
        ]
        files = [path.stem for path in sorted(PLUGINS.joinpath(*name.split(".")).glob("*.py"))]
        private = [f"{name}.{file}" for file in files if file not in PUBLIC_FILES]
        if private:
            yield forbidden(
                f"Of {name} others import the public names only",
                others,
                private,
                allow_indirect_imports=True,
            )
    yield forbidden(
        "Components do not look up others",
        [*components, *libraries, "hgms.adapters", "hgms.compiled", "hgms_mix.methods"],
        ["hgms.plugins"],
        allow_indirect_imports=True,
    )
    yield forbidden(
        "Of hgms_core others import the public names only",
        ["hgms", "hgms_mix"],
        ["hgms_core.*"],
        allow_indirect_imports=True,
        ignore_imports=[
            *(f"{name}.** -> hgms_core.{file}" for name in ("hgms", "hgms_mix") for file in SHARED),
            "hgms.config.** -> hgms_core.annotations",
            "hgms.plugins.** -> hgms_core.annotations",
        ],
        unmatched_ignore_imports_alerting="none",
    )
    yield layers(
        "The core's own layers", *[[row] for row in CORE], containers=["hgms_core"], exhaustive=True
    )


def main() -> int:
    from importlinter.cli import lint_imports  # of the extra lint, which the tests do without

    table = {
        "root_packages": [name for row in WHEEL for name in row],
        "exclude_type_checking_imports": True,
    }
    table["contracts"] = [
        {"id": str(number), **contract} for number, contract in enumerate(contracts())
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pyproject.toml")
        path.write_text(tomlkit.dumps({"tool": {"importlinter": table}}))
        sys.path[:0] = [str(ROOT), str(PLUGINS)]
        return int(lint_imports(config_filename=str(path), no_cache=True) or 0)


if __name__ == "__main__":
    sys.exit(main())
