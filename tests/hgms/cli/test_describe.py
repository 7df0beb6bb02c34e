"""`hgms list` and `hgms describe`."""

from __future__ import annotations

import re
from functools import reduce

import pytest
from support.fakes import TOY, Site, call, json_of


def second(site: Site, *edits: tuple[str, str]) -> None:
    """Another distribution, hgms-second, with the toy plugin changed."""
    site.module("second", reduce(lambda text, edit: text.replace(*edit), edits, TOY))
    site.install("hgms-second", {"second": "second"}, version="1.0")


def test_list_prints_one_object_or_one_line_per_component(fake: Site) -> None:
    rows = json_of("list")
    assert [(row["kind"], row["name"], row["plugin"]) for row in rows] == [
        ("task", "one", "fake"),
        ("method", "halve", "fake"),
        ("method", "pipeline", "core"),
    ]
    assert [row["summary"] for row in rows[:2]] == ["One number.", "Halves x at every step."]
    assert json_of("list", "tasks") == rows[:1]
    [line] = [line for line in call("list").stdout.splitlines() if "halve" in line]
    assert "third party" in line


def test_a_class_is_described_by_its_fields_and_needs(fake: Site) -> None:
    answer = json_of("describe", "method", "halve")
    rate = {"name": "rate", "type": "a number", "required": False, "default": 0.5, "range": "> 0"}
    assert (answer["fields"], answer["needs"]) == ([rate], {})
    assert answer["doc"].startswith("Halves x at every step.")
    text = call("describe", "halve").stdout
    assert text.startswith("method halve  (hgms-fake 3.0, plugin 'fake', fake_plugin:Halve)\n")
    assert re.search(r"rate +0\.5 +a number > 0", text)
    needs = ('= "halve"', '= "needing"\n    needs = frozenset({"sources"})')
    second(fake, ('= "one"', '= "two"'), needs)
    assert json_of("describe", "method", "needing")["needs"] == {"sources": "needing"}
    fields = {row["name"]: row for row in json_of("describe", "method", "pipeline")["fields"]}
    assert (fields["generator"]["required"], fields["answer"]["default"]) == (True, "selected")


def test_a_task_is_described_by_metrics_and_traits(fake: Site) -> None:
    answer = json_of("describe", "one")
    assert (answer["metrics"], answer["traits"]) == ({"size": False}, None)
    text = call("describe", "one").stdout
    assert "Metrics, lower is better: size\nTraits: not declared" in text


def test_a_composition_is_described_by_its_parts(site: Site) -> None:
    site.module(
        "recipes",
        """
        from hgms_core import Composition, hookimpl
        parts = {"generator": {"name": "g", "count": 4}, "selector": "s"}
        parts |= {"hypergradient": "h", "outer": "o"}
        @hookimpl
        def hgms_register_methods():
            on = {"generator": {"count": 2}, "selector": {"name": "first", "batch_size": 3}}
            named = {"name": "mix", "summary": "A mix.", "source": "a cookbook"}
            return [Composition(**named, parts=parts, on={"sources": on})]
        """,
    )
    site.install("hgms-recipes", {"recipes": "recipes"})
    answer = json_of("describe", "method", "mix")
    assert answer["parts"]["generator"] == {"name": "g", "count": 4}
    assert answer["on"]["sources"]["generator"] == {"name": "g", "count": 2}
    shown = call("describe", "method", "mix").stdout
    assert '[method.selector]\nname = "first"\nbatch_size = 3' in shown


@pytest.mark.parametrize(
    ("words", "place", "near"),
    [
        ("list metods", "(KIND)", "'method'"),
        ("describe havle", "", "'halve'"),
        ("describe task won", "", "'two'"),
        ("describe one", "", "`hgms describe task one` or `hgms describe method one`"),
        ("lst", "", "'list'"),
        ("compar", "", "'compare'"),
        ("gret", "", "'greet'"),
    ],
)
def test_a_misspelt_word_gets_a_suggestion(fake: Site, words: str, place: str, near: str) -> None:
    second(fake, ('= "one"', '= "two"'), ('= "halve"', '= "one"'))
    done = call(*words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert all(part in done.stderr for part in (place, near))


# --- components that are described in other words

PARTS = """
from typing import Any, ClassVar
import torch
from attrs import field, frozen, validators
from hgms_core import Problem, hookimpl

@frozen(kw_only=True)
class Sized:
    "A task of a size."
    name: ClassVar[str] = "sized"
    version: ClassVar[str] = "1"
    metrics: ClassVar[dict] = {"size": False, "gain": True}
    traits: ClassVar[frozenset] = frozenset({"sources", "own-trait"})
    size: int
    def problem(self, seed, device, dtype): ...

@frozen(kw_only=True)
class Far:
    "A task of data that are not here."
    name: ClassVar[str] = "far"
    version: ClassVar[str] = "1"
    metrics: ClassVar[dict] = {"size": False}
    def problem(self, seed, device, dtype): ...

@frozen(kw_only=True)
class Empty:
    "A method without fields."
    name: ClassVar[str] = "empty"
    needs: ClassVar[frozenset] = frozenset({"sources", "own-trait"})
    def init(self, problem, seed): ...
    def step(self, problem, state, progress): ...
    def result(self, state): ...

@frozen(kw_only=True)
class Odd(Empty):
    "A method with a default that no file can say, and a bound."
    name: ClassVar[str] = "odd"
    act: Any = field(default=len)
    few: int = field(default=1, validator=validators.le(3))

@frozen(kw_only=True)
class Wants(Empty):
    "A method that must be told a number."
    name: ClassVar[str] = "wants"
    number: int

@hookimpl
def hgms_register_tasks():
    return [Sized, Far]

@hookimpl
def hgms_register_methods():
    return [Empty, Odd, Wants]
"""


def of_parts(site: Site) -> None:
    site.module("parts_plugin", PARTS)
    site.install("hgms-parts", {"parts": "parts_plugin"})


def test_needs_and_traits_are_explained_and_a_method_may_have_no_fields(site: Site) -> None:
    of_parts(site)
    text = call("describe", "method", "empty").stdout
    needs = [line for line in text.splitlines() if line.startswith("Needs ")]
    assert needs[0].startswith("Needs own-trait: a task trait")
    assert needs[1].startswith("Needs sources: named data sources")
    assert text.endswith("It has no fields.\n")
    fields = {row["name"]: row for row in json_of("describe", "method", "odd")["fields"]}
    assert (str(len) in fields["act"]["default"], fields["few"]["range"]) == (True, "≤ 3")
    assert json_of("describe", "method", "wants")["needs"] == {
        "own-trait": "wants",
        "sources": "wants",
    }
    text = call("describe", "task", "sized").stdout
    parts = ("Metrics, higher is better: gain", "  own-trait: a task trait\n")
    assert all(part in text for part in parts)


def test_a_description_lists_the_declared_capabilities() -> None:
    assert json_of("describe", "solver", "lancbio")["capabilities"] == [
        "HasTestingInstance",
        "Recycles",
    ]
    text = call("describe", "solver", "lancbio").stdout
    assert "Capabilities: HasTestingInstance, Recycles" in text
    assert "Capabilities" not in call("describe", "selector", "first").stdout
