"""Every built-in component is named on the page that says which to take, and in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hgms.plugins import FIRST_PARTY, Registry, registry

DOCS = Path(__file__).resolve().parents[2] / "docs"


def ours() -> dict[str, list[str]]:
    """Names by kind."""
    names: dict[str, list[str]] = {kind: [] for kind in registry.KINDS}
    for component in Registry.load().components():
        if component.plugin.distribution in (FIRST_PARTY, None):
            names[component.kind.name].append(component.name)
    return names


@pytest.mark.parametrize("page", ["reference/paper-index.md", "reference/methods-and-parts.md"])
def test_the_page_names_every_component(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    names = ours()
    assert set().union(*names.values()) - set(re.findall(r"`([^`]+)`", text)) == set()
