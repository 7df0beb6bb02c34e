"""Small problems with named data sources, in float64: what methods that choose rows or mixtures
work on.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from hgms.adapters import from_losses
from hgms_core import ConfigError, Data, Problem, Sources, State, Tree
from hgms_core.capabilities import GivesRepresentations
from support.helpers import F64, assert_same, normal


def _examples(x: Tree, batch: Tree) -> Tensor:
    """Squared errors of a small network, row by row."""
    hidden = torch.tanh(batch["a"] @ x["w"] + x["b"])
    return 0.5 * (hidden @ x["v"] - batch["y"]).square()


def _distances(x: Tree, batch: Tree) -> Tensor:
    """½‖x − a‖², row by row: the mean of a mixture of rows is where its loss is least."""
    return 0.5 * (x["x"] - batch["a"]).square().sum(-1)


def _problem(
    examples: object,
    x0: Tree,
    tables: Mapping[str, Tree],
    upper: Mapping[str, Data],
    parts: tuple[str, ...],
) -> Problem:
    """g = Σ_s ω_s · mean loss of source s, ω = softmax(θ); f = mean loss of validation rows."""
    names = tuple(tables)
    pool = {
        key: torch.cat([table[key] for table in tables.values()])
        for key in next(iter(tables.values()))
    }
    sizes = [len(next(iter(table.values()))) for table in tables.values()]
    pool["source"] = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes))
    data = evolve(Data.of(pool), strata=tuple(zip(names, sizes, strict=True)))

    def losses(x: Tree, batch: Tree) -> Tensor:
        rows = examples(x, batch)  # type: ignore[operator]
        share = torch.nn.functional.one_hot(batch["source"], len(names)).to(rows)
        return (rows @ share) / share.sum(0).clamp_min(1)

    def theta(weights: Mapping[str, float]) -> Tree:
        unknown = set(weights) - set(names)
        if unknown or not sum(weights.values()) > 0:
            raise ConfigError(
                "wrong-value", f"weights of {sorted(unknown)}, or none at all", place=("mixture",)
            )
        omega = torch.tensor([weights.get(name, 0.0) for name in names], dtype=F64)
        return {"logits": (omega / omega.sum()).clamp_min(1e-12).log()}

    sources = Sources(
        names=names,
        weights=lambda theta: torch.softmax(theta["logits"], 0),
        theta=theta,
        losses=losses,
        examples=examples,  # type: ignore[arg-type]
        parts=parts,
    )
    return from_losses(
        theta0={"logits": torch.zeros(len(names), dtype=F64)},
        x0=x0,
        g=lambda theta, x, batch: torch.softmax(theta["logits"], 0) @ losses(x, batch),
        f=lambda _, x, batch: examples(x, batch).mean(),  # type: ignore[operator]
        lower_data=data,
        upper_data=upper,
        extensions=(sources,),
    )


def network_sources(features: int = 5, hidden: int = 6, wrong: float = 0.0) -> Problem:
    """Three sources of 20, 12 and 8 rows: near the validation rows (``near``), with signs turned
    (``turned``), and noise (``noise``). Two validation sets, which differ in the rows' features."""
    target = normal(features, seed=50)

    def table(rows: int, seed: int, sign: float, shift: float = 0.0) -> Tree:
        a = normal(rows, features, seed=seed) + shift
        return {"a": a, "y": sign * torch.tanh(a @ target) + 0.05 * normal(rows, seed=seed + 1)}

    def validation(rows: int, seed: int) -> Data:
        halves = [table(rows - rows // 2, seed, 1.0, 0.5), table(rows // 2, seed + 2, 1.0, -0.5)]
        part = torch.arange(2).repeat_interleave(torch.tensor([rows - rows // 2, rows // 2]))
        return Data.of(
            {key: torch.cat([half[key] for half in halves]) for key in halves[0]} | {"source": part}
        )

    noise = {"a": normal(8, features, seed=70), "y": normal(8, seed=71)}
    x0 = {
        "w": 0.5 * normal(features, hidden, seed=1),
        "b": 0.1 * normal(hidden, seed=2),
        "v": 0.5 * normal(hidden, seed=3),
    }
    upper = {
        "differentiate": validation(9, 80),
        "select": validation(8, 90),
        "stop": validation(7, 100),
    }
    tables = {"near": table(20, 60, 1.0), "turned": table(12, 65, -1.0), "noise": noise}
    return _problem(_examples, x0, tables, upper, ("right", "left"))


@functools.cache
def language_sources(sets: int) -> Problem:
    """A tiny language model, two sources and ``sets`` validation sets, all of whose means are
    over tokens.
    """
    pytest.importorskip("transformers")
    from hgms_mix.lm import SourceMixture

    task = SourceMixture.testing_instance()
    validation = dict(
        zip(
            ("doubles", "others"),
            [*task.validation.values(), task.sources["dots"]][:sets],
            strict=False,
        )
    )
    task = evolve(task, average="token", validation=validation, validation_split=(1, 1, 1))
    return task.problem(0, torch.device("cpu"), F64)


def token_losses(problem: Problem, x: Tree, data: Data, index: Tensor) -> Tensor:
    """What each row adds to its table's mean over tokens: its tokens' loss over the mean number
    of tokens in such a row.
    """
    everything = data.batch(None)
    batch = data.rows(index)
    tokens = everything["mask"][:, 1:].sum(1)
    lengths = batch["mask"][:, 1:].sum(1)
    means = torch.stack(
        [
            tokens[everything["source"] == number].double().mean()
            for number in everything["source"].unique()
        ]
    )
    return problem.find(Sources).examples(x, batch) * lengths / means[batch["source"]]


def with_looks(problem: Problem) -> Problem:
    """The same problem, whose rows can be compared by what they look like."""
    looks: Any = functools.partial(problem.find(Sources).examples)
    looks.representations = lambda x, batch: batch["a"] + x["b"].sum()
    looks.capabilities = frozenset({GivesRepresentations})
    return problem.with_extensions(evolve(problem.find(Sources), examples=looks))


def convex_sources(best: Mapping[str, float], rows: int = 40) -> Problem:
    """Rows around one unit vector a source; validation rows around the mixture ``best`` of them,
    which is the minimiser.
    """
    count = len(best)
    corners = torch.eye(count, dtype=F64)

    def around(centre: Tensor, rows: int, seed: int) -> Tree:
        noise = 0.05 * normal(rows, count, seed=seed)
        return {"a": centre + noise - noise.mean(0)}

    centre = torch.tensor(list(best.values()), dtype=F64) @ corners
    zero = {"source": torch.zeros(20, dtype=torch.int64)}
    upper = {
        role: Data.of(around(centre, 20, 200 + i) | zero)
        for i, role in enumerate(("differentiate", "select", "stop"))
    }
    tables = {name: around(corners[i], rows, 300 + i) for i, name in enumerate(best)}
    return _problem(
        _distances,
        {"x": torch.full((count,), 1 / count, dtype=F64)},
        tables,
        upper,
        ("validation",),
    )


def through(
    method: Any, problem: Problem, seed: int = 3, most: int = 1000
) -> Iterator[tuple[State, dict[str, Any]]]:
    """Every state and row until the method says that it has finished."""
    state = method.init(problem, seed)
    for _ in range(most):
        if method.is_finished(state):
            return
        state, row = method.step(problem, state)
        yield state, row
    raise AssertionError("it does not finish")


def stepped(
    method: Any, problem: Problem, count: int, seed: int = 3
) -> list[tuple[State, dict[str, Any]]]:
    """The states and rows of the first steps, the n-th at the progress (n − 1)/count."""
    state = method.init(problem, seed)
    rows = []
    for number in range(count):
        state, row = method.step(problem, state, number / count)
        rows.append((state, row))
    return rows


def assert_goes_on(method: Any, problem: Problem, most: int = 1000) -> State:
    """A run whose state is written and read back before every step is the run without, bit for
    bit; its last state.
    """
    from hgms.runs import pack, unpack

    plain = read_back = method.init(problem, 3)
    for _ in range(most):
        if getattr(method, "finished", lambda state: False)(plain):
            break
        structure, tensors = pack(read_back)
        plain, row = method.step(problem, plain)
        read_back, again = method.step(problem, unpack(json.loads(json.dumps(structure)), tensors))
        assert_same((read_back, again), (plain, row))
    return plain


def watched(problem: Problem) -> tuple[Problem, dict[str, list[Tensor]]]:
    """The same problem, and the numbers of all rows that are read, by role (``pool`` for the
    lower level).
    """
    seen: dict[str, list[Tensor]] = {role: [] for role in ("pool", *problem.upper_data)}

    def watch(role: str, data: Data) -> Data:
        def rows(index: Tensor) -> Tree:
            seen[role].append(index)
            return data.rows(index)

        return evolve(data, rows=rows)

    upper = {role: watch(role, data) for role, data in problem.upper_data.items()}
    return evolve(problem, lower_data=watch("pool", problem.lower_data), upper_data=upper), seen


def weights(problem: Problem, theta: Tree) -> Tensor:
    """ω(θ) of the problem's sources."""
    return problem.find(Sources).weights(theta)


def assert_shares(
    problem: Problem, method: Any, state: State, shares: Iterable[float], **within: float
) -> None:
    """The mixture that a state stands for, up to its sum."""
    expected = torch.tensor([float(share) for share in shares], dtype=F64)
    found = weights(problem, method.result(state)[0])
    assert_same(found, expected / expected.sum(), **({"rtol": 1e-9, "atol": 1e-9} | within))


def on_rows(
    problem: Problem, batches: Iterable[Tensor], data: Data | None = None
) -> list[Callable[[Tree], Tensor]]:
    """The mean losses of batches of rows, by default of the pool, whatever their sources."""
    table = problem.lower_data if data is None else data
    return [lambda x, index=index: problem.f({}, x, table.rows(index)) for index in batches]


def at_mixture(
    problem: Problem, theta: Tree, batches: Iterable[Tensor]
) -> list[Callable[[Tree], Tensor]]:
    """The lower losses of batches of the pool at θ."""
    pool = problem.lower_data
    return [lambda x, index=index: problem.g(theta, x, pool.rows(index)) for index in batches]


def by_torch(
    x0: Tree,
    losses: Iterable[Callable[[Tree], Tensor]],
    lr: float = 0.02,
    weight_decay: float = 0.0,
    rates: Sequence[float] | None = None,
    **options: float,
) -> list[Tree]:
    """x0, and x after each update of torch's AdamW; at learning rates of their own if given."""
    x = {name: leaf.clone().requires_grad_() for name, leaf in x0.items()}
    optimizer = torch.optim.AdamW(list(x.values()), lr=lr, weight_decay=weight_decay, **options)
    states = [x0]
    for number, loss in enumerate(losses):
        optimizer.param_groups[0]["lr"] = lr if rates is None else rates[number]
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()
        states.append({name: leaf.detach().clone() for name, leaf in x.items()})
    return states


def without_rows(problem: Problem, role: str) -> Problem:
    """The same problem with no validation row in one role."""
    return evolve(problem, upper_data={**problem.upper_data, role: Data()})
