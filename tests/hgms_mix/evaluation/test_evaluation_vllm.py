"""vLLM's side of an evaluation, against a stand-in that answers by transformers from the files it
is given.

vLLM itself needs a GPU and is not run. The stand-in's functions have the signatures of vLLM 0.33.0,
as far as they are called (read in its ``entrypoints/llm.py``, ``lora/request.py``,
``sampling_params.py``, ``config/lora.py`` and ``model_executor/models/registry.py``); where vLLM is
installed, they are compared with its own.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.generating import small_model
from support.helpers import rejects

from hgms_core import ConfigError, MissingExtra
from hgms_mix.evaluation import Evaluate, vllm_engine
from hgms_mix.evaluation.generate import Prompts, replies
from hgms_mix.evaluation.vllm_engine import RANKS, Engine

transformers = pytest.importorskip("transformers", reason="the extra hgms[llm] is not installed")
peft = pytest.importorskip("peft", reason="the extra hgms[llm] is not installed")


class LoRARequest:
    def __init__(
        self,
        lora_name: str,
        lora_int_id: int,
        lora_path: str = "",
        base_model_name: str | None = None,
    ) -> None:
        assert lora_int_id >= 1
        assert lora_path
        self.lora_name = lora_name
        self.lora_int_id = lora_int_id
        self.lora_path = lora_path


class SamplingParams:
    def __init__(
        self,
        *,
        temperature: float = 1.0,
        max_tokens: int | None = 16,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        assert temperature == 0
        self.max_tokens = max_tokens
        self.stops = stop_token_ids or []


class LLM:
    loaded: list[dict[str, Any]] = []  # noqa: RUF012 - the calls of a test
    running: list[Any] = []  # noqa: RUF012 - those that hold their memory

    def __init__(self, model: str, *, seed: int = 0, **kwargs: Any) -> None:
        """What ``kwargs`` may hold are fields of vLLM's EngineArgs."""
        self.most = kwargs.get("max_lora_rank", 16) if kwargs.get("enable_lora") else 0
        assert self.most in (0, 1, 8, 16, 32, 64, 128, 256, 320, 512)
        self.loaded.append({"files": sorted(path.name for path in Path(model).iterdir()), **kwargs})
        self.folder = model
        self.running.append(self)
        core = types.SimpleNamespace(shutdown=lambda: self.running.remove(self))
        self.llm_engine = types.SimpleNamespace(engine_core=core)

    def generate(
        self,
        prompts: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
    ) -> list[Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64)
        if lora_request is not None:
            assert (
                json.loads((Path(lora_request.lora_path) / "adapter_config.json").read_text())["r"]
                <= self.most
            )
            model = peft.PeftModel.from_pretrained(model, lora_request.lora_path).double()
        assert sampling_params is not None
        outputs = []
        for prompt in prompts:
            given = prompt["prompt_token_ids"]
            new = []
            while len(new) < (sampling_params.max_tokens or 0) and not (
                new and new[-1] in sampling_params.stops
            ):
                with torch.no_grad():
                    new.append(
                        int(model.eval()(torch.tensor([given + new])).logits[0, -1].argmax())
                    )
            ended = new[-1] in sampling_params.stops
            completion = types.SimpleNamespace(
                token_ids=new, finish_reason="stop" if ended else "length"
            )
            outputs.append(types.SimpleNamespace(outputs=[completion]))
        return outputs


def _registered(supports: bool) -> Any:
    return types.SimpleNamespace(
        inspect_model_cls=lambda: types.SimpleNamespace(supports_lora=supports)
    )


MODELS = {"LlamaForCausalLM": _registered(True), "GPT2LMHeadModel": _registered(False)}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    module = types.ModuleType("vllm")
    request = types.ModuleType("vllm.lora.request")
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    registry = types.SimpleNamespace(models=MODELS)
    module.__dict__.update(LLM=LLM, SamplingParams=SamplingParams, ModelRegistry=registry)
    request.__dict__.update(LoRARequest=LoRARequest)
    for name, value in {
        "vllm": module,
        "vllm.lora": types.ModuleType("vllm.lora"),
        "vllm.lora.request": request,
    }.items():
        monkeypatch.setitem(sys.modules, name, value)
    LLM.loaded.clear()
    LLM.running.clear()
    return LLM


def adapted(model: Any, seed: int = 0, **changes: Any) -> Any:
    targets = ["q_proj", "v_proj"] if hasattr(model, "model") else ["c_attn"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        options = {"r": 2, "target_modules": targets, "init_lora_weights": False, **changes}
        return peft.get_peft_model(model, peft.LoraConfig(**options)).double()


@pytest.fixture
def stage(tmp_path: Path) -> Evaluate:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"}) + "\n"
            for n in range(3)
        )
    )
    return Evaluate(
        benchmarks=("gsm8k",),
        paths={"gsm8k": str(path)},
        template="plain",
        max_new_tokens=8,
        judge=None,
    )


def read(path: Path) -> dict[int, Any]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


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
def test_answers_through_it_are_those_of_the_model(
    kind: str,
    changes: dict[str, Any],
    apart: bool,
    vllm: type[LLM],
    stage: Evaluate,
    tmp_path: Path,
) -> None:
    """An adapter goes to vLLM beside its base, or merged into it where vLLM does not take such a
    one.
    """
    model, tokenizer = small_model(kind)
    tuned = adapted(model, **changes)
    usual = stage.run(tuned, tokenizer, tmp_path / "usual")
    before = {name: tensor.clone() for name, tensor in tuned.state_dict().items()}
    assert attrs.evolve(stage, engine="vllm").run(tuned, tokenizer, tmp_path / "vllm") == usual
    assert read(tmp_path / "vllm" / "gsm8k.answers.jsonl") == read(
        tmp_path / "usual" / "gsm8k.answers.jsonl"
    )
    (call,) = vllm.loaded
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= set(call["files"])
    assert ("adapter" in call["files"], call.get("enable_lora", False)) == (apart, apart)
    assert call.get("max_lora_rank") == (8 if apart else None)
    assert call["max_model_len"] == 512
    assert not list((tmp_path / "vllm").glob("vllm-*"))
    # no rounding errors are left in the model: another benchmark would be another model's
    state = tuned.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


@pytest.mark.parametrize("fails", [False, True], ids=["answers", "fails"])
def test_its_memory_is_free_before_the_model_returns(
    fails: bool, vllm: type[LLM], stage: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = small_model()
    moves: list[tuple[str, int]] = []
    monkeypatch.setattr(model, "to", lambda device: moves.append((str(device), len(vllm.running))))
    if fails:
        monkeypatch.setattr(vllm, "generate", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        attrs.evolve(stage, engine="vllm").run(model, tokenizer, tmp_path / "out")
    assert len(vllm.loaded) == 1
    assert moves[-1] == ("cpu", 0)  # where it was, with vLLM gone
    assert len(moves) == 2


def test_one_base_answers_with_each_of_three_adapters(vllm: type[LLM], tmp_path: Path) -> None:
    model, tokenizer = small_model()
    model.save_pretrained(tmp_path / "base")
    tokens = [tokenizer(text)["input_ids"] for text in ("What is 2 + 2?", "Why?")]
    prompts = Prompts(tokens, stops=[257], cap=100, new_tokens=6)
    expected = {}

    def by_transformers(any_model: Any) -> list[Any]:
        return [
            reply for batch in replies(any_model, tokenizer, prompts, 2, print) for reply in batch
        ]

    expected[None] = by_transformers(model)
    for number, rank in enumerate((2, 12, 9)):
        tuned = adapted(small_model()[0], seed=number, r=rank)
        tuned.save_pretrained(tmp_path / f"mix-{number}", save_embedding_layers=False)
        expected[f"mix-{number}"] = by_transformers(tuned)
    adapters = {name: tmp_path / name for name in expected if name is not None}
    with Engine(tmp_path / "base", adapters, length=120) as engine:
        for name, wanted in expected.items():
            answered = [
                reply for batch in engine.replies(tokenizer, prompts, name) for reply in batch
            ]
            assert sorted(answered) == sorted(wanted), name
        with rejects("unknown-adapter", "adapter", of=ConfigError) as caught:
            next(engine.replies(tokenizer, prompts, "mix-4"))
        (near,) = caught.value.did_you_mean
        assert near.startswith("mix-")
    assert vllm.running == []
    assert len({str(sorted(wanted)) for wanted in expected.values()}) == 4
    (call,) = vllm.loaded  # the base was loaded once
    assert (call["max_lora_rank"], call["max_loras"], call["max_cpu_loras"]) == (16, 1, 3)


def test_an_adapter_of_too_high_a_rank_is_refused(vllm: type[LLM], tmp_path: Path) -> None:
    config = {"r": 4, "rank_pattern": {"q_proj": 600}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with rejects("out-of-range", "adapter", "rank", of=ConfigError):
        Engine(tmp_path, {"a": tmp_path}, length=10)
    assert vllm.loaded == []


def test_where_it_is_not_installed(
    stage: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == "vllm" else object()
    )
    with rejects("missing-package", "evaluate", "engine", of=MissingExtra) as caught:
        attrs.evolve(stage, engine="vllm").run(*small_model(), tmp_path / "out")
    assert caught.value.install == "pip install 'hgms[vllm]'"


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: its signatures cannot be read",
)
def test_the_stand_in_has_the_signatures_of_vllm() -> None:
    import vllm
    from vllm.config.lora import MaxLoRARanks
    from vllm.lora.request import LoRARequest as Real
    from vllm.v1.engine.core_client import EngineCoreClient

    for ours, theirs in (
        (LLM.generate, vllm.LLM.generate),
        (LLM.__init__, vllm.LLM.__init__),
        (LoRARequest, Real),
    ):
        names = set(inspect.signature(ours).parameters) - {"kwargs"}
        assert names <= set(inspect.signature(theirs).parameters)
    assert {"temperature", "max_tokens", "stop_token_ids"} <= set(
        inspect.signature(vllm.SamplingParams).parameters
    )
    assert MaxLoRARanks.__args__ == RANKS == vllm_engine.RANKS
    assert hasattr(vllm.ModelRegistry, "models")
    assert hasattr(EngineCoreClient, "shutdown")
