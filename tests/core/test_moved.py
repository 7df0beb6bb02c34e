"""Importing a name of version 0.2 fails with the place that it is in now."""

from __future__ import annotations

import importlib

import pytest

import hgms_core

PLACES = [
    ("from hgms_core import load_images", "there is no hgms_core.load_images since version 0.3: see hgms_images"),
    ("from hgms_core import Hypergradient", "see hgms_core.Estimate"),
    ("from hgms_core.running import run_config", "there is no hgms_core.running since version 0.3: see hgms_run, hgms_results"),
    ("import hgms_core.testing", "see hgms_testing"),
    ("import hgms_core.testing.kit", "see hgms_testing"),
    ("from hgms_core.cli import main", "see hgms_cli"),
    ("from hgms_core.plugins import Host", "see hgms_core.host"),
    ("import hgms_cg", "there is no hgms_cg since version 0.3: see hgms_solvers"),
    ("from hgms_interop import OuterSteps", "see hgms_loops and hgms_solvers"),
]


@pytest.mark.parametrize(("line", "message"), PLACES, ids=[line for line, _ in PLACES])
def test_an_old_name_says_where_it_is_now(line: str, message: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(line, {})
    assert message in str(caught.value)


def test_other_names_fail_as_always() -> None:
    for line, message in {
        "from hgms_core import load_imagse": "cannot import name 'load_imagse' from 'hgms_core'",
        "import hgms_core.nowhere": "No module named 'hgms_core.nowhere'",
        "import hgms_nowhere": "No module named 'hgms_nowhere'",
    }.items():
        with pytest.raises(ImportError, match=message):
            exec(line, {})


@pytest.mark.plugins
def test_the_new_places_are_there_and_the_old_ones_are_not() -> None:
    for place, words in hgms_core._MOVED.items():
        for name in place.replace(" and ", ", ").split(", "):
            package, _, attribute = name.partition(".")
            module = importlib.import_module(package)
            assert not attribute or hasattr(module, attribute) or importlib.import_module(name)
        for word in words.split():
            assert not hasattr(hgms_core, word)
