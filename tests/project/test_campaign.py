"""A few minutes of the standing campaign."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "campaign.py"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [("kills", "--count", "150"), ("damage", "--count", "200"), ("inputs", "--count", "600")],
    ids=lambda arguments: arguments[0],
)
def test_nothing_is_violated(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, SCRIPT, *arguments, "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
