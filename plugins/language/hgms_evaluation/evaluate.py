"""The stage `evaluate`: answers, scores and ratings of one model, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

from attrs import field, frozen, validators

from hgms_core import CheckpointError, ConfigError
from hgms_evaluation import asking, questions, records, scores
from hgms_evaluation.answering import Respondent, answers
from hgms_evaluation.judge import Judge, Request, messages
from hgms_evaluation.questions import Benchmark, Question
from hgms_evaluation.verifier import Verifier, require_math_verify

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BENCHMARKS: Final = ("gsm8k", "math", "mt-bench")
NEW_TOKENS: Final[Mapping[Benchmark, int]] = {"gsm8k": 1024, "math": 1024, "mt-bench": 512}
INSTRUCTION: Final = "Please reason step by step, and put your final answer within \\boxed{}."

Report = Callable[[str], None]


def _known(_self: object, _attribute: object, value: Iterable[str]) -> None:
    for name in value:
        if name not in BENCHMARKS:
            raise ValueError(f"unknown benchmark {name!r} (known: {', '.join(BENCHMARKS)})")


def _once(_self: object, _attribute: object, value: Sequence[str]) -> None:
    if len(set(value)) < len(value):
        raise ValueError(f"'benchmarks' names one twice: {', '.join(value)}")


@final
@frozen(kw_only=True)
class Evaluate:
    """The table ``[evaluate]`` of a mix file: which benchmarks, and how they are answered and scored.

    Greedy answers (no sampling, no beam, one answer per prompt) to GSM8K (1,319 questions), MATH (5,000) and MT-Bench (80
    questions of two turns). GSM8K and MATH are right or wrong, with Wilson's interval; MT-Bench is the mean of a judge's
    ratings, with a percentile bootstrap over questions.

    Use when: a fine-tuned model is to be compared with the paper's tables or with another mixture. Avoid reading differences
    smaller than the intervals: on GSM8K they are 2 to 2.6 points wide on each side.

    Args:
        benchmarks: of "gsm8k", "math", "mt-bench"; () evaluates nothing.
        paths: file (MT-Bench: folder) by benchmark, where it is not below $HGMS_DATA.
        limit: only the first so many questions of each (None: all).
        max_new_tokens: of an answer (None: 1,024 for GSM8K and MATH, 512 for MT-Bench, as in the paper).
        max_prompt_tokens: a longer prompt loses its beginning; how many did is in the results.
        batch_size: prompts answered at once; halved by itself where memory runs out.
        engine: "transformers", or "vllm" (an extra package; for models that it knows).
        instruction: what follows each question of GSM8K and MATH, on a line of its own; "" for nothing.
        template: "model" (the tokenizer's chat template), or a named one: the one the model was fine-tuned with.
        judge: of MT-Bench; "none" leaves the answers to be rated later, by :meth:`rate`.
        resamples, seed: of MT-Bench's bootstrap.

    Cost: one generation per turn. Scoring takes about 7 ms a right and 20 ms a wrong answer on one core.

    >>> Evaluate(benchmarks=("gsm8k", "math")).new_tokens("math")
    1024

    Source: the HG-MS paper, "Final inference and judging" and the table of evaluation uncertainty; what it leaves open is in
    the package's README.
    """

    benchmarks: tuple[Literal["gsm8k", "math", "mt-bench"], ...] = field(default=(), validator=[_known, _once])
    paths: dict[str, str] = field(factory=dict, validator=_known)
    limit: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_new_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_prompt_tokens: int = field(default=1024, validator=validators.ge(1))
    batch_size: int = field(default=16, validator=validators.ge(1))
    engine: Literal["transformers", "vllm"] = field(default="transformers", validator=validators.in_(("transformers", "vllm")))
    instruction: str = INSTRUCTION
    template: str = "model"
    judge: Judge | None = field(factory=Judge)
    resamples: int = field(default=10_000, validator=validators.ge(100))
    seed: int = field(default=0, validator=validators.ge(0))

    def new_tokens(self, benchmark: Benchmark) -> int:
        return NEW_TOKENS[benchmark] if self.max_new_tokens is None else self.max_new_tokens

    def run(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, report: Report = lambda _: None
    ) -> dict[str, Any]:
        """Answers every question that ``folder`` has no answer to, scores all, writes results.json and returns it.

        In ``folder``, per benchmark: NAME.settings.json (what the answers depend on), NAME.answers.jsonl (one line per answer,
        written as it comes), NAME.scores.jsonl (one line per question); mt-bench.ratings.JUDGE.jsonl. results.json is brought
        up to date after each benchmark.

        Raises:
            CheckpointError: the folder's answers were made by another model or with other settings.
            DataError: a benchmark's file is missing or malformed.
            ConfigError: MT-Bench without a key for its judge, or more new tokens than the model has positions.
            MissingExtra: math-verify, openai, tenacity or vLLM is needed and not installed.
            HgmsError: the judge does not answer, or memory is too small for a single prompt. What was done is kept.
        """
        self.check()
        folder.mkdir(parents=True, exist_ok=True)
        loaded = {
            name: questions.load(name, questions.place(name, self.paths.get(name)), self.limit) for name in self.benchmarks
        }
        respondent = Respondent(self, model, tokenizer, folder, report)
        with Verifier() as verifier:
            for name, (chosen, source) in loaded.items():
                respondent.answer(name, chosen, source)
                if name != "mt-bench":
                    self._write(folder, name, self._score(verifier, name, chosen, folder, report))
        if "mt-bench" in self.benchmarks:
            self._write(folder, "mt-bench", self._rated(folder, report, ask=False))
            if self.judge is not None:
                self.rate(folder, report)
        results = self._results(folder)
        return {name: results[name] for name in self.benchmarks}

    def rate(self, folder: Path, report: Report = lambda _: None) -> dict[str, Any]:
        """The judge's pass alone, over the MT-Bench answers in ``folder``; brings results.json up to date and returns it.

        Raises:
            ConfigError: no judge, or no key for it.
            DataError, CheckpointError: the folder has no answers to MT-Bench.
            HgmsError: the judge does not answer. What was rated is kept.
        """
        if self.judge is None:
            raise ConfigError('evaluate.judge = "none": name a judge to rate the answers')
        self.judge.require()
        self._write(folder, "mt-bench", self._rated(folder, report, ask=True))
        return self._results(folder)

    def check(self) -> None:
        """What would only be missing after hours of generation."""
        if "mt-bench" in self.benchmarks and self.judge is not None:
            self.judge.require()
        if {"gsm8k", "math"} & set(self.benchmarks):
            require_math_verify()
        if self.engine == "vllm":
            from hgms_evaluation import vllm_engine

            vllm_engine.require()

    def _score(
        self, verifier: Verifier, name: Benchmark, chosen: Sequence[Question], folder: Path, report: Report
    ) -> dict[str, Any]:
        replies = answers(folder, name)
        report(f"{name}: scoring {len(chosen)} answers")
        rows = [scores.score(verifier, name, question, replies[question.id, 1]["text"]) for question in chosen]
        records.write(folder / f"{name}.scores.jsonl", rows)
        result = scores.accuracy(name, rows, [replies[question.id, 1] for question in chosen])
        low, high = result["interval"]["low"], result["interval"]["high"]
        report(f"{name}: {result['score']:.2f} % of {len(rows)} right ({low:.2f} to {high:.2f})")
        return result

    def _rated(self, folder: Path, report: Report, *, ask: bool) -> dict[str, Any]:
        place = questions.place("mt-bench", self.paths.get("mt-bench"))
        prompts, replies = questions.judge_prompts(place), answers(folder, "mt-bench")
        chosen, _ = questions.load("mt-bench", place, self.limit)
        turns = [(question, turn) for question in chosen for turn in range(1, len(question.turns) + 1)]
        missing = sum((question.id, turn) not in replies for question, turn in turns)
        if missing:
            raise CheckpointError(f"{folder}: {missing} answers to mt-bench are missing; generate them first")
        wanted = []
        for question, turn in turns:
            so_far = [replies[question.id, number]["text"] for number in range(1, turn + 1)]
            wanted.append(Request(question.id, turn, messages(prompts, question, so_far, turn)))
        ratings: asking.Ratings = {}
        if self.judge is not None:
            ratings = asking.rate(self.judge, folder, wanted, report) if ask else asking.stored(self.judge, folder, wanted)
        result = scores.summary(wanted, ratings, self.resamples, self.seed)
        if ask:
            report(f"mt-bench: {result['score']:.2f} of 10, {result['rated']} turns rated, {result['failed']} without a rating")
        judge = None if self.judge is None else {"where": self.judge.where, "temperature": self.judge.temperature}
        return {**result, "judge": judge, **scores.lengths([replies[question.id, turn] for question, turn in turns])}

    def _write(self, folder: Path, name: Benchmark, result: Mapping[str, Any]) -> None:
        records.write_table(folder / "results.json", {**self._results(folder), name: result})

    def _results(self, folder: Path) -> dict[str, Any]:
        path = folder / "results.json"
        return records.table(path) if path.exists() else {}
