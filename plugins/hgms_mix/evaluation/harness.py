"""Run tasks of the Language Model Evaluation Harness (lm-eval) on a model in memory.

Data are read from local files.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast, final

import attrs
from attrs import field

from hgms.arguments import require
from hgms.packages import optional_module
from hgms.store import Folder, file_digest
from hgms_core import component
from hgms_core.validators import at_least, not_empty, optional
from hgms_mix.evaluation import questions, records, scores
from hgms_mix.evaluation.generate import own_stops, prompt_cap, without_own_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GSM8K: Final = {"train": "gsm8k/train.jsonl.gz", "test": "gsm8k/test.jsonl.gz"}
MATH: Final = {"train": "math/train.jsonl.gz", "test": "math/test.jsonl.gz"}
LOCAL: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "gsm8k": ("gsm8k/gsm8k.yaml", GSM8K),
    "gsm8k_cot": ("gsm8k/gsm8k-cot.yaml", GSM8K),
    "gsm8k_cot_zeroshot": ("gsm8k/gsm8k-cot-zeroshot.yaml", GSM8K),
    "hendrycks_math": ("hendrycks_math/hendrycks_math_algebra.yaml", MATH),
}
"""The definition of each task in the harness, and the files below $HGMS_DATA that replace its
data set on the Hub.
"""

PLACE: Final = ("evaluate", "lm_eval")
"""The table of a mix file, for the places of errors."""

TASKS: Final = (*PLACE, "tasks")

FEWSHOT_SEED: Final = 1234
"""The default of the harness for the order of examples in a prompt."""


@final
@component
class LmEval:
    """Tasks of the lm-eval harness, with its definitions, prompts and scores.

    Use when: comparing results with other results from the harness. Avoid comparing its results
    with the results of ``benchmarks``: prompts, examples in the prompts, and the extraction of
    answers differ.

    Parameters
    ----------
    tasks
        Any of "gsm8k" (five examples in the prompt), "gsm8k_cot" (eight worked examples),
        "gsm8k_cot_zeroshot" and "hendrycks_math" (all seven subjects in one task). Their data are
        read below $HGMS_DATA, without a request to the Hub. For other tasks, give the tuned model
        to the harness's own command.
    limit
        Number of questions, from the first (default: all).
    max_new_tokens
        Largest number of tokens per response. Decoding is greedy.
    batch_size
        Prompts per batch.
    chat_template
        Whether prompts use the tokenizer's chat template.

    Notes
    -----
    Cost: one generation per question. A task that finished with the same settings is skipped; an
    interrupted task restarts. A prompt longer than the positions of the model loses its beginning;
    the results contain the number of such prompts.

    Source: Gao et al., lm-evaluation-harness 0.4.13.

    Examples
    --------
    >>> LmEval(tasks=("gsm8k",)).limit is None
    True
    """

    tasks: tuple[Literal["gsm8k", "gsm8k_cot", "gsm8k_cot_zeroshot", "hendrycks_math"], ...] = (
        field(validator=not_empty)
    )
    limit: int | None = field(default=None, validator=optional(at_least(1)))
    max_new_tokens: int = field(default=256, validator=at_least(1))
    batch_size: int = field(default=16, validator=at_least(1))
    chat_template: bool = False

    def check(self) -> None:
        """Raise MissingExtra, DataError or ConfigError before training.

        Without this check, these failures would occur only after training.
        """
        optional_module("lm_eval", "evaluate.lm_eval", "lm-eval", place=PLACE)
        for name in self.tasks:
            _digests(name)

    def run(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        answers: Folder,
        report: Callable[[str], None],
    ) -> dict[str, Any]:
        """Return a result for each task, filter and metric, named ``lm-eval TASK FILTER METRIC``.

        Write every question, answer and score to ``lm-eval.TASK.samples.jsonl``.

        Raises
        ------
        MissingExtra
        DataError
        ConfigError
            As :meth:`check`; the model has too few positions for the new tokens; or a chat template
            is required and the tokenizer has none.
        """
        prompt_cap(model, 1, self.max_new_tokens, (*PLACE, "max_new_tokens"))
        require(
            not self.chat_template or tokenizer.chat_template is not None,
            "not-supported",
            "chat_template=True requires a chat template, but the tokenizer has none",
            place=(*PLACE, "chat_template"),
            hint="set chat_template = false",
        )
        facts = answers.manifest().facts
        stored = dict(facts.get("lm_eval", {}))
        common = {
            key: value
            for key, value in attrs.asdict(cast(Any, self)).items()
            if key not in ("tasks", "batch_size")
        }
        results: dict[str, Any] = {}
        for name in self.tasks:
            settings = {
                **common,
                "files": _digests(name),
                "chat_template_text": tokenizer.chat_template,
            }
            if stored.get(name, {}).get("settings") != settings:
                found = self._task(name, model, tokenizer, answers.path, report)
                stored[name] = {"settings": settings, "results": found}
                answers.commit([], facts={**facts, "lm_eval": stored})
            results |= stored[name]["results"]
        return results

    def _prepare(self, name: str) -> Any:
        """Load the harness's task and apply these settings."""
        task = load(name)
        task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        generation = {
            **task.config.generation_kwargs,
            "max_gen_toks": self.max_new_tokens,
            "do_sample": False,
        }
        task.config.generation_kwargs = generation
        return task

    def _task(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        report: Callable[[str], None],
    ) -> dict[str, Any]:
        from lm_eval import evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.utils import handle_non_serializable
        from transformers import GenerationConfig

        task = self._prepare(name)
        report(f"lm-eval: {task.config.task}")
        # The harness leaves the end of an answer to the settings of the model. Without such
        # settings, rows continue past their end.
        stops = sorted(
            {
                *own_stops(model),
                *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]),
            }
        )
        with without_own_settings(model, GenerationConfig(eos_token_id=stops or None)):
            lm = HFLM(
                pretrained=model,  # also accepts peft's wrapper
                tokenizer=copy.deepcopy(tokenizer),
                batch_size=self.batch_size,
                backend="causal",
            )
            # simple_evaluate also seeds the global generators and reads some thousand task files
            done: Any = evaluate(
                lm,
                {"tasks": {name: task}},
                limit=self.limit,
                log_samples=True,
                bootstrap_iters=0,
                apply_chat_template=self.chat_template,
            )
        samples = json.loads(json.dumps(done["samples"][name], default=handle_non_serializable))
        records.write(
            folder / f"lm-eval.{name}.samples.jsonl", [_sample(sample) for sample in samples]
        )
        results = summary(name, samples, done["results"][name])
        room = lm.max_length - self.max_new_tokens
        prompts = {sample["doc_id"]: sample["arguments"][0][0] for sample in samples}
        cut = sum(len(lm.tok_encode(prompt)) > room for prompt in prompts.values())
        if cut:
            report(f"lm-eval: {cut} of {len(prompts)} prompts cut to their last {room} tokens")
        return {key: {**result, "prompts_truncated": cut} for key, result in results.items()}


def load(name: str) -> Any:
    """Load the harness's definition of a task, with local data files."""
    import lm_eval.tasks
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    _quietly()
    definition, files = LOCAL[name]
    table = {
        **load_yaml(Path(str(lm_eval.tasks.__file__)).parent / definition),
        "task": name,
        "dataset_name": None,
    }
    return ConfigurableTask(config={**table, "custom_dataset": lambda **_: _dataset(files)})


def summary(
    name: str, samples: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the harness's figure for each metric under each filter.

    If a figure is the mean of scores of 0 and 1, return it in percent, with Wilson's interval.
    """
    results: dict[str, Any] = {}
    for which in dict.fromkeys(sample["filter"] for sample in samples):
        rows = [sample for sample in samples if sample["filter"] == which]
        for metric in rows[0]["metrics"]:
            values = [row[metric] for row in rows]
            figure = float(figures[f"{metric},{which}"])
            result: dict[str, Any] = {
                "score": figure,
                "unit": metric,
                "n": len(values),
                "interval": None,
            }
            if all(value in (0, 1) for value in values) and math.isclose(
                figure, sum(values) / len(values)
            ):
                result |= {
                    "score": 100 * figure,
                    "unit": "percent",
                    "interval": scores.share(int(sum(values)), len(values)),
                }
            results[f"lm-eval {name} {which} {metric}".replace(" none ", " ")] = result
    return results


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a sample to a row of the file of samples."""
    return {
        "id": sample["doc_id"],
        "filter": sample["filter"],
        "prompt": sample["arguments"][0][0],
        "target": str(sample["target"]),
        "response": sample["resps"][0][0],
        "answer": sample["filtered_resps"][0],
        **{metric: sample[metric] for metric in sample["metrics"]},
    }


def _dataset(files: Mapping[str, str]) -> Any:
    from datasets import Dataset, DatasetDict

    def rows(file: str) -> Any:
        return Dataset.from_list(
            [row for _, row in questions.rows_of(questions.data_path(file, TASKS))[0]]
        )

    return DatasetDict({split: rows(file) for split, file in files.items()})


def _digests(name: str) -> dict[str, str]:
    """Return the digests of the files of a task."""
    return {file: file_digest(questions.data_path(file, TASKS)) for file in LOCAL[name][1].values()}


def _quietly() -> None:
    """Suppress progress bars and the harness's warnings about a model object as argument."""
    from datasets.utils import disable_progress_bars

    disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
