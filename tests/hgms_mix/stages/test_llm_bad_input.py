"""What a practitioner sees of bad input to `hgms mix` and `hgms run`: one message with the place,
an exit code, no traceback, and nothing lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects
from support.small_mixes import TASK, begin, fails, right, sampled, write_rows, write_sums

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

from hgms_core.pipeline import Pipeline
from hgms_mix.lm.store import warn
from hgms_mix.stages.config import load
from hgms_mix.stages.mix import ensure_runnable
from hgms_mix.stages.reweight import reweight

pytestmark = [
    # peft's own calls of names that transformers has renamed
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    )
]
MIX = f"""
seed = 1
budget = "2 steps"
method = "hg-ms"
run = {{ threads = 1 }}
{TASK}
[sample]
size = 12
[finetune]
accumulation = 4
save_every = 1
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    begin(MIX, sums=range(12), dots=range(20, 32), validation=range(40, 52), test=range(60, 72))
    warn.cache_clear()
    yield tmp_path
    assert logging.getLogger("hgms").handlers == []


def learn(*sets: str) -> None:
    """The first stage of the mix, in Python."""
    config = load(Path("mix.toml"), list(sets))
    ensure_runnable(config, "evaluate")
    reweight(config.reweight, Path("out"))


def added(text: str) -> Callable[[], Any]:
    """More lines of the first source."""
    return lambda: Path("sums.jsonl").write_text(Path("sums.jsonl").read_text() + text)


def nothing() -> None: ...


MODEL = "task.model.path"
CONFIG = "task.model.config."
SUMS = "task.sources.sums.path"
CASES: list[tuple[Callable[[], Any], str, str, str]] = [
    (nothing, "task.sources.sums.path=summs.jsonl", "missing-file", SUMS),
    (nothing, "task.validation.sums.path=no", "missing-file", "task.validation.sums.path"),
    (lambda: write_rows("sums", ()), "", "no-rows", SUMS),
    (added('{"prompt": "4 + 1 =",\n'), "", "wrong-row", SUMS),
    (
        added('{"promt": "a", "completion": "b"}\n' * 7),
        f"{SUMS[:-4]}max_bad_rows=6",
        "wrong-row",
        SUMS,
    ),
    (nothing, "task.sources.dots.rows=13", "too-few-rows", "task.sources.dots.rows"),
    (nothing, "task.max_length=8", "no-rows", SUMS),
    (nothing, "task.sources.Sums.path=sums.jsonl", "duplicate-name", "mix.toml.task.sources"),
    (nothing, "task.template=model", "missing-template", "task.template"),
    (nothing, "task.model={ path = './m/no', tokenizer = 'bytes' }", "missing-file", MODEL),
    (nothing, "task.model={ path = '$NO/m', tokenizer = 'bytes' }", "missing-variable", MODEL),
    (nothing, CONFIG + "model_type=gtp2", "unknown-model-type", CONFIG + "model_type"),
    (nothing, CONFIG + "n_layers=2", "unknown-option", CONFIG + "n_layers"),
    (nothing, CONFIG + "n_layer=two", "cannot-load", "task.model.config"),
    (nothing, CONFIG + "n_positions=8", "out-of-range", "task.max_length"),
    (nothing, CONFIG + "vocab_size=100", "wrong-value", "task.model.tokenizer"),
    (nothing, "task.adapter.targets=['q_proj']", "unknown-module", "task.adapter.targets"),
    (nothing, "finetun.lr=1", "unknown-option", "mix.toml.finetun"),
    (nothing, "sample.size=0", "out-of-range", "sample.size"),
    (nothing, "finetune.epochs=0", "conflicting-options", "finetune.epochs"),
    (nothing, "finetune.epochs=-1", "out-of-range", "finetune.epochs"),
    (nothing, "finetune.lr=0.0", "out-of-range", "finetune.lr"),
    (nothing, "finetune.schedule=step", "unknown-choice", "finetune.schedule"),
    (nothing, "evaluate.benchmarks=['gsm8k']", "unknown-option", "mix.toml.evaluate.benchmarks"),
    (nothing, "evaluate=3", "unknown-option", "mix.toml.evaluate"),
    (nothing, "run.device=cuda:1", "not-supported", "run.device"),
    (nothing, "task=quadratic", "not-supported", "task.name"),
]


@pytest.mark.parametrize(("prepare", "sets", "code", "place"), CASES)
def test_bad_input_is_an_error_with_its_code_and_place(
    prepare: Callable[[], Any], sets: str, code: str, place: str
) -> None:
    prepare()
    with rejects(code) as caught:
        learn(*([sets] if sets else []))
    assert ".".join(map(str, caught.value.place)) == place


@pytest.mark.parametrize(
    ("words", "sets", "part"),
    [
        (("mix", "mix.toml"), ["task.sources.sums.path=summs.jsonl"], "(task.sources.sums.path)"),
        (("run", "mix.toml"), ["task.sources.sums.path=summs.jsonl"], "(task.sources.sums.path)"),
        (("mix", "reweigth", "mix.toml"), [], "'reweight'?"),
        (("mix", "/dev/zero"), [], "(/dev/zero)"),
        (("mix", "sample"), [], "'CONFIG'"),
    ],
)
def test_a_command_says_it_in_one_message(
    words: tuple[str, ...], sets: list[str], part: str
) -> None:
    done = fails(*words, sets=sets, parts=[part])
    assert done.stderr.lower().count("error: ") == 1
    assert not list(Path().rglob("report.json"))


@pytest.mark.parametrize("words", [("mix", "old.toml"), ("mix", "compare", "old.toml")])
def test_benchmarks_are_rejected_with_the_commands_that_evaluate_them(
    words: tuple[str, ...],
) -> None:
    text = MIX.replace('method = "hg-ms"', "" if "compare" in words else 'method = "hg-ms"')
    text += "[evaluate]\nbenchmarks = ['gsm8k']\n"
    text += '[[method]]\nname = "uniform"\n' if "compare" in words else ""
    Path("old.toml").write_text(text)
    parts = ["(old.toml: evaluate.benchmarks)", "lm_eval --model hf", "benchmarks/llm/evaluate.py"]
    done = fails(*words, parts=parts)
    assert done.stderr.lower().count("error: ") == 1


def test_rows_left_out_and_overlaps_are_said_once() -> None:
    """KTO's answers whose `label` is false, and prompts in two sets."""
    texts = [("GOOD" if number % 2 else "BAD", f"{number}?") for number in range(20)]
    rows = [
        {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": said},
            ],
            "label": said == "GOOD",
        }
        for said, asked in texts
    ]
    write_rows("sums", rows)
    write_sums("test", range(20, 32))  # which `dots` has, too
    with rejects("wrong-row", *SUMS.split(".")):
        learn()
    done = right("mix", "sample", "mix.toml", "--json", sets=["task.sources.sums.max_bad_rows=10"])
    for once, part in (
        ("rows skipped or cut", "sources 'sums': 10 bad, of 20"),
        ("prompts that are in two sets", "  test 'sums' and train 'dots': 12 of 12 (100.0%)"),
    ):
        assert (done.stderr.count(once), done.stderr.count(part)) == (1, 1)
    said = {row["messages"][-1]["content"] for row in sampled(json.loads(done.stdout))}
    assert ("GOOD" in said, "BAD" in said) == (True, False)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (["method.generator.optimizer.lr=1e30"], "(method.generator)"),
        (["method=uniform", "finetune.lr=1e30"], "(finetune.lr)"),
    ],
    ids=["reweight", "finetune"],
)
def test_losses_that_are_not_finite_end_the_stage(sets: list[str], part: str) -> None:
    fails("mix", "mix.toml", sets=sets, parts=["nan", part], code=1)


def test_out_of_memory_names_the_knobs_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    def second(self: Any, problem: Any, state: Any, *rest: Any, step: Any = Pipeline.step) -> Any:
        return full() if int(state["step"]) == 1 else step(self, problem, state, *rest)

    words = ("mix", "reweight", "mix.toml")
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "step", second)
        fails(*words, parts=["step 2: ", "9.00 GiB.", "  method.generator: lower chunk"], code=1)
    assert "reweight: resumes (hg-ms" in right(*words).stderr
