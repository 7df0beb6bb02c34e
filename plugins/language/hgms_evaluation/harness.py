"""Tasks of the Language Model Evaluation Harness (lm-eval) on a model that is in memory already, with data from local files."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import attrs
from attrs import field, validators

from hgms_core import ConfigError, DataError, MissingExtra, closest
from hgms_evaluation import intervals, questions, records
from hgms_evaluation.generate import answering, fingerprint, own_stops, prompt_cap
from hgms_fields import frozen

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
"""The harness's own definition of a task, and the files below $HGMS_DATA that take the place of its data set on the Hub."""

FEWSHOT_SEED: Final = 1234
"""The harness's own, of the order of examples in a prompt."""


def _known(_self: object, _attribute: object, value: Sequence[str]) -> None:
    for name in value:
        if name not in LOCAL and not name.endswith((".yaml", ".yml")):
            near = closest(name, LOCAL)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"unknown task {name!r}{hint} (known: {', '.join(LOCAL)}, or the path of a YAML file of your own)")


@final
@frozen(kw_only=True)
class LmEval:
    """Tasks of the lm-eval harness, as it defines, prompts and scores them.

    Use when: figures are to stand beside others that came from the harness, or a task is wanted that it has. Avoid comparing
    its figures with those of ``benchmarks``: prompts, the examples in them and what counts as the answer differ.

    Arguments:
        tasks: of "gsm8k" (five examples in the prompt), "gsm8k_cot" (eight worked ones), "gsm8k_cot_zeroshot" and
            "hendrycks_math" (all seven subjects in one), whose data are read below $HGMS_DATA; or paths of YAML files in the
            harness's format. Nothing is asked of the Hub, so those have to name local data.
        num_fewshot: examples in a prompt; None: as the task says.
        limit: only the first so many questions; None: all.
        max_new_tokens: of an answer.
        batch_size: prompts answered at once.
        chat_template: prompts in the tokenizer's chat template.

    Cost: one generation a question. A task that was finished with the same settings and model is not run again; one that was
    broken off begins anew.

    >>> LmEval(tasks=("gsm8k",)).limit is None
    True

    Source: Gao et al., lm-evaluation-harness 0.4.13.
    """

    tasks: tuple[str, ...] = field(validator=[validators.min_len(1), _known])
    num_fewshot: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    limit: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_new_tokens: int = field(default=256, validator=validators.ge(1))
    batch_size: int = field(default=16, validator=validators.ge(1))
    chat_template: bool = False

    def check(self) -> None:
        """Raises MissingExtra, DataError or ConfigError for what would only show after the model is trained."""
        if importlib.util.find_spec("lm_eval") is None:
            raise MissingExtra("[evaluate.lm_eval] needs lm-eval, which is not installed\n  pip install 'hgms[lm-eval]'")
        for name in self.tasks:
            _files(name)

    def run(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, report: Callable[[str], None]
    ) -> dict[str, Any]:
        """A result for each task, filter and metric, named ``lm-eval TASK FILTER METRIC``. Every question, answer and score
        goes to ``lm-eval.TASK.samples.jsonl``.

        Raises:
            MissingExtra, DataError, ConfigError: as :meth:`check`; or more new tokens than the model has positions.
        """
        self.check()
        prompt_cap(model, 1, self.max_new_tokens)
        folder.mkdir(parents=True, exist_ok=True)
        results: dict[str, Any] = {}
        for name in self.tasks:
            path = folder / f"lm-eval.{_short(name)}.json"
            settings = {
                **{key: value for key, value in attrs.asdict(self).items() if key not in ("tasks", "batch_size")},
                "files": _files(name), "model": fingerprint(model), "chat_template_text": tokenizer.chat_template,
            }  # fmt: skip
            if not path.exists() or (before := records.table(path)).get("settings") != settings:
                before = {"settings": settings, "results": self._task(name, model, tokenizer, folder, report)}
                records.replace(path, before)
            results |= before["results"]
        return results

    def _task(
        self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, report: Callable[[str], None]
    ) -> dict[str, Any]:
        from lm_eval import evaluate
        from lm_eval.models.huggingface import HFLM
        from transformers import GenerationConfig

        task = load(name)
        shown = task.get_config("num_fewshot") or 0 if self.num_fewshot is None else self.num_fewshot
        task.set_config(key="num_fewshot", value=shown)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        generation = {**task.config.generation_kwargs, "max_gen_toks": self.max_new_tokens, "do_sample": False}
        task.config.generation_kwargs = generation
        report(f"lm-eval: {task.config.task}")
        # the harness leaves the end of an answer to the model's own settings: where those have none, rows ran on past it
        stops = sorted({*own_stops(model), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})
        with _quiet(), answering(model, GenerationConfig(eos_token_id=stops or None)):
            any_model: Any = model  # peft's wrapper is taken as well
            lm = HFLM(pretrained=any_model, tokenizer=copy.deepcopy(tokenizer), batch_size=self.batch_size, backend="causal")
            # not simple_evaluate, which also seeds the global generators and reads some thousand task files
            done: Any = evaluate(
                lm, {"tasks": {name: task}}, limit=self.limit, log_samples=True, bootstrap_iters=0,
                apply_chat_template=self.chat_template,
            )  # fmt: skip
        (samples,) = done["samples"].values()
        records.write(folder / f"lm-eval.{_short(name)}.samples.jsonl", [_sample(sample) for sample in samples])
        return summary(_short(name), samples)


def load(name: str) -> Any:
    """The harness's task: its own definition with our files for its data set, or one's own."""
    import lm_eval.tasks
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    with _quiet():
        if name not in LOCAL:
            (task,) = TaskManager(include_defaults=False).load([str(_own(name))])["tasks"].values()
            return task
        definition, files = LOCAL[name]
        table = {**load_yaml(Path(str(lm_eval.tasks.__file__)).parent / definition), "task": name, "dataset_name": None}
        return ConfigurableTask(config={**table, "custom_dataset": lambda **_: _dataset(files)})


def summary(name: str, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each metric under each filter, with Wilson's interval where every score is 0 or 1."""
    results: dict[str, Any] = {}
    for which in dict.fromkeys(sample["filter"] for sample in samples):
        rows = [sample for sample in samples if sample["filter"] == which]
        for metric in rows[0]["metrics"]:
            values = [float(row[metric]) for row in rows]
            mean = sum(values) / len(values)
            result: dict[str, Any] = {"score": mean, "unit": metric, "n": len(values), "interval": None}
            if set(values) <= {0.0, 1.0}:
                ends = intervals.wilson(round(sum(values)), len(values))
                interval = {"low": 100 * ends.low, "high": 100 * ends.high, "method": "wilson", "level": 0.95}
                result |= {"score": 100 * mean, "unit": "percent", "interval": interval}
            results[f"lm-eval {name} {which} {metric}".replace(" none ", " ")] = result
    return results


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    scores = {metric: float(sample[metric]) for metric in sample["metrics"]}
    return {
        "id": sample["doc_id"], "filter": sample["filter"], "prompt": sample["arguments"][0][0],
        "target": str(sample["target"]), "response": sample["resps"][0][0], "answer": sample["filtered_resps"][0],
        **scores,
    }  # fmt: skip


def _dataset(files: Mapping[str, str]) -> Any:
    from datasets import Dataset, DatasetDict

    def rows(file: str) -> Any:
        return Dataset.from_list([row for _, row in questions.rows_of(_below_data(file))[0]])

    return DatasetDict({split: rows(file) for split, file in files.items()})


def _files(name: str) -> dict[str, str]:
    """The digests of the files that a task is made of."""
    paths = [_below_data(file) for file in LOCAL[name][1].values()] if name in LOCAL else [_own(name)]
    return {path.name if name not in LOCAL else "/".join(path.parts[-2:]): _digest(path) for path in paths}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _below_data(file: str) -> Path:
    if "HGMS_DATA" not in os.environ:
        raise DataError(f"where is {file}? Set HGMS_DATA to the folder that holds it")
    path = Path(os.environ["HGMS_DATA"], file)
    if not path.exists():
        raise DataError(f"lm-eval: there is no {file} below HGMS_DATA")
    return path


def _own(name: str) -> Path:
    path = Path(os.path.expandvars(name)).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no task file {name} @ evaluate.lm_eval.tasks")
    return path.resolve()


def _short(name: str) -> str:
    return name if name in LOCAL else re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).stem)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's remarks on being handed a model, which is what it is for here, and without bars across ours."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, shown = logging.getLogger("lm_eval"), not are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            enable_progress_bars()
