"""Errors: code, place, remedy, suggestions, groups, pickling."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from support.helpers import rejects

from hgms_core.discovery import canonical
from hgms_core.errors import (
    LINE,
    LINES,
    ConfigError,
    DataError,
    ErrorGroup,
    HgmsError,
    MissingExtra,
    NumericalError,
    OutOfMemory,
    closest,
    dotted,
    one_of,
    raise_all,
    shortened,
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


def classes(of: type[HgmsError] = HgmsError) -> Iterator[type[HgmsError]]:
    """The class and its subclasses in the modules that are imported here."""
    yield of
    for each in of.__subclasses__():
        if each.__module__.startswith("hgms"):
            yield from classes(each)


def raised_error(field: str = "lr") -> HgmsError:
    return ConfigError("out-of-range", f"{field}=0 must be greater than 0", place=(field,))


class TestHgmsError:
    def test_the_text_has_the_place_and_one_line_per_remedy(self) -> None:
        assert str(HgmsError(**PARTS)) == (
            "steps=0 must be at least 1 (generator.diversity[0].steps)\n"
            "  did you mean 'stages' or 'step'?\n"
            "  use steps = 1\n"
            "  or remove the option\n"
            "  install it: pip install 'hgms[more]'"
        )

    def test_code_and_message_are_enough(self) -> None:
        error = HgmsError("not-finite", "the loss is nan")
        assert error.lines() == ["the loss is nan"]
        assert (error.place, error.hint, error.install, error.did_you_mean) == ((), None, None, ())
        assert error.errors == (error,)

    def test_the_place_follows_the_first_line_of_a_message(self) -> None:
        assert HgmsError("a", "one\ntwo", place=("x",)).lines() == ["one (x)", "two"]

    def test_at_returns_a_copy_with_the_outer_place(self) -> None:
        inner = DataError(**PARTS)
        outer = inner.at("run.toml", "method")
        assert type(outer) is DataError
        assert outer.place == ("run.toml", "method", *PARTS["place"])
        assert {**outer.as_dict(), "place": inner.place} == inner.as_dict() == PARTS
        assert inner.place == PARTS["place"]

    def test_suggestions_may_be_any_sequence(self) -> None:
        assert HgmsError("a", "b", did_you_mean=["c"]).did_you_mean == ("c",)

    @pytest.mark.parametrize("cls", list(classes()), ids=lambda cls: cls.__qualname__)
    def test_every_class_survives_pickling_and_a_change_of_place(
        self, cls: type[HgmsError]
    ) -> None:
        error: HgmsError = cls(**PARTS) if cls is not ErrorGroup else ErrorGroup([raised_error()])
        for same in (pickle.loads(pickle.dumps(error)), error.at()):
            assert type(same) is cls
            assert str(same) == str(error)
            assert [each.as_dict() for each in same.errors] == [
                each.as_dict() for each in error.errors
            ]
        assert [each.place for each in error.at("outer").errors] == [
            ("outer", *each.place) for each in error.errors
        ]

    def test_failed_runs_and_wrong_input_have_different_exit_codes(self) -> None:
        assert {cls.exit_code for cls in (HgmsError, ConfigError, DataError, MissingExtra)} == {2}
        assert {cls.exit_code for cls in (NumericalError, OutOfMemory)} == {1}


class TestSeveralErrors:
    def test_a_group_prints_each_error_with_its_remedies(self) -> None:
        group = ErrorGroup([raised_error(), unknown_name("rule", "sdg", ["sgd"], ("rule",))])
        assert str(group.at("outer")) == (
            "2 errors:\n"
            "  lr=0 must be greater than 0 (outer.lr)\n"
            "  unknown rule 'sdg' (outer.rule)\n"
            "    did you mean 'sgd'?\n"
            "    available: sgd"
        )
        assert group.code == "several-errors"
        assert [error.place for error in group.errors] == [("lr",), ("rule",)]

    def test_a_single_error_is_raised_unchanged(self) -> None:
        error = raised_error()
        with rejects("out-of-range", "lr") as caught:
            raise_all([error])
        assert caught.value is error

    def test_several_are_raised_as_a_group(self) -> None:
        errors = (raised_error(), raised_error("rate"))
        with rejects("several-errors", of=ErrorGroup) as caught:
            raise_all(errors)
        assert caught.value.errors == errors


class TestNames:
    def test_a_misspelt_name_has_the_kind_in_its_code_and_the_nearest_name(self) -> None:
        error = unknown_name("linear solver", "CGG", ["minres", "cg"], ("solver", "name"))
        assert (type(error), error.code) == (ConfigError, "unknown-linear-solver")
        assert error.place == ("solver", "name")
        assert error.did_you_mean == ("cg",)
        assert error.hint == "available: cg, minres"

    def test_a_label_changes_the_text_and_not_the_code(self) -> None:
        error = unknown_name("option", "x", [], label="argument of CG")
        assert (error.code, error.message) == ("unknown-option", "unknown argument of CG 'x'")
        assert error.did_you_mean == ()
        assert error.hint == "available: (none)"

    @pytest.mark.parametrize("count", [40, 41, 60])
    def test_of_many_names_the_nearest_are_listed(self, count: int) -> None:
        names = [f"rule-{number:02}" for number in range(count - 2)] + ["scalebio", "stocbio"]
        error = unknown_name("method", "scalbio", names)
        assert error.did_you_mean == ("scalebio",)
        assert error.hint is not None
        listed = error.hint.removeprefix("available: ").split(", ")
        if count <= 40:
            assert listed == sorted(names)
        else:
            assert listed[:2] == ["scalebio", "stocbio"]
            assert len(listed) == 9
            assert listed[-1] == f"… and {count - 8} more"

    def test_a_choice_is_rejected_with_its_place(self) -> None:
        one_of("mode", "loop", ["loop", "stacked"])
        with rejects("unknown-choice", "mode", of=ConfigError) as caught:
            one_of("mode", "looop", ["loop", "stacked"])
        assert caught.value.did_you_mean == ("loop",)
        with rejects("unknown-choice", "generator", "mode"):
            one_of("mode", 3, ["loop"], ("generator", "mode"))

    def test_names_without_a_similar_choice_have_no_suggestion(self) -> None:
        assert closest("zebra", ["cg", "minres"]) is None
        assert closest("c" * 101, ["c" * 101]) is None
        assert closest("CGG", ["cg", "minres"]) == "cg"

    def test_case_and_separator_do_not_distinguish_names(self) -> None:
        assert canonical("Fast_CG") == canonical("fast.cg") == "fast-cg"


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
    assert dotted(place) == text


def test_a_message_of_megabytes_can_be_read() -> None:
    (line,) = shortened(["a" * 10_000_000])
    assert len(line) < LINE
    assert "(10,000,000 characters)" in line
    assert len(shortened(["line"] * 1000)) == LINES + 1
    assert shortened(["a", "b"]) == ["a", "b"]
    long = str(HgmsError("a", "line\n" * 1000, hint="b" * 10_000_000))
    assert len(long.splitlines()) == LINES + 1
    assert max(map(len, str(HgmsError("a", "x" * 10**7, hint="b" * 10**7)).splitlines())) < LINE
