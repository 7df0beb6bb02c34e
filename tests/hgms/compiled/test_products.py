"""Products of matrices: transposed if that is faster, and avoided if a matrix is one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hgms.compiled.loops import replacements
from hgms.compiled.trace import KNOWN, is_narrow, trace, turned_products, without_repetitions

ROWS = 256
TABLES = ("functions", "turned", "step")
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize(
    ("columns", "dtype", "narrow"),
    [
        (10, torch.float32, True),
        (10, torch.float64, True),
        (10, torch.bfloat16, False),
        (16, torch.float32, False),
        (ROWS + 1, torch.float32, False),
    ],
)
def test_columns_and_type_decide_what_is_narrow(
    columns: int, dtype: torch.dtype, narrow: bool
) -> None:
    assert is_narrow(normal(ROWS, 32, dtype=dtype), normal(32, columns, dtype=dtype)) is narrow


def test_small_products_and_other_devices_are_not_narrow() -> None:
    assert not is_narrow(normal(8, 4), normal(4, 3))
    a = torch.empty(ROWS, 300, device="meta")
    assert not is_narrow(a, torch.empty(300, 10, device="meta"))


def replaced(table: str) -> dict[Any, Callable[..., Any]]:
    """Return the replacements of compiled functions, of large products, or of a step."""
    return {"functions": KNOWN, "turned": turned_products(), "step": replacements()}[table]


def products_in(graph: GraphModule) -> list[torch.Size]:
    return [node.meta["val"].shape for node in graph.graph.nodes if node.target in PRODUCTS]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: a @ b,
        lambda a, b, c: torch.stack([a, 2 * a]) @ torch.stack([b, -b]),
        lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
    ],
    ids=["mm", "bmm", "addmm"],
)
def test_a_narrow_product_has_its_rows_last(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], table: str
) -> None:
    arguments = normal(ROWS, 32), normal(32, 10), normal(10)
    graph = make_fx(function, replaced(table), tracing_mode="fake")(*arguments)
    assert torch.allclose(graph(*arguments), function(*arguments))
    assert [shape[-2:] for shape in products_in(graph)] == [(10, ROWS)]


@pytest.mark.parametrize("table", TABLES)
def test_a_product_with_one_repeated_number_is_a_sum(table: str) -> None:
    """A derivative in forward mode multiplies the weights by a direction of zeros."""

    def function(number: Tensor, b: Tensor) -> list[Tensor]:
        single = number.expand(ROWS, 32) @ b
        several = torch.bmm(number.expand(2, ROWS, 32), torch.stack([b, -b]))
        return [single, several]

    arguments = torch.tensor(3.0, dtype=torch.float64), normal(32, 10)
    graph = make_fx(function, replaced(table), tracing_mode="fake")(*arguments)
    assert not products_in(graph)
    for actual, expected in zip(graph(*arguments), function(*arguments), strict=True):
        torch.testing.assert_close(actual, expected)


def test_an_argument_of_equal_numbers_is_a_matrix_of_any_numbers() -> None:
    found = trace(lambda a, b: a @ b, (torch.ones(()).expand(ROWS, 32), normal(32, 16).float()))
    other = normal(ROWS, 32).float(), normal(32, 16).float()
    torch.testing.assert_close(found.graph(*other)[0], other[0] @ other[1])


def test_a_matrix_is_not_transposed_twice() -> None:
    graph = make_fx(lambda a: a.t().mT.t() @ a, KNOWN)(normal(4, 3))
    operations = without_repetitions(graph)
    assert [node.name for node in operations.graph.nodes if "t" in node.name] == ["t", "output"]
    torch.testing.assert_close(operations(normal(4, 3)), normal(4, 3).t() @ normal(4, 3))
