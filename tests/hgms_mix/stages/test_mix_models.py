"""Which model a mix tunes: where tuning begins, another model than the one that learned, and how
many are in memory.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_mixes import TASK, begin, report_of, right, sampled, stage_folder

from hgms_mix.lm import BaseModel
from hgms_mix.lm.tokenizers import byte_tokenizer
from hgms_mix.stages import finetune

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
)
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

pytestmark = [
    # peft's own calls of names that transformers has renamed
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    )
]
MIX = f"""
seed = 1
budget = "3 steps"
method = "uniform"
{TASK}
[sample]
size = 30
[finetune]
lr = 1e-2
micro_batch = 3
accumulation = 5
"""
TUNED = """
[finetune.model]
config = { model_type = "gpt2", n_layer = 2, n_embd = 16, n_head = 2, n_positions = 40 }
tokenizer = "pairs"
[finetune.adapter]
rank = 3
alpha = 6
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    begin(MIX, sums=range(36, 76))  # prompts of six and seven bytes
    return tmp_path


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "rows", "sets"),
    [
        ("adapter", 0, ["finetune.epochs=0"]),
        ("model", 30, ["task.adapter=none", "finetune.lr=1e-30"]),
    ],
)
def test_what_fine_tuning_starts_from_is_what_reweighting_ended_with(
    here: Path, kind: str, rows: int, sets: list[str]
) -> None:
    """With no pass over rows, or a learning rate too small to move anything, what is saved is the
    run's lower state.
    """
    from safetensors.torch import load_file

    learned = ["method=hg-ms-online", "method.generator.lr=0.5", "finetune.start=reweighted"]
    report = report_of("mix", "mix.toml", sets=[*learned, *sets])
    folder = Path(report["folder"])
    same = torch.equal if kind == "adapter" else torch.allclose
    assert (report["finetune"]["kind"], report["finetune"]["rows"]) == (kind, rows)
    state = next(load_file(path) for path in folder.glob("checkpoint-*.safetensors"))
    (file,) = (stage_folder(report, "finetune") / "tuned").glob("*.safetensors")
    for name, leaf in load_file(file).items():
        own = name.removeprefix("base_model.model.")
        learned_leaves = [value for key, value in state.items() if key.endswith(own)]
        assert any(leaf.shape == each.shape and same(each, leaf) for each in learned_leaves), name


@pytest.mark.extended
@pytest.mark.usefixtures("all_garbage")
def test_one_base_is_in_memory_whenever_another_stage_loads_its_own(
    here: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Without the collector, so that cycles do not go by luck; a stored ranking needs no base."""
    loaded: list[weakref.ref[Any]] = []
    alive = []

    def counting(self: Any, *arguments: Any, load: Any = BaseModel.load, **options: Any) -> Any:
        alive.append(sum(item() is not None for item in loaded))
        model = load(self, *arguments, **options)
        loaded.append(weakref.ref(model))
        return model

    less = "{ name = 'less', warmup.epochs = 1, projection = 'none', batch_size = 4, lr = 1e-3 }"
    sets = [f"method={less}", "budget=60 steps", "sample.size=10", "task.cache=8"]
    monkeypatch.setattr(BaseModel, "load", counting)
    gc.collect()
    request.addfinalizer(gc.enable)
    gc.disable()
    right("mix", "mix.toml", sets=sets)
    # reweight, uncertainty, finetune, evaluate (before tuning and after)
    assert alive == [0] * 5


@pytest.fixture
def pairs(here: Path) -> Any:
    """A tokenizer with a token for each two digits beside those of the bytes, and a chat template:
    other lengths than bytes.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"{i:02d}" for i in range(100)])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained("pairs")
    return transformers.AutoTokenizer.from_pretrained("pairs")


@pytest.mark.extended
def test_a_small_model_learns_the_mixture_and_another_is_tuned(
    here: Path, pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very rows that were drawn, in the tokens of the model that is tuned."""
    trained: list[Any] = []

    def watched(settings: Any, model: Any, rows: Any, *rest: Any, **options: Any) -> Any:
        trained.append((model.config.n_embd, [rows[i][0].tolist() for i in range(len(rows))]))
        return train(settings, model, rows, *rest, **options)

    train = finetune.train
    monkeypatch.setattr(finetune, "train", watched)
    Path("target.toml").write_text(MIX + TUNED)
    report = report_of("mix", "target.toml")
    [(width, rows)] = trained
    assert width == 16
    drawn = [[item["content"] for item in row["messages"]] for row in sampled(report)]
    texts = [f"{prompt}\n{answer}<eos>" for prompt, answer in drawn]
    assert [pairs.decode(ids) for ids in rows] == texts
    folder = stage_folder(report, "finetune") / "tuned"
    saved = transformers.AutoTokenizer.from_pretrained(folder)
    assert saved("12 + 3 =")["input_ids"] == pairs("12 + 3 =")["input_ids"]
