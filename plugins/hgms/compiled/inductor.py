"""Compile a graph of tensor operations with torch's inductor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule

from hgms.compiled.cuda_graphs import Runner
from hgms.compiled.library import Library, is_on_cpu, plain
from hgms.compiled.scratch import scratch_memory
from hgms.compiled.trace import MODE, apart, mutates, retrace

ON_CPU = {
    "aot_inductor.enable_line_tables": False,
    "compile_threads": 1,
    "cpp_wrapper": True,
    "cpp.vec_isa_ok": True,
    "fx_graph_cache": False,
    "pattern_matcher": False,
}
"""Settings of inductor. All kernels of a function are in one C++ file, which this process compiles:
one file per kernel takes twice as long, and a pool of processes takes longer to start. The check of
vector instructions would compile a program with them, but an invalid program fails as well. The
library is stored, so torch need not store it. Patterns of attention and of joined products are for
large models, and take a second of the first step.
"""
ON_GPU = {"triton.cudagraphs": False}
"""HGMS records the functions itself, independent of torch's settings in the environment."""
KERNELS = "torch/csrc/inductor/cpp_prefix.h"
"""The header of inductor's kernels."""


def compile_graph(graph: GraphModule, leaves: Sequence[Tensor], **settings: Any) -> Runner:
    """Return the graph compiled for contiguous inputs of these shapes.

    ``settings`` are settings of inductor.
    """
    from torch._inductor.compile_fx import compile_fx

    if is_on_cpu(leaves):
        return _compile_on_cpu(graph, leaves, settings)
    with torch._inductor.config.patch({**ON_GPU, **settings}):
        program: Any = compile_fx(copy.deepcopy(graph), apart(plain(leaves)))
    return lambda inputs: program(*plain(inputs))


def _compile_on_cpu(
    graph: GraphModule, leaves: Sequence[Tensor], settings: dict[str, Any]
) -> Runner:
    """Compile the operations of the graph without torch's autograd for compilers.

    The graph has no gradients, and does not change its inputs. Torch would trace it in several
    layers: 1 of 24 s of a first step with the 784-300-10 network, 4 of 36 s of a small step.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    with (
        torch._inductor.config.patch({**ON_CPU, **settings}),
        scratch_memory(),
        precompiled_headers(),
        torch.no_grad(),
        enable_python_dispatcher(),
    ):
        supported, inputs = _in_operations_of_inductor(graph, apart(plain(leaves)))
        for module in supported.modules():  # also the bodies of loops
            if isinstance(module, GraphModule):
                joint_graph_passes(module)
        outputs = next(reversed(supported.graph.nodes))
        outputs.meta["user_visible_output_idxs"] = list(range(len(outputs.args[0])))
        compiled: Any = compile_fx_inner(supported, inputs, cpp_wrapper=True, is_inference=True)
    return Library.of(compiled) or (lambda inputs: compiled(plain(inputs)))


def _in_operations_of_inductor(
    graph: GraphModule, leaves: Sequence[Tensor]
) -> tuple[GraphModule, list[Any]]:
    """Return the graph in operations that inductor supports, and its inputs without numbers."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = graph.meta.get(MODE) or FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    inputs = [mode.from_tensor(leaf, static_shapes=True) for leaf in leaves]
    if MODE in graph.meta and not mutates(graph):
        return copy.deepcopy(graph), inputs
    return retrace(graph, inputs, select_decomp_table()), inputs


def precompiled_headers() -> AbstractContextManager[Any]:
    """Precompile all headers of a C++ file, once per machine: without the headers of its kernels,
    each file takes a third longer.
    """
    from torch._inductor.codecache import CppWrapperCodeCache

    find = CppWrapperCodeCache._get_uncompiled_header

    def headers(device: str) -> str | None:
        found = find(device)
        return found and f"{found}>\n#include <{KERNELS}"

    return patch.object(CppWrapperCodeCache, "_get_uncompiled_header", headers)
