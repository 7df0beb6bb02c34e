"""The judge through Inspect, with its mock model: the same records, ratings and score as our own
judge on recorded replies.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.helpers import rejects
from support.judge_files import evaluation_of, records_of, write_bench

from hgms_core import ConfigError
from hgms_mix.evaluation import InspectJudge, Judge, inspect_judge
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
MOCK = InspectJudge(model="mockllm/model")


class Recorded:
    """The next reply to a prompt; a turn of which there are no more has an error."""

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
        assert (config.temperature, config.max_tokens, config.max_retries) == (0.0, 2048, 6)
        reply = ModelOutput.from_content("mockllm/model", recorded(messages[1].text))
        # without it the mock model counts tokens by a table that it downloads
        reply.usage = ModelUsage()
        return reply

    def grader(judge: InspectJudge, real: Any = inspect_judge.grader) -> Any:
        config = real(judge).config
        return get_model("mockllm/model", custom_outputs=output, config=config, memoize=False)

    monkeypatch.setattr(inspect_judge, "grader", grader)
    return recorded


@needs_inspect
def test_recorded_replies_give_the_records_and_the_score_of_our_judge(
    folder: Path, mocked: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded()

    def sent(judge: Any, client: Any, request: Any) -> Any:
        """What comes through the endpoint of our judge."""
        message = SimpleNamespace(content=recorded(request.messages[1]["content"]))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    monkeypatch.setattr(asking, "_send", sent)
    own = evaluation_of(folder, Judge(base_url="http://localhost:1/v1", model="judge"))
    inspected = evaluation_of(folder, MOCK)
    ours, theirs = (stage.rate(folder)["mt-bench"] for stage in (own, inspected))
    assert records_of(inspected, folder) == records_of(own, folder)
    assert mocked.asked == recorded.asked
    assert {**theirs, "judge": None} == {**ours, "judge": None}
    assert theirs["score"] == pytest.approx((8 + 6.5 + 10 + 0 + 3.5 + 4) / 6)


def test_no_key_is_sent_that_only_a_file_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = InspectJudge(model="anthropic/claude")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(inspect_judge, "grader", lambda judge: None)
    monkeypatch.delenv("HGMS_SEND_KEY", raising=False)
    with rejects("not-allowed", "evaluate", "judge", "model", of=ConfigError):
        judge.require()
    monkeypatch.setenv("HGMS_SEND_KEY", "localhost,anthropic")
    judge.require()
