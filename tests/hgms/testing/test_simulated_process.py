"""Tests on the simulated device, in processes of their own: its registration cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FEW = (
    "(not test_conforms and not test_a_cell and not test_the_hypergradient) "
    "and (not test_three_steps or soba or hg-implicit or test_task) "
    "and (not test_gives_what_the_cpu_gives or solver or outer or selector)"
)


def gpu(*parts: str) -> list[str]:
    return [f"tests/gpu/test_gpu_{part}.py" for part in parts]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            [
                "tests/core/test_recurrent.py",
                *gpu("modules", "page", "programs"),
                *gpu("runs", "methods", "components"),
                *("-k", FEW),
            ],
            marks=pytest.mark.extended,
            id="few",
        ),
        *(
            pytest.param(gpu(part), marks=pytest.mark.nightly, id=part)
            for part in ("components", "llm_hypergradients", "methods")
        ),
    ],
)
def test_nightly_tests_pass_on_a_device_as_strict_as_a_gpu(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "nightly", "--tb=short"]
    environment = {name: at for name, at in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=environment | {"HGMS_GPU_TESTS_DEVICE": "simulated"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
