"""The benchmarks for the day there is a GPU run to their end on a CPU; no test looks at a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_bench_gpu_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are the traced graphs: a compiler takes seconds for each."""
    from hgms.compiled import programs

    as_traced = lambda graph, leaves, **_: lambda inputs: graph(*inputs)  # noqa: E731
    monkeypatch.setattr(programs, "compile_graph", as_traced)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bench_gpu

    bench_gpu.main(["--device", "cpu", "--quick", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert {"outer", "stacking", "compiled", "products"} <= figures.keys()
    assert all(row["θ differs by"] < 1e-3 for row in figures["compiled"].values())
    assert all(row["differs by"] < 1e-4 for row in figures["products"].values())
