"""Intermediate values of a program in memory of the stack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hgms.compiled import Programs, repeat, scratch
from hgms.compiled.scratch import LARGEST, with_scratch


def allocation(name: str, sizes: str = "sizes", strides: str = "strides") -> str:
    return (
        f"AtenTensorHandle {name}_handle;\n"
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, {sizes}, {strides}, "
        f"cached_torch_dtype_float32, cached_torch_device_type_cpu, 0, &{name}_handle));\n"
        f"RAIIAtenTensorHandle {name}({name}_handle);"
    )


def alias(name: str, of: str) -> str:
    return (
        f"AtenTensorHandle {name}_handle;\n"
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_assign_tensors_out({of}, &{name}_handle));\n"
        f"RAIIAtenTensorHandle {name}({name}_handle);"
    )


def changed(*lines: str, shape: str = "4L, 5L") -> str:
    """Return the code of a program with these lines, without the lines around them."""
    sizes = f"static constexpr int64_t sizes[] = {{{shape}}};"
    strides = "static constexpr int64_t strides[] = {5L, 1L};"
    body = "\n".join(["void inductor_entry_impl(", sizes, strides, *lines])
    code = with_scratch(f"before\n{body}\n}} // inductor_entry_impl\nafter")
    assert code.startswith("before\nstruct")
    assert code.endswith("} // inductor_entry_impl\nafter")
    return code.split(strides)[1]


def test_a_value_that_only_kernels_use_has_memory_of_its_size() -> None:
    code = changed(
        allocation("a"),
        "kernel((float*)(a.data_ptr()));",
        "auto b = std::move(a);  // reuse",
        "kernel((float*)(b.data_ptr()));",
        "b.reset();",
    )
    assert "char a_memory[80]; HgmsScratch a{a_memory};" in code
    assert "HgmsScratch b = a;" in code
    assert "empty_strided" not in code


@pytest.mark.parametrize(
    "use",
    [
        "output_handles[0] = a.release();",
        "auto b = std::move(a);  // reuse\noutput_handles[0] = b.release();",
        "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_sort_stable(a, 0));",
        f"{alias('b', 'a')}\nother(b);",
        f"{alias('b', 'view(a)')}\nkernel((float*)(b.data_ptr()));",
        f"{alias('b', 'a')}\nauto c = std::move(b);  // reuse",
    ],
)
def test_a_value_with_another_use_remains_a_tensor(use: str) -> None:
    code = changed(allocation("a"), use)
    assert code.splitlines()[1:-2] == [*allocation("a").splitlines(), *use.splitlines()]


@pytest.mark.parametrize("sizes", ["sizes", "unknown"])
def test_a_value_of_large_or_unknown_size_remains_a_tensor(sizes: str) -> None:
    code = changed(allocation("a", sizes), shape=f"{LARGEST}L, 1L")
    assert allocation("a", sizes) in code


def test_a_loop_copies_the_values_that_it_carries() -> None:
    code = changed(
        allocation("start"),
        alias("carried", "start"),
        alias("argument", "carried"),
        allocation("next"),
        "kernel((float*)(argument.data_ptr()), (float*)(next.data_ptr()));",
        "carried.reset();",
        "carried = std::move(next);",
    )
    assert "std::memcpy(carried_memory, start.data_ptr(), 80);" in code
    assert "HgmsScratch argument{carried.data_ptr()};" in code
    assert "std::memcpy(carried.memory, next.memory, 80);" in code


@pytest.mark.extended
def test_a_loop_of_torch_allocates_no_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines are those of the installed torch, and the numbers are unchanged."""

    def function(a: Tensor) -> Tensor:
        values, _ = repeat(lambda x: torch.sin((a * x).sum(1)), a.sum(0), 9, lambda x: x.sum() < 9)
        return values.sum()

    seen: list[str] = []

    def recorded(source: str) -> str:
        seen.extend([source, with_scratch(source)])
        return seen[-1]

    monkeypatch.setenv("HGMS_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setattr(scratch, "with_scratch", recorded)
    a = torch.linspace(-1, 1, 25, dtype=torch.float64).reshape(5, 5)
    programs = Programs()
    actual = programs(("function",), function)(a)
    assert programs.outcomes == {"function": "compiled"}
    torch.testing.assert_close(actual, function(a), rtol=1e-12, atol=0)
    before, after = seen
    assert before.count("aoti_torch_empty_strided") >= 3
    assert before.count("aoti_torch_assign_tensors_out") >= 4
    assert after.count("aoti_torch_empty_strided") == 1  # the result
    assert after.count("aoti_torch_assign_tensors_out") == 0
