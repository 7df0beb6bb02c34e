"""Budgets as users write them, and the share that is spent."""

from __future__ import annotations

import pytest
from support.helpers import rejects

from hgms.config import Budget
from hgms_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("60s", Budget(seconds=60.0)),
        (" 2 min ", Budget(seconds=120.0)),
        ("1.5 hours", Budget(seconds=5400.0)),
        ("25 steps", Budget(outer_steps=25)),
        ("25 Outer Steps", Budget(outer_steps=25)),
        ("1e5 calls", Budget(oracle_calls=100_000)),
    ],
)
def test_budgets_are_read(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("1 \u017ftep", "wrong-budget", ()),  # other letters
        ("1.2.3 s", "wrong-budget", ()),
        ("-3 s", "wrong-budget", ()),
        ("5 parsecs", "wrong-budget", ()),
        # not with time in the square of its length
        ("1" + 20_000 * " " + "!", "wrong-budget", ()),
        ("9" * 20_000 + " steps", "wrong-budget", ()),
        ("2.5 steps", "wrong-budget", ()),
        ("0 steps", "out-of-range", ("outer_steps",)),
        ("0 s", "out-of-range", ("seconds",)),
        ("1e999 s", "out-of-range", ("seconds",)),
    ],
)
def test_budgets_that_cannot_be_read(text: str, code: str, place: tuple[str, ...]) -> None:
    with rejects(code, *place, of=ConfigError):
        Budget.parse(text)


def test_the_share_of_a_budget_that_is_spent() -> None:
    assert Budget(seconds=10.0).spent_share(2.5, 100, 100) == 0.25
    assert Budget(oracle_calls=200).spent_share(99.0, 9, 50) == 0.25
    steps = Budget(outer_steps=4)
    assert [
        steps.spent_share(99.0, 9, 50),
        steps.spent_share(0.0, 4, 0),
        steps.spent_share(99.0, 3, 99),
    ] == [1.0, 1.0, 0.75]
