"""Pure functions of trees as compiled programs: one object for a run, that makes each program
once and says what it made.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar, final

import torch
from attrs import define, field
from torch import Tensor
from torch.fx import GraphModule, Node

from hgms.compiled import cuda_graphs as graphs
from hgms.compiled.cuda_graphs import Recording, Runner
from hgms.compiled.trace import Trace, arrangement, flatten, trace, unflatten
from hgms.compiled.verify import compared, moved
from hgms_core import ConfigError, Problem
from hgms_core.torch_errors import first_line

LOG = logging.getLogger("hgms.programs")
COMPILERS = ("cpu", "cuda", "mps", "xpu")
"""Types of devices for which torch's inductor generates code."""
SHAPES = 8
"""For how many shapes of its arguments a function is compiled; beyond, it runs as it is written."""

Value = TypeVar("Value")


@final
@define(eq=False)
class Programs:
    """What makes programs of the pure functions that components run often: ``problem.compiler`` of
    a run that compiles.

    ``programs(key, function)`` is the function in its fastest form, made at its first call for the
    shapes of its arguments and kept for the key, which must hold all that the function reads beside
    them. Arguments and results are tensors, None, dictionaries, lists and tuples of such (a tuple
    comes back as a list). On a CPU the form is a program of torch's inductor, on a GPU that program
    recorded as a CUDA graph (or launched kernel by kernel, with a warning, where it cannot be
    recorded).

    A program is checked once against the function, on its first arguments. Where it differs, or
    cannot be made (the function chooses by the value of a tensor, there is no C++ compiler), the
    function runs as it is written, and one warning says so.

    Arguments:
        clock: what ``seconds`` counts in.
        before: called with the name of a function before each part of the work on its program. An
            exception that it raises ends the work, and passes on.

    ``seconds`` is what making programs took so far, ``waited`` the same on the wall (a C++ compiler
    is a process of its own, which this one's processor time does not count); ``outcomes`` says by
    the name of each function, the first word of its key, how it runs.

    Cost: two calls of the function for the check. torch keeps compiled code on disk
    (``TORCHINDUCTOR_CACHE_DIR``), so the next process that asks for the same takes seconds.

    >>> programs = Programs()
    >>> double = programs(("double",), lambda tree: {"x": 2 * tree["x"]})
    >>> double({"x": torch.tensor([1.0, 3.0])})
    {'x': tensor([2., 6.])}
    >>> programs.outcomes
    {'double': 'compiled'}

    Source: torch.fx and torch.compile's inductor.
    """

    clock: Callable[[], float] = time.perf_counter
    before: Callable[[str], None] = lambda name: None
    seconds: float = field(default=0.0, init=False)
    waited: float = field(default=0.0, init=False)
    outcomes: dict[str, str] = field(factory=dict, init=False)
    _kept: dict[Hashable, Any] = field(factory=dict, init=False)
    _making: bool = field(default=False, init=False)
    _reasons: set[str] = field(factory=set, init=False)

    def __call__(
        self, key: tuple[Hashable, ...], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        return self.keep(("program", *key), lambda: _Shapes(self, str(key[0]), function))

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make()`` returned for the key when it was first asked for."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Inside, time is spent on making programs: it is counted apart."""
        if self._making:
            yield
            return
        self._making, begin, since = True, self.clock(), time.perf_counter()
        try:
            yield
        finally:
            self._making = False
            self.seconds += self.clock() - begin
            self.waited += time.perf_counter() - since

    def traced(
        self, name: str, function: Callable[..., Any], arguments: Sequence[Any]
    ) -> Trace | None:
        """The function as a graph; None where it cannot be traced, or the graph is another
        function.
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
            result = trace(function, arguments)
            # Elsewhere than where it was traced, so that nothing of that place can have become
            # part of the graph.
            elsewhere = moved(leaves, 0.01)
            expected: list[Tensor] = []
            flatten(function(*unflatten(arranged, elsewhere)), expected)
            return result, compared(result.graph(*elsewhere, *result.constants), expected)

        found = self.attempt(name, "traced", make)
        if found is None:
            return None
        result, difference = found
        if difference:
            self.refuse(name, f"differs when it is traced: {difference}")
        return None if difference else result

    def compiled(self, name: str, graph: GraphModule, leaves: Sequence[Tensor]) -> Runner | None:
        """A program of the graph for inputs of these shapes; None where it cannot be made, or
        differs.
        """
        if self.refuses(name):
            return None

        def make() -> tuple[Runner, str, str]:
            program, unrecorded = _recorded(_inductor(graph, leaves), graph, leaves)
            return program, unrecorded, compared(program(leaves), graph(*leaves), graph, leaves)

        found = self.attempt(name, "compiled", make)
        if found is None:
            return None
        program, unrecorded, difference = found
        if difference:
            self.refuse(name, f"differs when it is compiled: {difference}")
            return None
        if unrecorded:
            LOG.warning("%s is launched kernel by kernel, which is slower: %s", name, unrecorded)
        self.outcomes.setdefault(name, "compiled")
        return program

    def attempt(self, name: str, what: str, make: Callable[[], Value]) -> Value | None:
        """``make()``, timed; None if it raises, and the function then runs as it is written."""
        self.before(name)
        try:
            with self.making():
                return make()
        except torch.OutOfMemoryError:
            raise
        except (Exception, SystemExit) as error:  # of a function under trace, or of a compiler
            # a trace may lack a derivative that the eager loss has
            if isinstance(error, ConfigError) and error.code != "no-second-derivative":
                raise
            self.before(name)  # Ctrl-C ends a C++ compiler too, which is no reason to give up
            self.refuse(name, f"cannot be {what}: {first_line(error)}")
        return None

    @property
    def busy(self) -> bool:
        """Whether a program is being made."""
        return self._making

    def refuses(self, name: str) -> bool:
        return self.outcomes.get(name, "compiled") != "compiled"

    def refuse(self, name: str, why: str) -> None:
        """From now on the function of that name runs as it is written. One reason is said once:
        where there is no compiler, it is that of every function."""
        self.outcomes[name] = f"as written: it {why}"
        if why in self._reasons:
            return
        self._reasons.add(why)
        LOG.warning(
            (
                "%s %s\n  it runs as it is written, which is slower; `run.compile = false` "
                "compiles nothing"
            ),
            name,
            why,
        )


def programs_of(problem: Problem) -> Programs | None:
    """What compiles the steps of this problem; None where they run as they are written: the run
    compiles nothing, or the losses count what they do (:attr:`Problem.counters`), which a program
    would not.
    """
    compiler = problem.compiler if problem.counters is None else None
    return compiler if isinstance(compiler, Programs) else None


class _Shapes:
    """The programs of one function, by the shapes of its arguments."""

    def __init__(self, programs: Programs, name: str, function: Callable[..., Any]) -> None:
        self._programs = programs
        self._name = name
        self._function = function
        self._runners: dict[Hashable, tuple[Runner | None, tuple[Tensor, ...], Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        leaves: list[Tensor] = []
        flatten(arguments, leaves)
        shapes = (arrangement(arguments), *[(leaf.shape, leaf.dtype) for leaf in leaves])
        known = self._runners.get(shapes)
        if known is None:
            known = self._runners[shapes] = self._make(arguments, leaves)
        runner, constants, structure = known
        if runner is None:
            return self._function(*arguments)
        return unflatten(structure, runner([*leaves, *constants]))

    def _make(
        self, arguments: Sequence[Any], leaves: list[Tensor]
    ) -> tuple[Runner | None, tuple[Tensor, ...], Any]:
        if len(self._runners) >= SHAPES:
            return None, (), None
        traced = self._programs.traced(self._name, self._function, arguments)
        if traced is None:
            return None, (), None
        runner = self._programs.compiled(self._name, traced.graph, [*leaves, *traced.constants])
        return runner, traced.constants, traced.structure


def _inductor(graph: GraphModule, leaves: Sequence[Tensor]) -> Runner:
    """The graph compiled for contiguous inputs of these shapes."""
    from torch._inductor import standalone_compile

    examples: list[Any] = [
        leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in leaves
    ]
    # On a CPU all kernels of a program are one C++ file, compiled in this process: a file for each
    # takes twice as long, and a pool of processes longer to start.
    on_cpu = (
        {"compile_threads": 1, "cpp_wrapper": True}
        if all(leaf.device.type == "cpu" for leaf in leaves)
        else {}
    )
    # A GPU's programs are recorded by _recorded, whatever the environment asks of torch.
    with torch._inductor.config.patch({"triton.cudagraphs": False, **on_cpu}):
        module = GraphModule(torch.nn.Module(), graph.graph)
        program = standalone_compile(
            module, examples, dynamic_shapes="from_example_inputs", options={}
        )

    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = program(*_plain(inputs))
        return outputs

    return run


def _recorded(program: Runner, graph: GraphModule, leaves: Sequence[Tensor]) -> tuple[Runner, str]:
    """The program recorded as a CUDA graph; as it is, and why, where that is not possible. On a
    CPU as it is.
    """
    devices = _devices(graph, leaves)
    if not any(device.type in graphs.RECORDING for device in devices):
        return program, ""
    if len(devices) > 1:
        # A kernel takes a number of the CPU as an argument, and a recording would repeat the one
        # that it was recorded with.
        return program, f"its numbers are on {' and '.join(sorted(map(str, devices)))}"
    try:
        return Recording(lambda inputs: program(_plain(inputs)), _plain(leaves)), ""
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return program, first_line(error)


def _devices(graph: GraphModule, leaves: Sequence[Tensor]) -> set[torch.device]:
    """Where the inputs are, and what is computed from them. A constant of the graph may be
    anywhere.
    """
    devices = {leaf.device for leaf in leaves}
    varies: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or any(parent in varies for parent in node.all_input_nodes):
            varies.add(node)
            value = None if node.op == "placeholder" else node.meta.get("val")
            devices |= {value.device} if isinstance(value, Tensor) else set()
    return devices


def _plain(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers as contiguous tensors without a graph."""
    return [
        leaf.detach() if leaf.is_contiguous() else leaf.detach().contiguous() for leaf in leaves
    ]
