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


def gpu(*parts: str) -> list[str]:
    return [f"tests/gpu/test_gpu_{part}.py" for part in parts]


def test_the_simulated_device_is_as_strict_as_a_gpu() -> None:
    passes("tests/hgms/testing/test_simulated.py", "tests/core/test_recurrent.py", *gpu("modules"))


@pytest.mark.extended
def test_gpu_tests_pass() -> None:
    few = "not test_conforms and not test_a_cell and not test_the_hypergradient"
    some = "not test_three_steps or soba or hg-implicit or test_task"
    only = "not test_gives_what_the_cpu_gives or solver or outer or selector"
    chosen = f"({few}) and ({some}) and ({only})"
    parts = gpu("waiting", "matmul", "page", "programs", "runs", "methods", "components")
    passes(*parts, "-k", chosen)


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["components", "llm_hypergradients", "methods"])
def test_all_gpu_tests_pass(part: str) -> None:
    passes(*gpu(part))
