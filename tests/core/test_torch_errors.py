"""Errors of torch are recognised by their cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.helpers import rejects
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hgms.torch_errors import (
    is_batch_of_one,
    is_failed_write,
    is_freed_graph,
    is_inside_functorch,
    is_lost_connection,
    is_overflow,
    once_differentiable,
)
from hgms_core.errors import ConfigError
from hgms_core.torch_errors import explain_errors, out_of_memory, with_forward_mode


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return caught.value


@torch.library.custom_op("hgms_tests::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


def twice(function: Callable[[Tensor], Tensor]) -> None:
    """Compute a second derivative."""
    x = torch.ones(1, 1, 2, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


def attention(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(x, x, x)


def recomputed_differently() -> None:
    factors = iter([2.0, None])

    def function(x: Tensor) -> Tensor:
        factor = next(factors)
        return x.exp() * x if factor else x * 1

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def forward_mode() -> None:
    x = torch.ones(1, 1, 2, 8)
    torch.func.jvp(attention, (x,), (x,))


def freed_graph() -> None:
    x = torch.ones(1, requires_grad=True)
    loss = x.square().sum()
    loss.backward()
    loss.backward()


def changed_under_vmap(x: Tensor) -> Tensor:
    y = torch.zeros(2)
    y[0] = x
    return y


def joined_after_vmap() -> None:
    kept = []
    torch.vmap(lambda x: kept.append(x) or x)(torch.ones(3, 2))
    torch.cat([kept[0], torch.ones(1)])


CAUSES: dict[str, tuple[Callable[[BaseException], bool], Callable[[], object]]] = {
    "memory": (out_of_memory, lambda: torch.empty(2**60, dtype=torch.int8)),
    "vmap": (is_inside_functorch, lambda: torch.vmap(changed_under_vmap)(torch.ones(3))),
    "grad": (
        is_inside_functorch,
        lambda: torch.func.grad(lambda x: x.requires_grad_().sum())(torch.ones(3)),
    ),
    "vmap that is over": (is_inside_functorch, joined_after_vmap),
    "freed graph": (is_freed_graph, freed_graph),
    "overflow": (is_overflow, lambda: torch.full((1,), 1e300, dtype=torch.float32)),
    "batch of one": (is_batch_of_one, lambda: nn.BatchNorm1d(2)(torch.ones(1, 2))),
    "failed write": (is_failed_write, lambda: torch.save(torch.ones(2**16), "/dev/full")),
}


@pytest.mark.parametrize(
    "call",
    [
        lambda: twice(attention),
        lambda: twice(square),
        lambda: torch.func.grad(lambda x: checkpoint(torch.sum, x, use_reentrant=False))(
            torch.ones(1)
        ),
        recomputed_differently,
        forward_mode,
    ],
    ids=[
        "kernel",
        "kernel of another library",
        "checkpoint under torch.func",
        "recomputed differently",
        "forward mode",
    ],
)
def test_a_missing_second_derivative(call: Callable[[], object]) -> None:
    assert once_differentiable(raised(call))


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_recognised_and_no_other(cause: str) -> None:
    predicate, call = CAUSES[cause]
    error = raised(call)
    others = {once_differentiable, *(other for other, _ in CAUSES.values())} - {predicate}
    assert predicate(error)
    assert not any(other(error) for other in others)
    assert not predicate(RuntimeError("shapes do not match"))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), out_of_memory),
        (MemoryError(), out_of_memory),
        (RuntimeError("CUDA error: out of memory"), out_of_memory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling …"), out_of_memory),
        (ValueError("can't allocate memory"), None),
        (dist.DistNetworkError("connection reset by peer"), is_lost_connection),
        (dist.DistStoreError("wait timeout"), is_lost_connection),
    ],
)
def test_errors_of_other_devices_and_of_torch_s_store(error: BaseException, cause: Any) -> None:
    causes = (out_of_memory, is_lost_connection)
    assert [each for each in causes if each(error)] == ([cause] if cause else [])


@pytest.mark.nightly
def test_code_compiled_by_torch_is_named() -> None:
    with rejects("compiled-loss", "hypergradient", "strategy", of=ConfigError), explain_errors():
        twice(torch.compile(lambda x: x.sin().exp(), backend="aot_eager"))


def test_a_forward_mode_that_runs_out_of_memory_is_not_taken_for_a_missing_one() -> None:
    def without_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        with_forward_mode(without_memory, list)
    assert with_forward_mode(forward_mode, list) == []
