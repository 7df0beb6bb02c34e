"""Keys of wrappers, which stand among those of the method inside, and keys that are no fields."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen
from support.config_parts import HOOKS, RECIPE, Around, config_of, error_of, make_registry

from hgms.methods import KeepBest
from hgms.plugins import KINDS, Registry, faults_of
from hgms_core import Method
from hgms_core.errors import ConfigError


def registry_with(*methods: Any, **options: Any) -> Registry:
    return make_registry({**HOOKS, "hgms_register_methods": list(methods)}, **options)


def test_a_wrappers_key_stands_among_those_of_the_pipeline() -> None:
    plain = config_of(method={"name": "recipe"})
    wrapped = config_of(method={"name": "recipe", "margin": 2, "generator": {"count": 3}})
    pipeline: Any = plain.method.method
    inside = KeepBest(method=evolve(pipeline, generator=evolve(pipeline.generator, count=3)))
    assert wrapped.method == Around(method=inside, margin=2.0)
    table = wrapped.as_dict()["method"]
    assert (table["name"], table["margin"], table["generator"]["count"]) == ("recipe", 2.0, 3)
    assert "margin" not in plain.as_dict()["method"]
    assert wrapped.config_hash != plain.config_hash


def test_a_wrapper_may_be_named_with_the_method_inside_as_a_table_or_with_its_keys() -> None:
    nested = config_of(method={"name": "around", "margin": 2.0, "method": "recipe"})
    assert config_of(method={**nested.as_dict()["method"], "name": "around"}) == nested
    inside = {"name": "recipe", "margin": 2.0}
    twice = config_of(method={"name": "around", "margin": 1.0, "method": inside})
    assert config_of(text=twice.to_toml()) == twice
    error = error_of(method={"name": "around", "method": "recipe"})
    assert (error.code, error.place) == ("missing-option", ("run.toml", "method", "margin"))


def is_unknown(error: ConfigError, option: str) -> bool:
    """Return whether an error reports an unknown option of the method."""
    return (error.code, error.place) == ("unknown-option", ("run.toml", "method", option))


def test_a_key_belongs_to_the_first_wrapper_that_has_it() -> None:
    @frozen(kw_only=True)
    class Second(Around):
        name = "second"  # type: ignore[misc]
        margin: float = 0.0
        patience: int = 3

    @frozen(kw_only=True)
    class Broken:
        name = "broken"
        method: Method = field(metadata={"flat": True})
        other: int = 3

    registry = registry_with(KeepBest, RECIPE, Around, Second, Broken, tolerant=True)
    assert registry.wrappers == [KeepBest, Around, Second]
    one, both = (
        config_of(registry, method={"name": "recipe", "margin": 2.0, **more}).method
        for more in ({}, {"patience": 5})
    )
    assert both == Second(method=one, patience=5)
    assert is_unknown(error_of(registry, method={"name": "recipe", "other": 4}), "other")


def test_a_composition_may_hold_a_wrappers_key() -> None:
    kind = KINDS["method"]
    plain = {key: part for key, part in RECIPE.parts.items() if key != "keep"}
    wide = evolve(RECIPE, name="wide", parts={**plain, "margin": 3.0})
    assert faults_of(kind, wide, [Around]) == faults_of(kind, evolve(wide, of=Around)) == []
    assert faults_of(kind, wide) != []
    assert faults_of(kind, evolve(RECIPE, parts=plain, of=Around)) == ["it has no part 'margin'"]


def test_the_key_of_a_wrapper_that_is_not_installed_may_only_say_that_it_is_not_there() -> None:
    assert config_of(method={"name": "recipe", "tilt": 0, "learn_start": False}) == config_of()
    for key, value in (("tilt", 1.0), ("learn_start", 0)):
        assert is_unknown(error_of(method={"name": "recipe", key: value}), key)
