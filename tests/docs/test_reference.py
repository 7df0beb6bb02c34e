"""The reference is whole: every field and member of a public class is described, and other
projects can link to all of it.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hgms_core
from hgms.plugins import Registry

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))

import descriptions
import generate

pytestmark = pytest.mark.extended

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODULES = (hgms_core, *generate.PROGRAMS)


def public_classes() -> Iterator[tuple[str, type]]:
    """The classes of the public modules and those of components, by where they are described."""
    for module in MODULES:
        things = ((name, getattr(module, name)) for name in module.__all__)
        yield from ((module.__name__, cls) for _, cls in things if descriptions.is_class(cls))


def components() -> Iterator[tuple[str, type]]:
    each = ((component.package, component.target) for component in Registry.load().components())
    yield from ((module, cls) for module, cls in each if inspect.isclass(cls))


def test_every_field_of_a_class_has_a_meaning() -> None:
    missing = [
        f"{module}.{cls.__name__}.{field.name}"
        for module, cls in [*public_classes(), *components()]
        for field in descriptions.fields(cls)
        if field.name not in descriptions.meanings(cls, module)
        and (field.metadata.get("toml", True) or (module, cls) not in [*components()])
        and (cls is not hgms_core.Pipeline or module == "hgms_core")
    ]
    assert missing == [], (
        "write them into docs/fields.toml, or into the section Parameters of the docstring"
    )


@pytest.mark.parametrize("page", ["hooks", "protocols"])
def test_every_example_runs_as_it_is_printed(page: str) -> None:
    text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
    examples = [match[2] for match in generate.CODE.finditer(text)]
    assert len(examples) > 5
    for code in examples:
        exec(compile(code, page, "exec"), {"__name__": "example"})


def test_every_documented_field_exists() -> None:
    stale = [
        f"{name}.{field}"
        for name, fields in descriptions.MEANINGS.items()
        for cls in (
            getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]),
        )
        for field in fields
        if field not in {each.name for each in descriptions.fields(cls)} | {*dir(cls), *vars(cls)}
    ]
    assert stale == []


def test_every_member_of_a_public_class_says_what_it_does() -> None:
    missing = [
        f"{module}.{member.text}"
        for module, cls in public_classes()
        for member in descriptions.members(cls)
        if not member.doc
        and member.name not in descriptions.MEANINGS.get(f"{module}.{cls.__name__}", {})
    ]
    assert missing == []


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The Python names in `objects.inv` of the pages of the reference, built without their
    neighbours.
    """
    from sphinx.util.inventory import InventoryFile

    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-c", str(DOCS)]
    command += [str(DOCS / "reference"), str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    read = InventoryFile.loads((folder / "objects.inv").read_bytes(), uri="https://example.org")
    return {domain: dict(names) for domain, names in read.data.items() if domain.startswith("py:")}


@pytest.mark.nightly  # it requires sphinx: `tox -e docs`
def test_other_projects_can_link_to_every_public_name(inventory: dict[str, dict[str, Any]]) -> None:
    known = set().union(*inventory.values())
    assert {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__} <= known
    assert {module.__name__ for module in MODULES} <= set(inventory["py:module"])
    assert {"hgms.runs.RunFolder.records", "hgms.solvers.CG"} <= known
