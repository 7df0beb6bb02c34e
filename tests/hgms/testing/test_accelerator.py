"""The simulated device: it rejects what a GPU rejects, and counts what a GPU transfers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from support.helpers import F64, moved, network_problem
from support.simulated_device import count_kernels, no_waiting, simulated_device
from torch import Tensor, nn
from torch.utils import backend_registration as registration

from hgms.compiled import Programs, programs
from hgms.config import Budget
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.optim import SGD
from hgms.outer import Adam
from hgms.runs import run
from hgms.runs.config import RunConfig
from hgms.runs.stepper import Stepper
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.testing import checks_of_kind, inputs_on
from hgms.testing.kit import demand_saved
from hgms_core import Pipeline

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        not hasattr(registration, "_setup_privateuseone_for_python_backend"),
        reason="requires torch 2.10",
    ),
]


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    """torch cannot unregister a device. Afterwards this one is not available, so that the tests
    that follow in this process see no accelerator.
    """
    with simulated_device() as device:
        yield device
    for kind in (registration._DummyPrivateUse1Hook, registration._DummyBackendModule):
        kind.is_available = lambda self: False
    registration._DummyBackendModule.device_count = lambda self: 0


def pipeline(solver: CG) -> Pipeline:
    return Pipeline(
        generator=Branches(count=3, steps=4, optimizer=SGD(lr=0.05), batch_size=8),
        selector=BestOfN(),
        hypergradient=Implicit(solver=solver),
        outer=Adam(lr=0.1),
    )


def test_it_computes_the_numbers_of_the_cpu(device: torch.device) -> None:
    x = torch.arange(3.0, device=device)
    assert x.device == device
    slope = torch.func.grad(lambda y: (y**3).sum())
    found = (
        (x * x).sum(),
        slope(x),
        torch.func.jvp(slope, (x,), (torch.ones_like(x),))[1],
        torch.func.vmap(lambda y: y.sum())(torch.stack([x, x])),
    )
    assert [at.tolist() for at in found] == [5.0, [0.0, 3.0, 12.0], [0.0, 6.0, 12.0], [3.0, 3.0]]


def test_its_tensors_are_used_as_those_of_a_gpu(device: torch.device) -> None:
    x = torch.arange(4.0, device=device, requires_grad=True)
    with pytest.raises(TypeError):
        x.numpy()
    with pytest.raises(TypeError):
        np.asarray(x.detach())
    assert x.detach().numpy(force=True).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert str(device) in repr(x)
    twin = copy.deepcopy({"x": x, "again": x})
    assert twin["x"] is twin["again"] is not x
    assert twin["x"].requires_grad
    with torch.no_grad():
        twin["x"][[0, 2]] = 7.0
        twin["x"][torch.tensor([True, False, False, True])] += 1.0
    made = (twin["x"], x.new_tensor([5]), torch.as_tensor(x))
    assert {at.device for at in made} == {device}
    assert [at.tolist() for at in made] == [[8.0, 1.0, 7.0, 4.0], [5.0], [0.0, 1.0, 2.0, 3.0]]
    leaf = torch.tensor([2.0], device=device, requires_grad=True)
    (leaf**3).sum().backward()
    assert leaf.grad.tolist() == [12.0]
    here = torch.zeros(4)
    assert here.copy_(x.detach()) is here
    assert here.tolist() == x.tolist()


def test_draws_are_those_of_the_cpu(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    assert generator.device == device
    found = torch.randn(5, generator=generator, device=device)
    assert torch.equal(found.cpu(), torch.randn(5, generator=torch.Generator().manual_seed(3)))
    assert torch.Generator().device == torch.device("cpu")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.stack([x, torch.ones(3)]),
        lambda x: torch.randn(3, generator=torch.Generator(), device=x.device),
        lambda x: nn.functional.linear(x, torch.ones(2, 3)),
    ],
)
def test_two_devices_are_not_mixed(call: Callable[[Tensor], Tensor], device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="device"):
        call(torch.ones(3, device=device))


@pytest.mark.parametrize(
    ("call", "transfers", "uploads"),
    [
        (lambda x: float(x.sum()), 1, 0),
        (lambda x: x.cpu(), 1, 0),
        (lambda x: x.tolist(), 1, 0),
        (lambda x: x[x > 1], 1, 0),
        (lambda x: x.nonzero(), 1, 0),
        (lambda x: bool((x > 1).any()), 1, 0),
        (lambda x: torch.ones(3).to(x.device), 0, 1),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), 0, 1),
        (lambda x: x[torch.tensor([0, 1])], 0, 1),
        (lambda x: x[[0, 1]], 0, 1),
        (lambda x: torch.ones(3).to(x.device, non_blocking=True), 0, 0),
        (lambda x: (x * 2 + 1).sum(), 0, 0),
        (lambda x: x.reshape(1, 3).t().unsqueeze(0), 0, 0),
    ],
)
def test_whatever_the_host_waits_for_is_counted(
    call: Callable[[Tensor], object], transfers: int, uploads: int, device: torch.device
) -> None:
    x = torch.arange(3.0, device=device)
    with count_kernels() as counts:
        call(x)
    assert (counts.transfers, counts.uploads) == (transfers, uploads)
    assert {place.partition(":")[0] for place in counts.places} <= {Path(__file__).name}
    if counts.waits:
        with no_waiting(), pytest.raises(RuntimeError, match="the host waits"):
            call(x)


def test_a_run_reads_one_record_per_step(device: torch.device) -> None:
    """Between two steps only the numbers of the record go to the host, in one transfer."""
    problem = moved(network_problem(rows=64), device)
    waits = []
    for steps in (1, 5):
        with count_kernels() as counts:
            run(pipeline(CG(ridge=0.5, max_steps=1)), problem, Budget(outer_steps=steps))
        waits.append(counts.waits)
    per_step, rest = divmod(waits[1] - waits[0], 4)
    assert (per_step, rest) == (1, 0), counts.places


SHORT = {"steps": 2}
METHODS = {
    "hg-ms": {"generator": SHORT},
    "v-pbgd": {},
    "scalebio": {},
    "soba": {},
    "hg-baseline": {"generator": SHORT},
}
READS = {"soba": 1}
"""Numbers that the host reads in a step: the lower gradient, which a bounded curvature compares."""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_makes_no_other_transfer_and_its_record_makes_one(
    name: str, compiled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In digits cleaning, eagerly, and with compiled functions whose graphs are interpreted."""
    monkeypatch.setattr(
        programs, "compile_graph", lambda graph, leaves, **_: lambda inputs: graph(*inputs)
    )
    monkeypatch.setattr(programs, "COMPILERS", (device.type,))
    config = RunConfig.from_dict(
        {
            "task": {"name": "hyper-cleaning", "dataset": "digits", "corruption": 0.4},
            "method": {"name": name, **METHODS[name]},
            "budget": {"outer_steps": 3},
        }
    )
    problem = config.task.problem(0, device, torch.float32)
    if compiled:
        problem = evolve(problem, compiler=Programs())
    stepper = Stepper(method=config.method, problem=problem, name=name, in_calls=False)
    position = stepper.begin(0)
    for step in range(3):
        reads = READS.get(name, 0) if step > 1 else 0  # the first norm has no earlier one
        strict = no_waiting() if step and not reads else nullcontext()
        with count_kernels() as counts, strict:
            outcome = stepper.step(position, 0.0)
        assert not step or counts.waits == reads, counts.places
        with count_kernels() as counts:
            position, record = stepper.read(position, outcome, {})
        # The first step also reads the norm of the first theta.
        assert counts.waits == (1 if step else 2), counts.places
    assert isinstance(record["upper_loss"], float)
    assert isinstance(record["oracle_calls"], int)
    if compiled:
        assert set(problem.compiler.outcomes.values()) == {"compiled"}


def test_a_loaded_state_is_on_the_device_of_the_inputs(device: torch.device) -> None:
    with inputs_on(device):
        theta = torch.ones(3, device=device)
        demand_saved({"m": theta}, lambda state: {"sum": state["m"] + theta})
        [check] = [check for check in checks_of_kind("outer") if check.name == "state"]
        check(Adam())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_fused_cells_compute_the_numbers_of_the_plain_ones_but_have_no_forward_mode(
    kind: Any, bias: bool, device: torch.device
) -> None:
    here = kind(2, 3, dtype=F64, bias=bias)
    x = torch.randn(4, 2, dtype=F64)
    found = []
    for place in (torch.device("cpu"), device):
        layer = kind(2, 3, dtype=F64, bias=bias)
        layer.load_state_dict(here.state_dict())
        out = layer.to(place)(x.to(place))
        leaf = out[0] if isinstance(out, tuple) else out
        slopes = torch.autograd.grad((leaf**2).sum(), list(layer.parameters()))
        found.append([leaf.detach().cpu(), *(slope.cpu() for slope in slopes)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
    with pytest.raises(NotImplementedError, match="forward AD with _thnn_fused"):
        torch.func.jvp(layer, (x.to(device),), (x.to(device),))
