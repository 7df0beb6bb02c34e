"""Responses, scores and ratings of one model, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

import attrs
from attrs import field

from evaluation import judge_calls as asking
from evaluation import questions, records, scores
from evaluation.judge import Judge, Request, messages
from evaluation.questions import Benchmark, Question
from evaluation.verifier import require_math_verify
from hgms.arguments import require, require_known
from hgms.store import Folder, json_digest, json_object
from hgms_core import ConfigError, component
from hgms_core.errors import CheckpointError
from hgms_core.validators import at_least, optional

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from evaluation.generate import Turn

NEW_TOKENS: Final[Mapping[Benchmark, int]] = {"gsm8k": 1024, "math": 1024, "mt-bench": 512}
INSTRUCTION: Final = "Please reason step by step, and put your final answer within \\boxed{}."

Answers = dict[tuple[int, int], dict[str, Any]]
Report = Callable[[str], None]


def _check_names(_self: object, attribute: Any, value: Iterable[str]) -> None:
    for name in value:
        require_known("benchmark", name, NEW_TOKENS, (attribute.name,))


def _check_distinct(_self: object, _attribute: object, value: Sequence[str]) -> None:
    require(
        len(set(value)) == len(value),
        "wrong-value",
        f"benchmarks={list(value)} contains a benchmark twice",
        place=("benchmarks",),
    )


@final
@component
class Evaluate:
    """The benchmarks, and the settings for generation and scoring.

    Decoding is greedy. The score of GSM8K (1,319 questions) and MATH (5,000) is the accuracy in
    percent, with Wilson's interval. The score of MT-Bench (80 questions of two turns) is the mean
    of a judge's ratings, with a percentile bootstrap over questions.

    Use when: comparing a fine-tuned model with the tables of the paper or with another mixture.
    Avoid interpreting differences smaller than the intervals: on GSM8K they are 2 to 2.6 points
    wide on each side.

    Parameters
    ----------
    benchmarks
        Any of "gsm8k", "math", "mt-bench"; () evaluates no benchmark.
    paths
        File (MT-Bench: folder) by benchmark, if it is not below $HGMS_DATA.
    limit
        Number of questions of each benchmark, from the first (default: all).
    max_new_tokens
        Largest number of tokens per response (default: 1,024 for GSM8K and MATH, 512 for MT-Bench,
        as in the paper).
    max_prompt_tokens
        Longer prompts lose their beginning; the results contain the number of such prompts.
    batch_size
        Prompts per batch; halved automatically if memory runs out.
    instruction
        Text on a separate line after each question of GSM8K and MATH; "" for no text.
    template
        "model" (the tokenizer's chat template), or the name of a template: use the template of
        fine-tuning.
    judge
        The judge of MT-Bench. With "none", the ratings can be added later by :meth:`rate`.

    Notes
    -----
    Cost: one generation per turn. Scoring takes about 7 ms per right and 20 ms per wrong answer on
    one core.

    Source: the HG-MS paper, "Final inference and judging" and the table of evaluation uncertainty.
    The README lists the details that the paper does not specify.

    Examples
    --------
    >>> Evaluate(benchmarks=("gsm8k", "math")).new_tokens("math")
    1024
    """

    benchmarks: tuple[Literal["gsm8k", "math", "mt-bench"], ...] = field(
        default=(), validator=_check_distinct
    )
    paths: dict[str, str] = field(factory=dict, validator=_check_names)
    limit: int | None = field(default=None, validator=optional(at_least(1)))
    max_new_tokens: int | None = field(default=None, validator=optional(at_least(1)))
    max_prompt_tokens: int = field(default=1024, validator=at_least(1))
    batch_size: int = field(default=16, validator=at_least(1))
    instruction: str = INSTRUCTION
    template: str = "model"
    judge: Judge | None = field(factory=Judge)

    @property
    def generation(self) -> list[Any]:
        """The settings that change responses.

        The batch size is excluded: decoding is greedy for all values.
        """
        return [self.instruction, self.template, self.max_new_tokens, self.max_prompt_tokens]

    def new_tokens(self, benchmark: Benchmark) -> int:
        return NEW_TOKENS[benchmark] if self.max_new_tokens is None else self.max_new_tokens

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        report: Report = lambda _: None,
    ) -> dict[str, Any]:
        """Generate the missing responses in ``folder``, and score all responses.

        Write and return results.json.

        The README lists the files. results.json is updated after each benchmark.

        Raises
        ------
        CheckpointError
            The responses in the folder are from another model, other settings or other questions.
        DataError
            a benchmark's file is missing or malformed.
        ConfigError
            MT-Bench has no key for its judge, or the new tokens exceed the positions of the model.
        MissingExtra
            Math-verify or openai is required and not installed.
        HgmsError
            The judge does not respond, or memory is too small for a single prompt. Finished work is
            kept.
        """
        from evaluation import generate

        self.check()
        folder.mkdir(parents=True, exist_ok=True)
        loaded = {
            name: questions.load(name, questions.place(name, self.paths.get(name)), self.limit)
            for name in self.benchmarks
        }
        made_by = [generate.fingerprint(model), tokenizer.chat_template, *self.generation]
        claimed = Folder(folder, key=json_digest(made_by))
        _record_questions(claimed, {name: digest for name, (_, digest) in loaded.items()})
        for name, (listed, _) in loaded.items():
            self._generate(name, listed, model, tokenizer, folder, report)
            if name != "mt-bench":
                _write(folder, name, _score_answers(name, listed, folder, report))
        if "mt-bench" in self.benchmarks:
            _write(folder, "mt-bench", self._rate_answers(folder, report, ask=False))
            if self.judge is not None:
                self.rate(folder, report)
        results = _results(folder)
        return {name: results[name] for name in self.benchmarks}

    def rate(self, folder: Path, report: Report = lambda _: None) -> dict[str, Any]:
        """Rate the MT-Bench responses in ``folder``, without generation.

        Update and return results.json.

        Raises
        ------
        ConfigError
            No judge, or no key for the judge.
        DataError
        CheckpointError
            The folder has no responses to MT-Bench.
        HgmsError
            The judge does not respond. Finished ratings are kept.
        """
        if self.judge is None:
            raise ConfigError(
                "missing-option",
                'rating requires a judge, but judge="none"',
                place=("judge",),
                hint="set a judge",
            )
        self.judge.require()
        _write(folder, "mt-bench", self._rate_answers(folder, report, ask=True))
        return _results(folder)

    def check(self) -> None:
        """Check for missing packages, keys and files before hours of generation."""
        if "mt-bench" in self.benchmarks and self.judge is not None:
            self.judge.require()
        if {"gsm8k", "math"} & set(self.benchmarks):
            require_math_verify()

    def _generate(
        self,
        name: Benchmark,
        listed: Sequence[Question],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        report: Report,
    ) -> None:
        from evaluation import generate

        for turn in range(1, max(len(question.turns) for question in listed) + 1):
            done = _answers(folder, name)
            todo = [
                question
                for question in listed
                if len(question.turns) >= turn and (question.id, turn) not in done
            ]
            if not todo:
                continue
            talks = [self._conversation(name, question, turn, done) for question in todo]
            limits = self.max_prompt_tokens, self.new_tokens(name)
            prompts = generate.prompts_for(model, tokenizer, self.template, talks, *limits)
            cut = sum(len(prompt) > prompts.cap for prompt in prompts.tokens)
            which = f"{name}, turn {turn}" if name == "mt-bench" else name
            report(
                f"{which}: {len(todo)} questions"
                + (f", {cut} of them cut to their last {prompts.cap} tokens" if cut else "")
            )
            batches = generate.replies(model, tokenizer, prompts, self.batch_size, report)
            count = 0
            for batch in batches:
                for position, reply in batch:
                    record = {"id": todo[position].id, "turn": turn, **attrs.asdict(reply)}
                    records.add(folder / f"{name}.answers.jsonl", record)
                count += len(batch)
                report(f"{which}: {count} of {len(todo)} answered")

    def _conversation(
        self, name: Benchmark, question: Question, turn: int, done: Answers
    ) -> list[Turn]:
        """Return the conversation up to this turn, with the model's earlier responses."""
        if name != "mt-bench":
            return [
                ("user", question.turns[0] + ("\n" + self.instruction if self.instruction else ""))
            ]
        turns: list[Turn] = []
        for place in range(1, turn):
            turns += [
                ("user", question.turns[place - 1]),
                ("assistant", done[question.id, place]["text"]),
            ]
        return [*turns, ("user", question.turns[turn - 1])]

    def _rate_answers(self, folder: Path, report: Report, *, ask: bool) -> dict[str, Any]:
        place = questions.place("mt-bench", self.paths.get("mt-bench"))
        listed, _ = questions.load("mt-bench", place, self.limit)
        turns = [
            (question, turn) for question in listed for turn in range(1, len(question.turns) + 1)
        ]
        answers = _answers(folder, "mt-bench")
        missing = sum((question.id, turn) not in answers for question, turn in turns)
        require(
            not missing,
            "too-few-rows",
            f"{missing} of {len(turns)} responses to mt-bench are missing",
            place=(str(folder),),
            hint="generate them first",
            error=CheckpointError,
        )
        prompts = questions.judge_prompts(place)
        requests = []
        for question, turn in turns:
            texts = [answers[question.id, earlier]["text"] for earlier in range(1, turn + 1)]
            requests.append(Request(question.id, turn, messages(prompts, question, texts, turn)))
        if self.judge is None:
            ratings = {}
        else:
            ratings = (
                asking.rate(self.judge, folder, requests, report)
                if ask
                else asking.stored_ratings(self.judge, folder, requests)
            )
        result = scores.summary(requests, ratings)
        if ask:
            report(
                f"mt-bench: {result['score']:.2f} of 10, {result['rated']} turns rated, "
                f"{result['failed']} without a rating"
            )
        return {
            **result,
            "judge": None
            if self.judge is None
            else {"where": self.judge.where, "temperature": self.judge.temperature},
            **scores.lengths([answers[question.id, turn] for question, turn in turns]),
        }


def _record_questions(folder: Folder, digests: Mapping[str, str]) -> None:
    """Record the digests of the files of questions.

    Raise CheckpointError if the folder has responses to other questions, or without a record.
    """
    facts = folder.manifest().facts
    recorded = facts.get("questions", {})
    for name, digest in digests.items():
        is_new = not (folder.path / f"{name}.answers.jsonl").exists()
        require(
            recorded.get(name, digest if is_new else None) == digest,
            "data-changed",
            f"the responses to {name} in the folder are from other or unrecorded questions",
            place=(str(folder.path),),
            hint="evaluate into another folder, or restore the questions",
            error=CheckpointError,
        )
    folder.commit([], facts={**facts, "questions": {**recorded, **digests}})


def _score_answers(
    name: Benchmark, listed: Sequence[Question], folder: Path, report: Report
) -> dict[str, Any]:
    known = _answers(folder, name)
    answers = [known[question.id, 1] for question in listed]
    report(f"{name}: scoring {len(listed)} answers")
    rows = scores.score(name, listed, [answer["text"] for answer in answers])
    records.write(folder / f"{name}.scores.jsonl", rows)
    result = scores.accuracy(name, rows, answers)
    low = result["interval"]["low"]
    high = result["interval"]["high"]
    report(f"{name}: {result['score']:.2f} % of {len(rows)} right ({low:.2f} to {high:.2f})")
    return result


def _write(folder: Path, name: str, result: Mapping[str, Any]) -> None:
    records.replace(folder / "results.json", {**_results(folder), name: result})


def _results(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    return json_object(path) if path.exists() else {}


def _answers(folder: Path, name: Benchmark) -> Answers:
    needs = ("id", "turn", "text", "finished", "new_tokens", "truncated")
    return records.by_turn(folder / f"{name}.answers.jsonl", needs)
