"""The answers of a model to a benchmark's questions, of which only the missing ones are generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from hgms_core import CheckpointError
from hgms_evaluation import records
from hgms_evaluation.questions import Benchmark, Question

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hgms_evaluation.evaluate import Evaluate
    from hgms_evaluation.prompts import Turn

Answers = dict[tuple[int, int], dict[str, Any]]
"""Records by question and turn."""


@frozen
class Respondent:
    """A model that is evaluated, and the folder that its answers go to."""

    settings: Evaluate
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    report: Callable[[str], None]

    def answer(self, name: Benchmark, questions: Sequence[Question], source: str) -> None:
        """Every turn that has no answer in the folder yet; ``source`` identifies the benchmark's files.

        Raises:
            CheckpointError: the folder's answers were made by another model or with other settings.
        """
        from hgms_evaluation.prompts import build

        self._claim(name, source)
        done = answers(self.folder, name)
        for turn in range(1, max(len(question.turns) for question in questions) + 1):
            todo = [question for question in questions if len(question.turns) >= turn and (question.id, turn) not in done]
            if todo:
                conversations = [self._conversation(name, question, turn, done) for question in todo]
                prompts = build(self.model, self.tokenizer, self.settings.template, conversations)
                which = f"{name}, turn {turn}" if name == "mt-bench" else name
                self._generate(name, which, turn, todo, prompts.tokens, prompts.stops)
                done = answers(self.folder, name)

    def _generate(
        self, name: Benchmark, which: str, turn: int, todo: Sequence[Question], prompts: list[list[int]], stops: list[int]
    ) -> None:
        from hgms_evaluation import generate, vllm_engine

        new = self.settings.new_tokens(name)
        cap = generate.prompt_cap(self.model, self.settings.max_prompt_tokens, new)
        cut = sum(len(prompt) > cap for prompt in prompts)
        self.report(f"{which}: {len(todo)} questions" + (f", {cut} of them cut to their last {cap} tokens" if cut else ""))
        engine: Any = generate.replies
        options: dict[str, Any] = {"batch_size": self.settings.batch_size, "report": self.report}
        if self.settings.engine == "vllm":
            engine, options = vllm_engine.replies, {"folder": self.folder}
        batches = engine(self.model, self.tokenizer, prompts, stops=stops, max_new_tokens=new, cap=cap, **options)
        count = 0
        with records.Journal(self.folder / f"{name}.answers.jsonl") as journal:
            for batch in batches:
                for position, reply in batch:
                    journal.write({"id": todo[position].id, "turn": turn, **attrs.asdict(reply)})
                count += len(batch)
                self.report(f"{which}: {count} of {len(todo)} answered")

    def _conversation(self, name: Benchmark, question: Question, turn: int, done: Answers) -> list[Turn]:
        """What comes before the answer: of a second turn also the first, with the model's own answer."""
        if name != "mt-bench":
            instruction = self.settings.instruction
            return [("user", question.turns[0] + ("\n" + instruction if instruction else ""))]
        turns: list[Turn] = []
        for number in range(1, turn):
            turns += [("user", question.turns[number - 1]), ("assistant", done[question.id, number]["text"])]
        return [*turns, ("user", question.turns[turn - 1])]

    def _claim(self, name: Benchmark, source: str) -> None:
        """Writes down what the answers depend on, or makes sure that nothing of it has changed. The batch size and the engine
        do not count: both give greedy answers."""
        from hgms_evaluation.generate import fingerprint

        settings, folder = self.settings, self.folder
        now = {
            "questions": source,
            "instruction": settings.instruction if name != "mt-bench" else "",
            "template": settings.template,
            "max_new_tokens": settings.new_tokens(name),
            "max_prompt_tokens": settings.max_prompt_tokens,
            "model": fingerprint(self.model),
            "chat_template": self.tokenizer.chat_template,
        }
        path = folder / f"{name}.settings.json"
        for other in sorted(folder.glob("*.settings.json")):
            if other != path and records.table(other).get("model") != now["model"]:
                which = other.name.removesuffix(".settings.json")
                raise CheckpointError(f"{folder} holds answers of another model ({which})\n  choose another folder")
        if not (folder / f"{name}.answers.jsonl").exists() or not path.exists():
            records.write_table(path, now)
            return
        before: Mapping[str, Any] = records.table(path)
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            raise CheckpointError(
                f"{folder} holds answers to {name} made with another {', '.join(changed)}\n  choose another folder, or remove "
                f"{name}.answers.jsonl to answer again"
            )


def answers(folder: Path, name: Benchmark) -> Answers:
    """The answers in a folder."""
    needs = ("id", "turn", "text", "finished", "new_tokens", "truncated")
    return {(record["id"], record["turn"]): record for record in records.read(folder / f"{name}.answers.jsonl", needs=needs)}
