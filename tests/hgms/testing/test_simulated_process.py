"""Tests on the simulated device, in processes of their own: its registration cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def passes(*arguments: str) -> None:
    """Require that nightly tests pass on the simulated device, in another process."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "nightly", "--tb=short"]
    environment = os.environ | {"HGMS_GPU_TESTS_DEVICE": "simulated"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def test_the_simulated_device_is_as_strict_as_a_gpu() -> None:
    passes("tests/hgms/testing/test_simulated.py", "tests/core/test_recurrent.py")


def test_a_part_of_the_gpu_tests_passes() -> None:
    passes("tests/gpu/test_gpu_waiting.py", "tests/gpu/test_gpu_modules.py")


@pytest.mark.extended
@pytest.mark.parametrize(
    "part", ["components", "llm_hypergradients", "matmul", "methods", "page", "programs", "runs"]
)
def test_all_gpu_tests_pass(part: str) -> None:
    passes(f"tests/gpu/test_gpu_{part}.py")
