"""DoReMi, DoGE, Skill-It and Aioli against loops written here, with torch's AdamW and numpy, on
the same rows.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, network_problem, rejects
from support.source_problems import (
    assert_goes_on,
    convex_sources,
    in_another_order,
    language_sources,
    network_sources,
    through,
    watched,
    weights,
)
from torch import Tensor

from hgms_core import ConfigError, Data, Key, NumericalError, Problem, State, Tree, groups
from hgms_mix.contrib import Aioli, SkillIt
from hgms_mix.contrib.aioli import mixing_law
from hgms_mix.methods.online import DoGE, DoReMi, gradients
from hgms_mix.methods.online.training import mixture_rows

PROBLEM = network_sources()
assert PROBLEM.sources is not None
SOURCES = PROBLEM.sources
SIZES = [20, 12, 8]
ADAMW = {"lr": 0.02, "weight_decay": 0.1, "batch_size": 7}
METHODS: dict[str, Any] = {
    "doremi": DoReMi(**ADAMW, steps=7, updates=3, eta=3.0, smoothing=0.05, prior="rows"),
    "doremi-to-the-end": DoReMi(**ADAMW, steps=4, updates=3, train_steps=5),
    "doge": DoGE(**ADAMW, steps=7, updates=3, rate=0.7, validation_batch_size=4, max_norm=0.8),
    "doge-sources": DoGE(
        **ADAMW, steps=7, updates=3, rate=0.7, target="sources", bounds=(-1.0, 0.4), train_steps=4
    ),
    "skill-it": SkillIt(
        **ADAMW, graph_steps=5, round_steps=7, rounds=4, updates=3, window=2, eta=0.8, chunk=4
    ),
    "aioli": Aioli(
        **ADAMW,
        rounds=3,
        round_steps=4,
        sweeps=2,
        sweep_steps=3,
        focus=0.6,
        eta=2.0,
        updates=3,
        chunk=4,
    ),
    "aioli-average": Aioli(**ADAMW, rounds=3, round_steps=2, sweeps=1, sweep_steps=2, average=0.3),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))


class Trainee:
    """x under torch's AdamW."""

    def __init__(self) -> None:
        self.x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
        self.optimizer = torch.optim.AdamW(list(self.x.values()), lr=0.02, weight_decay=0.1)

    def move(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def on(self, index: Tensor) -> None:
        """An update on rows as they come."""
        self.move(SOURCES.examples(self.x, PROBLEM.lower_data.rows(index)).mean())

    def gradient(self, loss: Tensor) -> np.ndarray[Any, Any]:
        return np.concatenate(
            [leaf.numpy().ravel() for leaf in torch.autograd.grad(loss, list(self.x.values()))]
        )

    def targets(self) -> np.ndarray[Any, Any]:
        """Mean loss of both validation sets."""
        batch = PROBLEM.upper_data["differentiate"].whole
        with torch.no_grad():
            losses = SOURCES.examples(self.x, batch)
        return np.array([float(losses[batch["source"] == part].mean()) for part in (0, 1)])


def rows_of(index: Tensor) -> list[Tensor]:
    """A batch's rows, source by source."""
    source = PROBLEM.lower_data.rows(index)["source"]
    return [index.reshape(-1)[(source == number).reshape(-1)] for number in range(3)]


def softmax(logits: Any) -> Any:
    shares = np.exp(logits - np.max(logits))
    return shares / shares.sum()


def mixture(method: Any, state: State, problem: Problem = PROBLEM) -> Tensor:
    return weights(problem, method.result(state)[0])


def assert_ends(method: Any, state: State, omega: Any, x: Tree) -> None:
    assert_same(mixture(method, state), torch.as_tensor(omega), rtol=1e-8)
    assert float((mixture(method, state) - 1 / 3).abs().max()) > 1e-3  # a mixture, not the start
    assert_same(
        method.result(state)[1],
        {name: leaf.detach() for name, leaf in x.items()},
        rtol=1e-8,
        atol=1e-11,
    )


def test_batches_have_the_mixture_on_average() -> None:
    data = PROBLEM.lower_data
    omega = torch.tensor([0.55, 0.05, 0.4], dtype=F64)
    index = mixture_rows(data, SOURCES, omega, Key(1), 7, 3000)
    source = data.rows(index)["source"]
    counts = torch.stack([(source == number).sum(1) for number in range(3)], 1).double()
    assert_same(counts.mean(0), 7 * omega, atol=0.03)
    assert float((counts - 7 * omega).abs().max()) < 1  # rounded up or down
    own = [index[source == number] for number in range(3)]
    for number, size in enumerate(SIZES):  # all rows of a source come before one comes again
        epochs = own[number][: len(own[number]) // size * size].reshape(-1, size)
        assert_same(epochs.sort(1).values, epochs[:1].sort(1).values.expand_as(epochs))
    alone = mixture_rows(data, SOURCES, torch.tensor([0.0, 1.0, 0.0], dtype=F64), Key(1), 7, 5)
    assert bool((data.rows(alone)["source"] == 1).all())


def test_doremi_is_its_loop() -> None:
    method, (problem, seen) = METHODS["doremi"], watched(PROBLEM)
    *_, (state, row) = through(method, problem)
    assert len(seen["pool"]) == 7 + 7
    reference = Trainee()
    proxy = Trainee()
    counts = torch.tensor(
        [[len(rows) for rows in rows_of(index)] for index in seen["pool"][:7]]
    ).double()
    # the prior by rows
    assert_same(counts.mean(0), 7 * torch.tensor(SIZES).double() / 40, atol=0.5)
    for index in seen["pool"][:7]:
        reference.on(index)
    alpha = np.full(3, 1 / 3)
    history = []
    for index in seen["pool"][7:]:
        excess = []
        losses = []
        for rows in rows_of(index):
            batch = PROBLEM.lower_data.rows(rows)
            losses.append(SOURCES.examples(proxy.x, batch))
            known = SOURCES.examples(reference.x, batch).detach()
            excess.append(np.maximum((losses[-1].detach() - known).numpy(), 0).mean())
        alpha = alpha * np.exp(3.0 * np.array(excess))
        alpha = 0.95 * alpha / alpha.sum() + 0.05 / 3
        history.append(alpha)
        proxy.move(sum(share * loss.mean() for share, loss in zip(alpha, losses, strict=True)))
    assert_ends(method, state, np.mean(history, 0), proxy.x)
    assert [row[f"excess.{name}"] for name in SOURCES.names] == pytest.approx(excess, rel=1e-8)
    assert method.untrained == "x is the proxy's (train_steps = 0)"


def test_a_prior_by_rows_is_that_of_the_files_where_the_task_keeps_fewer() -> None:
    examples = lambda x, batch: SOURCES.examples(x, batch)  # noqa: E731
    examples.sizes = {"near": 10.0, "turned": 890.0, "noise": 100.0}  # type: ignore[attr-defined]
    problem, seen = watched(evolve(PROBLEM, sources=evolve(SOURCES, examples=examples)))
    method = DoReMi(**(ADAMW | {"batch_size": 10}), steps=20, updates=20, prior="rows")
    method.step(problem, method.init(problem, 3))
    counts = torch.tensor(
        [[len(rows) for rows in rows_of(index)] for index in seen["pool"]]
    ).double()
    assert_same(counts.mean(0), torch.tensor([0.1, 8.9, 1.0], dtype=F64), atol=0.3)


@every_method
def test_where_sources_stand_in_the_table_does_not_matter(method: Any) -> None:
    *_, (state, row) = through(method, PROBLEM)
    *_, (other, again) = through(method, in_another_order(PROBLEM))
    assert_same(method.result(other), method.result(state), rtol=1e-8, atol=1e-11)
    assert row.keys() == again.keys()


@pytest.mark.parametrize("name", ["doge", "doge-sources"])
def test_doge_is_its_loop(name: str) -> None:
    method, (problem, seen) = evolve(METHODS[name], train_steps=0), watched(PROBLEM)
    states = list(through(method, problem))
    state, row = states[-1]
    assert len(seen["pool"]) == 7
    assert all([len(rows) for rows in rows_of(index)] == [2, 2, 2] for index in seen["pool"])
    limit, (low, high) = method.max_norm, method.bounds

    def shortened(vector: Any) -> Any:
        return vector * min(1.0, limit / (np.linalg.norm(vector) + 1e-6))

    proxy = Trainee()
    alpha = np.full(3, 1 / 3)
    history = []
    clipped = 0
    for at, index in enumerate(seen["pool"]):
        losses = [
            SOURCES.examples(proxy.x, PROBLEM.lower_data.rows(rows)).mean()
            for rows in rows_of(index)
        ]
        long = [proxy.gradient(loss) for loss in losses]
        grads = [shortened(vector) for vector in long]
        clipped += sum(np.linalg.norm(vector) > limit for vector in long)
        if method.target == "validation":
            batch = PROBLEM.upper_data["differentiate"].rows(seen["differentiate"][at])
            target = shortened(proxy.gradient(SOURCES.examples(proxy.x, batch).mean()))
            score = np.array([vector @ target for vector in grads])
        else:
            score = np.array([vector @ (sum(grads) - vector) for vector in grads])
        score = np.clip(
            score / (np.mean([np.linalg.norm(vector) for vector in grads]) + 1e-6), low, high
        )
        alpha = softmax(np.log(alpha) + 0.7 * score)
        history.append(alpha)
        step = sum(share * vector for share, vector in zip(alpha, grads, strict=True))
        first = 0
        for leaf in proxy.x.values():
            leaf.grad = torch.as_tensor(step[first : first + leaf.numel()]).reshape(leaf.shape)
            first += leaf.numel()
        proxy.optimizer.step()
    assert clipped > 0 or name != "doge"
    assert_ends(method, state, np.mean(history, 0), proxy.x)
    assert [row[f"score.{name}"] for name in SOURCES.names] == pytest.approx(
        score, rel=1e-7, abs=1e-9
    )
    assert ("upper_loss" in row) == (method.target == "validation")


@pytest.mark.parametrize("problem", [PROBLEM, "language"], ids=["network", "language"])
def test_one_pass_gives_the_gradients_of_a_loop(
    problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = language_sources(1) if problem == "language" else problem
    index = gradients.even_rows(problem.lower_data, problem.sources, Key(0), 3, 1)[0]
    results = {}
    for mode in ("stacked", "loop"):
        monkeypatch.setattr(gradients, "groups", partial(groups, mode=mode))
        results[mode] = gradients.source_gradients(problem, problem.x0, index, 1)
    assert_same(results["stacked"], results["loop"], rtol=1e-9, atol=1e-12)
    alone = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    pooled = problem.sources.pooled
    losses = [pooled(problem.theta0, alone, problem.lower_data.rows(rows)) for rows in index]
    for number, loss in enumerate(losses):
        expected = torch.autograd.grad(loss, list(alone.values()), materialize_grads=True)
        assert_same(
            [leaf[number] for leaf in results["loop"][0]], list(expected), rtol=1e-8, atol=1e-11
        )


def test_skill_it_is_its_loop() -> None:
    method, (problem, seen) = METHODS["skill-it"], watched(PROBLEM)
    states = list(through(method, problem))
    start = Trainee().targets()
    graph = []
    for number in range(3):
        own = Trainee()
        for index in seen["pool"][5 * number : 5 * number + 5]:
            assert_same(PROBLEM.lower_data.rows(index)["source"], torch.full((7,), number))
            own.on(index)
        graph.append((start - own.targets()) / start)
    assert_same(states[5][0]["graph"], torch.as_tensor(np.array(graph)), rtol=1e-8)
    x = Trainee()
    shares = softmax(0.8 * np.sum(graph, 1))
    losses = []
    used = []
    for number in range(4):
        used.append(shares)
        for index in seen["pool"][15 + 7 * number : 22 + 7 * number]:
            x.on(index)
        losses.append(x.targets())
        shares = softmax(0.8 * np.array(graph) @ np.sum(losses[-2:], 0))
    assert len(seen["pool"]) == 15 + 4 * 7
    assert_ends(method, states[-1][0], np.mean(used, 0), x.x)
    assert states[-1][1]["cost_upper_values"] == 1 + 3 + 4


@pytest.mark.parametrize("name", ["aioli", "aioli-average"])
def test_aioli_is_its_loop(name: str) -> None:
    method, (problem, seen) = METHODS[name], watched(PROBLEM)
    states = list(through(method, problem))
    sweeps = method.sweeps
    steps = method.sweep_steps
    focus = method.focus
    batches = iter(seen["pool"])
    x = Trainee()
    shares = np.full(3, 1 / 3)
    used = []
    law = np.zeros((2, 3))
    stretches = iter([row["source"] for _, row in states if row["phase"] == "sweeps"])
    for number in range(3):
        before = x.targets()
        falls = np.zeros((2, 3))
        mixtures = np.full((3, 3), (1 - focus) / 2) + np.eye(3) * (focus - (1 - focus) / 2)
        for _ in range(sweeps):
            order = [SOURCES.names.index(next(stretches)) for _ in range(3)]
            assert sorted(order) == [0, 1, 2]
            for source in order:
                for _ in range(steps):
                    x.on(next(batches))
                after = x.targets()
                falls[:, source] += (before - after) / sweeps
                before = after
        new = np.stack([np.linalg.lstsq(mixtures, fall, rcond=None)[0] for fall in falls])
        new = new - min(new.min(), 0)
        new = new / new.sum()
        if method.average is None:
            shares = softmax(np.log(shares) + method.eta * new.sum(0))
        else:
            law = new if number == 0 else 0.7 * new + 0.3 * law
            shares = softmax(method.eta * law.sum(0))
        used.append(shares)
        for _ in range(method.round_steps):
            x.on(next(batches))
    assert next(batches, None) is None
    assert_ends(method, states[-1][0], np.mean(used, 0), x.x)


def test_focused_batches_hold_the_focus() -> None:
    problem, seen = watched(PROBLEM)
    rows = [row for _, row in through(METHODS["aioli"], problem)]
    held: Counter[bool] = Counter()
    for stretch, row in enumerate(rows[:6]):
        for index in seen["pool"][3 * stretch : 3 * stretch + 3]:
            held += Counter(
                (
                    PROBLEM.lower_data.rows(index)["source"] == SOURCES.names.index(row["source"])
                ).tolist()
            )
    assert held[True] / held.total() == pytest.approx(0.6, abs=0.06)


def test_a_law_of_no_falls_is_even() -> None:
    assert_same(mixing_law(torch.zeros(2, 3, dtype=F64), 0.6), torch.full((2, 3), 1 / 6, dtype=F64))


@pytest.mark.parametrize(
    "method",
    [
        DoGE(steps=150, updates=150, lr=0.02, rate=0.05, bounds=(-5.0, 5.0)),
        SkillIt(graph_steps=20, round_steps=20, updates=20, rounds=5, lr=0.02, eta=0.2),
        Aioli(rounds=10, round_steps=10, sweeps=2, updates=10, lr=0.01),
    ],
    ids=lambda method: method.name,
)
def test_sources_that_help_weigh_more(method: Any) -> None:
    problem = convex_sources({"first": 0.6, "second": 0.3, "third": 0.1})
    *_, (state, _) = through(method, problem)
    first, second, third = mixture(method, state, problem).tolist()
    assert first > second + 0.01 > third + 0.02


def test_doremi_follows_what_is_not_yet_learned() -> None:
    """x0 is where the rows of two sources lie, the third is far: only its excess is above 0 at
    first.
    """
    problem = convex_sources({"near": 0.5, "other": 0.5, "far": 0.0})
    problem = evolve(problem, x0={"x": torch.tensor([0.5, 0.5, 0.0], dtype=F64)})
    method = DoReMi(steps=40, updates=40, lr=0.02, batch_size=30, eta=2.0)
    *_, (state, _) = through(method, problem)
    assert float(mixture(method, state, problem)[2]) > 0.4


@pytest.mark.parametrize("name", ["doremi-to-the-end", "doge-sources"])
def test_a_fresh_x_is_trained_at_the_mixture(name: str) -> None:
    method, (problem, seen) = METHODS[name], watched(PROBLEM)
    states = list(through(method, problem))
    proxies = [state for state, row in states if row["phase"] != "train"]
    assert_same(method.result(proxies[-1])[1], PROBLEM.x0)
    own = Trainee()
    for index in seen["pool"][-method.train_steps :]:
        own.on(index)
    assert_ends(method, states[-1][0], mixture(method, proxies[-1]), own.x)
    assert method.untrained == ""
    assert evolve(method, train_steps=None).finished(states[-1][0]) is False


@every_method
def test_a_state_read_back_goes_on_bit_for_bit(method: Any) -> None:
    state = assert_goes_on(method, PROBLEM)
    assert method.finished(state)
    after, _ = method.step(PROBLEM, state)
    assert_same(method.result(after), method.result(state))


@every_method
def test_costs_are_what_was_read(method: Any) -> None:
    problem, seen = watched(PROBLEM)
    *_, (_, row) = through(method, problem)
    lower, upper = (
        sum(index.numel() for index in seen[role]) for role in ("pool", "differentiate")
    )
    # the proxy's rows go through the reference, too
    rows = lower + (7 * method.steps if method.name == "doremi" else 0)
    assert row["cost_rows"] == rows + upper
    more = 2 * method.steps if method.name == "doge" else 0  # its gradients are of three sources
    assert row["cost_lower_gradients"] == len(seen["pool"]) + more
    if method.name == "doge":
        assert row["cost_upper_gradients"] == len(seen["differentiate"])


@every_method
def test_language_models(method: Any) -> None:
    pytest.importorskip("transformers")
    problem = language_sources(2)
    state = method.init(problem, 0)
    for _ in range(3):
        state, row = method.step(problem, state)
    assert np.isfinite(float(row["lower_loss"]))
    assert_same(mixture(method, state, problem).sum(), torch.tensor(1.0, dtype=F64), atol=1e-9)


@every_method
def test_losses_that_are_not_finite_stop_the_run(method: Any) -> None:
    nan = lambda x, batch: batch["y"] * x["v"].sum() * torch.nan  # noqa: E731
    pooled = lambda theta, x, batch: nan(x, batch).mean()  # noqa: E731
    broken = evolve(SOURCES, examples=nan, pooled=pooled)
    with rejects("not-finite", of=NumericalError) as caught:
        list(through(method, evolve(PROBLEM, sources=broken)))
    assert "step 1: " in caught.value.message
    if method.name in ("skill-it", "aioli") or method == METHODS["doge"]:
        with rejects("not-finite", of=NumericalError) as caught:
            list(
                through(method, evolve(PROBLEM, f=lambda theta, x, batch: x["v"].sum() * torch.nan))
            )
        assert "step 1: " in caught.value.message
        assert "validation" in caught.value.message


def test_bad_settings() -> None:
    empty = evolve(PROBLEM, upper_data={**PROBLEM.upper_data, "differentiate": Data.none()})
    for method in METHODS.values():
        with rejects("not-supported", "problem", "sources", of=ConfigError):
            method.init(network_problem(), 0)
        if method.name in ("skill-it", "aioli") or method == METHODS["doge"]:
            with rejects("no-rows-for-role", "problem", "upper_data", "differentiate"):
                method.init(empty, 0)
        else:
            method.init(empty, 0)  # it does not look at them
        if method.name in ("doremi", "doge"):
            with rejects("out-of-range", "method", "batch_size", of=ConfigError):
                evolve(method, batch_size=2).init(PROBLEM, 0)
    with rejects("out-of-range", "method", "focus", of=ConfigError):
        Aioli(focus=0.3).init(PROBLEM, 0)
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        Aioli(focus=1.0).init(convex_sources({"alone": 1.0}), 0)
    with rejects("out-of-range", "problem", "f", of=NumericalError) as caught:
        list(through(SkillIt(), evolve(PROBLEM, f=lambda theta, x, batch: 0 * x["v"].sum())))
    assert "step 1: " in caught.value.message
    assert "[0.0" in caught.value.message
    with rejects("wrong-value", "bounds", of=ConfigError):
        DoGE(bounds=(1.0, 1.0))
    with rejects("out-of-range", "average", of=ConfigError):
        Aioli(average=1.0)
    with rejects("out-of-range", "smoothing", of=ConfigError):
        DoReMi(smoothing=2.0)
