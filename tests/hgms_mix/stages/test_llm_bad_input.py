"""What a practitioner sees of bad input to `hgms mix` and `hgms run`: one message with the place
and what to do, an exit code, no traceback, and nothing lost."""

from __future__ import annotations

import gzip
import json
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support.helpers import rejects

from hgms.cli import main

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

from hgms_mix.lm.store import warn
from hgms_mix.lm.tokenizers import byte_tokenizer

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
{(Path(__file__).resolve().parents[2] / "tiny_mix.toml").read_text()}
[sample]
size = 12
[finetune]
accumulation = 4
save_every = 1
"""


def write(name: str, first: int, count: int = 12, completion: str = "") -> None:
    rows = [
        json.dumps({"prompt": f"{i} + 1 =", "completion": completion or str(i + 1)})
        for i in range(first, first + count)
    ]
    Path(name).write_text("\n".join(rows) + "\n")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HGMS_CACHE", str(tmp_path / "cache"))
    for number, name in enumerate(("sums", "dots", "validation", "test")):
        write(f"{name}.jsonl", 100 * (number + 1))
    Path("mix.toml").write_text(MIX)
    warn.cache_clear()
    yield tmp_path
    assert logging.getLogger("hgms").handlers == []


def hgms(*arguments: str, sets: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(
        main, [*arguments, *(part for item in sets for part in ("--set", item))]
    )


def refused(done: Result, *messages: str, code: int = 2) -> None:
    """Leaves with the code; one error, no traceback; and each of the messages in what it says."""
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.output
    for message in messages:
        assert message in done.stderr, done.stderr


def no_rows() -> None:
    Path("sums.jsonl").write_text("")


def malformed() -> None:
    write("sums.jsonl", 0, 3)
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


BAD: list[tuple[str, Callable[[], None], tuple[str, ...], tuple[str, ...]]] = [
    (
        "a source that is not there",
        nothing,
        ("task.sources.sums.path=summs.jsonl",),
        ("summs.jsonl", "(task.sources.sums.path)", "'sums.jsonl'?", "dots.jsonl, "),
    ),
    (
        "a validation set that is not there",
        nothing,
        ("task.validation.sums.path=validatoin.jsonl",),
        ("(task.validation.sums.path)", "'validation.jsonl'?"),
    ),
    ("an empty source", no_rows, (), ("sums.jsonl", "(task.sources.sums.path)")),
    (
        "malformed JSON",
        malformed,
        (),
        (
            "1 of 4 rows of sums.jsonl",
            "(task.sources.sums.path)",
            "  line 4: malformed JSON: ",
            "max_bad_rows = 1 ",
        ),
    ),
    (
        "rows without a field",
        misspelt_fields,
        ("task.sources.sums.max_bad_rows=6",),
        (
            "7 of 19 rows of sums.jsonl",
            "max_bad_rows=6 (task.sources.sums.path)",
            "line 13: no 'prompt'",
            "'promt'?",
            "… and 2 more",
            "max_bad_rows = 7 ",
        ),
    ),
    (
        "a source shorter than asked",
        nothing,
        ("task.sources.dots.rows=13",),
        ("rows=13 ", "dots.jsonl has 12 ", "(task.sources.dots.rows)", "rows = 12 "),
    ),
    (
        "all rows too long",
        nothing,
        ("task.max_length=8",),
        (
            "12 of 12 rows of sums.jsonl",
            "max_length=8 ",
            "(task.sources.sums.path)",
            "max_length to 14 ",
        ),
    ),
    (
        "names that differ by case",
        nothing,
        ("task.sources.Sums.path=sums.jsonl",),
        ("'sums' and 'Sums'", "(mix.toml: task.sources)"),
    ),
    (
        "no chat template",
        nothing,
        ("task.template=model",),
        ("chat template", "(task.template)", "plain, alpaca, chatml"),
    ),
    (
        "no padding and no end token",
        bare_tokenizer,
        ("task.model.tokenizer=bare",),
        ("padding", "(task.model.tokenizer)", "tokenizer.pad_token"),
    ),
    (
        "a misspelt template",
        nothing,
        ("task.template=plian",),
        ("'plian' (task.template)", "'plain'?"),
    ),
    (
        "a model folder that is not there",
        lambda: Path("models/small").mkdir(parents=True),
        ('task.model={ path = "./models/smal", tokenizer = "bytes" }',),
        ("'./models/smal'", "(task.model.path)", "'models/small'?", "available in models: small"),
    ),
    (
        "a variable that is not set",
        nothing,
        ('task.model={ path = "$HGMS_NOT_SET/m", tokenizer = "bytes" }',),
        (" HGMS_NOT_SET ", "(task.model.path)"),
    ),
    (
        "a model with code of its own",
        folder_with_code,
        ('task.model={ path = "own", tokenizer = "bytes" }',),
        (
            "'own'",
            "(task.model.path)",
            "task.model.trust_remote_code = true",
            "--trust-remote-code",
        ),
    ),
    (
        "a folder without a tokenizer",
        lambda: Path("empty").mkdir(),
        ("task.model.tokenizer=empty",),
        ("'empty'", "(none) (task.model.tokenizer)\n"),
    ),
    (
        "an unknown architecture",
        nothing,
        ("task.model.config.model_type=gtp2",),
        ("'gtp2' (task.model.config.model_type)", "'gpt2'?"),
    ),
    (
        "an unknown field of the architecture",
        nothing,
        ("task.model.config.n_layers=2",),
        ("'n_layers' (task.model.config.n_layers)", "'n_layer'?", "available: "),
    ),
    (
        "a field of the wrong type",
        nothing,
        ("task.model.config.n_layer=two",),
        ("Validation error for field 'n_layer': ", "(task.model.config)"),
    ),
    (
        "rows longer than the model reads",
        nothing,
        ("task.model.config.n_positions=8",),
        ("14 tokens", "8 positions (task.max_length)", "max_length = 8 "),
    ),
    (
        "a tokenizer of another model",
        nothing,
        ("task.model.config.vocab_size=100",),
        ("token 257,", "100 tokens (task.model.tokenizer)"),
    ),
    (
        "targets that match nothing",
        nothing,
        ('task.adapter.targets=["q_proj"]',),
        ("'q_proj' (task.adapter.targets)", "available: c_attn,"),
    ),
]


@pytest.mark.parametrize(
    ("prepare", "sets", "messages"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_input_is_one_message(
    prepare: Callable[[], None], sets: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    prepare()
    refused(hgms("mix", "mix.toml", sets=sets), *messages)


def test_run_says_the_same_as_mix() -> None:
    done = hgms("run", "mix.toml", sets=("task.sources.sums.path=summs.jsonl",))
    refused(done, "summs.jsonl", "(task.sources.sums.path)", "'sums.jsonl'?")


def test_compare_keeps_the_reason_of_a_cell_that_failed() -> None:
    no_rows()
    Path("grid.toml").write_text(
        MIX.replace("seed = 1", "seeds = 1").replace('method = "hg-ms"', 'method = ["hg-ms"]')
    )
    done = hgms("compare", "grid.toml", "--jobs", "0")
    assert done.exit_code in (1, 2), done.output
    assert "sums.jsonl has no rows (task.sources.sums.path)" in done.output
    assert "Traceback" not in done.output


def test_two_tables_of_one_name_are_no_toml() -> None:
    text = MIX.replace("[task.sources.dots]", "[task.sources.sums]")
    Path("mix.toml").write_text(text)
    second = text[: text.rindex("[task.sources.sums]")].count("\n") + 1
    refused(hgms("mix", "mix.toml"), "TOML", "sums", f"at line {second}", "(mix.toml)")


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
    done = hgms(
        "mix", "mix.toml", sets=('task.model={ path = "Owner/Model-7B", tokenizer = "bytes" }',)
    )
    cause = "hf auth login" if reason == "unknown" else ": ConnectError"
    refused(done, "'Owner/Model-7B'", cause, "(task.model.path)\n")
    assert requests == ["Owner/Model-7B"]


@pytest.mark.parametrize("words", [("mix", "sample"), ("mix", "--dry-run")])
def test_columns_that_are_not_read_are_named_once_per_source(words: tuple[str, ...]) -> None:
    rows = [
        {"prompt": f"{i} + 2 =", "completion": str(i + 2), "id": i, "grade": "A", "note": "n"}
        for i in range(100, 112)
    ]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = hgms(*words, "mix.toml")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("columns that are not read") == 1
    assert "\n  sources 'sums': 'grade', 'note'\n" in done.stderr


def test_answers_that_the_data_mark_as_bad_are_refused_or_left_out() -> None:
    """KTO: `label` is false."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "GOOD" if i % 2 else "BAD"},
            ],
            "label": bool(i % 2),
        }
        for i in range(20)
    ]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(
        hgms("mix", "sample", "mix.toml"),
        "10 of 20 rows",
        "line 1: 'label' is false",
        "(task.sources.sums.path)",
    )
    done = hgms("mix", "sample", "mix.toml", "--json", sets=("task.sources.sums.max_bad_rows=10",))
    assert done.exit_code == 0, done.output
    assert "sources 'sums': 10 bad, of 20" in done.stderr
    folder = Path(json.loads(done.stdout)["folder"])
    with gzip.open(folder / "sample" / "rows.jsonl.gz", "rt") as stream:
        said = [row["messages"][-1]["content"] for row in map(json.loads, stream)]
    assert "GOOD" in said
    assert "BAD" not in said


def test_overlaps_and_rows_left_out_are_counted_once() -> None:
    misspelt_fields()
    write("validation.jsonl", 110)  # 110 and 111 stand in `sums` too
    write("test.jsonl", 115)  # all but five in the validation set
    done = hgms("mix", "sample", "mix.toml", sets=("task.sources.sums.max_bad_rows=7",))
    assert done.exit_code == 0, done.output
    assert "warning: rows left out or cut:\n  sources 'sums': 7 bad, of 19\n" in done.stderr
    assert done.stderr.count("prompts that stand in two sets") == 1
    assert (
        "  validation 'sums' and train 'sums': 2 of 12 (16.7%); rows 0, 1 of 'sums'\n"
        in done.stderr
    )
    assert (
        "  test 'sums' and validation 'sums': 7 of 12 (58.3%); rows 0, 1, 2, 3, 4, … of 'sums'\n"
        in done.stderr
    )
    assert "UserWarning" not in done.stderr


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        (("method.generator.lr=1e30",), ("step 1: ", "nan", "(method.generator)")),
        (("method=uniform", "finetune.lr=1e30"), ("fine-tuning step 2 ", "nan", "(finetune.lr)")),
    ],
    ids=["reweight", "finetune"],
)
def test_losses_that_are_not_finite_end_the_stage(
    sets: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    refused(hgms("mix", "mix.toml", sets=sets), *parts, code=1)


def test_out_of_memory_names_the_knobs_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from hgms_core.pipeline import Pipeline

    step = Pipeline.step
    full = [1]

    def limited(self: Pipeline, problem: Any, state: Any, progress: float = 0.0) -> Any:
        if int(state["step"]) in full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return step(self, problem, state, progress)

    monkeypatch.setattr(Pipeline, "step", limited)
    done = hgms("mix", "reweight", "mix.toml")
    refused(
        done,
        "step 2: ",
        "CUDA out of memory. Tried to allocate 9.00 GiB.",
        " step 1 ",
        "  method.generator: lower chunk (now all; the same result), lower batch_size (now 16)",
        "  method.selector: lower chunk (now all; the same result)",
        (
            "  task: lower micro_batch (now all; the same result), set checkpointing = true (the "
            "same result)"
        ),
        code=1,
    )
    (folder,) = Path("runs/source-mixture").glob("hg-ms-*/seed-1")
    assert json.loads((folder / "summary.json").read_bytes())["status"] == "failed"
    full.clear()
    again = hgms("mix", "reweight", "mix.toml")
    assert again.exit_code == 0, again.output
    assert "reweight: going on with hg-ms" in again.stderr


def test_a_base_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(nn.Module, "to", full)
    done = hgms("mix", "mix.toml")
    refused(
        done,
        "the model does not fit into the memory of cpu: CUDA out of memory.",
        'task.model.quantize = "4bit"',
        code=1,
    )


@pytest.fixture
def silent() -> Iterator[str]:
    """An endpoint that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def test_a_judge_that_never_answers_loses_nothing(silent: str, tmp_path: Path) -> None:
    from hgms_mix.evaluation import Judge
    from hgms_mix.evaluation.judge import Request
    from hgms_mix.evaluation.judge_calls import rate

    judge = Judge(base_url=silent, model="j", timeout=0.2, retries=1, backoff=0.01)
    with rejects("judge-failed", "evaluate", "judge") as caught:
        rate(
            judge, tmp_path, [Request(1, 1, [{"role": "user", "content": "rate"}])], lambda _: None
        )
    assert f"j at {silent} " in caught.value.message
    assert "APITimeoutError" in caught.value.message
    for part in ("timeout=0.2", "retries=1", "0 of 1 ratings"):
        assert part in (caught.value.hint or "")
    assert caught.value.exit_code == 2


def test_ctrl_c_in_each_stage_and_going_on(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    import importlib

    inside = {
        "reweight": ("hgms.runs.loop", "check_numbers"),
        "sample": ("hgms_mix.stages.sample", "write_rows"),
        "finetune": ("hgms_mix.stages.trainers", "completion_loss"),
        "evaluate": ("hgms_mix.stages.evaluate", "row_losses"),
    }
    done: list[str] = []
    # A worker of pytest-xdist ignores Ctrl-C; a program does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    for stage, (module, function) in inside.items():
        where = importlib.import_module(module)
        kept = getattr(where, function)

        def press(*arguments: Any, kept: Any = kept, **options: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return kept(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(where, function, press)
            broken = hgms("mix", "mix.toml", sets=("method=uniform",))
        assert broken.exit_code == 130, broken.output
        assert f"run the same command again to resume in stage {stage}" in broken.stderr
        assert "Traceback" not in broken.output
        assert [
            line.partition(":")[0] for line in broken.stderr.splitlines() if "going on with" in line
        ] == done[-1:]
        done.append(stage)
    again = hgms("mix", "mix.toml", sets=("method=uniform",))
    assert again.exit_code == 0, again.output
    assert "evaluate: going on with" in again.stderr
    assert again.stderr.count("done before") == 4


def test_a_step_is_told_beforehand_and_afterwards() -> None:
    done = hgms("mix", "reweight", "mix.toml")
    assert done.exit_code == 0, done.output
    begun, memory, tokens, *_ = [
        line for line in done.stderr.splitlines() if not line.startswith("  note: ")
    ]
    assert begun == "reweight: hg-ms, 2 outer steps"
    assert memory.startswith("  about 0.")
    assert " MiB at the peak of a step (base 0.0" in memory
    assert tokens.startswith("  an outer step: ")
    assert " tokens forward, " in tokens
