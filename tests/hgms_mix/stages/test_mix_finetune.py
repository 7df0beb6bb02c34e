"""Fine-tuning: the loss against one computed by hand, the optimiser against torch's own,
resumption bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.helpers import rejects

from hgms.runs import DiskError, Interrupted
from hgms_core import CheckpointError, ConfigError, NumericalError, OutOfMemory
from hgms_mix.lm.models import BaseModel
from hgms_mix.stages.base_losses import untuned_losses
from hgms_mix.stages.batches import collate, completion_loss
from hgms_mix.stages.checkpoints import SEAL, newest_checkpoint
from hgms_mix.stages.finetune import Finetune
from hgms_mix.stages.losses import row_losses
from hgms_mix.stages.training import tied_are_there, train

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
)
peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

# peft's own calls of names that transformers has renamed
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
)

Rows = list[tuple[torch.Tensor, torch.Tensor]]


class PowerCut(RuntimeError):
    """Ends a training in the middle of it."""


def gpt(seed: int = 0, dropout: float = 0.0) -> Any:
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.GPT2LMHeadModel(config)


def random_rows(count: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 12, (), generator=generator))
        prompt = int(torch.randint(1, length - 1, (), generator=generator))
        rows.append(
            (
                torch.randint(1, 40, (length,), generator=generator, dtype=torch.int32),
                torch.arange(length) >= prompt,
            )
        )
    return rows


def lora(dropout: float = 0.0) -> Any:
    return peft.LoraConfig(
        r=2, lora_alpha=4, lora_dropout=dropout, target_modules=["c_attn"], fan_in_fan_out=True
    )


def by_hand(model: Any, rows: Rows) -> float:
    """Mean −log p over the completion tokens, one row and one token at a time, no padding."""
    terms = []
    for tokens, mask in rows:
        with torch.no_grad():
            logits = model(input_ids=tokens.long()[None]).logits[0].double()
        scored = [i for i in range(1, len(tokens)) if mask[i]]
        terms += [float(logits[i - 1].logsumexp(0) - logits[i - 1][int(tokens[i])]) for i in scored]
    return sum(terms) / len(terms)


def test_the_loss_of_a_padded_batch_is_the_one_computed_by_hand() -> None:
    model = gpt().eval()
    rows = random_rows(5)
    batch = collate(rows, pad=39)
    with torch.no_grad():
        out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert float(completion_loss(out.logits, batch["labels"])) == pytest.approx(
        by_hand(model, rows), rel=1e-5
    )


def test_padding_on_the_left_gives_the_same_loss() -> None:
    model = gpt().eval()
    rows = random_rows(3)
    right = collate(rows, pad=0)
    widest = right["input_ids"].shape[1]
    left = {
        name: torch.stack(
            [leaf.roll(widest - len(t)) for leaf, (t, _) in zip(leaves, rows, strict=True)]
        )
        for name, leaves in right.items()
    }
    positions = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(
            input_ids=left["input_ids"],
            attention_mask=left["attention_mask"],
            position_ids=positions,
        )
    assert float(completion_loss(out.logits, left["labels"])) == pytest.approx(
        by_hand(model, rows), rel=1e-5
    )


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = folder.glob("*/*.safetensors")
    return load_file(path)


def test_one_step_is_torch_adamw_on_the_mean_over_all_tokens(tmp_path: Path) -> None:
    """Three micro-batches of two rows of different lengths: their losses add up to the mean over
    the tokens of all six rows.
    """
    rows = random_rows(6)
    done = train(
        Finetune(lr=1e-2, micro_batch=2, accumulation=3, weight_decay=0.0),
        gpt(),
        rows,
        tmp_path,
        seed=0,
    )
    assert (done["optimizer_steps"], done["kind"], done["rows"]) == (1, "model", 6)
    assert done["first_loss"] == pytest.approx(by_hand(gpt().eval(), rows), rel=1e-5)

    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    batch = collate(rows, pad=0)
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    completion_loss(out.logits, batch["labels"]).backward()
    optimiser.step()
    result = parameters(tmp_path)
    expected = dict(model.named_parameters())
    assert set(result) <= set(expected)
    moved = 0
    for name, leaf in result.items():
        # AdamW's first step is lr·sign(gradient) where a gradient is not tiny: elsewhere rounding
        # decides it
        sure = expected[name].grad.abs() > 1e-6
        assert torch.allclose(leaf[sure], expected[name][sure], atol=1e-5), name
        moved += int(sure.sum())
    assert moved > 5000


def test_a_resumed_run_ends_with_the_very_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = Finetune(
        lr=1e-2, accumulation=2, save_every=3, schedule="cosine", warmup=2, clip=1.0, epochs=2
    )
    rows = random_rows(9)

    def go(folder: Path, stop_at: int | None) -> None:
        folder.mkdir(exist_ok=True)

        def watch(step: int, steps: int, loss: float) -> None:
            if step == stop_at:
                raise PowerCut

        train(
            settings, gpt(dropout=0.1), rows, folder, seed=5, adapter=lora(dropout=0.2), watch=watch
        )

    go(tmp_path / "whole", None)
    with pytest.raises(PowerCut):
        go(tmp_path / "broken", 5)
    assert [row["step"] for row in logged(tmp_path / "broken")] == [1, 2, 3, 4, 5]
    # killed while it was being written
    (tmp_path / "broken" / "checkpoints" / "checkpoint-5").mkdir()
    assert (
        newest_checkpoint(tmp_path / "broken" / "checkpoints")
        == tmp_path / "broken" / "checkpoints" / "checkpoint-3"
    )
    go(tmp_path / "broken", None)
    whole = parameters(tmp_path / "whole")
    resumed = parameters(tmp_path / "broken")
    assert set(whole) == set(resumed)
    assert all(leaf.equal(resumed[name]) for name, leaf in whole.items())
    assert logged(tmp_path / "whole") == logged(tmp_path / "broken")
    assert len(logged(tmp_path / "whole")) == 10
    assert not (tmp_path / "broken" / "checkpoints").exists()


def test_a_kill_while_the_last_checkpoint_is_removed_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Finetune(lr=1e-2, accumulation=1, save_every=3)
    rows = random_rows(10)
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    train(settings, gpt(), rows, tmp_path / "whole", seed=5)
    real = shutil.rmtree

    def half(path: Path, **named: Any) -> None:
        held = [file for file in Path(path).rglob("*") if file.is_file() and file.name != SEAL]
        if (
            "checkpoints" not in path.parts
            or not (tmp_path / "broken" / "model").exists()
            or not held
        ):
            return real(path, **named)
        held[0].unlink()
        raise PowerCut

    monkeypatch.setattr(shutil, "rmtree", half)
    with pytest.raises(PowerCut):
        train(settings, gpt(), rows, tmp_path / "broken", seed=5)
    monkeypatch.undo()
    train(settings, gpt(), rows, tmp_path / "broken", seed=5)
    whole = parameters(tmp_path / "whole")
    resumed = parameters(tmp_path / "broken")
    assert all(leaf.equal(resumed[name]) for name, leaf in whole.items())
    assert logged(tmp_path / "whole") == logged(tmp_path / "broken")


def broken_off(folder: Path, adapter: Any = None) -> Finetune:
    """A fine-tuning that ended after its fourth of ten steps, with a checkpoint of the third."""
    settings = Finetune(lr=1e-2, accumulation=1, save_every=3)

    def watch(step: int, steps: int, loss: float) -> None:
        if step == 4:
            raise PowerCut

    with pytest.raises(PowerCut):
        train(settings, gpt(), random_rows(10), folder, seed=5, adapter=adapter, watch=watch)
    return settings


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.pt", "trainer_state.json", "sha256.json"]
)
def test_a_flipped_bit_in_a_checkpoint_is_named_and_nothing_changes(
    file: str, tmp_path: Path
) -> None:
    settings = broken_off(tmp_path)
    path = tmp_path / "checkpoints" / "checkpoint-3" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = (tmp_path / "losses.jsonl").read_bytes()
    with rejects("damaged-file", str(path.parent), of=CheckpointError):
        train(settings, gpt(), random_rows(10), tmp_path, seed=5)
    assert (tmp_path / "losses.jsonl").read_bytes() == before


def test_a_checkpoint_killed_while_it_was_sealed_is_made_again(tmp_path: Path) -> None:
    settings = broken_off(tmp_path)
    seal = tmp_path / "checkpoints" / "checkpoint-3" / "sha256.json"
    seal.rename(seal.with_name("sha256.json.part"))
    broken_off(tmp_path)
    assert newest_checkpoint(tmp_path / "checkpoints") == seal.parent
    train(settings, gpt(), random_rows(10), tmp_path, seed=5)


@pytest.mark.parametrize("harm", ["shorter", "digit", "missing"])
def test_losses_that_are_not_those_of_the_checkpoint_are_named(harm: str, tmp_path: Path) -> None:
    settings = broken_off(tmp_path)
    path = tmp_path / "losses.jsonl"
    first, second, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join([first, *rest])
        if harm == "shorter"
        else "".join([first, second.replace("2", "3", 1), *rest])
    )
    if harm == "missing":
        path.unlink()
    with rejects("damaged-file", str(path), of=CheckpointError) as caught:
        train(settings, gpt(), random_rows(10), tmp_path, seed=5)
    assert "step 3" in caught.value.message


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"step": 2}', '{"step": "x", "loss": 1.0}', "{", "[" * 100_000]
)
def test_losses_of_another_shape_are_named(line: str, tmp_path: Path) -> None:
    settings = broken_off(tmp_path)
    lines = (tmp_path / "losses.jsonl").read_text().splitlines()
    (tmp_path / "losses.jsonl").write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    with rejects("damaged-file", of=CheckpointError) as caught:
        train(settings, gpt(), random_rows(10), tmp_path, seed=5)
    assert caught.value.place[0] == str(tmp_path / "losses.jsonl")
    shutil.rmtree(tmp_path / "checkpoints")
    with rejects("damaged-file", str(tmp_path / "losses.jsonl"), 2, of=CheckpointError):
        train(settings, gpt(), random_rows(10), tmp_path, seed=5)


@pytest.mark.parametrize("bytes_allowed", [0, 20_000], ids=["weights", "optimiser"])
def test_a_disk_that_is_full_keeps_what_was_saved(bytes_allowed: int, tmp_path: Path) -> None:
    """A limit on the size of files, which the libraries meet as they meet a full disk: safetensors
    in the first file of a checkpoint, torch in the optimiser's, which is twice as large."""
    import resource

    settings = broken_off(tmp_path)
    rows = random_rows(10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = (tmp_path / "checkpoints" / "checkpoint-3" / "model.safetensors").stat().st_size
    most = weights // 2 if bytes_allowed == 0 else weights + bytes_allowed // 4
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with rejects("cannot-write", str(tmp_path), of=DiskError) as caught:
            train(settings, gpt(), rows, tmp_path, seed=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "--resume" not in (caught.value.hint or "")
    assert newest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "checkpoint-3"
    train(settings, gpt(), rows, tmp_path, seed=5)
    (tmp_path / "whole").mkdir()
    train(settings, gpt(), rows, tmp_path / "whole", seed=5)
    assert logged(tmp_path) == logged(tmp_path / "whole")


def test_resuming_a_full_fine_tuning_says_nothing_of_missing_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-2's head is its embedding under another name: one of the two is in the checkpoint."""
    logger = logging.getLogger("transformers")
    settings = broken_off(tmp_path)
    logger.addHandler(caplog.handler)
    try:
        train(settings, gpt(), random_rows(10), tmp_path, seed=5)
        assert "missing keys" not in caplog.text
        with tied_are_there(gpt()):  # a key that is really missing is still said
            logging.getLogger("transformers.trainer").warning(
                "There were missing keys in it: ['transformer.ln_f.bias']."
            )
        assert "ln_f.bias" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_ctrl_c_saves_what_is_done_and_says_so(tmp_path: Path) -> None:
    settings = Finetune(lr=1e-2, accumulation=1, save_every=100)
    rows = random_rows(6)

    def press(step: int, steps: int, loss: float) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        train(settings, gpt(), rows, tmp_path, seed=0, watch=press)
    assert "3 of 6" in stopped.value.args[0]
    train(settings, gpt(), rows, tmp_path, seed=0)
    (tmp_path / "whole").mkdir()
    train(settings, gpt(), rows, tmp_path / "whole", seed=0)
    assert logged(tmp_path) == logged(tmp_path / "whole")


def test_the_adapter_is_one_that_peft_loads(tmp_path: Path) -> None:
    rows = random_rows(8)
    train(Finetune(lr=1e-2, accumulation=2), gpt(), rows, tmp_path, seed=0, adapter=lora())
    assert sorted(
        path.name
        for path in (tmp_path / "adapter").iterdir()
        if path.suffix in (".json", ".safetensors")
    ) == ["adapter_config.json", "adapter_model.safetensors"]
    tuned = peft.PeftModel.from_pretrained(gpt(), tmp_path / "adapter").eval()
    assert by_hand(tuned, rows) < by_hand(gpt().eval(), rows)


def test_gradient_checkpointing_trains_to_the_same_parameters(tmp_path: Path) -> None:
    result = []
    for on in (False, True):
        folder = tmp_path / str(on)
        folder.mkdir()
        settings = Finetune(lr=1e-2, accumulation=2, checkpointing=on)
        train(settings, gpt(), random_rows(6), folder, seed=0, adapter=lora(dropout=0.1))
        result.append(parameters(folder))
    assert all(torch.allclose(leaf, result[1][name], atol=1e-6) for name, leaf in result[0].items())


def test_training_can_start_from_given_parameters(tmp_path: Path) -> None:
    wrapped = peft.get_peft_model(gpt(), lora())
    start = {
        name: torch.full_like(p, 0.01) for name, p in wrapped.named_parameters() if p.requires_grad
    }
    train(
        Finetune(lr=1e-12, weight_decay=0.0, accumulation=4),
        gpt(),
        random_rows(4),
        tmp_path,
        seed=0,
        adapter=lora(),
        start=start,
    )
    assert all(
        torch.allclose(leaf, torch.full_like(leaf, 0.01)) for leaf in parameters(tmp_path).values()
    )


def test_the_global_generators_are_left_as_they_were(tmp_path: Path) -> None:
    import random

    import numpy as np

    numpys = np.random.get_state()[1].tolist()  # noqa: NPY002
    before = (torch.get_rng_state(), numpys, random.getstate())
    train(Finetune(accumulation=2), gpt(), random_rows(2), tmp_path, seed=0)
    assert torch.get_rng_state().equal(before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert random.getstate() == before[2]


def test_a_loss_that_is_not_finite_stops_with_what_to_do(tmp_path: Path) -> None:
    model = gpt()
    with torch.no_grad():
        model.transformer.wte.weight.fill_(math.nan)
    with rejects("not-finite", "finetune", "lr", of=NumericalError) as caught:
        train(Finetune(accumulation=1), model, random_rows(2), tmp_path, seed=0)
    assert "step 1 is nan" in caught.value.message


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        (Finetune(micro_batch=4), ("finetune", "micro_batch")),
        (Finetune(), ("task", "max_length")),
        (Finetune(checkpointing=True), ("task", "max_length")),
    ],
)
def test_out_of_memory_says_which_knob(
    settings: Finetune, place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", full)
    with rejects("out-of-memory", *place, of=OutOfMemory) as caught:
        train(settings, gpt(), random_rows(2), tmp_path, seed=0)
    assert caught.value.message.endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    hint = caught.value.hint or ""
    assert ("micro_batch (now 4)" in hint) == (settings.micro_batch == 4)
    assert ("finetune.checkpointing = true" in hint) != settings.checkpointing
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("lr", 0.0, "out-of-range"),
        ("epochs", -1, "out-of-range"),
        ("epochs", 0, "conflicting-options"),
        ("schedule", "step", "unknown-choice"),
        ("clip", -1.0, "out-of-range"),
    ],
)
def test_settings_are_checked(field: str, value: Any, code: str) -> None:
    with rejects(code, field, of=ConfigError):
        Finetune(**{field: value})


def a_table(rows: Rows) -> Any:
    from hgms_mix.lm import TokenTable

    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    numbers = torch.arange(len(rows))
    return TokenTable(
        "t",
        torch.cat([t for t, _ in rows]),
        torch.cat([m for _, m in rows]),
        offsets,
        numbers,
        "digest",
    )


def test_losses_of_rows_are_those_computed_by_hand_however_they_are_grouped() -> None:
    model = gpt(dropout=0.3)
    rows = random_rows(7)
    result = row_losses(model, a_table(rows), rows=3)
    for i, row in enumerate(rows):
        assert float(result.per_row[i]) == pytest.approx(by_hand(model.eval(), [row]), rel=1e-5)
    assert torch.allclose(row_losses(model, a_table(rows), rows=7).total, result.total, rtol=1e-5)


@pytest.mark.parametrize("fits", [0, 2])
def test_evaluation_takes_fewer_rows_where_memory_runs_out(
    fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = transformers.GPT2LMHeadModel.forward
    seen = []

    def limited(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        seen.append(len(input_ids))
        if len(input_ids) > fits:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you "
                "tried"
            )
        return forward(self, input_ids=input_ids, **more)

    rows = random_rows(5)
    expected = row_losses(gpt(), a_table(rows)).total
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", limited)
    if fits == 0:
        with rejects("out-of-memory", "task", "max_length", of=OutOfMemory):
            row_losses(gpt(), a_table(rows), rows=4)
        return
    assert torch.allclose(row_losses(gpt(), a_table(rows), rows=4).total, expected, rtol=1e-5)
    assert seen == [4, 2, 2, 1]


def test_losses_before_tuning_are_computed_once_for_an_experiment(tmp_path: Path) -> None:
    """The second mix of an experiment reads them; a damaged file is made again; another model or
    other rows have their own.
    """
    loads: list[int] = []

    def mix(method: str, seed: int = 0) -> Any:
        gpt(seed).save_pretrained(tmp_path / f"model-{seed}")
        model = BaseModel(path=str(tmp_path / f"model-{seed}"), tokenizer="bytes")

        def base(ranks: Any = None) -> Any:
            loads.append(seed)
            return gpt(seed)

        config = SimpleNamespace(finetune=SimpleNamespace(model=None))
        folder = tmp_path / method / "seed-0"
        task = SimpleNamespace(model=model)
        return SimpleNamespace(
            config=config, task=task, folder=folder, base=base, tuned_tables=lambda which: tables
        )

    tables = {"t": a_table(random_rows(5))}
    expected = row_losses(gpt(), tables["t"]).total
    first = untuned_losses(mix("hg-ms-1"))["t"]
    second = untuned_losses(mix("uniform-2"))["t"]
    assert loads == [0]
    assert torch.equal(first.total, expected)
    assert torch.equal(second.total, expected)
    (file,) = (tmp_path / "untuned").iterdir()
    file.write_text("{")
    assert torch.equal(untuned_losses(mix("hg-ms-1"))["t"].total, expected)
    other = untuned_losses(mix("hg-ms-1", seed=1))["t"]
    assert loads == [0, 0, 1]
    assert not torch.equal(other.total, expected)
