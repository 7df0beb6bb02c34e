"""A pure function of trees as a graph of tensor operations, and that graph split by what depends
on some of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

Structure = Any
"""Where the leaves of a value belong: None, ``...`` for a tensor, a list of structures, or a
dictionary of them.
"""

SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Operations that return their argument, where nothing is differentiated any more and nothing
changed in place.
"""


def flatten(value: Any, leaves: list[Tensor]) -> Structure:
    """Appends the tensors in ``value`` (a tensor, None, or a dictionary, list or tuple of such) to
    ``leaves``.

    >>> flatten({"a": torch.zeros(2), "b": [None]}, leaves := []), leaves
    ({'a': Ellipsis, 'b': [None]}, [tensor([0., 0.])])
    """
    if isinstance(value, Tensor):
        leaves.append(value)
        return ...
    if isinstance(value, dict):
        return {name: flatten(item, leaves) for name, item in value.items()}
    return None if value is None else [flatten(item, leaves) for item in value]


def unflatten(structure: Structure, leaves: Sequence[Tensor]) -> Any:
    """The value with that structure and these leaves; a tuple comes back as a list."""
    rest = iter(leaves)

    def build(part: Structure) -> Any:
        if part is ...:
            return next(rest)
        if isinstance(part, dict):
            return {name: build(item) for name, item in part.items()}
        return None if part is None else [build(item) for item in part]

    return build(structure)


def arrangement(value: Any) -> Hashable:
    """What tells values of different structure apart: names in their order, lengths, and where
    there is None.

    >>> arrangement(({"a": torch.zeros(2), "b": [None]}, None))
    (('a', 'b', True, (False,)), False)
    """
    if isinstance(value, dict):
        return (
            *value,
            *[True if isinstance(item, Tensor) else arrangement(item) for item in value.values()],
        )
    if isinstance(value, list | tuple):
        return tuple([True if isinstance(item, Tensor) else arrangement(item) for item in value])
    return value is not None


@frozen(eq=False)
class Trace:
    """``graph(*leaves, *constants)`` gives the leaves of what the function returns for arguments
    with these ``leaves``.

    ``constants`` are the tensors that the function reads beside its arguments; they are read anew
    at every call. ``structure`` is that of the result.
    """

    graph: GraphModule
    constants: tuple[Tensor, ...]
    structure: Structure


def trace(function: Callable[..., Any], arguments: Sequence[Any]) -> Trace:
    """The tensor operations of ``function(*arguments)``, derivatives in it included.

    Errors: whatever the function or torch raises where it cannot be traced: it chooses by the value
        of a tensor, say.

    Source: torch.fx; the derivatives are traced, not compiled code differentiated.
    """
    leaves: list[Tensor] = []
    arranged = flatten(tuple(arguments), leaves)
    leaves = _apart(leaves)
    structure: Structure = None

    def flat(*inputs: Tensor) -> list[Tensor]:
        nonlocal structure
        outputs: list[Tensor] = []
        structure = flatten(function(*unflatten(arranged, inputs)), outputs)
        return [output.detach() for output in outputs]

    graph, constants = _lifted(_as_graph(flat, leaves))
    return Trace(graph, constants, structure)


def without_mutations(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """The same operations, none in place and none twice, so that parts of the graph can share
    what they read.
    """
    pure, constants = _lifted(_as_graph(functionalize(graph, remove="mutations"), _apart(inputs)))
    assert not constants, "a graph whose constants are inputs has no other"
    operations = _without_repetitions(pure.graph)
    operations.eliminate_dead_code()
    return GraphModule(torch.nn.Module(), operations)


def _as_graph(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    known = {torch.ops.aten._foreach_norm.Scalar: _norms}  # inductor has no code for it
    return make_fx(function, known, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def _norms(
    leaves: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return [torch.linalg.vector_norm(leaf, order, dtype=dtype) for leaf in leaves]


def _apart(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The same values, none of which shares memory with another: what is equal now need not be
    at the next call.
    """
    places = set()
    apart = []
    for leaf in leaves:
        place = leaf.untyped_storage()._cdata
        apart.append(leaf.detach().clone() if place in places else leaf.detach())
        places.add(place)
    return apart


def _lifted(traced: GraphModule) -> tuple[GraphModule, tuple[Tensor, ...]]:
    """The graph with the tensors it holds as further inputs, and these tensors."""
    graph = traced.graph
    constants: dict[Any, tuple[Node, Tensor]] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in constants:
            with graph.inserting_after(last):
                last = graph.placeholder(f"constant_{len(constants)}")
            constants[node.target] = (last, getattr(traced, node.target))
        node.replace_all_uses_with(constants[node.target][0])
        graph.erase_node(node)
    return GraphModule(torch.nn.Module(), graph), tuple(
        tensor.detach() for _, tensor in constants.values()
    )


def _without_repetitions(graph: Graph) -> Graph:
    """The same graph in which every operation on the same inputs is there once. Operations are
    pure, but for random draws.
    """
    fresh = Graph()
    copies: dict[Node, Node] = {}
    known: dict[Any, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(
            node.target, "tags", ()
        ):
            copies[node] = fresh.node_copy(node, copies.__getitem__)
            continue
        if node.target in SAME:
            copies[node] = copies[node.args[0]]
            continue
        arguments = torch.fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        key = (node.target, repr(arguments))
        if key not in known:
            known[key] = fresh.node_copy(node, copies.__getitem__)
        copies[node] = known[key]
    return fresh


@frozen(eq=False)
class Split:
    """A graph in two: what does not depend on some inputs, the late ones, and what does.

    ``before(*inputs)``, the late ones left out, gives the outputs that come first, then values that
    are kept; ``after[i](*kept_i, *late)`` gives the i-th group of the other outputs. ``kept[i]``
    numbers what group i needs among ``[*inputs, *values]``."""

    before: GraphModule
    after: tuple[GraphModule, ...]
    kept: tuple[tuple[int, ...], ...]


def split(graph: Graph, late: range, groups: Sequence[int]) -> Split:
    """``graph`` split by the inputs numbered by ``late``; ``groups`` are the sizes of the groups of
    outputs that may depend on them, the last ones of the graph's.

    What is only another view of a value is made again on the other side, so that no value is kept
    twice.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    early = [node for i, node in enumerate(inputs) if i not in late]
    outputs: list[Node] = list(nodes[-1].args[0])
    depends = {inputs[i] for i in late}
    for node in nodes:
        if node.op != "output" and any(parent in depends for parent in node.all_input_nodes):
            depends.add(node)

    first = len(outputs) - sum(groups)
    place = {node: i for i, node in enumerate(early)}
    values: list[Node] = []
    after = []
    kept = []
    for size in groups:
        wanted = outputs[first : first + size]
        first = first + size
        reached = _behind(wanted, lambda node: node in depends or _is_view(node))
        needed = [
            node for node in nodes if node in reached and node not in depends and not _is_view(node)
        ]
        for node in needed:
            if node not in place:
                place[node] = len(early) + len(values)
                values.append(node)
        after.append(_part(nodes, reached, [*needed, *(inputs[i] for i in late)], wanted))
        kept.append(tuple(place[node] for node in needed))
    before = [*outputs[: len(outputs) - sum(groups)], *values]
    return Split(
        _part(nodes, _behind(before, lambda node: True), early, before), tuple(after), tuple(kept)
    )


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "is_view", False)


def _behind(wanted: Sequence[Node], through: Callable[[Node], bool]) -> set[Node]:
    """``wanted``, and all that they are made of, as far as ``through`` goes on."""
    reached = set(wanted)
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        fresh = (
            [parent for parent in node.all_input_nodes if parent not in reached]
            if through(node)
            else []
        )
        reached.update(fresh)
        waiting += fresh
    return reached


def _part(
    nodes: Sequence[Node], reached: set[Node], inputs: Sequence[Node], outputs: Sequence[Node]
) -> GraphModule:
    """The operations of ``reached`` from ``inputs``, which may be any of them, to ``outputs``."""
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        if node in reached and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    return GraphModule(torch.nn.Module(), graph)
