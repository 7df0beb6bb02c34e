"""The device of all tests here: a GPU; with ``HGMS_GPU_TESTS_DEVICE`` the CPU (``cpu``) or the
simulated device of `tests/support` (``simulated``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from placement import Draws
from support.simulated_device import simulated_device

from hgms_core import Key

# Read when cuBLAS is first used: what deterministic algorithms need (docs/how-to/run-on-gpus.md).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

SWITCH = "HGMS_GPU_TESTS_DEVICE"


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    chosen = os.environ.get(SWITCH, "cuda")
    if chosen == "simulated":
        with simulated_device() as simulated:
            yield simulated
    else:
        yield torch.device("cpu") if chosen == "cpu" else _gpu()


@cache
def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.fail(
            f"torch finds no CUDA device; {SWITCH}=simulated runs these tests without one",
            pytrace=False,
        )
    found = torch.device("cuda")
    with warnings.catch_warnings():
        # The first product in autograd's own thread warns that it sets up the context there; later
        # ones do not.
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.float64):
            one = torch.ones(2, 2, device=found, dtype=dtype, requires_grad=True)
            (one @ one).sum().backward()
        torch.linalg.qr(one.detach())
        torch.linalg.eigh(one.detach())
        torch.cuda.synchronize()
    return found


@pytest.fixture
def real(device: torch.device) -> torch.device:
    """The device, for tests of what the simulated one lacks: compilers, library routes, memory, a
    name in configurations.
    """
    if device.type == "simulated":
        pytest.skip("the simulated device has no compilers, routes, memory or name in files")
    return device


@pytest.fixture
def deterministic(device: torch.device) -> Iterator[None]:
    """Kernels that add up in a fixed order, as the page on GPUs says how to ask for them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Draws:
    """Counts the generators that are asked for on a device other than the CPU."""
    counted = Draws()
    plain = Key.generator

    def generator(key: Key, device: torch.device | str = "cpu") -> torch.Generator:
        counted.on_device += torch.device(device).type != "cpu"
        return plain(key, device)

    monkeypatch.setattr(Key, "generator", generator)
    return counted
