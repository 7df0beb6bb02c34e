"""Source reweighting: losses without bias; hypergradients against double backward and finite
differences.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import rejects

from hgms.testing import check_component
from hgms_core import (
    Branch,
    ConfigError,
    Cost,
    Data,
    DataError,
    Key,
    LastStep,
    Pipeline,
    Problem,
    Tree,
    gradient,
    groups,
    repeat,
)

pytest.importorskip("transformers")
pytest.importorskip("peft")

from hgms.gauss_newton import by_difference, gauss_newton
from hgms.generators.branches import Branches
from hgms.generators.penalty import Minimax
from hgms.hypergradients import Implicit, ThroughStep, Unrolled
from hgms.outer import Adam
from hgms.selectors import BestOfN
from hgms.solvers import CG, Neumann
from hgms_mix.lm import BaseModel, Lora, Source, SourceMixture
from hgms_mix.lm.store import warn

F64 = torch.float64
CPU = torch.device("cpu")
LAYERS = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64},
    "llama": LAYERS,
    "qwen2": LAYERS,
    "gemma2": {**LAYERS, "head_dim": 8},
}
TEXTS = {
    "sums": [(f"{a} plus {b}", str(a + b)) for a in range(1, 7) for b in range(2, 6)],
    "dots": [(f"{a} plus {b}", ".") for a in range(3, 8) for b in range(7, 9)],
    "words": [
        (f"say {word} twice", f"{word} {word}")
        for word in ("yes", "no", "never", "maybe now", "so")
    ],
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Source]:
    results = {}
    for name, rows in TEXTS.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(
            "".join(
                json.dumps({"prompt": prompt, "completion": answer}) + "\n"
                for prompt, answer in rows
            )
        )
        results[name] = Source(path=str(path))
    return results


def task(files: dict[str, Source], kind: str = "gpt2", **fields: Any) -> SourceMixture:
    held_out = evolve(files["sums"], skip=16)
    options: dict[str, Any] = {
        "sources": {**files, "sums": evolve(files["sums"], rows=16)},
        "validation": {"sums": held_out},
        "model": BaseModel(config={"model_type": kind, **SMALL[kind]}, tokenizer="bytes"),
        "adapter": Lora(rank=2, alpha=4.0, dropout=0.25),
        "template": "plain",
        "max_length": 48,
        "validation_split": (1, 1, 1),
        **fields,
    }
    return SourceMixture(**options)


def moved(x: Tree, seed: int = 0) -> Tree:
    """A point where nothing vanishes (a fresh adapter has B = 0)."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: leaf + 0.2 * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
        for name, leaf in x.items()
    }


def problem_of(files: dict[str, Source], kind: str = "gpt2", **fields: Any) -> Problem:
    problem = task(files, kind, **fields).problem(0, CPU, F64)
    return evolve(
        problem, x0=moved(problem.x0), theta0={"logits": torch.tensor([0.3, -0.2, 0.1], dtype=F64)}
    )


def one_step(**fields: Any) -> Branches:
    return Branches(**{"count": 3, "steps": 1, "lr": 0.5, "noise": 0.05, "batch_size": 6, **fields})


def hypergradients(problem: Problem, generator: Branches, *estimators: Any) -> list[torch.Tensor]:
    results = []
    for estimator in estimators:
        method = Pipeline(
            generator=generator, selector=BestOfN(), hypergradient=estimator, outer=Adam(lr=0.1)
        )
        state = method.init(problem, 3)
        key = Key(3).fold("step", 0)
        start = state["start"]
        candidates = generator.propose(problem, problem.theta0, start, key.fold("propose"))
        chosen = BestOfN().select(problem, problem.theta0, candidates, key.fold("select")).index
        branch = candidates.branch(chosen)
        estimate, _ = estimator.estimate(
            problem, problem.theta0, branch, key.fold("differentiate"), {}
        )
        results.append(estimate.value["logits"])
    return results


def value_after_the_step(problem: Problem, generator: Branches, theta: Tree) -> torch.Tensor:
    """F(θ) = f of the branch that is best at θ₀, run at θ."""
    key = Key(3).fold("step", 0)
    start = generator.init(problem, key)
    first = generator.propose(problem, problem.theta0, start, key.fold("propose"))
    chosen = BestOfN().select(problem, problem.theta0, first, key.fold("select")).index
    end = generator.propose(problem, theta, start, key.fold("propose")).at(chosen)
    return problem.f(theta, end, problem.upper_data["differentiate"].batch(None))


@pytest.mark.parametrize("average", ["example", "token"])
def test_the_lower_loss_says_its_logits(files: dict[str, Source], average: str) -> None:
    """Of all scored tokens, and what is made of them; with dropout, and of a whole model's
    parameters. Products with the Gauss–Newton matrix by forward mode and by differences of the
    logits agree.
    """
    for fields in ({}, {"adapter": None}):
        problem = problem_of(files, average=average, **fields)
        batch, _ = problem.lower_data.sample(Key(1), 6)
        z = problem.g.outputs(problem.x0, batch)
        assert len(z) == int(batch["mask"][:, 1:].sum())
        value = problem.g.criterion(problem.theta0, problem.x0, z, batch)
        torch.testing.assert_close(value, problem.g(problem.theta0, problem.x0, batch))
        at = (
            problem.theta0,
            problem.x0,
            batch,
            moved({name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}),
        )
        exact = gauss_newton(problem.g)(*at)
        ours = by_difference(problem.g)(*at)
        assert sum(float((exact[name] * leaf).sum()) for name, leaf in at[3].items()) > 0
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", SMALL)
def test_the_one_step_hypergradient_is_exact(files: dict[str, Source], kind: str) -> None:
    problem = problem_of(files, kind)
    generator = one_step()
    ways = [
        *(
            ThroughStep(batch="own", derivative=way)
            for way in ("exact", "difference", "per-source")
        ),
        Unrolled(),
    ]
    exact, difference, per_source, double_backward = hypergradients(problem, generator, *ways)
    assert exact.norm() > 1e-4
    # Llama's kind normalise in float32, which bounds what can agree.
    close = {"rtol": 1e-8, "atol": 1e-12} if kind == "gpt2" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(exact, double_backward, **close)
    torch.testing.assert_close(per_source, double_backward, **close)
    torch.testing.assert_close(
        difference, double_backward, rtol=1e-3, atol=2e-5 * float(exact.norm()) + close["atol"]
    )
    step = 1e-4 if kind == "gpt2" else 1e-2
    for i in range(3):
        e = torch.zeros(3, dtype=F64)
        e[i] = step
        values = [
            value_after_the_step(problem, generator, {"logits": problem.theta0["logits"] + s * e})
            for s in (1, -1)
        ]
        slope = (values[0] - values[1]) / (2 * step)
        torch.testing.assert_close(
            slope,
            exact[i],
            rtol=1e-5 if kind == "gpt2" else 5e-3,
            atol=1e-8 if kind == "gpt2" else 1e-5,
        )


def test_differences_on_a_bfloat16_base_have_the_signs_of_the_exact_float32_direction(
    files: dict[str, Source],
) -> None:
    """The losses are computed in the base's precision, so that decides how far a difference
    reaches, not the adapters' type.
    """

    def on(base: str, estimator: Any) -> list[torch.Tensor]:
        model = BaseModel(
            config={"model_type": "gpt2", **SMALL["gpt2"]}, tokenizer="bytes", dtype=base
        )  # type: ignore[arg-type]
        problem = task(files, model=model, adapter=Lora(rank=4, alpha=8.0)).problem(
            0, CPU, torch.float32
        )
        assert problem.precision == getattr(torch, base)
        draw = torch.Generator().manual_seed(0)
        x = {
            name: leaf + 0.05 * torch.randn(leaf.shape, generator=draw)
            for name, leaf in problem.x0.items()
        }
        results = []
        for number in range(4):
            index = problem.lower_data.draw(Key(number), 9, 1)
            step = LastStep(x=x, batch=problem.lower_data.batch(index[0]), rows=9, rate=0.1)
            branch = Branch(
                x=x,
                replay=lambda theta, last: (x, Cost()),
                next_step=lambda key: step,  # noqa: B023
            )
            estimate, _ = estimator.estimate(problem, problem.theta0, branch, Key(0), {})
            results.append(estimate.value["logits"])
        return results

    for right, difference in zip(
        on("float32", ThroughStep(derivative="exact")), on("bfloat16", ThroughStep()), strict=True
    ):
        assert torch.equal(difference > 0, right > 0)
        assert float((difference - right).norm() / right.norm()) < 0.15


def test_the_last_of_several_steps(files: dict[str, Source]) -> None:
    problem = problem_of(files)
    generator = one_step(steps=3, weight_decay=0.1, momentum=0.5)
    exact, truncated = hypergradients(
        problem, generator, ThroughStep(batch="own", derivative="exact"), Unrolled(last=1)
    )
    torch.testing.assert_close(exact, truncated, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("fields", [{"optimizer": "adamw"}, {"clip": 1.0}])
def test_a_step_that_is_not_linear_is_refused(
    files: dict[str, Source], fields: dict[str, Any]
) -> None:
    with rejects("not-supported", "generator", *fields, of=ConfigError):
        hypergradients(problem_of(files), one_step(**fields), ThroughStep())


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("batches", ["independent", "shared"])
def test_stacked_steps_equal_separate_ones(
    files: dict[str, Source], kind: str, batches: str
) -> None:
    problem = problem_of(files, kind)  # with dropout
    start = one_step().init(problem, Key(0))
    loop, *others = (
        one_step(mode=mode, chunk=chunk, batches=batches).propose(
            problem, problem.theta0, start, Key(1)
        )
        for mode, chunk in (("loop", None), ("stacked", None), ("stacked", 2))
    )
    for other in others:
        for name, leaf in loop.x.items():
            torch.testing.assert_close(other.x[name], leaf, rtol=1e-5, atol=1e-7)


def test_the_mixture_loss_has_no_bias(files: dict[str, Source]) -> None:
    """The mean of g over batches is g over all rows, with batches that hold every source and
    with ones that do not.
    """
    problem = problem_of(files, adapter=Lora(rank=2))
    data = problem.lower_data
    theta = problem.theta0
    x = problem.x0
    whole = problem.g(theta, x, data.batch(None))
    rows = problem.sources.examples(x, data.batch(None))
    source = data.batch(None)["source"]
    by_hand = sum(
        w * rows[source == s].mean() for s, w in enumerate(problem.sources.weights(theta))
    )
    torch.testing.assert_close(whole, by_hand)
    for size in (5, 2):
        draws = torch.stack(
            [problem.g(theta, x, data.batch(i)) for i in data.draw(Key(size), size, 400)]
        )
        assert abs(draws.mean() - whole) < 4 * draws.std() / 20


def test_the_token_mean_has_no_bias(files: dict[str, Source]) -> None:
    problem = problem_of(files, adapter=Lora(rank=2), average="token")
    data = problem.lower_data
    theta = problem.theta0
    x = problem.x0
    batch = data.batch(None)
    rows = problem.sources.examples(x, batch)
    count = batch["mask"][:, 1:].sum(1)
    by_hand = sum(
        w * (rows * count)[batch["source"] == s].sum() / count[batch["source"] == s].sum()
        for s, w in enumerate(problem.sources.weights(theta))
    )
    torch.testing.assert_close(problem.g(theta, x, batch), by_hand)
    draws = torch.stack([problem.g(theta, x, data.batch(i)) for i in data.draw(Key(0), 4, 400)])
    assert abs(draws.mean() - by_hand) < 4 * draws.std() / 20


def test_on_average_over_all_tokens_a_batch_is_the_mean_over_its_tokens(
    files: dict[str, Source],
) -> None:
    """Up to the scale of the mean row; so a source of long rows weighs more than its ω."""
    problem = problem_of(files, adapter=Lora(rank=2), average="all-tokens")
    data = problem.lower_data
    x = problem.x0
    batch = data.batch(None)
    summed = problem.sources.examples(x, batch) * (count := batch["mask"][:, 1:].sum(1))
    of = [batch["source"] == number for number in range(len(problem.sources.names))]
    means = torch.stack([count[own].double().mean() for own in of])
    assert means.max() > 1.2 * means.min()  # else nothing is told apart
    for index in (torch.tensor([0, 1, 5]), torch.tensor([data.size - 1, 2])):
        torch.testing.assert_close(
            problem.sources.pooled(problem.theta0, x, data.rows(index)),
            (summed[index].sum() / len(index) / means.mean()).to(summed),
        )
    by_hand = sum(
        w * summed[own].mean() / means.mean()
        for w, own in zip(problem.sources.weights(problem.theta0), of, strict=True)
    )
    torch.testing.assert_close(
        problem.g(problem.theta0, x, batch), torch.as_tensor(by_hand).to(summed)
    )


def test_batches_hold_every_source_equally() -> None:
    data = Data(60, strata=(("a", 40), ("b", 15), ("c", 5)))
    of = torch.tensor([0] * 40 + [1] * 15 + [2] * 5)
    for size, odd in ((6, 0), (8, 2), (2, 2)):
        drawn = data.draw(Key(0), size, 300)
        assert drawn.shape == (300, size)
        held = torch.stack([torch.bincount(of[row], minlength=3) for row in drawn])
        assert set(held.unique().tolist()) <= {size // 3, size // 3 + 1}
        assert (held > size // 3).float().mean().item() == pytest.approx(odd / 3)
        if odd:  # each source gets the odd ones as often as any other
            assert ((held > size // 3).float().mean(0) - odd / 3).abs().max() < 0.12


def test_the_order_of_the_sources_changes_no_draw(files: dict[str, Source]) -> None:
    straight = task(files)
    turned = task(files)
    turned = evolve(turned, sources=dict(reversed(turned.sources.items())))
    drawn = []
    for entry in (straight, turned):
        problem = entry.problem(0, CPU, F64)
        index = problem.lower_data.draw(Key(0), 7, 2)
        texts = problem.lower_data.rows(index)["tokens"]
        drawn.append([sorted(str(row.tolist()) for row in step) for step in texts])
    assert drawn[0] == drawn[1]


def test_a_given_mixture_is_by_name(files: dict[str, Source]) -> None:
    sources = task(files).problem(0, CPU, F64).sources
    omega = sources.weights(sources.theta({"words": 3, "sums": 1}))
    assert dict(zip(sources.names, omega.tolist(), strict=True)) == pytest.approx(
        {"sums": 0.25, "dots": 0, "words": 0.75}
    )
    with rejects("unknown-source", "mixture", "word", of=ConfigError) as caught:
        sources.theta({"word": 1})
    assert caught.value.did_you_mean == ("words",)
    with rejects("wrong-value", "mixture", of=ConfigError):
        sources.theta({"words": 0})


def test_every_table_is_made_once(
    files: dict[str, Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    import hgms_mix.lm.task

    made: list[str] = []
    original = hgms_mix.lm.task.token_table
    monkeypatch.setattr(
        hgms_mix.lm.task,
        "token_table",
        lambda name, *args, **options: (made.append(name), original(name, *args, **options))[1],
    )
    options = task(files)
    options.problem(0, CPU, F64)
    assert len(made) == len(options.sources) + len(options.validation) + len(options.test)


PRIORS: list[tuple[Any, Any]] = [
    ("uniform", lambda sizes: [1.0] * len(sizes)),
    ("size", list),
    ({"sums": 3.0, "words": 1.0}, lambda sizes: [3.0, 0.0, 1.0]),
]


@pytest.mark.parametrize(("prior", "shares"), PRIORS)
def test_a_prior_is_where_the_weights_begin(
    files: dict[str, Source], prior: Any, shares: Any
) -> None:
    strata = task(files).problem(0, CPU, F64).lower_data.strata
    problem = task(files, prior=prior, cache=4).problem(0, CPU, F64)
    expected = torch.tensor(shares([size for _, size in strata]), dtype=F64)
    omega = problem.sources.weights(problem.theta0)
    assert omega.tolist() == pytest.approx((expected / expected.sum()).tolist(), abs=1e-12)


def test_a_prior_of_another_source_is_refused(files: dict[str, Source]) -> None:
    with rejects("unknown-source", "prior", "sum", of=ConfigError) as caught:
        task(files, prior={"sum": 1.0})
    assert caught.value.did_you_mean == ("sums",)


def test_scalebio_moves_the_logits_by_its_formula(files: dict[str, Source]) -> None:
    """h_s = α ω_s [(ℓ_s(w) − ℓ_s(u)) − Σ_j ω_j (ℓ_j(w) − ℓ_j(u))] at the losses before the step."""
    problem = problem_of(files, adapter=Lora(rank=2))
    generator = Minimax(alpha=10.0, lr=0.1)
    start = generator.init(problem, Key(0))
    start["aux"] = {f"u.{name}": leaf[None] for name, leaf in moved(problem.x0, 5).items()}
    results = generator.propose(problem, problem.theta0, start, Key(1)).aux["theta.logits"][0]
    batch = problem.lower_data.batch(None)
    w = problem.x0
    u = moved(problem.x0, 5)
    apart = problem.sources.losses(w, batch) - problem.sources.losses(u, batch)
    omega = problem.sources.weights(problem.theta0)
    torch.testing.assert_close(results, 10.0 * omega * (apart - (omega * apart).sum()))


def test_per_example_gradients_in_one_pass(files: dict[str, Source]) -> None:
    problem = problem_of(files)
    batch = problem.lower_data.rows(torch.tensor([0, 5, 20]))
    single = {name: leaf.unsqueeze(1) for name, leaf in batch.items() if name != "seed"}
    (group,) = groups(problem.f, repeat(problem.x0, 3), own_batch=True, mode="stacked")
    grads, losses = gradient(group.loss, problem.theta0, group.x, single)
    for i in range(3):
        row = {name: leaf[i : i + 1] for name, leaf in batch.items() if name != "seed"}
        alone, loss = gradient(problem.f, problem.theta0, problem.x0, row)
        torch.testing.assert_close(losses[i], loss)
        for theirs, ours in zip(grads, alone, strict=True):
            torch.testing.assert_close(theirs[i], ours)


@pytest.mark.parametrize(
    "estimator",
    [
        Implicit(solver=CG(ridge=20.0, max_steps=4), batch_size=6),
        Implicit(solver=CG(ridge=20.0, max_steps=4), batch_size=6, strategy="difference"),
        Implicit(solver=Neumann(ridge=20.0, lr=1e-2, steps=3), batch_size=6),
        Unrolled(),
    ],
)
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_second_order_ways_run_on_a_language_model(
    files: dict[str, Source], kind: str, estimator: Any
) -> None:
    problem = problem_of(files, kind, adapter=Lora(rank=2))
    method = Pipeline(
        generator=one_step(count=2, steps=3),
        selector=BestOfN(),
        hypergradient=estimator,
        outer=Adam(lr=0.1),
    )
    state = method.init(problem, 0)
    for _ in range(2):
        state, record = method.step(problem, state)
    assert torch.isfinite(record["hypergradient_norm"])
    assert record["hypergradient_norm"] > 0


@pytest.mark.parametrize("saving", [{"checkpointing": True}, {"micro_batch": 4}], ids=str)
def test_a_second_derivative_through_activations_computed_again(
    files: dict[str, Source], saving: dict[str, Any]
) -> None:
    """They are computed again with the attention kernel of the first time, whatever is allowed
    by then.
    """
    ways = [Implicit(solver=CG(ridge=20.0, max_steps=4), batch_size=6), Unrolled()]
    results = [
        hypergradients(problem_of(files, adapter=Lora(rank=2), **how), one_step(steps=2), *ways)
        for how in ({}, saving)
    ]
    for plain, saved in zip(*results, strict=True):
        assert plain.norm() > 1e-6
        torch.testing.assert_close(saved, plain, rtol=1e-7, atol=1e-12)


def test_all_parameters_are_lower_variables_without_an_adapter(files: dict[str, Source]) -> None:
    problem = task(files, adapter=None, checkpointing=True).problem(0, CPU, F64)
    assert "transformer.wte.weight" in problem.x0
    generator = one_step(count=2, noise=1e-3, lr=0.1)
    exact, double = hypergradients(
        problem, generator, ThroughStep(derivative="per-source"), ThroughStep()
    )
    torch.testing.assert_close(exact, double, rtol=1e-4, atol=1e-8)


def test_metrics(files: dict[str, Source], caplog: pytest.LogCaptureFixture) -> None:
    built = task(
        files,
        test={"sums": evolve(files["sums"], skip=10, rows=6)},
        reference={"sums": 1.0},
        validation_split=(0.5, 0.25, 0.25),
    )
    warn.cache_clear()
    problem = built.problem(0, CPU, F64)
    built.problem(0, CPU, F64)
    (text,) = caplog.messages  # once, however often the problem is built
    assert "test 'sums' and train 'sums': 6 of 6 (100.0%)" in text
    results = problem.evaluate({"logits": torch.zeros(3, dtype=F64)}, problem.x0)
    assert set(results) == set(built.metrics)
    assert results["recovery_error"] == pytest.approx(4 / 3)
    assert results["test_loss"] == pytest.approx(5.5, abs=0.3)  # log 259: nothing is learned yet


@pytest.mark.parametrize(
    ("method", "moves"),
    [
        ("hg-ms", True),
        ("hg-baseline", True),
        ("hg-ms-mixture", True),
        ("scalebio", True),
        ("scalebio-best-of-n", True),
        ("uniform", False),
        ("uniform-tilted", False),
        ("validation-only", False),
        ({"name": "fixed", "mixture": {"sums": 3.0, "words": 1.0}}, False),
    ],
)
def test_every_method_by_its_name(files: dict[str, Source], method: Any, moves: bool) -> None:
    from hgms.runs import RunConfig, run
    from hgms_core import Budget

    table = {
        "task": {
            "name": "source-mixture",
            "sources": {name: {"path": source.path} for name, source in files.items()},
            "validation": {"sums": {"path": files["sums"].path}},
            "model": {"config": {"model_type": "gpt2", **SMALL["gpt2"]}, "tokenizer": "bytes"},
            "adapter": {"rank": 2},
            "template": "plain",
        },
        "method": method,
        "budget": "2 steps",
    }
    config = RunConfig.from_dict(table)
    assert RunConfig.from_toml(config.to_toml()) == config
    own = config.method
    while not hasattr(own, "generator"):
        own = own.method  # what a wrapper is around
    # the defaults are those for weighted sources
    assert own.generator.lr == (2e-4 if method == "hg-ms-mixture" else 1e-4)
    problem = config.task.problem(0, CPU, torch.float32)
    rows = run(config.method, problem, Budget(outer_steps=2)).records
    first, last = (
        {name: value for name, value in row.items() if name.startswith("weight.")}
        for row in (rows[0], rows[-1])
    )
    assert (first != last) == moves
    if isinstance(method, dict):
        assert last == pytest.approx(
            {"weight.sums": 0.75, "weight.dots": 0.0, "weight.words": 0.25}
        )


def test_a_string_in_place_of_a_source_or_a_model_is_its_path() -> None:
    from hgms.runs import RunConfig

    def config(source: Any, model: Any) -> RunConfig:
        task = {
            "name": "source-mixture",
            "sources": {"a": source, "b": {"path": "b.jsonl"}},
            "validation": {"a": source},
        }
        return RunConfig.from_dict(
            {"task": {**task, "model": model}, "method": "uniform", "budget": "2 steps"}
        )

    short = config("a.jsonl", "smollm2-135m")
    long = config({"path": "a.jsonl"}, {"path": "smollm2-135m"})
    assert short == long
    assert short.resolved() == long.resolved()


def test_files_are_looked_at_before_the_model_is_loaded(
    files: dict[str, Source], tmp_path: Path
) -> None:
    (tmp_path / "odd.jsonl").write_text('{"body": "neither prompt nor answer"}\n')
    sources = {**files, "odd": Source(path=str(tmp_path / "odd.jsonl"))}
    task = SourceMixture(
        sources=sources, validation=files, model=BaseModel(path=str(tmp_path / "no-model"))
    )
    with rejects("wrong-format", "task", "sources", "odd", "path", of=DataError) as caught:
        task.problem(0, CPU, torch.float32)
    assert caught.value.message.endswith(" body")
    assert 'format = "text"' in (caught.value.hint or "")


def test_the_tokens_of_a_step_are_recorded(files: dict[str, Source], tmp_path: Path) -> None:
    from hgms.runs import run
    from hgms_core import Budget

    problem = problem_of(files)
    method = Pipeline(
        generator=one_step(), selector=BestOfN(), hypergradient=ThroughStep(), outer=Adam(lr=0.1)
    )
    result = run(method, problem, Budget(outer_steps=2))
    row = result.records[-1]
    assert {"weight.sums", "weight.dots", "weight.words"} <= set(row)
    assert sum(value for name, value in row.items() if name.startswith("weight.")) == pytest.approx(
        1
    )
    assert row["step_backward_tokens"] > 0
    assert row["step_forward_tokens"] > row["step_backward_tokens"]


def test_the_conformance_kit_finds_nothing(files: dict[str, Source]) -> None:
    # Declared are the metrics of a task with a test set and a reference; dropout masks of stacked
    # candidates differ.
    built = task(
        files,
        validation={"sums": evolve(files["sums"], skip=16, rows=4)},
        test={"sums": evolve(files["sums"], skip=20)},
        reference={"sums": 1.0, "dots": 0.0, "words": 0.0},
        adapter=Lora(rank=2, alpha=4.0, dropout=0.0),
    )
    assert check_component(built) == {}
