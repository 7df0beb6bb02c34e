"""Intermediate values of a program in memory of the stack, instead of one tensor each.

Inductor's C++ code allocates a tensor for each intermediate value and for each argument of a loop.
In a program of small operations this takes longer than the operations.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from attrs import Factory, define

LARGEST = 16 * 1024
"""Maximum bytes of a value in memory of the stack."""
TOTAL = 512 * 1024
"""Maximum bytes of all these values in one program."""
BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int32": 4, "int64": 8, "float32": 4, "float64": 8}
ALIGNMENT = 64
BEGIN = "void inductor_entry_impl("
END = "} // inductor_entry_impl"
TYPE = """struct HgmsScratch {
    void* memory;
    void* data_ptr() const { return memory; }
    void reset() {}
};
"""
CALL = "AOTI_TORCH_ERROR_CODE_CHECK"
LINES = {
    "sizes": r"static constexpr int64_t (?:\*(\w+)=nullptr|(\w+)\[\] = \{([^}]*)\});",
    "allocate": rf"{CALL}\(aoti_torch_empty_strided\(\d+, (\w+), (\w+), cached_torch_dtype_(\w+), "
    r"cached_torch_device_type_cpu, 0, &(\w+)_handle\)\);",
    "alias": rf"{CALL}\(aoti_torch_assign_tensors_out\((\w+), &(\w+)_handle\)\);",
    "handle": r"AtenTensorHandle (\w+)_handle;",
    "declare": r"RAIIAtenTensorHandle (\w+)\(\1_handle\);",
    "condition": r"RAIIAtenTensorHandle (\w+);",
    "read": rf"{CALL}\(aoti_torch_item_bool\((\w+), &(\w+)\)\);",
    "reuse": r"auto (\w+) = std::move\((\w+)\);  // reuse",
    "carry": r"(\w+) = std::move\((\w+)\);",
    "reset": r"(\w+)\.reset\(\);",
    "assert": r"assert_size_stride\((\w+), .*\);",
}
"""Lines of inductor's C++ code that use tensors, other than calls of kernels."""
PATTERNS = {kind: re.compile(pattern) for kind, pattern in LINES.items()}
ARGUMENT = re.compile(r"\(\w+\.data_ptr\(\)\)")
COMMENT = re.compile(r"//.*")
NAME = re.compile(r"\b[A-Za-z_]\w*")


@define
class Values:
    """The values of a program: their sizes in bytes, their relations, and which are tensors."""

    bytes: dict[str, int] = Factory(dict)
    sources: dict[str, str] = Factory(dict)
    pairs: list[tuple[str, str]] = Factory(list)
    carried: set[str] = Factory(set)
    conditions: set[str] = Factory(set)
    tensors: set[str] = Factory(set)

    @classmethod
    def of(cls, lines: list[tuple[str, tuple[str, ...]]]) -> Values:
        values = cls()
        arrays: dict[str, list[int]] = {}
        for kind, words in lines:
            if kind == "sizes":
                arrays[words[0] or words[1]] = list(map(int, re.findall(r"\d+", words[2] or "")))
            elif kind == "allocate":
                shape, strides, dtype, name = words
                if not {shape, strides} <= arrays.keys():
                    values.tensors.add(name)
                    continue
                extents = zip(arrays[shape], arrays[strides], strict=True)
                count = max(1 + sum((size - 1) * stride for size, stride in extents), 1)
                values.bytes[name] = count * BYTES.get(dtype, LARGEST + 1)
            elif kind == "alias":
                values.sources[words[1]] = words[0]
            elif kind in ("reuse", "carry"):
                values.pairs.append((words[0], words[1]))
                values.carried.update(words[:1] if kind == "carry" else ())
            elif kind == "condition":
                values.conditions.add(words[0])
            elif kind == "other":
                values.tensors.update(words)
        values.tensors |= {name for name, size in values.bytes.items() if size > LARGEST}
        values._settle()
        return values

    def _settle(self) -> None:
        """Complete the sizes, and the names of values that remain tensors."""
        before = None
        while before != (len(self.bytes), len(self.tensors)):
            before = len(self.bytes), len(self.tensors)
            for one, other in [*self.pairs, *((b, a) for a, b in self.pairs)]:
                if one in self.bytes:
                    self.bytes.setdefault(other, self.bytes[one])
                if one in self.tensors:
                    self.tensors.add(other)
                if one in self.sources and one not in self.carried:
                    self.tensors.add(one)
            self.tensors |= {self.sources[name] for name in self.tensors & self.sources.keys()}


def with_scratch(source: str) -> str:
    """Return C++ code of inductor's wrapper with intermediate values in memory of the stack.

    A value is moved if only kernels and loops use it. All other lines are unchanged.
    """
    head, begin, rest = source.partition(BEGIN)
    body, end, tail = rest.partition(END)
    text = body.split("\n")
    lines = [_read(line.strip()) for line in text]
    values = Values.of(lines)
    own = {words[-1] for kind, words in lines if kind == "allocate"}
    own = (own | values.carried - values.conditions) - values.tensors
    if sum(values.bytes[name] + ALIGNMENT for name in own) > TOTAL:
        return source
    changed = [
        _write(line, kind, words, values) for line, (kind, words) in zip(text, lines, strict=True)
    ]
    return "".join([head, TYPE, begin, "\n".join(changed), end, tail])


def _read(line: str) -> tuple[str, tuple[str, ...]]:
    """Return the kind of a line, and the words of its pattern."""
    for kind, pattern in PATTERNS.items():
        if found := pattern.fullmatch(line):
            return kind, tuple(found.groups())
    names = NAME.findall(COMMENT.sub("", ARGUMENT.sub("", line)))
    return "other", tuple(name.removesuffix("_handle") for name in names)


def _write(line: str, kind: str, words: tuple[str, ...], values: Values) -> str:
    """Return a line, with memory of the stack if the value is no tensor."""
    name = words[-1] if kind in ("allocate", "alias") else words[0] if words else ""
    known = name in values.bytes or name in values.sources or name in values.conditions
    if kind in ("sizes", "other") or not known or name in values.tensors:
        return line
    if kind == "condition":
        return f"HgmsScratch {name}{{nullptr}};"
    if kind == "read":
        return f"{words[1]} = *static_cast<const bool*>({name}.data_ptr());"
    if kind == "reuse":
        return f"HgmsScratch {name} = {words[1]};"
    if kind == "carry" and name in values.conditions:
        return f"{name} = {words[1]};"
    size = values.bytes.get(name)
    if kind == "carry":
        return f"std::memcpy({name}.memory, {words[1]}.memory, {size});"
    if kind == "alias" and name not in values.carried:
        return f"HgmsScratch {name}{{{words[0]}.data_ptr()}};"
    if kind not in ("allocate", "alias"):
        return ""
    memory = f"alignas({ALIGNMENT}) char {name}_memory[{size}]; "
    copy = f" std::memcpy({name}_memory, {words[0]}.data_ptr(), {size});"
    return f"{memory}HgmsScratch {name}{{{name}_memory}};" + copy * (kind == "alias")


def scratch_memory() -> AbstractContextManager[Any]:
    """Compile programs with intermediate values in memory of the stack."""
    from torch._inductor.codecache import CppWrapperCodeCache

    load = CppWrapperCodeCache.load_pybinding

    def load_changed(*arguments: Any, main_code: str, **settings: Any) -> Any:
        return load(*arguments, main_code=with_scratch(main_code), **settings)

    return patch.object(CppWrapperCodeCache, "load_pybinding", load_changed)
