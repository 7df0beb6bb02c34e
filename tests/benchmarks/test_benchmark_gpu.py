"""The benchmarks for the day there is a GPU run to their end on a CPU; no test looks at a clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are the traced graphs: a compiler takes seconds for each."""
    from hgms.compiled import programs

    def as_traced(graph: GraphModule, leaves: Sequence[Tensor]) -> Callable[..., Any]:
        return lambda inputs: graph(*inputs)

    monkeypatch.setattr(programs, "_inductor", as_traced)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.mark.nightly
def test_bench_gpu_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_gpu

    before = torch.get_float32_matmul_precision()
    bench_gpu.main(["--device", "cpu", "--quick", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert {"outer", "stacking", "compiled", "products"} <= figures.keys()
    assert len(figures["compiled"]) == 2 * len(bench_gpu.FORMS)
    for name, row in figures["compiled"].items():
        assert row["θ differs by"] < 1e-3, name
        assert row["as written all the same"] == (0 if "compiled" in name else "–"), name
    assert all(row["differs by"] < 1e-4 for row in figures["products"].values())
    assert torch.get_float32_matmul_precision() == before
    assert "compiled, exact" in capsys.readouterr().out
