"""What the commands look like on a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import field, fields, make_class, validators
from click.testing import CliRunner

from hgms.cli import main
from hgms.runs.describe import range_of
from hgms_core.validators import decay_rate, optional_positive, positive, share

pytestmark = pytest.mark.usefixtures("one_registry")


def shown(*arguments: str) -> list[str]:
    done = CliRunner().invoke(main, list(arguments), env={"COLUMNS": "80"}, terminal_width=80)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


# --- help and describe
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("validator", "shown"),
    [
        (None, ""),
        (positive, "> 0"),
        (share, "in [0, 1]"),
        (decay_rate, "in [0, 1)"),
        (optional_positive, "> 0"),
        ([validators.instance_of(int), validators.ge(1), validators.le(9)], "in [1, 9]"),
    ],
)
def test_the_range_of_a_validator(validator: Any, shown: str) -> None:
    [item] = fields(make_class("Part", {"a": field(validator=validator)}))
    assert range_of(item.validator) == shown
