"""The judge of MT-Bench as a task of Inspect.

Models and logs are from Inspect; prompts and the parsing of ratings are from this package.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, final

from attrs import field

from hgms_core import ConfigError, HgmsError, component
from hgms_core.errors import MissingExtra
from hgms_core.validators import at_least
from hgms_mix.evaluation.judge import Request, rating

KEYLESS: Final = ("openai", "mockllm")
"""Providers that need no permission on the command line.

The key in OPENAI_API_KEY goes to OpenAI, and mockllm sends no requests.
"""


def _provider(_self: object, _attribute: object, value: str) -> None:
    provider, slash, name = value.partition("/")
    if not (provider and slash and name):
        raise ConfigError(
            "wrong-value",
            f"model={value!r} must be a provider and a model, such as 'openai/gpt-4o'",
            place=("model",),
        )


@final
@component
class InspectJudge:
    """Rate MT-Bench with any model that Inspect supports (OpenAI, Anthropic, Google, …), with a log
    for ``inspect view``. Prompts, the parsing of ratings, attempts and the score are the same as
    for ``Judge``.

    Use when: the judge has no OpenAI-compatible endpoint, or you need Inspect's logs. Avoid if such
    an endpoint exists: ``Judge`` has fewer dependencies, limits its request rate, and stores each
    rating immediately. Here, a killed process loses the whole pass.

    Arguments:
        model: provider and model, with Inspect's names. Inspect reads the provider's key from the
            environment. Any provider other than OpenAI requires permission from the command
            (``--send-key PROVIDER``; from Python HGMS_SEND_KEY=PROVIDER).
        temperature, max_tokens: of the judge's replies.
        timeout: seconds for a reply.
        retries: number of retries of a failed request (the default of Inspect is to retry without
            limit), after 3, 6, 12, … seconds; after these, the rating counts as failed.
        attempts: total number of requests if replies contain no rating; after these, the rating
            counts as failed.
        concurrency: number of concurrent requests.

    Cost: one request per turn: 160 for MT-Bench.

    >>> InspectJudge(model="anthropic/claude-sonnet").where
    'anthropic/claude-sonnet through Inspect'

    Source: Inspect, UK AI Security Institute (https://inspect.aisi.org.uk), 0.3.285; Zheng et al.
    (2023) for the judging.
    """

    name: ClassVar[str] = "inspect"

    model: str = field(default="openai/gpt-4o", validator=_provider)
    temperature: float = field(default=0.0, validator=at_least(0))
    max_tokens: int = field(default=2048, validator=at_least(1))
    timeout: int = field(default=120, validator=at_least(1))
    retries: int = field(default=6, validator=at_least(0))
    attempts: int = field(default=3, validator=at_least(1))
    concurrency: int = field(default=4, validator=at_least(1))

    @property
    def where(self) -> str:
        """The judge's name and endpoint, as in every record."""
        return f"{self.model} through Inspect"

    @property
    def sends(self) -> str:
        """A message about the key that is sent to the judge with questions and answers."""
        provider = self.model.partition("/")[0]
        return (
            "nobody is asked" if provider == "mockllm" else f"Inspect sends its key for {provider}"
        )

    def require(self) -> None:
        """Raise MissingExtra or ConfigError if requests are not possible."""
        if importlib.util.find_spec("inspect_ai") is None:
            raise MissingExtra(
                "missing-package",
                "this judge requires inspect-ai, which is not installed",
                place=("evaluate", "judge"),
                install="pip install 'hgms[inspect]'",
            )
        provider = self.model.partition("/")[0]
        if provider not in KEYLESS and provider not in os.environ.get("HGMS_SEND_KEY", "").split(
            ","
        ):
            raise ConfigError(
                "not-allowed",
                f"model={self.model!r} sends your key for {provider} to {provider}, which the "
                "command does not allow",
                place=("evaluate", "judge", "model"),
                hint=f"add --send-key {provider} to the command to allow it",
            )
        try:
            grader(self)
        except Exception as error:
            # the provider's package or key is missing, or Inspect does not know the provider
            why = " ".join(re.sub(r"\[/?[a-z]+\]", "", str(error)).removeprefix("ERROR: ").split())
            raise ConfigError(
                "not-supported",
                f"Inspect cannot use model={self.model!r}: {why}",
                place=("evaluate", "judge", "model"),
            ) from error

    def rate_requests(self, todo: Sequence[Request], folder: Path) -> Iterator[dict[str, Any]]:
        """Yield the records of these requests.

        They have the form of :func:`hgms_mix.evaluation.judge_calls.rate`. Inspect writes its log
        into ``folder``.

        Raises:
            HgmsError: Inspect could not finish the task; finished ratings are yielded first.
        """
        from inspect_ai import eval as evaluated

        (log,) = evaluated(
            judging(self, todo),
            model=grader(self),
            log_dir=str(folder),
            display="none",
            log_level="error",
            fail_on_error=False,
            max_samples=self.concurrency,
            max_connections=self.concurrency,
            acp_server=False,
            ctl_server=False,
        )
        by_key = {request.key: request for request in todo}
        for sample in log.samples or []:
            request = by_key[sample.metadata["id"], sample.metadata["turn"]]
            failed = "malformed: no text"
            if sample.error:
                failed = f"refused: {' '.join(sample.error.message.split())[:200]}"
            store = sample.store
            yield request.record(self.where, store.get("attempts", 0), store.get("reply"), failed)
        if log.status != "success":
            why = " ".join(str(log.error.message if log.error else log.status).split())[:200]
            raise HgmsError(
                "judge-failed",
                f"the judge {self.where} did not finish: {why}",
                place=("evaluate", "judge"),
                hint=f"read its log in {folder}",
            )


def grader(judge: InspectJudge) -> Any:
    """Return Inspect's model."""
    from inspect_ai.model import GenerateConfig, get_model

    settings = GenerateConfig(
        temperature=judge.temperature,
        max_tokens=judge.max_tokens,
        max_retries=judge.retries,
        attempt_timeout=judge.timeout,
    )
    return get_model(judge.model, config=settings, memoize=False)


def judging(judge: InspectJudge, todo: Sequence[Request]) -> Any:
    """Return the Inspect task, with one sample per turn; its input is the request to the judge.

    The solver repeats the request until a reply contains a rating. The scorer returns the rating; a
    sample without a rating is unscored.
    """
    from inspect_ai import Task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser
    from inspect_ai.scorer import Score, mean, scorer, stderr
    from inspect_ai.solver import solver

    kinds = {"system": ChatMessageSystem, "user": ChatMessageUser}

    @solver
    def ask() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            prompt = list(state.messages)
            for attempt in range(1, judge.attempts + 1):
                state.messages = list(prompt)
                state = await generate(state)
                text = state.output.completion
                reply = text.encode(errors="replace").decode() if text.strip() else None
                state.store.set("attempts", attempt)
                state.store.set("reply", reply)
                if reply is not None and rating(reply) is not None:
                    break
            return state

        return solve

    @scorer(metrics=[mean(), stderr()])
    def rating_scorer() -> Any:
        async def score(state: Any, target: Any) -> Any:
            reply = state.store.get("reply")
            value = None if reply is None else rating(reply)
            return (
                Score.unscored(explanation=reply)
                if value is None
                else Score(value=value, explanation=reply)
            )

        return score

    def sample(request: Request) -> Any:
        messages = [
            kinds[message["role"]](content=message["content"]) for message in request.messages
        ]
        place = {"id": request.id, "turn": request.turn}
        return Sample(id=f"{request.id}-{request.turn}", input=messages, metadata=place)

    samples = [sample(request) for request in todo]
    return Task(
        dataset=MemoryDataset(samples), solver=ask(), scorer=rating_scorer(), name="mt-bench-judge"
    )
