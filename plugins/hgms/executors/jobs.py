"""Jobs, how they end, and the interface of an executor."""

from __future__ import annotations

import pkgutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

from attrs import Factory, define, evolve, field, frozen

from hgms.runs import RunSettings
from hgms_core import ConfigError, HgmsError, errors
from hgms_core.validators import at_least

Tell = Callable[..., None]
"""``tell(event="step", share=0.5, …)``: report progress from a running function, as plain JSON
values.
"""


@frozen(kw_only=True)
class Needs:
    """Resources of a running job.

    Examples
    --------
    >>> Needs(cpus=2)
    Needs(cpus=2, gpus=0)
    """

    cpus: int = field(default=1, validator=at_least(1))
    gpus: int = field(default=0, validator=at_least(0))

    @classmethod
    def of_run(cls, settings: RunSettings) -> Needs:
        """Return the resources of a run: its threads, or a GPU, for each of its ranks."""
        cpus = settings.threads or 1
        gpus = int(settings.device.startswith("cuda"))
        return cls(cpus=settings.ranks * cpus, gpus=settings.ranks * gpus)


@frozen(kw_only=True, eq=False)
class Job:
    """A function to call in some process, identified by ``"package.module:function"``.

    It is called as ``function(arguments, tell)``. ``arguments`` and the returned value are plain
    JSON values, so no pickle is sent. A second call must be safe after the first process ended
    early.

    Examples
    --------
    >>> Job(title="one", function="builtins:dict", arguments={}).function
    'builtins:dict'
    """

    title: str
    function: str
    arguments: Mapping[str, Any]
    needs: Needs = Needs()


@frozen(kw_only=True)
class Ending:
    """How a job ended, in one of three ways.

    ``outcome`` is the value that its function returned. ``error`` is the error that it raised, and
    that a retry would raise too. ``lost`` is the reason for the loss of its worker.
    """

    job: Job
    outcome: Mapping[str, Any] | None = None
    error: HgmsError | None = None
    lost: str = ""

    @classmethod
    def of(cls, job: Job, result: Mapping[str, Any]) -> Ending:
        """Return the ending of a job from the message that contains its outcome or its error.

        Raises
        ------
        ConfigError
            If the machine rejected the job, because every other job would fail too.
        """
        if "rejected" in result:
            raise unpack_error(result["rejected"])
        return cls(
            job=job,
            outcome=result.get("outcome"),
            error=unpack_error(result["error"]) if "error" in result else None,
        )

    @property
    def failure(self) -> HgmsError:
        """Return the error; for a lost worker, the error ``worker-lost``."""
        return self.error or HgmsError("worker-lost", self.lost)


Report = Callable[[Job, Mapping[str, Any]], None]
"""``report(job, event)``: an event of a running job."""


class Executor(Protocol):
    """Interface of executors: run jobs in processes of this machine, or on a cluster.

    An executor is a class with a ``name``, registered by the hook ``hgms_register_executors``. Its
    fields are settings (``--set executor.FIELD=VALUE``). One of the fields is ``jobs``: the number
    of simultaneous jobs, or None if the user did not set it.

    All state is in the folders of the runs, on a disk that all machines share. An executor stores
    no state, and lost workers are detected from the folders.
    """

    name: ClassVar[str]

    def carry_out(self, jobs: Iterable[Job], report: Report) -> Iterator[Ending]:
        """Yield the endings of all jobs as they arrive; a failed job does not stop the others.

        ``jobs`` yields each job that may start now, once. It may yield more jobs when it is
        iterated later, so take a job only when a worker is free. After a KeyboardInterrupt inside,
        every job finishes its step and saves it, within a minute; then the exception propagates.
        """

    def close(self) -> None:
        """Release all resources: remaining workers end."""


def as_error(error: Exception) -> HgmsError:
    """Return an HgmsError unchanged, and another exception as the error ``unexpected-error``.

    Examples
    --------
    >>> print(as_error(KeyError("a")))
    KeyError: 'a'
    """
    if isinstance(error, HgmsError):
        return error
    return HgmsError("unexpected-error", f"{type(error).__name__}: {error}".rstrip(": "))


def pack_error(error: HgmsError) -> dict[str, Any]:
    """Return an error as values that JSON can store.

    Examples
    --------
    >>> unpack_error(pack_error(ConfigError("wrong-value", "lr=0", place=("outer", 0))))
    ConfigError('lr=0')
    """
    # Other machines may lack the class of a plugin.
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    if isinstance(error, errors.ErrorGroup):
        return {"class": name, "errors": [pack_error(member) for member in error.errors]}
    return {"class": name, **error.as_dict()}


def unpack_error(packed: Mapping[str, Any]) -> HgmsError:
    """Return the error from the values of :func:`pack_error`."""
    arguments = dict(packed)
    cls: type[HgmsError] = getattr(errors, arguments.pop("class"))
    if "errors" in arguments:
        return errors.ErrorGroup([unpack_error(member) for member in arguments["errors"]])
    return cls(**{**arguments, "place": tuple(arguments["place"])})


def function_of(name: str) -> Callable[[Mapping[str, Any], Tell], Mapping[str, Any]]:
    """Return the function of a job.

    Examples
    --------
    >>> function_of("hgms.executors.jobs:function_of") is function_of
    True
    """
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "other-installation",
            f"the worker cannot import {name}: {error}",
            place=(name,),
            hint="install the same packages as on this machine",
        ) from error
    return function


@define(eq=False)
class Here:
    """Executor that runs one job after another in this process; the default of programs.

    Examples
    --------
    >>> job = Job(title="a pair", function="hgms.executors.local:echo", arguments={"number": 2})
    >>> [ending.outcome for ending in Here().carry_out([job], lambda job, event: None)]
    [{'number': 2}]
    """

    name: ClassVar[str] = "here"

    def carry_out(self, jobs: Iterable[Job], report: Report) -> Iterator[Ending]:
        for job in jobs:
            try:
                outcome = function_of(job.function)(
                    job.arguments, lambda _job=job, **event: report(_job, event)
                )
            except Exception as error:
                yield Ending(job=job, error=as_error(error))
            else:
                yield Ending(job=job, outcome=outcome)

    def close(self) -> None:
        pass


TRIES = 3
"""Number of lost workers after which a job fails: the job itself is then the likely cause."""


def run_with_retries(
    executor: Executor,
    jobs: Iterable[Job],
    report: Report = lambda job, event: None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Ending]:
    """Yield the endings of all ``jobs`` as they arrive; ``jobs`` yields each job once.

    A job with a lost worker is retried, up to TRIES runs in total. ``say`` receives one line per
    loss.
    """
    losses = Counter[Job]()
    left = _Left(others=jobs)
    begun = False
    while not begun or left.lost:
        begun = True
        for ending in executor.carry_out(left, report):
            if not ending.lost:
                yield ending
                continue
            losses[ending.job] += 1
            if losses[ending.job] < TRIES:
                say(f"{ending.job.title}: {ending.lost}; it is retried")
                left.lost.append(ending.job)
            else:
                yield evolve(ending, lost=f"{ending.lost}, for the {TRIES}rd time")


@define(eq=False)
class _Left:
    """Waiting jobs, lost jobs first. Each job is taken once, even with several iterations."""

    others: Iterable[Job]
    lost: deque[Job] = Factory(deque)

    def __iter__(self) -> Iterator[Job]:
        while self.lost:
            yield self.lost.popleft()
        others = iter(self.others)
        # `yield from` would close the generator together with the first iterator of this object.
        while (job := next(others, None)) is not None:
            yield job
