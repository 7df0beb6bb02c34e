"""Compiled functions of trees.

One object per run compiles each function once and reports how each function runs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, final

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.fx import GraphModule, Node

from hgms.compiled import cuda_graphs as graphs
from hgms.compiled.cuda_graphs import Recording, Runner
from hgms.compiled.graph_code import Code, has_constants
from hgms.compiled.inductor import compile_graph
from hgms.compiled.library import KIND, Library, is_on_cpu, key_of, plain, software
from hgms.compiled.step_program import JoinedStep
from hgms.compiled.trace import Trace, arrangement, flatten, leaves_of, of_leaves, trace, unflatten
from hgms.compiled.verify import difference_nearby, difference_of
from hgms.config.code_cache import CodeCache
from hgms.lazy import avoid_compiler_import
from hgms_core import ConfigError, Pipeline, Problem, Record, State
from hgms_core.torch_errors import first_line

LOG = logging.getLogger("hgms.programs")
COMPILERS = ("cpu", "cuda", "mps", "xpu")
"""Device types for which torch's inductor generates code."""
LARGE = 100_000
"""Numbers that a function reads above which it is not compiled on a CPU if an outer step calls it
once. Its matrix products take most of the time, so compilation would save 1 % of the step
(784-300-10 network) and take 5 s.
"""
SHAPES = 8
"""Maximum number of argument shapes for which a function is compiled; further shapes run eagerly.
"""

Value = TypeVar("Value")


@final
@define(eq=False)
class Programs:
    """Compiler of the pure functions that components run often: ``problem.compiler`` of a run.

    ``programs(key, function)`` returns the function in its fastest form. This form is compiled at
    the first call per argument shape and stored under the key. The key must contain everything that
    the function reads in addition to its arguments. Arguments and results are tensors, None, and
    dictionaries, lists and tuples of such values (a tuple becomes a list).

    On a CPU, the form is a function compiled by torch's inductor. On a GPU, that function is
    recorded as a CUDA graph. If it cannot be recorded, its kernels are launched individually, and a
    warning is logged.

    A compiled function is compared once with the original function, on its first arguments. If the
    results differ or compilation fails, the function runs eagerly, and one warning reports the
    reason. Compilation fails, for example, if the function branches on the value of a tensor or no
    C++ compiler is available.

    ``seconds`` is the compilation time so far. ``waited`` is the same in wall time: a C++ compiler
    is a separate process, which this process's processor time excludes. ``outcomes`` reports how
    each function runs, by its name, which is the first element of its key. ``busy`` is whether a
    compilation is in progress.

    Parameters
    ----------
    clock
        The clock of ``seconds``.
    joins
        Whether steps of pipelines are compiled into one program each, if their parts permit it
        (:class:`hgms_core.capabilities.JoinsStep`).
    before
        Called with the name of a function before each part of its compilation. If it raises an
        exception, compilation ends and the exception propagates.

    Notes
    -----
    Cost: two calls of the function for the check. On a CPU, the next process loads the compiled
    function from disk (``$HGMS_CACHE``) without a trace, and repeats the check. On a GPU, it
    compiles it again, with torch's cache (``TORCHINDUCTOR_CACHE_DIR``).

    Source: torch.fx and torch.compile's inductor.

    Examples
    --------
    >>> programs = Programs()
    >>> halve = programs(("halve",), lambda tree: {"x": tree["x"] / 2 if tree["x"] > 1 else 0})
    >>> halve({"x": torch.tensor(3.0)})
    {'x': tensor(1.5000)}
    >>> programs.outcomes["halve"].startswith("eager: it cannot be traced")
    True
    """

    clock: Callable[[], float] = time.perf_counter
    before: Callable[[str], None] = lambda name: None
    joins: bool = True
    seconds: float = field(default=0.0, init=False)
    waited: float = field(default=0.0, init=False)
    outcomes: dict[str, str] = field(factory=dict, init=False)
    _kept: dict[Hashable, Any] = field(factory=dict, init=False)
    _last: tuple[Pipeline | None, Problem | None] = field(default=(None, None), init=False)
    _joined: JoinedStep | None = field(default=None, init=False)
    busy: bool = field(default=False, init=False)
    _reasons: set[str] = field(factory=set, init=False)

    def __call__(
        self, key: tuple[Hashable, ...], function: Callable[..., Any], once: bool = False
    ) -> Callable[..., Any]:
        return self.keep(("program", *key), lambda: _Shapes(self, key, function, once))

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of ``make()`` from the first call with this key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Count the time inside the context separately, as compilation time."""
        if self.busy:
            yield
            return
        begin = self.clock()
        since = time.perf_counter()
        collects = gc.isenabled()
        gc.disable()  # searches for garbage in the many objects of a graph take a tenth of the time
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
            if collects:
                gc.enable()
            self.seconds += self.clock() - begin
            self.waited += time.perf_counter() - since

    def step(
        self, pipeline: Pipeline, problem: Problem, state: State, progress: float
    ) -> tuple[State, Record] | None:
        """Run an outer step as one program. Without such a program, return None."""
        if not self.joins:
            return None
        last, of_last = self._last
        if last is not pipeline or of_last is not problem:
            rows = (problem.lower_data, *problem.upper_data.values())
            # The entry keeps references, so that its ids remain unique.
            key = ("step", id(pipeline), problem.f, problem.g, problem.project, *map(id, rows))
            self._joined, *_ = self.keep(
                key, lambda: (JoinedStep.of(self, pipeline, problem), pipeline, rows)
            )
            self._last = pipeline, problem
        return None if self._joined is None else self._joined(state, progress)

    def recall(
        self,
        names: Sequence[str],
        parts: tuple[Any, ...],
        leaves: Sequence[Tensor],
        make: Callable[[], Value | None],
        check: Callable[[Value], str],
    ) -> Value | None:
        """Return ``make()``, or its result in an earlier process with the same ``parts``.

        ``parts`` contain all code and settings that ``make`` reads, and ``leaves`` are the inputs
        of the functions with these ``names``. ``check`` returns how the results of a loaded program
        differ (empty if they agree); a different program is replaced.
        """
        if any(map(self.refuses, names)):
            return None
        with self.making():
            entry = _entry(parts, leaves)
            stored = None if entry is None else entry.load()
            known, outcomes = stored or (None, {})
            difference = "" if known is None else _outcome(check, known)
        if entry is None:
            return make()
        if known is not None and not difference:
            self.outcomes |= outcomes
            return known
        if difference:
            entry.file.delete()
            LOG.warning("the stored %s is replaced, since it differs: %s", names[0], difference)
        made = make()
        if made is not None:
            entry.store((made, {name: self.outcomes.get(name, "compiled") for name in names}))
        return made

    def build(
        self,
        name: str,
        graph: GraphModule,
        leaves: Sequence[Tensor],
        check: Callable[[Runner], str],
        **settings: Any,
    ) -> Runner | None:
        """Return the graph compiled for these inputs, or loaded from disk.

        ``check`` returns how the results differ (empty if they agree). ``settings`` are settings of
        inductor. If compilation fails or the results differ, the function runs eagerly.
        """
        if self.refuses(name):
            return None
        key = key_of(graph, leaves, settings) if is_on_cpu(leaves) else None
        stored = None if key is None else Library.load(key)

        def make() -> tuple[Runner, str, str]:
            run: Runner = stored or compile_graph(graph, leaves, **settings)
            recorded, unrecorded = _record_graph(run, graph, leaves)
            difference = check(recorded)
            if isinstance(run, Library) and key and not stored and not difference:
                run.store(key)
            return recorded, unrecorded, difference

        found = self.attempt(name, "compiled", make)
        if found is None:
            return None
        run, unrecorded, difference = found
        if difference:
            self.refuse(name, f"differs when it is compiled: {difference}")
            return None
        if unrecorded:
            LOG.warning("%s is launched kernel by kernel, which is slower: %s", name, unrecorded)
        self.outcomes.setdefault(name, "compiled")
        return run

    def traced(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        turned: bool = False,
    ) -> Trace | None:
        """Return the function as a graph.

        With ``turned``, rows of data are the last axis of large matrix products. The result is None
        if tracing fails or the graph computes a different result.
        """
        if self.refuses(name):
            return None
        leaves: list[Tensor] = []
        arranged = flatten(arguments, leaves)
        kinds = {leaf.device.type for leaf in leaves}.difference(COMPILERS)
        if kinds:
            self.refuse(name, f"cannot be compiled: torch has no compiler for {min(kinds)}")
            return None

        def make() -> tuple[Trace, str]:
            result = trace(function, arguments, turned)

            def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
                outputs: Sequence[Tensor] = result.graph(*inputs, *result.constants)
                return outputs

            return result, difference_nearby(of_leaves(function, arranged), run, leaves)

        found = self.attempt(name, "traced", make)
        if found is None:
            return None
        result, difference = found
        if difference:
            self.refuse(name, f"differs when it is traced: {difference}")
        return None if difference else result

    def compiled(
        self, name: str, graph: GraphModule, leaves: Sequence[Tensor], once: bool = False
    ) -> Runner | None:
        """Return the compiled graph for inputs of these shapes.

        A large graph that an outer step calls ``once`` is not compiled on a CPU. The result is None
        if compilation fails or the results differ.
        """
        if once and is_large(leaves) and not self.refuses(name):
            self.outcomes.setdefault(name, "traced")
            return partial(run_code, graph if has_constants(graph) else Code.of(graph))

        def check(run: Runner) -> str:
            return difference_of(lambda inputs: graph(*inputs), run, leaves)

        return self.build(name, graph, leaves, check)

    def attempt(self, name: str, what: str, make: Callable[[], Value]) -> Value | None:
        """Return ``make()``, timed. If it raises, return None: the function then runs eagerly."""
        self.before(name)
        try:
            with self.making():
                return make()
        except torch.OutOfMemoryError:
            raise
        except (Exception, SystemExit) as error:  # errors of a traced function, or of a compiler
            # A trace may lack a derivative that the eager loss supports.
            if isinstance(error, ConfigError) and error.code != "no-second-derivative":
                raise
            self.before(name)  # Ctrl-C also ends a C++ compiler, which is not a compilation failure
            self.refuse(name, f"cannot be {what}: {first_line(error)}")
        return None

    def refuses(self, name: str) -> bool:
        return self.outcomes.get(name, "").startswith("eager")

    def refuse(self, name: str, why: str) -> None:
        """Run the function of that name eagerly from now on.

        Each reason is logged once; a missing compiler affects every function.
        """
        self.outcomes[name] = f"eager: it {why}"
        if why in self._reasons:
            return
        self._reasons.add(why)
        LOG.warning(
            (
                "%s %s\n  it runs eagerly, which is slower; `run.compile = false` "
                "disables compilation"
            ),
            name,
            why,
        )


def _entry(parts: tuple[Any, ...], leaves: Sequence[Tensor]) -> CodeCache | None:
    """Return the place of a program on disk, on a CPU and for parts with readable code."""
    kinds = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]
    with contextlib.suppress(Exception):  # reading an object of a user can raise any
        if is_on_cpu(leaves):
            return CodeCache.of(KIND, parts, kinds, software(), ignored=(Programs,))
    return None


def _outcome(check: Callable[[Value], str], program: Value) -> str:
    """Return how a loaded program differs; an error counts as a difference."""
    avoid_compiler_import()
    try:
        return check(program)
    except Exception as error:
        return first_line(error)


def is_large(leaves: Sequence[Tensor]) -> bool:
    """Return whether a function of these inputs is compiled only if a step calls it often."""
    return is_on_cpu(leaves) and sum(leaf.numel() for leaf in leaves) > LARGE


@torch.no_grad()
def run_code(code: Code | GraphModule, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run a graph that is not compiled."""
    return list(code(*inputs))


@frozen(eq=False)
class _Form:
    """A function compiled for arguments of given shapes."""

    runner: Runner
    constants: tuple[Tensor, ...]
    structure: Any

    def outputs(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.runner([*leaves, *self.constants])


@define(eq=False)
class _Shapes:
    """Compiled forms of one function, by the shapes of its arguments."""

    _programs: Programs
    _key: tuple[Hashable, ...]
    _function: Callable[..., Any]
    _once: bool
    _runners: dict[Hashable, _Form | None] = field(factory=dict, init=False)

    def __call__(self, *arguments: Any) -> Any:
        leaves = leaves_of(arguments)
        shapes = (arrangement(arguments), *[(leaf.shape, leaf.dtype) for leaf in leaves])
        if shapes not in self._runners:
            self._runners[shapes] = self._find(arguments, leaves)
        known = self._runners[shapes]
        if known is None:
            return self._function(*arguments)
        return unflatten(known.structure, known.outputs(leaves))

    def _find(self, arguments: Sequence[Any], leaves: list[Tensor]) -> _Form | None:
        if len(self._runners) >= SHAPES or (self._once and is_large(leaves)):
            return None
        arranged = flatten(arguments, [])
        return self._programs.recall(
            [str(self._key[0])],
            (self._key, self._function, arranged),
            leaves,
            lambda: self._make(arguments, leaves),
            lambda found: difference_nearby(
                of_leaves(self._function, arranged), found.outputs, leaves
            ),
        )

    def _make(self, arguments: Sequence[Any], leaves: list[Tensor]) -> _Form | None:
        name = str(self._key[0])
        traced = self._programs.traced(name, self._function, arguments)
        if traced is None:
            return None
        runner = self._programs.compiled(name, traced.graph, [*leaves, *traced.constants])
        return runner and _Form(runner, traced.constants, traced.structure)


def _record_graph(
    program: Runner, graph: GraphModule, leaves: Sequence[Tensor]
) -> tuple[Runner, str]:
    """Return the function recorded as a CUDA graph.

    If recording is not possible, return the function unchanged and the reason. On a CPU, return it
    unchanged.
    """
    devices = _devices(graph, leaves)
    if not any(device.type in graphs.RECORDING for device in devices):
        return program, ""
    if len(devices) > 1:
        # A kernel receives a number on the CPU as an argument, and a recording would repeat the
        # number of the first call.
        return program, f"its numbers are on {' and '.join(sorted(map(str, devices)))}"
    try:
        return Recording(program, plain(leaves)), ""
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return program, first_line(error)


def _devices(graph: GraphModule, leaves: Sequence[Tensor]) -> set[torch.device]:
    """Return the devices of the inputs and of the values computed from them.

    A constant of the graph may be on any device.
    """
    devices = {leaf.device for leaf in leaves}
    varies: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or any(parent in varies for parent in node.all_input_nodes):
            varies.add(node)
            value = None if node.op == "placeholder" else node.meta.get("val")
            devices |= {value.device} if isinstance(value, Tensor) else set()
    return devices
