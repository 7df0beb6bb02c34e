"""DoReMi and DoGE against loops written here, with torch's AdamW and numpy, on the same rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same
from support.online_loops import (
    ADAMW,
    PROBLEM,
    SOURCES,
    Trainee,
    assert_costs,
    assert_ends,
    counts_of,
    rows_of,
    softmax,
)
from support.source_problems import convex_sources, language_sources, through, watched, weights

from hgms_core import Key, Sources, groups
from hgms_mix.methods.online import DoGE, DoReMi, gradients
from hgms_mix.methods.online.training import mixture_rows

DOREMI = DoReMi(**ADAMW, steps=7, updates=3, eta=3.0, smoothing=0.05, prior="rows")
DOGE = DoGE(**ADAMW, steps=7, updates=3, rate=0.7, validation_batch_size=4, max_norm=0.8)
OF_SOURCES = evolve(DOGE, target="sources", bounds=(-1.0, 0.4))
SIZES = [20, 12, 8]


def test_batches_have_the_mixture_on_average() -> None:
    data = PROBLEM.lower_data
    omega = torch.tensor([0.55, 0.05, 0.4], dtype=F64)
    index = mixture_rows(data, SOURCES, omega, Key(1), 7, 3000)
    source = data.rows(index)["source"]
    counts = torch.nn.functional.one_hot(source, 3).sum(1).double()
    assert_same(counts.mean(0), 7 * omega, atol=0.03)
    assert float((counts - 7 * omega).abs().max()) < 1  # rounded up or down
    for number, size in enumerate(SIZES):  # all rows of a source come before one comes again
        own = index[source == number]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert_same(epochs.sort(1).values, epochs[:1].sort(1).values.expand_as(epochs))


def test_doremi_is_its_loop() -> None:
    problem, seen = watched(PROBLEM)
    *_, (state, row) = through(DOREMI, problem)
    assert len(seen["pool"]) == 7 + 7
    assert_costs(DOREMI, row, seen)
    reference, proxy = Trainee(), Trainee()
    expected = 7 * torch.tensor(SIZES).double() / 40  # the prior by rows
    assert_same(counts_of(seen["pool"][:7]).mean(0), expected, atol=0.5)
    for index in seen["pool"][:7]:
        reference.on(index)
    alpha = np.full(3, 1 / 3)
    history = []
    for index in seen["pool"][7:]:
        losses = [proxy.losses(rows) for rows in rows_of(index)]
        known = [reference.losses(rows).detach() for rows in rows_of(index)]
        excess = [
            float((own.detach() - other).clamp_min(0).mean())
            for own, other in zip(losses, known, strict=True)
        ]
        alpha = alpha * np.exp(3.0 * np.array(excess))
        alpha = 0.95 * alpha / alpha.sum() + 0.05 / 3
        history.append(alpha)
        proxy.move(sum(share * loss.mean() for share, loss in zip(alpha, losses, strict=True)))
    assert_ends(DOREMI, state, np.mean(history, 0), proxy.x)
    assert [row[f"excess.{name}"] for name in SOURCES.names] == pytest.approx(excess, rel=1e-8)


@pytest.mark.parametrize("method", [DOGE, OF_SOURCES], ids=["validation", "sources"])
def test_doge_is_its_loop(method: DoGE) -> None:
    problem, seen = watched(PROBLEM)
    *_, (state, row) = through(method, problem)
    assert_costs(method, row, seen)
    assert counts_of(seen["pool"]).tolist() == [[2, 2, 2]] * 7
    limit, (low, high) = method.max_norm, method.bounds

    def shortened(vector: Any) -> Any:
        return vector * min(1.0, limit / (np.linalg.norm(vector) + 1e-6))

    proxy = Trainee()
    alpha = np.full(3, 1 / 3)
    history = []
    clipped = 0
    for at, index in enumerate(seen["pool"]):
        long = [proxy.gradient(proxy.losses(rows).mean()) for rows in rows_of(index)]
        grads = [shortened(vector) for vector in long]
        clipped += sum(np.linalg.norm(vector) > limit for vector in long)
        if method.target == "validation":
            batch = PROBLEM.upper_data["differentiate"].rows(seen["differentiate"][at])
            target = shortened(proxy.gradient(SOURCES.examples(proxy.x, batch).mean()))
            score = np.array([vector @ target for vector in grads])
        else:
            score = np.array([vector @ (sum(grads) - vector) for vector in grads])
        length = np.mean([np.linalg.norm(vector) for vector in grads])
        score = np.clip(score / (length + 1e-6), low, high)
        alpha = softmax(np.log(alpha) + 0.7 * score)
        history.append(alpha)
        step = sum(share * vector for share, vector in zip(alpha, grads, strict=True))
        first = 0
        for leaf in proxy.x.values():
            leaf.grad = torch.as_tensor(step[first : first + leaf.numel()]).reshape(leaf.shape)
            first += leaf.numel()
        proxy.optimizer.step()
    assert clipped > 0
    assert_ends(method, state, np.mean(history, 0), proxy.x)
    scores = [row[f"score.{name}"] for name in SOURCES.names]
    assert scores == pytest.approx(score, rel=1e-7, abs=1e-9)
    assert ("upper_loss" in row) == (method.target == "validation")


@pytest.mark.parametrize("problem", [PROBLEM, "language"], ids=["network", "language"])
def test_one_pass_gives_the_gradients_of_a_loop(
    problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = language_sources(1) if problem == "language" else problem
    index = gradients.even_rows(problem.lower_data, problem.find(Sources), Key(0), 3, 1)[0]
    results = {}
    for mode in ("stacked", "loop"):
        monkeypatch.setattr(gradients, "groups", partial(groups, mode=mode))
        results[mode] = gradients.source_gradients(problem, problem.x0, index, 1)
    assert_same(results["stacked"], results["loop"], rtol=1e-9, atol=1e-12)
    alone = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    for number, rows in enumerate(index):
        loss = problem.find(Sources).pooled(problem.theta0, alone, problem.lower_data.rows(rows))
        expected = torch.autograd.grad(loss, list(alone.values()), materialize_grads=True)
        own = [leaf[number] for leaf in results["loop"][0]]
        assert_same(own, list(expected), rtol=1e-8, atol=1e-11)


def test_sources_that_help_weigh_more() -> None:
    problem = convex_sources({"first": 0.6, "second": 0.3, "third": 0.1})
    method = DoGE(steps=150, updates=150, lr=0.02, rate=0.05, bounds=(-5.0, 5.0))
    *_, (state, _) = through(method, problem)
    first, second, third = weights(problem, method.result(state)[0]).tolist()
    assert first > second + 0.01 > third + 0.02
