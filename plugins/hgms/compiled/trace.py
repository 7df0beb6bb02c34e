"""Trace a pure function of trees to a graph of tensor operations, and split the graph.

The split separates the operations that depend on selected inputs from all others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch._ops import OpOverload
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from hgms.config.code_cache import place_of

Structure = Any
"""Positions of the leaves in a value: None, ``...`` for a tensor, a list of structures, or a
dictionary of structures.
"""

aten = torch.ops.aten
LARGE_PRODUCT = 50_000_000
"""Multiply-adds of a matrix product that takes about a millisecond."""
MODE = "mode of a graph for inductor"
"""Key of ``graph.meta``: the mode of the tensors without numbers with which a graph was traced in
the operations that inductor supports.
"""
SMALL_PRODUCT = 50_000
"""Multiply-adds of a matrix product below which its call takes longer than its operations."""
LANES = 8
"""Numbers in a register."""
SAME = (aten.detach.default, aten.alias.default)
"""Operations that return their argument, provided that no gradient is computed afterwards and no
tensor changes in place.
"""


def flatten(value: Any, leaves: list[Tensor]) -> Structure:
    """Append the tensors in ``value`` to ``leaves`` and return the structure.

    ``value`` is a tensor, None, or a dictionary, list or tuple of such values.

    Examples
    --------
    >>> flatten({"a": torch.zeros(2), "b": [None]}, leaves := []), leaves
    ({'a': Ellipsis, 'b': [None]}, [tensor([0., 0.])])
    """
    if isinstance(value, Tensor):
        leaves.append(value)
        return ...
    if isinstance(value, dict):
        return {name: flatten(item, leaves) for name, item in value.items()}
    return None if value is None else [flatten(item, leaves) for item in value]


def leaves_of(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, in the order of :func:`flatten`."""
    leaves: list[Tensor] = []
    flatten(value, leaves)
    return leaves


def unflatten(structure: Structure, leaves: Sequence[Tensor]) -> Any:
    """Return the value with this structure and these leaves; a tuple becomes a list."""
    rest = iter(leaves)

    def build(part: Structure) -> Any:
        if part is ...:
            return next(rest)
        if isinstance(part, dict):
            return {name: build(item) for name, item in part.items()}
        return None if part is None else [build(item) for item in part]

    return build(structure)


def of_leaves(
    function: Callable[..., Any], structure: Structure
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function of arguments with this structure as a function of their leaves."""

    def flat(leaves: Sequence[Tensor]) -> list[Tensor]:
        return leaves_of(function(*unflatten(structure, leaves)))

    return flat


def arrangement(value: Any) -> Hashable:
    """Return a key that distinguishes values of different structure.

    The key contains names in their order, lengths, and the positions of None.

    Examples
    --------
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
    """``graph(*leaves, *constants)`` returns the leaves of the function's result.

    ``leaves`` are the leaves of the arguments. ``constants`` are the tensors that the function
    reads in addition to its arguments; each call reads their current values. ``structure`` is the
    structure of the result.
    """

    graph: GraphModule
    constants: tuple[Tensor, ...]
    structure: Structure


def trace(function: Callable[..., Any], arguments: Sequence[Any], turned: bool = False) -> Trace:
    """Return the tensor operations of ``function(*arguments)``, including its derivatives.

    ``turned`` is whether rows of data are the last axis of matrix products.

    Raises
    ------
    HgmsError
        The error of the function or of torch if tracing fails, for example because the function
        branches on the value of a tensor.

    Notes
    -----
    Source: torch.fx; the derivatives are traced, compiled code is not differentiated.
    """
    leaves: list[Tensor] = []
    arranged = flatten(tuple(arguments), leaves)
    leaves = apart(leaves)
    structure: Structure = None

    def flat(*inputs: Tensor) -> list[Tensor]:
        nonlocal structure
        outputs: list[Tensor] = []
        structure = flatten(function(*unflatten(arranged, inputs)), outputs)
        return [output.detach() for output in outputs]

    graph, constants = lift_constants(
        _as_graph(flat, leaves, turned_products() if turned else KNOWN)
    )
    return Trace(graph, constants, structure)


def without_mutations(
    graph: GraphModule, inputs: Sequence[Tensor], table: dict[Any, Callable[..., Any]] | None = None
) -> GraphModule:
    """Return the graph without in-place operations and without repeated operations.

    Parts of the graph can then share the values that they read. ``table`` replaces operations of a
    graph with in-place operations.
    """
    pure = retrace(graph, apart(inputs), table or KNOWN) if mutates(graph) else graph
    return without_repetitions(pure)


def retrace(
    graph: GraphModule, inputs: Sequence[Tensor], table: dict[Any, Callable[..., Any]]
) -> GraphModule:
    """Return the graph with the replacements of ``table`` and without in-place operations."""
    pure = functionalize(graph, remove="mutations") if mutates(graph) else graph
    traced, constants = lift_constants(_as_graph(pure, inputs, table))
    assert not constants, "a graph whose constants are inputs has no other"
    return traced


def mutates(graph: GraphModule) -> bool:
    """Return whether the graph changes a tensor in place."""
    return any(map(_changes_its_argument, graph.graph.nodes))


def _changes_its_argument(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _as_graph(
    function: Callable[..., Any], inputs: Sequence[Tensor], table: dict[Any, Callable[..., Any]]
) -> GraphModule:
    traced = make_fx(function, table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    return without_changes_of_new_tensors(traced)


def without_changes_of_new_tensors(graph: GraphModule) -> GraphModule:
    """Replace in-place operations on new tensors without another view, and return the graph.

    A derivative in forward mode copies its direction into new zeros, and that of a softmax divides
    a new sum. Without this replacement, such a graph is traced again.
    """
    if not mutates(graph):
        return graph
    for node in list(graph.graph.nodes):
        if node.target in SAME:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    viewed: set[Node] = set()
    for node in place:
        if _changes_its_argument(node) and _is_new(node.args[0], node, viewed):
            changed: Node = node.args[0]
            node.target = _functional(node.target)
            later = {user for user in changed.users if place[user] > place[node]}
            changed.replace_all_uses_with(node, delete_user_cb=later.__contains__)
        if _returns_view(node):
            viewed.update(node.all_input_nodes)
    graph.recompile()
    return graph


def _is_new(changed: Any, node: Node, viewed: set[Node]) -> bool:
    """Return whether an operation allocates a tensor that has no other view before ``node``.

    The inputs of ``node`` must have the same type; otherwise its result may have another one.
    """
    return (
        isinstance(changed, Node)
        and changed not in viewed
        and isinstance(changed.target, OpOverload)
        and not _returns_view(changed)
        and len({parent.meta["val"].dtype for parent in node.all_input_nodes}) == 1
    )


def _returns_view(node: Node) -> bool:
    """Return whether a result can share the memory of an input."""
    if not isinstance(node.target, OpOverload) or node.target == aten._unsafe_view.default:
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _functional(operation: OpOverload) -> OpOverload:
    """Return the operation that returns the value instead of changing its argument."""
    name = operation._schema.name.removeprefix("aten::").removesuffix("_")
    pure: OpOverload = getattr(getattr(aten, name), operation._overloadname)
    return pure


def _norms(
    leaves: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return [torch.linalg.vector_norm(leaf, order, dtype=dtype) for leaf in leaves]


def _view(a: Tensor, shape: Sequence[int]) -> Tensor:
    """View a product with another memory layout."""
    return NotImplemented if a.is_contiguous() else aten.view.default(a.contiguous(), shape)


def turn(a: Tensor, b: Tensor) -> Tensor:
    """Return the product as the transpose of a product with rows of data as the last axis."""
    return (b.mT @ a.mT).mT


def is_narrow(a: Tensor, b: Tensor) -> bool:
    """Return whether the columns of a product do not fill the registers of a CPU.

    Torch's linear algebra library multiplies its transpose faster: on an AMD EPYC, 128 × 300 × 10
    takes 0.10 ms, and its transpose 0.02 ms.
    """
    m = a.shape[-2]
    n = b.shape[-1]
    on_cpu = a.device.type == "cpu" and a.dtype in (torch.float32, torch.float64)
    return on_cpu and n % LANES != 0 and n < m and m * a.shape[-1] * n > SMALL_PRODUCT


def products(turns: Callable[[Tensor, Tensor], bool]) -> dict[Any, Callable[..., Any]]:
    """Return replacements of the products of two matrices for which ``turns`` is true."""

    def mm(a: Tensor, b: Tensor) -> Tensor:
        if a.numel() > 1 and not any(a.stride()):  # one number, such as a direction of zeros
            return (a[..., :1, :1] * b.sum(-2, keepdim=True)).expand(*a.shape[:-1], -1)
        return turn(a, b) if turns(a, b) else NotImplemented

    def addmm(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
        return beta * c + alpha * turn(a, b) if turns(a, b) else NotImplemented

    return {aten.mm.default: mm, aten.bmm.default: mm, aten.addmm.default: addmm}


KNOWN: dict[Any, Callable[..., Any]] = {
    aten._foreach_norm.Scalar: _norms,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    **products(is_narrow),
}
"""Operations in terms of others that torch's inductor supports, or that are faster."""


def turned_products() -> dict[Any, Callable[..., Any]]:
    """Return replacements that make the rows of data the last axis of products and activations.

    They apply from the first large product on. On an AMD EPYC, a Hessian product takes 0.84 times
    as long for 5,000 rows of a 784-300-10 network, but 1.4 times for 600 rows of 64-32-10.
    """
    large = False

    def turns(a: Tensor, b: Tensor) -> bool:
        nonlocal large
        large = large or a.numel() * b.shape[-1] >= LARGE_PRODUCT
        return (large and a.shape[-2] > b.shape[-1]) or is_narrow(a, b)

    return {**KNOWN, **products(turns)}


def apart(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the values that share no memory, also within a tensor.

    Two tensors, or the numbers of an expanded tensor, that are equal in this call can differ in the
    next call.
    """
    places = set()
    separate = []
    for leaf in leaves:
        place = leaf.untyped_storage()._cdata
        shares = place in places or 0 in leaf.stride()
        separate.append(leaf.detach().clone() if shares else leaf.detach())
        places.add(place)
    return separate


def lift_constants(
    traced: GraphModule, first: bool = False
) -> tuple[GraphModule, tuple[Tensor, ...]]:
    """Return the graph with its tensors as additional inputs, and these tensors.

    They are the last inputs, or the ``first`` inputs.
    """
    graph = traced.graph
    constants: dict[Any, tuple[Node, Tensor]] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    last = inputs[-1]
    for node in list(graph.nodes):
        value = getattr(traced, node.target) if node.op == "get_attr" else None
        if not isinstance(value, Tensor):  # a graph of a loop is no input
            continue
        key = place_of(value)
        if key not in constants:
            place = graph.inserting_before(inputs[0]) if first else graph.inserting_after(last)
            with place:
                last = graph.placeholder(f"constant_{len(constants)}")
            constants[key] = (last, value)
        node.replace_all_uses_with(constants[key][0])
        graph.erase_node(node)
    return GraphModule(traced, graph), tuple(tensor.detach() for _, tensor in constants.values())


def without_repetitions(whole: GraphModule) -> GraphModule:
    """Return the graph with each operation on the same inputs only once.

    All operations are pure, except random draws. Operations without effect are removed: inductor
    would make two copies of a matrix that is transposed twice.
    """
    fresh = Graph()
    copies: dict[Node, Node] = {}
    known: dict[Any, Node] = {}
    for node in whole.graph.nodes:
        draws = (
            isinstance(node.target, OpOverload)
            and torch.Tag.nondeterministic_seeded in node.target.tags
        )
        if node.op != "call_function" or draws:
            copies[node] = fresh.node_copy(node, copies.__getitem__)
            continue
        if node.target in SAME:
            copies[node] = copies[node.args[0]]
            continue
        if _is_transposition(node) and _is_transposition(copies[node.args[0]]):
            copies[node] = copies[node.args[0]].all_input_nodes[0]
            continue
        arguments = torch.fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        key = (node.target, repr(arguments))
        if key not in known:
            known[key] = fresh.node_copy(node, copies.__getitem__)
        copies[node] = known[key]
    fresh.eliminate_dead_code()
    return GraphModule(whole, fresh)


def _is_transposition(node: Node) -> bool:
    return (node.target, *node.args[1:]) in (
        (aten.t.default,),
        (aten.transpose.int, -2, -1),
        (aten.permute.default, [1, 0]),
    )


@frozen(eq=False)
class Split:
    """A graph in two parts: operations that depend on the late inputs, and all others.

    ``before(*inputs)``, called without the late inputs, returns the first outputs and then the
    stored values. ``after[i](*kept_i, *late)`` returns group i of the other outputs. ``kept[i]``
    contains the positions of the values that group i needs in ``[*inputs, *values]``.
    """

    before: GraphModule
    after: tuple[GraphModule, ...]
    kept: tuple[tuple[int, ...], ...]


def split(graph: GraphModule, late: range, groups: Sequence[int]) -> Split:
    """Split ``graph`` by the inputs with the positions ``late``.

    ``groups`` are the sizes of the groups of outputs that may depend on these inputs. These outputs
    are the last outputs of the graph.

    A view of another value is recomputed on the other side, so no value is stored twice.
    """
    nodes = list(graph.graph.nodes)
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
        after.append(_part(graph, reached, [*needed, *(inputs[i] for i in late)], wanted))
        kept.append(tuple(place[node] for node in needed))
    before = [*outputs[: len(outputs) - sum(groups)], *values]
    return Split(
        _part(graph, _behind(before, lambda node: True), early, before), tuple(after), tuple(kept)
    )


def _is_view(node: Node) -> bool:
    return node.op == "get_attr" or (
        node.op == "call_function" and isinstance(node.target, OpOverload) and node.target.is_view
    )


def _behind(wanted: Sequence[Node], through: Callable[[Node], bool]) -> set[Node]:
    """Return ``wanted`` and all nodes that they depend on, following nodes for which ``through`` is
    true.
    """
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
    whole: GraphModule, reached: set[Node], inputs: Sequence[Node], outputs: Sequence[Node]
) -> GraphModule:
    """Return the operations of ``reached`` as a graph from ``inputs`` to ``outputs``.

    ``inputs`` may be any nodes of ``reached``.
    """
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in whole.graph.nodes:
        if node in reached and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    return GraphModule(whole, graph)
