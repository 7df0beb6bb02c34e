"""Keys of generator wrappers, which stand among those of the generator inside."""

from __future__ import annotations

from typing import Any

import pytest

from hgms.config.as_table import plain
from hgms.config.convert import structure
from hgms.generators import Branches, Restarts, Ula
from hgms.plugins import Component, Registry
from hgms_core import CandidateGenerator, Composition, ConfigError, Method

REGISTRY = Registry.load()


def generator_of(table: Any) -> Any:
    return structure(table, CandidateGenerator, REGISTRY)


def test_the_key_of_a_wrapper_stands_among_the_keys_of_any_generator() -> None:
    wrapped = generator_of({"name": "branches", "restart_every": 3, "count": 2})
    assert wrapped == Restarts(generator=Branches(count=2), restart_every=3)
    assert generator_of(plain(wrapped)) == wrapped
    assert generator_of({"name": "branches", "restart_every": "none"}) == Branches()
    assert generator_of({"name": "ula", "restart_every": 2}).generator == Ula()
    assert generator_of({"name": "restarts", "generator": "ula"}) == Restarts(generator=Ula())


def test_a_registered_method_can_drop_its_wrapper() -> None:
    method: Any = structure({"name": "hg-ms"}, Method, REGISTRY)
    assert method.method.generator.restart_every == 10
    table = {"name": "hg-ms", "generator": {"restart_every": "none", "count": 5}}
    plainer: Any = structure(table, Method, REGISTRY)
    assert (type(plainer.method.generator), plainer.method.generator.count) == (Branches, 5)


@pytest.mark.parametrize(
    "component",
    [
        item
        for item in REGISTRY.components("method")
        if isinstance(item.target, Composition) and "generator" in item.target.parts
    ],
    ids=lambda item: item.name,
)
def test_the_table_of_a_registered_method_without_restarts_has_none_when_it_is_read(
    component: Component,
) -> None:
    """A worker and a resumed run read the table of the method below the name of the method."""
    table = {"name": component.name, "generator": {"restart_every": "none"}}
    method = structure(table, Method, REGISTRY)
    written = {**plain(method), "name": component.name}
    assert structure(written, Method, REGISTRY) == method


@pytest.mark.parametrize(
    ("table", "code", "place"),
    [
        ({"name": "branches", "restart_every": 0}, "out-of-range", "restart_every"),
        ({"name": "branches", "restart_evry": 2}, "unknown-option", "restart_evry"),
        ({"name": "restarts", "steps": 2}, "unknown-option", "steps"),
    ],
)
def test_wrong_keys_have_their_place(table: Any, code: str, place: str) -> None:
    with pytest.raises(ConfigError) as raised:
        generator_of(table)
    assert (raised.value.code, raised.value.place) == (code, (place,))
