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
from support.small_mixes import TASK, fails, report_of, right, sampled, write_rows, write_sums

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

from hgms_mix.lm.store import warn
from hgms_mix.lm.tokenizers import byte_tokenizer
from hgms_mix.stages.config import load
from hgms_mix.stages.mix import Mix

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
    for number, name in enumerate(("sums", "dots", "validation", "test")):
        write_sums(name, range(20 * number, 20 * number + 12))
    Path("mix.toml").write_text(MIX)
    warn.cache_clear()
    yield tmp_path
    assert logging.getLogger("hgms").handlers == []


def learn(*sets: str) -> None:
    """The first stage of the mix, in Python."""
    mix = Mix(load(Path("mix.toml"), list(sets)), Path("out"))
    mix.check("evaluate")
    mix.run("reweight")


def malformed() -> None:
    with Path("sums.jsonl").open("a") as stream:
        stream.write('{"prompt": "4 + 1 =",\n')


def misspelt_fields() -> None:
    with Path("sums.jsonl").open("a") as stream:
        stream.write('{"promt": "a", "completion": "b"}\n' * 7)


def folder_with_code() -> None:
    Path("own").mkdir()
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    Path("own/config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    Path("own/own.py").write_text("raise SystemExit('this code ran')\n")


def bare_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained("bare")


def nothing() -> None: ...


MODEL = "task.model.path"
CONFIG = "task.model.config."
SUMS = "task.sources.sums.path"
CASES: list[tuple[Callable[[], None], str, str, str]] = [
    (nothing, "task.sources.sums.path=summs.jsonl", "missing-file", SUMS),
    (nothing, "task.validation.sums.path=no", "missing-file", "task.validation.sums.path"),
    (lambda: write_rows("sums", ()), "", "no-rows", SUMS),
    (malformed, "", "wrong-row", SUMS),
    (misspelt_fields, "task.sources.sums.max_bad_rows=6", "wrong-row", SUMS),
    (nothing, "task.sources.dots.rows=13", "too-few-rows", "task.sources.dots.rows"),
    (nothing, "task.max_length=8", "no-rows", SUMS),
    (nothing, "task.sources.Sums.path=sums.jsonl", "duplicate-name", "mix.toml.task.sources"),
    (nothing, "task.template=model", "missing-template", "task.template"),
    (nothing, "task.template=plian", "unknown-choice", "task.template"),
    (bare_tokenizer, "task.model.tokenizer=bare", "missing-token", "task.model.tokenizer"),
    (nothing, "task.model={ path = './m/no', tokenizer = 'bytes' }", "missing-file", MODEL),
    (nothing, "task.model={ path = '$NO/m', tokenizer = 'bytes' }", "missing-variable", MODEL),
    (folder_with_code, "task.model={ path = 'own', tokenizer = 'bytes' }", "untrusted-code", MODEL),
    (lambda: Path("e").mkdir(), "task.model.tokenizer=e", "missing-file", "task.model.tokenizer"),
    (nothing, CONFIG + "model_type=gtp2", "unknown-model-type", CONFIG + "model_type"),
    (nothing, CONFIG + "n_layers=2", "unknown-option", CONFIG + "n_layers"),
    (nothing, CONFIG + "n_layer=two", "cannot-load", "task.model.config"),
    (nothing, CONFIG + "n_positions=8", "out-of-range", "task.max_length"),
    (nothing, CONFIG + "vocab_size=100", "wrong-value", "task.model.tokenizer"),
    (nothing, "task.adapter.targets=['q_proj']", "unknown-module", "task.adapter.targets"),
    (nothing, "finetun.lr=1", "unknown-option", "mix.toml.finetun"),
    (nothing, "sample.sise=3", "unknown-option", "sample.sise"),
    (nothing, "sample.size=0", "out-of-range", "sample.size"),
    (nothing, "finetune.schedule=cosin", "unknown-choice", "finetune.schedule"),
    (nothing, "finetune.epochs=0", "conflicting-options", "finetune.epochs"),
    (nothing, "evaluate.benchmarks=['gsm9k']", "unknown-choice", "evaluate.benchmarks.0"),
    (nothing, "run.device=cuda:1", "not-supported", "run.device"),
    (nothing, "task=quadratic", "not-supported", "task.name"),
    (nothing, "evaluate.benchmarks=['mt-bench']", "missing-variable", "evaluate.judge.api_key_env"),
]


@pytest.mark.parametrize(("prepare", "sets", "code", "place"), CASES)
def test_bad_input_is_an_error_with_its_code_and_place(
    prepare: Callable[[], None], sets: str, code: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
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


def test_a_file_that_is_no_mix_is_rejected() -> None:
    Path("mix.toml").write_text(MIX.replace("[sample]\nsize = 12\n", ""))
    with rejects("missing-option", "mix.toml", "sample"):
        learn()
    Path("mix.toml").write_text(MIX.replace("[task.sources.dots]", "[task.sources.sums]"))
    with rejects("wrong-format", "mix.toml"):
        learn()


@pytest.mark.parametrize(
    ("stage", "missing"),
    [("finetune", "accelerate"), ("finetune", "peft"), ("sample", "transformers")],
)
def test_what_is_not_installed_is_said_before_anything_runs(
    stage: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else there(name, *rest),
    )
    with rejects("missing-package", stage) as caught:
        Mix(load(Path("mix.toml")), Path("out")).check(stage)
    assert caught.value.install == "pip install 'hgms[llm]'"
    assert missing in caught.value.message


@pytest.mark.parametrize("reason", ["unknown", "no network"])
def test_a_name_that_the_hub_does_not_give_is_asked_for_once(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx2 as httpx  # what huggingface_hub is built on
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    requests = []

    def model_info(self: Any, name: str, **_: Any) -> None:
        requests.append(name)
        if reason == "unknown":
            raise RepositoryNotFoundError(
                "404", response=httpx.Response(404, request=httpx.Request("GET", "https://hub"))
            )
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    code = "unknown-model" if reason == "unknown" else "no-network"
    with rejects(code, *MODEL.split(".")):
        learn('task.model={ path = "Owner/Model-7B", tokenizer = "bytes" }')
    assert requests == ["Owner/Model-7B"]


def test_rows_and_columns_left_out_and_overlaps_are_said_once() -> None:
    """KTO's answers whose `label` is false, columns of no meaning, prompts in two sets."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{number}?"},
                {"role": "assistant", "content": "GOOD" if number % 2 else "BAD"},
            ],
            "label": bool(number % 2),
            "grade": "A",
            "note": "n",
        }
        for number in range(20)
    ]
    write_rows("sums", rows)
    write_sums("test", range(20, 32))  # which `dots` has, too
    with rejects("wrong-row", *SUMS.split(".")):
        learn()
    done = right("mix", "sample", "mix.toml", "--json", sets=["task.sources.sums.max_bad_rows=10"])
    assert done.stderr.count("columns that are not read") == 1
    assert "\n  sources 'sums': 'grade', 'note'\n" in done.stderr
    assert done.stderr.count("rows left out or cut") == 1
    assert "sources 'sums': 10 bad, of 20" in done.stderr
    assert done.stderr.count("prompts that stand in two sets") == 1
    assert "  test 'sums' and train 'dots': 12 of 12 (100.0%); rows 0, 1, 2" in done.stderr
    assert "UserWarning" not in done.stderr
    said = {row["messages"][-1]["content"] for row in sampled(json.loads(done.stdout))}
    assert "GOOD" in said
    assert "BAD" not in said


@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (["method.generator.lr=1e30"], "(method.generator)"),
        (["method=uniform", "finetune.lr=1e30"], "(finetune.lr)"),
    ],
    ids=["reweight", "finetune"],
)
def test_losses_that_are_not_finite_end_the_stage(sets: list[str], part: str) -> None:
    fails("mix", "mix.toml", sets=sets, parts=["nan", part], code=1)


def test_out_of_memory_names_the_knobs_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from hgms_core.pipeline import Pipeline

    step = Pipeline.step
    full = [1]

    def limited(self: Pipeline, problem: Any, state: Any, progress: float = 0.0) -> Any:
        if int(state["step"]) in full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return step(self, problem, state, progress)

    monkeypatch.setattr(Pipeline, "step", limited)
    knobs = ["  method.generator: lower chunk", "  method.selector: lower chunk", "  task: lower"]
    fails("mix", "reweight", "mix.toml", parts=["step 2: ", "9.00 GiB.", *knobs], code=1)
    (folder,) = Path("runs/source-mixture").glob("hg-ms-*/seed-1")
    assert json.loads((folder / "summary.json").read_bytes())["status"] == "failed"
    full.clear()
    assert "reweight: going on with hg-ms" in right("mix", "reweight", "mix.toml").stderr


def test_a_base_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    part = 'task.model.quantize = "4bit"'
    fails("mix", "reweight", "mix.toml", parts=["CUDA out of memory.", part], code=1)


def test_near_copies_between_sets_are_told_with_an_example() -> None:
    pytest.importorskip("rensa", reason="rensa is not installed: pip install 'hgms[near]'")
    answer = " ".join(f"word{number}" for number in range(40))
    row = {"prompt": "Say the words from zero to forty.", "completion": answer}
    write_rows("dots", [row, {"prompt": "How?", "completion": "So it is."}])
    write_rows("test", [row | {"completion": answer + " more"}])
    (pair,) = report_of("mix", "near", "mix.toml")
    assert (pair["name"], pair["other"]) == ("test sums", "sources dots")
    assert (pair["count"], pair["size"]) == (1, 1)
    shown = right("mix", "near", "mix.toml").stdout
    assert "test sums row 0 and sources dots row 0 agree by" in shown
    assert row["prompt"] in shown
