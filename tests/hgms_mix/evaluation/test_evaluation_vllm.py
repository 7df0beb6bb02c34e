"""vLLM's side of an evaluation, against a stand-in that answers greedily from the files it is
given: vLLM itself needs a GPU and is not run.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from support.generation import by_hand, small_model
from support.judge_files import read, sums

from hgms_mix.evaluation import Evaluate

transformers = pytest.importorskip("transformers", reason="the extra hgms[llm] is not installed")
peft = pytest.importorskip("peft", reason="the extra hgms[llm] is not installed")


class LLM:
    """vLLM 0.33.0's class of that name, as far as it is called."""

    loaded: list[dict[str, Any]] = []  # noqa: RUF012 - the calls of a test

    def __init__(self, model: str, *, seed: int = 0, **kwargs: Any) -> None:
        self.folder = model
        self.loaded.append({"files": {path.name for path in Path(model).iterdir()}, **kwargs})
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    def generate(self, prompts: Any, sampling: Any, *, lora_request: Any = None) -> list[Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64)
        if lora_request is not None:
            model = peft.PeftModel.from_pretrained(model, lora_request.path).double()
        stops = tuple(sampling.stop_token_ids)
        given = [prompt["prompt_token_ids"] for prompt in prompts]
        answers = [by_hand(model.eval(), one, sampling.max_tokens, stops) for one in given]
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=tokens, finish_reason="stop" if tokens[-1] in stops else "length"
                    )
                ]
            )
            for tokens in answers
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    models = {
        name: SimpleNamespace(
            inspect_model_cls=lambda lora=lora: SimpleNamespace(supports_lora=lora)
        )
        for name, lora in {"LlamaForCausalLM": True, "GPT2LMHeadModel": False}.items()
    }
    parts: dict[str, Any] = {
        "vllm": {
            "__spec__": importlib.machinery.ModuleSpec("vllm", None),
            "LLM": LLM,
            "SamplingParams": SimpleNamespace,
            "ModelRegistry": SimpleNamespace(models=models),
        },
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": lambda name, number, path: SimpleNamespace(path=path)},
    }
    for name, content in parts.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    LLM.loaded.clear()
    return LLM


def adapted(model: Any, seed: int = 0, **changes: Any) -> Any:
    targets = ["q_proj", "v_proj"] if hasattr(model, "model") else ["c_attn"]
    options = {"r": 2, "target_modules": targets, "init_lora_weights": False, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(**options)).double()


@pytest.fixture
def stage(tmp_path: Path) -> Evaluate:
    path = sums(tmp_path / "gsm8k.jsonl", 3)
    common: dict[str, Any] = {"template": "plain", "max_new_tokens": 5, "judge": None}
    return Evaluate(benchmarks=("gsm8k",), paths={"gsm8k": str(path)}, **common)


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning")
@pytest.mark.parametrize(
    ("kind", "changes", "apart"),
    [
        ("llama", {}, True),
        ("llama", {"use_dora": True}, False),
        ("gpt2", {"fan_in_fan_out": True}, False),
    ],
    ids=["request", "dora", "gpt2"],
)
def test_answers_through_it_are_those_of_the_model_with_its_adapter_beside_it_or_merged(
    kind: str, changes: Any, apart: bool, vllm: type[LLM], stage: Evaluate, tmp_path: Path
) -> None:
    model, tokenizer = small_model(kind)
    tuned = adapted(model, **changes)
    usual = stage.run(tuned, tokenizer, tmp_path / "usual")
    before = {name: tensor.clone() for name, tensor in tuned.state_dict().items()}
    assert attrs.evolve(stage, engine="vllm").run(tuned, tokenizer, tmp_path / "vllm") == usual
    ours, theirs = (
        sorted(read(tmp_path / name / "gsm8k.answers.jsonl"), key=lambda row: row["id"])
        for name in ("vllm", "usual")
    )
    assert ours == theirs
    (call,) = vllm.loaded
    assert call["files"] >= {"config.json", "model.safetensors", "tokenizer_config.json"}
    assert ("adapter" in call["files"], call.get("enable_lora", False)) == (apart, apart)
    assert (call["max_model_len"], call.get("max_lora_rank")) == (512, 8 if apart else None)
    # no rounding errors are left in the model: another benchmark would be another model's
    state = tuned.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
