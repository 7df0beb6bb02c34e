"""Errors: code, place, remedy, suggestions, groups, pickling."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from support.helpers import rejects

from hgms_core.errors import (
    ConfigError,
    DataError,
    ErrorGroup,
    HgmsError,
    join_place,
    raise_all,
    unknown_name,
)

PARTS: dict[str, Any] = {
    "code": "out-of-range",
    "message": "steps=0 must be at least 1",
    "place": ("generator", "diversity", 0, "steps"),
    "hint": "use steps = 1\nor remove the option",
    "install": "pip install 'hgms[more]'",
    "did_you_mean": ("stages", "step"),
}
ERROR = ConfigError("out-of-range", "lr=0 must be greater than 0", place=("lr",))


def classes(of: type[HgmsError] = HgmsError) -> Iterator[type[HgmsError]]:
    """The class and its subclasses in the modules that are imported here."""
    yield of
    for each in of.__subclasses__():
        if each.__module__.startswith("hgms"):
            yield from classes(each)


def test_the_text_has_the_place_after_its_first_line_and_one_line_per_remedy() -> None:
    assert str(HgmsError(**PARTS)) == (
        "steps=0 must be at least 1 (generator.diversity[0].steps)\n"
        "  did you mean 'stages' or 'step'?\n"
        "  use steps = 1\n"
        "  or remove the option\n"
        "  install it: pip install 'hgms[more]'"
    )
    assert HgmsError("a", "one\ntwo", place=("x",)).lines() == ["one (x)", "two"]
    plain = HgmsError("not-finite", "the loss is nan", did_you_mean=["c"])
    assert (plain.place, plain.hint, plain.install, plain.did_you_mean) == ((), None, None, ("c",))
    assert plain.errors == (plain,)


def test_at_returns_a_copy_with_the_outer_place() -> None:
    inner = DataError(**PARTS)
    outer = inner.at("run.toml", "method")
    assert type(outer) is DataError
    assert outer.place == ("run.toml", "method", *PARTS["place"])
    assert {**outer.as_dict(), "place": inner.place} == inner.as_dict() == PARTS


@pytest.mark.parametrize("cls", list(classes()), ids=lambda cls: cls.__qualname__)
def test_every_class_survives_pickling_and_a_change_of_place(cls: type[HgmsError]) -> None:
    error: HgmsError = cls(**PARTS) if cls is not ErrorGroup else ErrorGroup([ERROR])
    for same in (pickle.loads(pickle.dumps(error)), error.at()):
        assert (type(same), str(same)) == (cls, str(error))
        assert [each.as_dict() for each in same.errors] == [each.as_dict() for each in error.errors]
    places = [("outer", *each.place) for each in error.errors]
    assert [each.place for each in error.at("outer").errors] == places


def test_a_group_prints_each_error_with_its_remedies() -> None:
    unknown = unknown_name("rule", "sdg", ["sgd"], ("rule",))
    with rejects("several-errors", of=ErrorGroup) as caught:
        raise_all([ERROR, unknown])
    assert caught.value.errors == (ERROR, unknown)
    assert str(caught.value.at("outer")) == (
        "2 errors:\n"
        "  lr=0 must be greater than 0 (outer.lr)\n"
        "  unknown rule 'sdg' (outer.rule)\n"
        "    did you mean 'sgd'?\n"
        "    available: sgd"
    )
    with rejects("out-of-range", "lr") as caught:
        raise_all([ERROR])
    assert caught.value is ERROR


def test_a_misspelt_name_has_the_kind_in_its_code_and_the_nearest_name() -> None:
    error = unknown_name("linear solver", "CGG", ["minres", "cg"], ("solver", "name"))
    assert (type(error), error.code) == (ConfigError, "unknown-linear-solver")
    assert (error.place, error.did_you_mean) == (("solver", "name"), ("cg",))
    assert error.hint == "available: cg, minres"
    labelled = unknown_name("option", "x", [], label="argument of CG")
    assert (labelled.code, labelled.did_you_mean) == ("unknown-option", ())
    assert labelled.message == "unknown argument of CG 'x'"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ((), ""),
        (("lr",), "lr"),
        (("generator", "diversity", 0, "std"), "generator.diversity[0].std"),
        (("method", 1), "method[1]"),
        (("runs.toml", "method", "count"), "runs.toml: method.count"),
        (("runs.toml", "method", 1), "runs.toml: method[1]"),
        (("data/train.jsonl", 12), "data/train.jsonl:12"),
        (("--set lr=0.1",), "--set lr=0.1"),
    ],
)
def test_a_place_as_text(place: tuple[str | int, ...], text: str) -> None:
    assert join_place(place) == text
