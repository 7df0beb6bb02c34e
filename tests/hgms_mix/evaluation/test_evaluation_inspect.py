"""The judge through Inspect, with its mock model: the same records, ratings and score as our own
judge on recorded replies.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.helpers import rejects
from support.judged import Act, Endpoint, error, evaluation_of, records_of, write_bench

from hgms.config.as_table import plain
from hgms.config.convert import converter_for
from hgms_core import ConfigError, MissingExtra
from hgms_core.registry import Registry
from hgms_mix.evaluation import Evaluate, InspectJudge, Judge, inspect_judge
from hgms_mix.evaluation import judge_calls as asking

needs_inspect = pytest.mark.skipif(
    importlib.util.find_spec("inspect_ai") is None,
    reason="inspect-ai is not installed: pip install 'hgms[inspect]'",
)
# of the libraries that Inspect brings along; streams of its own that it leaves to the collector
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <function "
        "MemoryObject:pytest.PytestUnraisableExceptionWarning"
    ),
]

REPLIES: dict[str, list[str]] = {
    "q0": ["Good. Rating: [[8]]"],
    "q1": ["I will not say.", "Rating: [6.5]"],
    "q2": ["Rating: [[99]]", "", "Rating: 9"],
    "q3": ["", "  ", ""],
    "more 0": ["[[10]] and [[2]]"],
    "more 1": ["[[0]]"],
    "more 2": ["No.", "No.", "[[3.5]]"],
    "more 3": ["Was it [1]? So [[4]]"],
}
"""What the judge says to each turn, in order; the turn is known by the question that stands in
the prompt last.
"""


class Recorded:
    """The next reply to a prompt."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __call__(self, prompt: str) -> str:
        turn = max(REPLIES, key=lambda question: prompt.rfind(question))
        self.asked[turn] += 1
        return REPLIES[turn][self.asked[turn] - 1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bench(tmp_path, 4)


@pytest.fixture
def mocked(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Inspect's own mock model with the recorded replies."""
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    recorded = Recorded()

    def output(messages: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
        assert (messages[0].role, messages[0].text, len(messages)) == ("system", "S", 2)
        assert (config.temperature, config.max_tokens) == (0.0, 2048)
        reply = ModelOutput.from_content("mockllm/model", recorded(messages[1].text))
        # without it the mock model counts tokens by a table that it downloads
        reply.usage = ModelUsage()
        return reply

    real = inspect_judge.grader

    def grader(judge: InspectJudge) -> Any:
        return get_model(
            "mockllm/model", custom_outputs=output, config=real(judge).config, memoize=False
        )

    monkeypatch.setattr(inspect_judge, "grader", grader)
    return recorded


@needs_inspect
def test_recorded_replies_give_the_records_and_the_score_of_our_judge(
    folder: Path, mocked: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inspect_ai.log import list_eval_logs, read_eval_log

    own = evaluation_of(folder, Judge(base_url="http://localhost:1/v1", model="judge"))
    recorded = Recorded()
    # our session, with what comes through the endpoint replaced (test_evaluation_judge.py has a
    # real one)
    monkeypatch.setattr(
        asking._Session,
        "_sent",
        lambda self, request: _completion(recorded(request.messages[1]["content"])),
    )
    ours = own.rate(folder)["mt-bench"]
    inspected = evaluation_of(folder, InspectJudge(model="mockllm/model"))
    theirs = inspected.rate(folder)["mt-bench"]
    assert records_of(inspected, folder) == records_of(own, folder)
    assert mocked.asked == recorded.asked
    assert {**theirs, "judge": None} == {**ours, "judge": None}
    assert (theirs["rated"], theirs["failed"]) == (6, 2)
    assert theirs["score"] == pytest.approx((8 + 6.5 + 10 + 0 + 3.5 + 4) / 6)
    # Inspect's own log has the same mean, and failed turns unscored
    (info,) = list_eval_logs(str(folder / "inspect"))
    (score,) = read_eval_log(info).results.scores
    assert (score.scored_samples, score.unscored_samples) == (6, 2)
    assert score.metrics["mean"].value == pytest.approx(theirs["score"])


def _completion(text: str) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])


@needs_inspect
def test_only_what_has_no_rating_is_asked_again(
    folder: Path, mocked: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = evaluation_of(folder, InspectJudge(model="mockllm/model"))
    evaluation.rate(folder)
    before = mocked.asked.copy()
    monkeypatch.setitem(REPLIES, "q2", [*REPLIES["q2"], "[[5]]"])
    monkeypatch.setitem(REPLIES, "q3", [*REPLIES["q3"], "[[7]]"])
    assert evaluation.rate(folder)["mt-bench"]["failed"] == 0
    assert mocked.asked - before == Counter({"q2": 1, "q3": 1})


@needs_inspect
def test_a_model_that_fails_is_a_turn_without_a_rating(
    folder: Path, mocked: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Recorded.__call__

    def failing(self: Recorded, prompt: str) -> str:
        if prompt.startswith("q1|") and "more" not in prompt:
            raise ValueError("content filter")
        return usual(self, prompt)

    monkeypatch.setattr(Recorded, "__call__", failing)
    evaluation = evaluation_of(folder, InspectJudge(model="mockllm/model"))
    assert evaluation.rate(folder)["mt-bench"]["failed"] == 3
    record = records_of(evaluation, folder)[82, 1]
    assert (record["rating"], record["reply"]) == (None, None)
    assert "content filter" in record["reason"]


@needs_inspect
def test_an_interrupted_pass_keeps_what_was_rated(
    folder: Path, mocked: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    import inspect_ai

    real = inspect_ai.eval

    def cancelled(*arguments: Any, **options: Any) -> list[Any]:
        (log,) = real(*arguments, **options)
        return [log.model_copy(update={"status": "cancelled", "samples": log.samples[:3]})]

    evaluation = evaluation_of(folder, InspectJudge(model="mockllm/model"))
    monkeypatch.setattr(inspect_ai, "eval", cancelled)
    with rejects("judge-failed", "evaluate", "judge") as caught:
        evaluation.rate(folder)
    assert "cancelled" in caught.value.message
    assert "3 of 8" in str(caught.value.hint)
    assert len(records_of(evaluation, folder)) == 3


@needs_inspect
def test_an_endpoint_that_turns_all_away_is_not_asked_for_ever(
    folder: Path, serve: Callable[[Act], Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setenv("OPENAI_BASE_URL", serve(error(429)).url)
    with rejects("judge-failed", "evaluate", "judge") as caught:
        evaluation_of(folder, InspectJudge(retries=0, concurrency=8)).rate(folder)
    assert "RateLimitError" in caught.value.message


@needs_inspect
@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("openai/gpt-4o", "Unable to initialise OpenAI client No OPENAI_API_KEY"),
        ("nowhere/x", "Model API nowhere of model 'nowhere/x' not recognized"),
    ],
)
def test_what_inspect_lacks_is_said_before_anything_is_generated(
    model: str, cause: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("HGMS_SEND_KEY", "nowhere")
    with rejects("not-supported", "evaluate", "judge", "model", of=ConfigError) as caught:
        evaluation_of(folder, InspectJudge(model=model)).check()
    assert f"{model!r}: {cause}" in caught.value.message


def test_it_is_a_judge_by_its_name() -> None:
    converter = converter_for(Registry.load())
    table = {"name": "inspect", "model": "anthropic/claude", "attempts": 2}
    evaluation = converter.structure({"judge": table}, Evaluate)
    assert evaluation.judge == InspectJudge(model="anthropic/claude", attempts=2)
    assert converter.structure(plain(evaluation), Evaluate) == evaluation
    assert converter.structure({"judge": "inspect"}, Evaluate).judge == InspectJudge()
    assert converter.structure({"judge": {"model": "gpt-4o"}}, Evaluate).judge == Judge()
    assert converter.structure({"judge": "none"}, Evaluate).judge is None
    for wrong, code, option, near in [
        ({"name": "inspekt"}, "unknown-name", "name", ("inspect",)),
        ({"name": "inspect", "mmodel": "a/b"}, "unknown-option", "mmodel", ("model",)),
        ({"mmodel": "a"}, "unknown-option", "mmodel", ("model",)),
        ({"name": "inspect", "model": "gpt-4o"}, "wrong-value", "model", ()),
    ]:
        with rejects(code, "judge", option) as caught:
            converter.structure({"judge": wrong}, Evaluate)
        assert caught.value.did_you_mean == near


def test_no_key_is_sent_that_only_a_file_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(inspect_judge, "grader", lambda judge: None)
    monkeypatch.delenv("HGMS_SEND_KEY", raising=False)
    judge = InspectJudge(model="anthropic/claude")
    with rejects("not-allowed", "evaluate", "judge", "model", of=ConfigError) as caught:
        judge.require()
    assert "--send-key anthropic" in str(caught.value.hint)
    monkeypatch.setenv("HGMS_SEND_KEY", "localhost,anthropic")
    judge.require()
    attrs.evolve(judge, model="openai/gpt-4o").require()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with rejects("missing-package", "evaluate", "judge", of=MissingExtra) as caught:
        judge.require()
    assert caught.value.install == "pip install 'hgms[inspect]'"
