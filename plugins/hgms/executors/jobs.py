"""Jobs, and how they end: what the programs ask of an executor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

from attrs import field, frozen

from hgms.runs import RunSettings
from hgms_core import ConfigError, HgmsError, errors
from hgms_core.validators import at_least, greater_than, optional

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

    cpus: int = field(default=1, validator=at_least(1))
    gpus: int = field(default=0, validator=at_least(0))
    memory: int | None = field(default=None, validator=optional(greater_than(0)))
    hours: float | None = field(default=None, validator=optional(greater_than(0)))

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
    """How a job ended: with the ``outcome`` that its function returned; with the ``error`` that it
    raised, and would raise again; or ``lost``: the reason why its worker is gone.
    """

    job: Job
    outcome: Mapping[str, Any] | None = None
    error: HgmsError | None = None
    lost: str = ""

    @property
    def failure(self) -> HgmsError:
        """The error, or the error ``worker-lost`` of a job whose worker is gone."""
        return self.error or HgmsError("worker-lost", self.lost)


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


def as_error(error: Exception) -> HgmsError:
    """Return an HgmsError unchanged, and another exception as the error ``unexpected-error``.

    >>> print(as_error(KeyError("a")))
    KeyError: 'a'
    """
    if isinstance(error, HgmsError):
        return error
    return HgmsError("unexpected-error", f"{type(error).__name__}: {error}".rstrip(": "))


def pack_error(error: HgmsError) -> dict[str, Any]:
    """Return an error as plain values, as JSON holds them.

    >>> unpack_error(pack_error(ConfigError("wrong-value", "lr=0", place=("outer", 0))))
    ConfigError('lr=0')
    """
    # other machines may lack the class of a plugin
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    if isinstance(error, errors.ErrorGroup):
        return {"class": name, "errors": [pack_error(member) for member in error.errors]}
    return {"class": name, **error.as_dict()}


def unpack_error(packed: Mapping[str, Any]) -> HgmsError:
    """Return the error that :func:`pack_error` has packed."""
    arguments = dict(packed)
    cls: type[HgmsError] = getattr(errors, arguments.pop("class"))
    if "errors" in arguments:
        return errors.ErrorGroup([unpack_error(member) for member in arguments["errors"]])
    return cls(**{**arguments, "place": tuple(arguments["place"])})


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
            "other-installation",
            f"the worker cannot import {name}: {error}",
            place=(name,),
            hint="install the same packages as on this machine",
        ) from error
    return function
