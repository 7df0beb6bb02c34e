"""Who may import whom: `python tests/contracts.py` (tox -e imports). import-linter checks the text of the modules.

The packages are read from the folders, so that a new one is under the contracts at once. Imports for types only do not count.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "plugins"


def packages(folder: str) -> list[str]:
    """The packages in a folder of plugins/."""
    return sorted(path.parent.name for path in (PLUGINS / folder).glob("*/__init__.py"))


LIBRARIES = [
    "hgms_adam",
    "hgms_fields",
    "hgms_gauss_newton",
    "hgms_graphs",
    "hgms_images",
    "hgms_llm",
    "hgms_optim",
    "hgms_rows",
]
"""What several components share; hgms_adam and hgms_fields also serve the other libraries."""

PROGRAMS = [
    ["hgms_exchange", "hgms_mix_compare", "hgms_surface"],
    ["hgms_demo", "hgms_mix"],
    ["hgms_compare", "hgms_ray", "hgms_report", "hgms_slurm"],
    ["hgms_evaluation", "hgms_executors", "hgms_loops", "hgms_results", "hgms_testing", "hgms_uncertainty"],
    ["hgms_new", "hgms_run"],
    ["hgms_cli", "hgms_diagnosis", "hgms_ranks"],
]
"""Programs, a layer a line: each may import what stands below it. hgms_evaluation is a stage of hgms_mix."""

CORE = [
    "registry",
    "host",
    "hookspecs | discovery | sandbox",
    "pipeline",
    "hypergrad",
    "linear | stacking",
    "protocols",
    "problem : records : budget : seeding : data : adapters",
    "trees : errors",
]
"""The core's own layers."""

KNOWN = ["adapters", "trees", "errors", "seeding", "data"]
ADAPTERS = ["modules", "views : checks : columns", "arguments", "display", "shapes"]
"""Those of its adapters, which know trees, errors, seeds and data."""

BELOW = ["hgms_adam", "hgms_fields"]
LANGUAGE = ["hgms_evaluation", "hgms_exchange", "hgms_mix", "hgms_mix_compare", "hgms_surface"]
"""Programs for language models."""
SHARED = [name for name in LIBRARIES if name not in BELOW]
STACK = sorted(name for layer in PROGRAMS for name in layer)
COMPONENTS = sorted({*packages("algorithms"), *packages("tasks"), *packages("language")} - {*STACK, *LIBRARIES})
EVERY = ["hgms_core", *LIBRARIES, *STACK, *COMPONENTS]


def layers(name: str, *rows: Iterable[str], **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "layers", "layers": [" | ".join(row) for row in rows], **more}


def forbidden(name: str, sources: list[str], targets: list[str], **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "forbidden", "source_modules": sources, "forbidden_modules": targets, **more}


def contracts() -> Iterator[dict[str, Any]]:
    yield layers("Programs are layers above the core", *PROGRAMS, ["hgms_core"])
    yield layers("Components import no other, but for shared libraries", COMPONENTS, SHARED, BELOW, ["hgms_core"])
    yield forbidden("Components and libraries import no program", [*COMPONENTS, *LIBRARIES], STACK)
    others = [name for name in STACK if name not in LANGUAGE]
    parts = [*COMPONENTS, *LIBRARIES]
    parts.remove("hgms_graphs")  # which knows devices, not components: a run decides by it how its steps are carried out
    parts.remove("hgms_fields")  # which knows types: settings of programs are checked as those of components are
    yield forbidden("Programs name components as strings", others, parts)
    yield forbidden("The stages of hgms_mix, and its hand-over, know language models only", LANGUAGE, COMPONENTS)
    for name in EVERY:
        hosts = [f"{program}.** -> hgms_core.{module}" for program in STACK for module in ("host", "registry")]
        hosts += [f"{program} -> hgms_core.{module}" for program in STACK for module in ("host", "registry")]
        yield forbidden(
            f"Of {name} others import the public names only",
            [other for other in EVERY if other != name],
            [f"{name}.*"],
            allow_indirect_imports=True,
            **({"ignore_imports": hosts, "unmatched_ignore_imports_alerting": "none"} if name == "hgms_core" else {}),
        )
    yield layers("The core's own layers", *[[row] for row in CORE], containers=["hgms_core"], exhaustive=True)
    yield layers("The core's adapters", *[[row] for row in ADAPTERS], containers=["hgms_core.adapters"], exhaustive=True)
    above = [f"hgms_core.{name}" for row in CORE for name in row.replace("|", ":").split(" : ") if name not in KNOWN]
    yield forbidden("The core's adapters know its lowest layers only", ["hgms_core.adapters"], above)


def main() -> int:
    from importlinter.cli import lint_imports  # of the extra lint, which the tests do without

    unknown = set(packages("programs")) - set(STACK)
    if unknown:
        print(f"programs without a layer: {', '.join(sorted(unknown))} @ PROGRAMS in {__file__}", file=sys.stderr)  # noqa: T201
        return 1
    table = {"root_packages": EVERY, "exclude_type_checking_imports": True}
    table["contracts"] = [{"id": str(number), **contract} for number, contract in enumerate(contracts())]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pyproject.toml")
        path.write_text(tomlkit.dumps({"tool": {"importlinter": table}}))
        for wing in (".", "plugins/algorithms", "plugins/tasks", "plugins/language", "plugins/programs"):
            sys.path.insert(0, str(ROOT / wing))
        return int(lint_imports(config_filename=str(path), no_cache=True) or 0)


if __name__ == "__main__":
    sys.exit(main())
