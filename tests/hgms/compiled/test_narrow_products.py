"""Products of matrices whose columns do not fill a register are transposes of products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hgms.compiled.loops import replacements
from hgms.compiled.trace import KNOWN, is_narrow, turned_products

ROWS = 256
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


@pytest.mark.parametrize("table", ["functions", "turned", "step"])
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
    known = {"functions": KNOWN, "turned": turned_products(), "step": replacements()}[table]
    arguments = normal(ROWS, 32), normal(32, 10), normal(10)
    graph = make_fx(function, known, tracing_mode="fake")(*arguments)
    assert torch.allclose(graph(*arguments), function(*arguments))
    shapes = [node.meta["val"].shape for node in graph.graph.nodes if node.target in PRODUCTS]
    assert [shape[-2:] for shape in shapes] == [(10, ROWS)]
