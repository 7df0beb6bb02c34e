"""A few minutes of the standing campaign, and that it says so when something is wrong: one that
cannot fail is worthless.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def campaign(*arguments: str, planted: str = "") -> tuple[int, str]:
    """The exit code and the lines of a campaign, with a mistake planted in what it tries."""
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import campaign\n{planted}\n"
    program += f"sys.exit(campaign.main({[*arguments]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


# Rows after the checkpoint stay, and come twice.
NO_REWIND = """
from hgms.runs import RunFolder
RunFolder.rewind = lambda self, step: 0.0
"""

CRASH = """
from hgms.runs import RunConfig
def broken(*_, **__): raise KeyError("planted")
RunConfig.from_dict = broken
"""

LEAK = """
from pathlib import Path
from hgms.config import tables
real = tables.read_toml
outside = Path("../outside/left")
tables.read_toml = lambda text, source: outside.write_text("x") and real(text, source)
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("arguments", "planted", "told"),
    [
        pytest.param(
            ("inputs", "--count", "1", "--kind", "data"), CRASH, "a traceback: ", id="traceback"
        ),
        pytest.param(
            ("inputs", "--count", "1", "--kind", "data"),
            LEAK,
            "left is new",
            id="outside",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("kills", "--count", "40", "--kind", "run"),
            NO_REWIND,
            " differs",
            id="lost",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_planted_mistake_is_a_violation(
    arguments: tuple[str, ...], planted: str, told: str
) -> None:
    code, lines = campaign(*arguments, planted=planted)
    assert code == 1, lines
    assert told in lines
    assert "--seed 0 --only " in lines


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [("kills", "--count", "150"), ("damage", "--count", "200"), ("inputs", "--count", "600")],
    ids=lambda arguments: arguments[0],
)
def test_nothing_is_violated(arguments: tuple[str, ...]) -> None:
    code, lines = campaign(*arguments, "--seed", "11")
    assert code == 0, lines
