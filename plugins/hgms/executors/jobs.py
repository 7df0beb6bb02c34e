"""Jobs, and how they end: what the programs ask of an executor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

from attrs import field, frozen, validators

from hgms.runs import RunSettings
from hgms_core import ConfigError, HgmsError

Tell = Callable[..., None]
"""``tell(event="step", share=0.5, …)``: what a function under way has to say; plain values, as
JSON holds them.
"""


@frozen(kw_only=True)
class Needs:
    """What a job takes while it runs. ``memory`` in bytes, ``hours`` of wall time; None: nobody
    knows, so nobody is told.

    >>> Needs(cpus=2, memory=2**30)
    Needs(cpus=2, gpus=0, memory=1073741824, hours=None)
    """

    cpus: int = field(default=1, validator=validators.ge(1))
    gpus: int = field(default=0, validator=validators.ge(0))
    memory: int | None = field(default=None, validator=validators.optional(validators.gt(0)))
    hours: float | None = field(default=None, validator=validators.optional(validators.gt(0)))

    @classmethod
    def of_run(cls, settings: RunSettings) -> Needs:
        """What a run takes: its threads, or a GPU, for each of its ranks."""
        cpus = settings.threads or 1
        gpus = int(settings.device.startswith("cuda"))
        return cls(cpus=settings.ranks * cpus, gpus=settings.ranks * gpus)


@frozen(kw_only=True, eq=False)
class Job:
    """A function to be called somewhere, by its name: ``"package.module:function"``, called as
    ``function(arguments, tell)``. ``arguments`` and what it returns are plain values, as JSON holds
    them: no pickle travels. It must be safe to call once more after a process in which it ran is
    gone. ``prepare`` names a function that a worker which waits may call with the arguments of any
    job of a batch, to load what all of them need. ``code`` are modules and files that must be the
    same there as here.

    >>> Job(title="one", function="builtins:dict", arguments={}).function
    'builtins:dict'
    """

    title: str
    function: str
    arguments: Mapping[str, Any]
    needs: Needs = Needs()
    prepare: str = ""
    code: tuple[str, ...] = ()


@frozen(kw_only=True)
class Ending:
    """How a job ended: with what its function returned; with the ``error`` that it raised, which it
    would raise again; or ``lost``: whoever carried it out is gone, and this says why.
    """

    job: Job
    outcome: Mapping[str, Any] | None = None
    error: str = ""
    lost: str = ""


Report = Callable[[Job, Mapping[str, Any]], None]
"""``report(job, event)``: what a job under way told; ``{"event": "look"}`` from an executor that
hears nothing of it.
"""


class Executor(Protocol):
    """Carries out jobs somewhere: in processes of this machine, on a cluster. A class with a
    ``name``, registered by the hook ``hgms_register_executors``; its fields are settings (``--set
    executor.FIELD=VALUE``), and ``jobs`` is one of them: how many at a time, None where a person
    did not say.

    The folders of runs, on a disk that all machines share, are the only truth: an executor
    remembers nothing, and who it has lost is found there.
    """

    name: ClassVar[str]

    def carry_out(self, jobs: Iterable[Job], report: Report) -> Iterator[Ending]:
        """The endings of all jobs, as they come; one that fails stops no other.

        ``jobs`` gives those that may begin now, each once, and may give more whenever it is
        iterated again: take a job when there is room for it, not before. A KeyboardInterrupt inside
        lets every job finish its step and save it, within a minute, and goes on upwards.
        """
        ...

    def close(self) -> None:
        """Lets go of everything: workers that are still there end."""
        ...


def described(error: Exception) -> str:
    """An error as whoever asked for the job is told of it: ours are sentences, of others the type
    is said.

    >>> described(ConfigError("no such data")), described(KeyError("a"))
    ('no such data', "KeyError: 'a'")
    """
    return (
        str(error)
        if isinstance(error, HgmsError)
        else f"{type(error).__name__}: {error}".rstrip(": ")
    )


def called(name: str) -> Callable[[Mapping[str, Any], Tell], Mapping[str, Any]]:
    """The function of a job.

    >>> called("hgms.executors.jobs:called") is called
    True
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"a worker has no {name}: {error}\n  give it the same installation as this machine's"
        ) from error
    return function
