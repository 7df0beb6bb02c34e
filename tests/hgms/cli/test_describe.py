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
    assert (fields["generator"]["required"], fields["keep"]["default"]) == (True, "last")


def test_a_task_is_described_by_metrics_traits_and_sizes(fake: Site) -> None:
    answer = json_of("describe", "one")
    told = [answer[name] for name in ("metrics", "traits", "theta", "x", "unknown")]
    assert told == [{"size": False}, [], {}, {"x": [1]}, None]
    text = call("describe", "one").stdout
    assert "Metrics, lower is better: size\nTraits: none\n" in text
    assert "x at these defaults: 1 number (x [1])\n" in text


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
