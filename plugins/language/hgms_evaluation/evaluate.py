"""The stage `evaluate`: answers, scores and ratings of one model, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

import attrs
from attrs import field, frozen, validators

from hgms_core import CheckpointError, ConfigError
from hgms_evaluation import asking, questions, records, scores
from hgms_evaluation.judge import Asked, Judge, messages
from hgms_evaluation.questions import Benchmark, Question
from hgms_evaluation.verifier import Verifier, require_math_verify

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hgms_evaluation.prompts import Prompts, Turn

BENCHMARKS: Final = ("gsm8k", "math", "mt-bench")
NEW_TOKENS: Final[Mapping[Benchmark, int]] = {"gsm8k": 1024, "math": 1024, "mt-bench": 512}
INSTRUCTION: Final = "Please reason step by step, and put your final answer within \\boxed{}."

Answers = dict[tuple[int, int], dict[str, Any]]
Report = Callable[[str], None]


def _known(_self: object, _attribute: object, value: Iterable[str]) -> None:
    for one in value:
        if one not in BENCHMARKS:
            raise ValueError(f"unknown benchmark {one!r} (known: {', '.join(BENCHMARKS)})")


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
        with Verifier() as verifier:
            for name in self.benchmarks:
                self._generate(name, *loaded[name], model, tokenizer, folder, report)
                if name != "mt-bench":
                    self._write(folder, name, self._score(verifier, name, loaded[name][0], folder, report))
        if "mt-bench" in self.benchmarks:
            self._write(folder, "mt-bench", self._rated(folder, report, ask=False))
            if self.judge is not None:
                self.rate(folder, report)
        found = self._results(folder)
        return {name: found[name] for name in self.benchmarks}

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

    def _generate(
        self,
        name: Benchmark,
        asked: Sequence[Question],
        source: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        report: Report,
    ) -> None:
        from hgms_evaluation.generate import fingerprint
        from hgms_evaluation.prompts import build

        self._claim(folder, name, source, {"model": fingerprint(model), "chat_template": tokenizer.chat_template})
        done = _answers(folder, name)
        for turn in range(1, max(len(question.turns) for question in asked) + 1):
            todo = [one for one in asked if len(one.turns) >= turn and (one.id, turn) not in done]
            if todo:
                prompts = build(model, tokenizer, self.template, [self._said(name, one, turn, done) for one in todo])
                self._answer(name, turn, todo, prompts, model, tokenizer, folder, report)
                done = _answers(folder, name)

    def _answer(
        self,
        name: Benchmark,
        turn: int,
        todo: Sequence[Question],
        prompts: Prompts,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        report: Report,
    ) -> None:
        from hgms_evaluation import generate, vllm_engine

        new = self.new_tokens(name)
        cap = generate.prompt_cap(model, self.max_prompt_tokens, new)
        cut = sum(len(prompt) > cap for prompt in prompts.tokens)
        which = f"{name}, turn {turn}" if name == "mt-bench" else name
        report(f"{which}: {len(todo)} questions" + (f", {cut} of them cut to their last {cap} tokens" if cut else ""))
        if self.engine == "vllm":
            batches = vllm_engine.replies(
                model, tokenizer, prompts.tokens, stops=prompts.stops, max_new_tokens=new, cap=cap, folder=folder
            )
        else:
            batches = generate.replies(
                model,
                tokenizer,
                prompts.tokens,
                stops=prompts.stops,
                max_new_tokens=new,
                cap=cap,
                batch_size=self.batch_size,
                report=report,
            )
        count = 0
        with records.Journal(folder / f"{name}.answers.jsonl") as journal:
            for batch in batches:
                for position, reply in batch:
                    journal.write({"id": todo[position].id, "turn": turn, **attrs.asdict(reply)})
                count += len(batch)
                report(f"{which}: {count} of {len(todo)} answered")

    def _said(self, name: Benchmark, question: Question, turn: int, done: Answers) -> list[Turn]:
        """The conversation up to the answer asked for: the model's own earlier answers are part of it."""
        if name != "mt-bench":
            return [("user", question.turns[0] + ("\n" + self.instruction if self.instruction else ""))]
        said: list[Turn] = []
        for place in range(1, turn):
            said += [("user", question.turns[place - 1]), ("assistant", done[question.id, place]["text"])]
        return [*said, ("user", question.turns[turn - 1])]

    def _claim(self, folder: Path, name: Benchmark, source: str, made_with: Mapping[str, Any]) -> None:
        """Writes down what the answers depend on, or makes sure that nothing of it has changed. The batch size and the engine
        do not count: both give greedy answers."""
        now = {
            "questions": source,
            "instruction": self.instruction if name != "mt-bench" else "",
            "template": self.template,
            "max_new_tokens": self.new_tokens(name),
            "max_prompt_tokens": self.max_prompt_tokens,
            **made_with,
        }
        path = folder / f"{name}.settings.json"
        for other in sorted(folder.glob("*.settings.json")):
            if other != path and records.table(other).get("model") != now["model"]:
                which = other.name.removesuffix(".settings.json")
                raise CheckpointError(f"{folder} holds answers of another model ({which})\n  choose another folder")
        if not (folder / f"{name}.answers.jsonl").exists() or not path.exists():
            records.replace(path, records.to_json(now))
            return
        before = records.table(path)
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            raise CheckpointError(
                f"{folder} holds answers to {name} made with another {', '.join(changed)}\n  choose another folder, or remove "
                f"{name}.answers.jsonl to answer again"
            )

    def _score(
        self, verifier: Verifier, name: Benchmark, asked: Sequence[Question], folder: Path, report: Report
    ) -> dict[str, Any]:
        answers = _answers(folder, name)
        report(f"{name}: scoring {len(asked)} answers")
        rows = [scores.score(verifier, name, question, answers[question.id, 1]["text"]) for question in asked]
        records.replace(folder / f"{name}.scores.jsonl", "".join(records.line(row) for row in rows))
        result = scores.accuracy(name, rows, [answers[question.id, 1] for question in asked])
        low, high = result["interval"]["low"], result["interval"]["high"]
        report(f"{name}: {result['score']:.2f} % of {len(rows)} right ({low:.2f} to {high:.2f})")
        return result

    def _rated(self, folder: Path, report: Report, *, ask: bool) -> dict[str, Any]:
        place = questions.place("mt-bench", self.paths.get("mt-bench"))
        asked, _ = questions.load("mt-bench", place, self.limit)
        answers = _answers(folder, "mt-bench")
        missing = sum((one.id, turn) not in answers for one in asked for turn in range(1, len(one.turns) + 1))
        if missing:
            raise CheckpointError(f"{folder}: {missing} answers to mt-bench are missing; generate them first")
        made = [answers[one.id, turn] for one in asked for turn in range(1, len(one.turns) + 1)]
        prompts = questions.judge_prompts(place)
        wanted = [
            Asked(one.id, turn, messages(prompts, one, [answers[one.id, t]["text"] for t in range(1, turn + 1)], turn))
            for one in asked
            for turn in range(1, len(one.turns) + 1)
        ]
        if self.judge is None:
            ratings = {}
        else:
            ratings = asking.rate(self.judge, folder, wanted, report) if ask else asking.stored(self.judge, folder, wanted)
        result = scores.summary(wanted, ratings, self.resamples, self.seed)
        if ask:
            report(f"mt-bench: {result['score']:.2f} of 10, {result['rated']} turns rated, {result['failed']} without a rating")
        return {
            **result,
            "judge": None if self.judge is None else {"where": self.judge.where, "temperature": self.judge.temperature},
            **scores.lengths(made),
        }

    def _write(self, folder: Path, name: Benchmark, result: Mapping[str, Any]) -> None:
        known = self._results(folder)
        records.replace(folder / "results.json", records.to_json({**known, name: result}))

    def _results(self, folder: Path) -> dict[str, Any]:
        path = folder / "results.json"
        return records.table(path) if path.exists() else {}


def _answers(folder: Path, name: Benchmark) -> Answers:
    needs = ("id", "turn", "text", "finished", "new_tokens", "truncated")
    return {(record["id"], record["turn"]): record for record in records.read(folder / f"{name}.answers.jsonl", needs=needs)}
