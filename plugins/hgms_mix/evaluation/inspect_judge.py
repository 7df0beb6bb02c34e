"""The judge of MT-Bench as a task of Inspect: its models, its logs, our prompts and our rule for
what a rating is.
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
"""Providers that need no word on the command line: the key in OPENAI_API_KEY goes to OpenAI, and
mockllm asks nobody.
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
    """MT-Bench rated by any model that Inspect has a provider for (OpenAI, Anthropic, Google, …),
    with a log that ``inspect view`` shows. Prompts, the rule for a rating, attempts and the score
    are those of ``Judge``.

    Use when: the judge has no OpenAI-compatible endpoint, or Inspect's logs are wanted. Avoid where
    such an endpoint will do: ``Judge`` needs less, paces its requests, and keeps each rating as it
    comes, where here a kill costs the pass.

    Arguments:
        model: provider and model, as Inspect calls them. The provider's key is read from the
            environment by Inspect; any other provider than OpenAI is asked only where the command
            says so (``--send-key PROVIDER``; from Python HGMS_SEND_KEY=PROVIDER).
        temperature, max_tokens: of the judge's own replies.
        timeout: seconds for a reply.
        retries: how often a request that failed is sent again (Inspect alone would go on for ever),
            after 3, 6, 12, … seconds; then the rating counts as failed.
        attempts: how often a reply without a rating is asked for in all; then the rating counts as
            failed.
        concurrency: requests under way at the same time.

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
        """The judge's name and place, as it stands in every record."""
        return f"{self.model} through Inspect"

    @property
    def sends(self) -> str:
        """What goes to the judge beside the questions and answers, in words."""
        provider = self.model.partition("/")[0]
        return (
            "nobody is asked" if provider == "mockllm" else f"Inspect sends its key for {provider}"
        )

    def require(self) -> None:
        """Raises MissingExtra or ConfigError where no request could be made."""
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
            # the provider's package or key is missing, or Inspect has no such provider
            why = " ".join(re.sub(r"\[/?[a-z]+\]", "", str(error)).removeprefix("ERROR: ").split())
            raise ConfigError(
                "not-supported",
                f"Inspect cannot use model={self.model!r}: {why}",
                place=("evaluate", "judge", "model"),
            ) from error

    def rated(self, todo: Sequence[Request], folder: Path) -> Iterator[dict[str, Any]]:
        """The records of these requests, as :func:`hgms_mix.evaluation.judge_calls.rate` keeps
        them; Inspect's log goes into ``folder``.

        Raises:
            HgmsError: Inspect could not finish the task; what was rated comes before.
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
            reply = sample.store.get("reply")
            record = {
                "id": request.id,
                "turn": request.turn,
                "judge": self.where,
                "asked": request.digest,
                "rating": None if reply is None else rating(reply),
                "attempts": sample.store.get("attempts", 0),
                "reply": reply,
            }
            if record["rating"] is None:
                failed = (
                    f"refused: {' '.join(sample.error.message.split())[:200]}"
                    if sample.error
                    else "malformed: no text"
                )
                record["reason"] = failed if reply is None else "no rating in the reply"
            yield record
        if log.status != "success":
            why = " ".join(str(log.error.message if log.error else log.status).split())[:200]
            raise HgmsError(
                "judge-failed",
                f"the judge {self.where} did not finish: {why}",
                place=("evaluate", "judge"),
                hint=f"read its log in {folder}",
            )


def grader(judge: InspectJudge) -> Any:
    """Inspect's model."""
    from inspect_ai.model import GenerateConfig, get_model

    settings = GenerateConfig(
        temperature=judge.temperature,
        max_tokens=judge.max_tokens,
        max_retries=judge.retries,
        attempt_timeout=judge.timeout,
    )
    return get_model(judge.model, config=settings, memoize=False)


def judging(judge: InspectJudge, todo: Sequence[Request]) -> Any:
    """The Inspect task: a sample for each turn, whose input is what the judge is asked. Its solver
    asks until a reply holds a rating; its scorer gives the rating, and leaves a sample unscored
    that has none.
    """
    from inspect_ai import Task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ChatMessageSystem, ChatMessageUser
    from inspect_ai.scorer import Score, mean, scorer, stderr
    from inspect_ai.solver import solver

    kinds = {"system": ChatMessageSystem, "user": ChatMessageUser}

    @solver
    def asked() -> Any:
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
    def rated() -> Any:
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
        dataset=MemoryDataset(samples), solver=asked(), scorer=rated(), name="mt-bench-judge"
    )
