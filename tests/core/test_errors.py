"""What messages and signs of torch's errors are taken for."""

from __future__ import annotations

import pytest

from hgms_core import closest, once_differentiable, out_of_memory, shortened, unknown
from hgms_core.discovery import canonical
from hgms_core.errors import LINE, LINES


def test_a_message_of_megabytes_can_be_read() -> None:
    text = shortened("a" * 10_000_000)
    assert len(text) < LINE
    assert "(10,000,000 characters)" in text
    assert len(shortened("line\n" * 1000).splitlines()) == LINES + 1
    assert shortened("a\nb") == "a\nb"


def test_what_is_like_nothing_has_no_suggestion() -> None:
    assert closest("zebra", ["cg", "minres"]) is None
    assert closest("CGG", ["cg", "minres"]) == "cg"


def test_names_are_told_apart_without_case_and_separator() -> None:
    assert canonical("Fast_CG") == canonical("fast.cg") == "fast-cg"


@pytest.mark.parametrize(
    ("text", "once"),
    [
        ("derivative for aten::_flash_attention_backward is not implemented", True),
        (
            "trying to differentiate twice a function that was marked with @once_differentiable",
            True,
        ),
        ("shapes do not match", False),
    ],
)
def test_missing_second_derivatives_are_known_by_torch_s_words(text: str, once: bool) -> None:
    assert once_differentiable(RuntimeError(text)) is once


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    assert not out_of_memory(RuntimeError("shapes do not match"))
    assert out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
    )


@pytest.mark.parametrize("count", [40, 41, 60])
def test_of_many_names_the_nearest_are_listed(count: int) -> None:
    names = [f"rule-{number:02}" for number in range(count - 2)] + ["scalebio", "stocbio"]
    first, listed = unknown("method", "scalbio", names).splitlines()
    assert first == "unknown method 'scalbio'; did you mean 'scalebio'?"
    if count <= 40:
        assert listed == f"  available: {', '.join(sorted(names))}"
    else:
        assert listed.startswith("  available: scalebio, stocbio, ")
        assert listed.endswith(f", … and {count - 8} more")
        assert len(listed) < 150
