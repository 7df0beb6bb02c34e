"""``import hgms``: it loads what is used, and type checkers see every name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))

import generate

import hgms
from hgms.lazy import module_of_names
from hgms.plugins import Registry

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("generators", "hypergradients", "methods", "outer", "selectors", "solvers", "tasks")
HEAVY = {
    "click",
    "hgms.testing",
    "matplotlib",
    "pandas",
    "scipy",
    "sklearn",
    "torch",
    "transformers",
}


def test_every_name_of_a_table_can_be_imported_and_stands_in_the_stubs() -> None:
    for package in generate.NAMESPACES:
        namespace = importlib.import_module(package)
        assert dir(namespace) == sorted(namespace.__all__)
        assert None not in [getattr(namespace, name) for name in namespace.__all__]
    texts = {path: path.read_text(encoding="utf-8") for path in generate.stubs()}
    assert texts == generate.stubs(), "run docs/generate.py"


def test_names_are_no_modules_and_a_misspelt_one_suggests_the_nearest() -> None:
    folder = ROOT / "plugins" / "hgms"
    assert not {*module_of_names(hgms.PLACES)} & {path.stem for path in folder.iterdir()}
    with pytest.raises(AttributeError, match="'CG'"):
        _ = hgms.solvers.CGG  # type: ignore[attr-defined]


def test_every_stable_class_is_in_the_namespace_of_its_kind() -> None:
    namespaces = [getattr(hgms, kind) for kind in (*KINDS, "contrib")]
    exported = [getattr(space, name) for space in namespaces for name in dir(space)]
    missing = [
        component.name
        for component in Registry.load().components()
        if isinstance(component.target, type)
        and component.target.__module__.startswith("hgms.")
        and component.target not in exported
    ]
    assert missing == []


def test_importing_the_face_loads_no_library() -> None:
    code = "import sys, json, hgms; print(json.dumps(sorted(sys.modules)))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert not HEAVY & set(json.loads(shown.stdout))


@pytest.mark.nightly
def test_mypy_reports_a_misspelt_name_and_a_wrong_argument(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed: pip install 'hgms[lint]'")
    file = tmp_path / "use.py"
    file.write_text("import hgms\n\nhgms.solvers.CGG()\nhgms.run(3)\nhgms.solvers.CG(ridge=0.1)\n")
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--no-incremental", str(file)]
    command = [sys.executable, "-m", "mypy", *options]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    errors = [line.split(":")[1] for line in shown.stdout.splitlines() if ": error:" in line]
    assert {*errors} == {"3", "4"}, shown.stdout + shown.stderr
