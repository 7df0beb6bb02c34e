"""Compare one outer step of source reweighting with its floor: the same passes, one by one.

    python benchmarks/bench_llm.py                                    # a small GPT-2 on the CPU
    python benchmarks/bench_llm.py --shape smollm2-135m --clock cpu
            # that model's shape, random weights
    python benchmarks/bench_llm.py --shape qwen-2-7b --length 512
            # the true shape, random weights, on a GPU

Both use the same model and batches. The floor of a step with N candidates: N training passes
(forward and backward), N scoring forward passes, one validation pass (forward and backward), and
for the hypergradient one training pass on a fresh batch and two forward passes. A further
comparison is plain fine-tuning of the same adapter with transformers' Trainer, on rows of the same
size. The output contains the ratio, tokens, model FLOP utilisation if the device's peak is known,
peak memory, and the parts of a pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import ThroughStep
from hgms.optim import SGD
from hgms.outer import Adam
from hgms.runs import calibrated, matrix_route
from hgms.selectors import BestOfN
from hgms_core import Key, Pipeline, Problem, gradient, groups, repeat
from hgms_mix.lm import BaseModel, Lora, Source, SourceMixture

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_embd": 256,
        "n_head": 4,
        "n_positions": 1024,
        "vocab_size": 8192,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257},
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen-2-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "qwen-2.5-32b": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
}
# dense bfloat16, from the manufacturers
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


class StorageMeter(TorchDispatchMode):
    """Sum the sizes of live storages."""

    def __init__(self, present: Iterable[Tensor]) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in present:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.held:
            return
        self.held[key] = storage.nbytes()
        self.now += self.held[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        self.now -= self.held.pop(key, 0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result


def peak_bytes(
    call: Callable[[], Any], device: torch.device, present: Iterable[Tensor] = ()
) -> int:
    """Return the peak bytes of tensors during ``call``.

    On CUDA devices, torch counts them. On other devices, every storage is followed. This is slow:
    do not use it for timed calls. ``present`` are tensors that existed before.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return int(torch.cuda.max_memory_allocated(device))
    follower = StorageMeter(present)
    with follower:
        call()
    return follower.peak


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--branches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="of the frozen base",
    )
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--profile", action="store_true", help="the 15 kernels of a step that take most time"
    )
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: seconds of the processor, for a busy machine",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def rows(folder: Path, name: str, count: int, length: int) -> Source:
    """Return rows of exactly ``length`` bytes, so every batch has the same shape."""
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(
            f'{{"prompt": "{i % 10}", "completion": "{"a" * 2 * length}"}}\n' for i in range(count)
        )
    )
    return Source(path=str(path))


def targets(shape: str) -> tuple[str, ...]:
    gpt2 = SHAPES[shape]["model_type"] == "gpt2"
    return ("c_attn", "attn.c_proj") if gpt2 else ("q_proj", "k_proj", "v_proj", "o_proj")


def problem_of(options: argparse.Namespace, folder: Path, device: torch.device) -> Problem:
    task = SourceMixture(
        sources={name: rows(folder, name, 64, options.length) for name in ("first", "second")},
        validation={"held-out": rows(folder, "held-out", 64, options.length)},
        model=BaseModel(config=SHAPES[options.shape], tokenizer="bytes", dtype=options.dtype),
        adapter=Lora(rank=options.rank, alpha=2.0 * options.rank, targets=targets(options.shape)),
        template="plain",
        max_length=options.length,
        too_long="truncate",
        micro_batch=options.micro_batch,
        checkpointing=options.checkpointing,
    )
    return task.problem(0, device, torch.float32)


def seconds(call: Callable[[], Any], device: torch.device, repeats: int, clock: str) -> float:
    """Return the median of ``repeats`` calls after a warm-up call."""
    now = time.perf_counter if clock == "wall" else time.process_time
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = now()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(now() - started)
    return statistics.median(times[1:])


def attention_kernels(call: Callable[[], Any]) -> str:
    """Return the kernels of scaled dot-product attention in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    kernels = {
        event.key.removeprefix("aten::")
        for event in profile.key_averages()
        if "_scaled_dot_product" in event.key
    }
    return ", ".join(sorted(kernels)) or "none of torch's"


def print_profile(call: Callable[[], Any], device: torch.device) -> None:
    kind = "cuda" if device.type == "cuda" else "cpu"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        # only kernels: tracing the host takes much time and memory
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def taken(event: Any) -> float:
        return float(event.self_device_time_total if kind == "cuda" else event.self_cpu_time_total)

    events = sorted(profile.key_averages(), key=taken, reverse=True)
    total = sum(map(taken, events))
    if not total:
        print("\nthe profiler saw no kernel")
        return
    print(f"\nof {total / 1e6:.3f} s in kernels:")
    for event in events[:15]:
        print(
            f"{taken(event) / 1e3:10.1f} ms {taken(event) / total:6.1%} {event.count:7d} × "
            f"{event.key[:110]}"
        )


def head_seconds(
    problem: Problem, options: argparse.Namespace, device: torch.device
) -> tuple[float, float]:
    """Time logits and loss at all places of one candidate's rows, with and without a gradient."""
    model: Any = problem.g.rows.model  # type: ignore[attr-defined]
    weight = model.model.get_output_embeddings().weight
    count = options.batch * (options.length - 1)
    hidden = torch.randn(count, weight.shape[1], device=device, dtype=weight.dtype)
    target = torch.randint(0, 256, (count,), device=device)

    def forward() -> None:
        with torch.no_grad():
            model.head_losses(hidden, target)

    def training() -> None:
        leaf = hidden.detach().requires_grad_()
        torch.autograd.grad(model.head_losses(leaf, target).sum(), leaf)

    return tuple(
        seconds(call, device, options.repeats, options.clock) for call in (forward, training)
    )  # type: ignore[return-value]


def trainer_seconds(options: argparse.Namespace, device: torch.device) -> float:
    """Time one optimiser step of transformers' Trainer on the rows of a training pass: the
    median without the first.
    """
    import peft
    import transformers

    base = BaseModel(config=SHAPES[options.shape], tokenizer="bytes", dtype=options.dtype).load(
        device
    )
    adapter = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules=list(targets(options.shape))
    )
    model = peft.get_peft_model(base, adapter)
    row = {"input_ids": [97] * options.length, "labels": [97] * options.length}
    now = time.perf_counter if options.clock == "wall" else time.process_time
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(now() - self.started)

    with TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.repeats + 1,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            learning_rate=1e-4,
        )
        transformers.Trainer(model, settings, train_dataset=[row] * 64, callbacks=[Clock()]).train()
    return statistics.median(times[1:])


def flops_of(problem: Problem, tokens: dict[str, int], length: int) -> float:
    """Return the model FLOPs.

    A frozen weight costs 2 per token forward and 2 backward (it has no gradient), including the
    head's, but not the table of input embeddings; attention under a causal mask costs
    2·width·length per layer forward and twice that backward.
    """
    model: Any = problem.g.rows.model.model  # type: ignore[attr-defined]
    config = model.config
    head = model.get_output_embeddings().weight
    table = model.get_input_embeddings().weight
    weights = sum(leaf.numel() for leaf in model.parameters()) - (
        table.numel() if head is not table else 0
    )
    attention = 2 * config.hidden_size * length * config.num_hidden_layers
    forward = tokens["forward_tokens"]
    backward = tokens["backward_tokens"]
    return forward * (2 * weights + attention) + backward * (2 * weights + 2 * attention)


def main() -> None:
    import warnings

    warnings.simplefilter("ignore", UserWarning)
    options = arguments()
    device = torch.device(options.device)
    with TemporaryDirectory() as folder:
        problem = problem_of(options, Path(folder), device)
    choice = calibrated(problem)  # as a run does
    print(f"matrix products: {choice.route} ({choice.reason})")
    with matrix_route(choice.route, device):
        measure(options, problem, device)


def measure(options: argparse.Namespace, problem: Problem, device: torch.device) -> None:
    count = options.branches
    batch = options.batch
    method = Pipeline(
        generator=Branches(
            count=count,
            steps=1,
            optimizer=SGD(lr=1e-4),
            diversity=Diversity(noise=1e-5),
            batch_size=batch,
            mode="stacked",
            chunk=options.chunk,
        ),
        selector=BestOfN(batch_size=batch, mode="stacked", chunk=options.chunk),
        hypergradient=ThroughStep(upper_batch_size=batch),
        outer=Adam(lr=0.05),
    )
    state = method.init(problem, 0)
    theta = problem.theta0
    x = problem.x0
    below = problem.lower_data.batch(problem.lower_data.draw(Key(0), batch, 1)[0])
    above = problem.upper_data["select"].batch(
        problem.upper_data["select"].draw(Key(0), batch, 1)[0]
    )

    def forward(loss: Any, rows: Any) -> None:
        with torch.no_grad():
            loss(theta, x, rows)

    before = dict(problem.counters())
    base = problem.g.rows.model.model.parameters()
    peak = peak_bytes(lambda: method.step(problem, state), device, [*base, *x.values()])
    tokens = {name: value - before[name] for name, value in problem.counters().items()}
    step = seconds(lambda: method.step(problem, state), device, options.repeats, options.clock)
    # Training passes of all N candidates, ``chunk`` of them stacked, and N of them one after the
    # other.
    parts = groups(problem.g, repeat(x, count), own_batch=True, mode="stacked", chunk=options.chunk)
    index = torch.stack([problem.lower_data.draw(Key(i), batch, 1)[0] for i in range(count)])

    def train_stacked() -> None:
        for group in parts:
            gradient(group.loss, theta, group.x, problem.lower_data.batch(index[group.part]))

    stacked = seconds(train_stacked, device, options.repeats, options.clock)
    train = seconds(
        lambda: gradient(problem.g, theta, x, below), device, options.repeats, options.clock
    )
    score = seconds(lambda: forward(problem.f, above), device, options.repeats, options.clock)
    validate = seconds(
        lambda: gradient(problem.f, theta, x, above), device, options.repeats, options.clock
    )
    plain = seconds(lambda: forward(problem.g, below), device, options.repeats, options.clock)
    feed = seconds(lambda: problem.lower_data.batch(index), device, options.repeats, options.clock)
    floor = (count + 1) * train + count * score + validate + 2 * plain

    print(
        f"{options.shape}, N = {count}, batch {batch} × {options.length} tokens, rank "
        f"{options.rank}, {device}"
    )
    for label, value in (
        ("outer step", step),
        ("floor", floor),
        (f"  {count} training passes (one: {train:.4f})", count * train),
        ("  one more, on the hypergradient's batch", train),
        (f"  {count} scoring passes (one: {score:.4f})", count * score),
        ("  validation pass", validate),
        ("  two forward passes", 2 * plain),
        (f"{count} training passes stacked", stacked),
        ("batch building for one step", feed),
    ):
        print(f"{label:<44}{value:10.4f} s")
    print(f"{'step / floor':<44}{step / floor:10.3f}")
    print(f"{'stacked / one after the other':<44}{stacked / (count * train):10.3f}")
    print(
        f"{'tokens a step':<44}{tokens['forward_tokens']} forward, {tokens['backward_tokens']} "
        "backward"
    )
    flops = flops_of(problem, tokens, options.length)
    both = tokens["forward_tokens"] + tokens["backward_tokens"]
    print(f"{'tokens a second':<44}{both / step:10.0f} (both passes)")
    print(f"{'model FLOPs a step':<44}{flops:.3e} ({flops / step / 1e12:.2f} TFLOP/s)")
    rows_a_pass = batch * options.length
    trainer = trainer_seconds(options, device)
    print(
        f"{'a step of the Trainer':<44}{trainer:10.4f} s   (a training pass here: "
        f"{train / trainer:.3f} of it)"
    )
    print(f"{'  its tokens a second':<44}{2 * rows_a_pass / trainer:10.0f} (both passes)")
    known = next(
        (
            peak
            for name, peak in PEAK_FLOPS.items()
            if device.type == "cuda" and name in torch.cuda.get_device_name()
        ),
        None,
    )
    if known is not None:
        print(f"{'model FLOP utilisation':<44}{flops / step / known:10.1%}")
        rows_tokens = {"forward_tokens": batch * options.length, "backward_tokens": 0}
        for label, taken, both in (
            ("  of a forward pass", plain, False),
            ("  of a training pass", train, True),
        ):
            row_counts = {**rows_tokens, "backward_tokens": batch * options.length if both else 0}
            print(
                f"{label:<44}{flops_of(problem, row_counts, options.length) / taken / known:10.1%}"
            )
    head, head_back = head_seconds(problem, options, device)
    for label, value in (
        ("head and loss, forward", head),
        ("head and loss, forward and backward", head_back),
        ("body and adapters, forward (by difference)", plain - head),
        ("body and adapters, training (by difference)", train - head_back),
    ):
        print(f"{label:<44}{value:10.4f} s")
    print(f"{'attention':<44}{attention_kernels(lambda: forward(problem.g, below))}")
    print(f"{'peak memory':<44}{peak / 2**30:.2f} GiB")
    if options.profile:
        print_profile(lambda: method.step(problem, state), device)


if __name__ == "__main__":
    main()
