"""`run` from Python: methods by name, budgets as text, folders that reports read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.descent import files
from support.helpers import rejects
from support.own_problems import Follow, bowl
from torch import nn
from torch.nn.functional import cross_entropy

from hgms.adapters import from_module
from hgms.config import Budget
from hgms.plugins import Host
from hgms.report import build
from hgms.results import read_run, scan
from hgms.runs import RunFolder, run
from hgms.runs.launch import device_called
from hgms_core import ConfigError, Problem
from hgms_core.errors import CheckpointError

HALF: Any = Follow(0.25)


def test_a_method_by_name_or_by_table_and_a_budget_as_text() -> None:
    result = run("hg-implicit", bowl(), "2 steps", settings={"evaluate_every": 2})
    info = (result.info.method, result.info.budget, len(result.records))
    assert info == ("hg-implicit", Budget(outer_steps=2), 3)
    slow, fast = (
        run({"name": "hg-implicit", "keep": "last", "outer": {"lr": lr}}, bowl(), "2 steps")
        for lr in (0.1, 0.5)
    )
    assert 0 < float(slow.theta["t"]) < float(fast.theta["t"])


@pytest.mark.parametrize(
    ("changes", "code", "place"),
    [
        ({"method": "hg-implict"}, "unknown-method", ("method",)),
        (
            {"method": {"name": "hg-implicit", "outer": {"lr": "x"}}},
            "wrong-type",
            ("method", "outer", "lr"),
        ),
        ({"method": Follow}, "wrong-part", ("method",)),
        ({"method": 3}, "wrong-part", ("method",)),
        ({"method": "oracle-clean"}, "not-supported", ("method",)),
        ({"budget": 3}, "wrong-type", ("budget",)),
        ({"problem": bowl}, "wrong-type", ("problem",)),
        ({"seed": "a"}, "wrong-type", ("seed",)),
        ({"seed": -1}, "out-of-range", ("seed",)),
        ({"watch": 3}, "wrong-type", ("watch",)),
        ({"settings": {"evaluate_every": 0}}, "out-of-range", ("settings", "evaluate_every")),
        ({"budget": "3 stepz"}, "wrong-budget", ("budget",)),
        ({"method": HALF, "problem": torch.zeros(99)}, "wrong-type", ("problem",)),
    ],
)
def test_wrong_arguments_are_rejected(
    changes: dict[str, Any], code: str, place: tuple[str, ...]
) -> None:
    arguments = {"method": HALF, "problem": bowl(), "budget": "3 steps"}
    with rejects(code, *place, of=ConfigError):
        run(**(arguments | changes))


@pytest.mark.parametrize("kind", [str, RunFolder])
def test_a_run_in_a_folder_is_kept_like_any_other(tmp_path: Path, kind: Callable[..., Any]) -> None:
    place = tmp_path / "new" / "mine"
    result = run(HALF, bowl(), "3 steps", folder=kind(place), watch=Host())
    stored = read_run(place)
    assert (stored.task_name, stored.label, stored.status) == ("problem", "follow", "done")
    metrics = {name: result.records[-1][f"metric.{name}"] for name in ("distance", "curious")}
    assert scan(place)[0][0].metrics == stored.metrics == metrics
    [section] = build([place]).sections
    assert (section.metric, section.compared.higher_is_better) == ("distance", False)

    before = files(place)
    with rejects("run-exists", str(place), of=CheckpointError):
        run(HALF, bowl(), "3 steps", folder=kind(place))
    again = run(HALF, bowl(), "3 steps", folder=kind(place), resume=True)
    assert (again.summary, again.records) == (result.summary, result.records)
    assert files(place) == before


def test_a_run_is_resumed_with_its_own_problem_method_and_budget_only(tmp_path: Path) -> None:
    run(HALF, bowl(), "3 steps", folder=tmp_path, watch=Host())
    changes: list[tuple[Any, Problem, str]] = [
        (HALF, bowl(1), "3 steps"),
        (HALF, bowl(scale=2.0), "3 steps"),
        (Follow(0.3), bowl(), "3 steps"),
        (HALF, bowl(), "4 steps"),
    ]
    for method, made, budget in changes:
        with rejects("other-settings", str(tmp_path), of=CheckpointError):
            run(method, made, budget, folder=tmp_path, resume=True, watch=Host())


def test_a_loss_that_cannot_be_stacked_gives_what_the_loop_gives() -> None:
    """`.item()` in a loss: vmap cannot evaluate it."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scale = max(1.0, model(batch["a"]).abs().max().item())
        return cross_entropy(model(batch["a"]), batch["y"], reduction="none") / scale

    a = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    rows = {"a": a, "y": (a[:, 0] > 0).long()}
    train, valid = ({name: leaf[n : n + 40] for name, leaf in rows.items()} for n in (0, 40))
    found = []
    for mode in ("auto", "loop"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        made = from_module(network, loss, train, valid)
        method = {"name": "hg-ms-tilted", "generator": {"mode": mode}, "selector": {"mode": mode}}
        found.append(run(method, made, "1 steps"))
    assert torch.equal(found[0].theta, found[1].theta)
    assert found[0].summary["upper_loss"] == found[1].summary["upper_loss"]


@pytest.mark.parametrize(
    ("name", "cuda", "mps", "code"),
    [
        ("cpu", 0, False, None),
        ("cuda", 0, False, "device-not-available"),
        ("cuda", 2, False, None),
        ("cuda:1", 2, False, None),
        ("cuda:2", 2, False, "device-not-available"),
        ("mps", 0, False, "device-not-available"),
        ("mps", 0, True, None),
        ("xpu:1", 0, False, None),
        ("gpu", 2, True, "unknown-device"),
        ("cuda:x", 2, True, "unknown-device"),
    ],
)
def test_a_device_is_one_that_torch_has(
    monkeypatch: pytest.MonkeyPatch, name: str, cuda: int, mps: bool, code: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    if code is None:
        assert device_called(name) == torch.device(name)
    else:
        with rejects(code, "run", "device", of=ConfigError):
            device_called(name)


def test_labels_name_a_run_from_python(tmp_path: Path) -> None:
    settings = {"label": "mine", "task_label": "two-bowls"}
    run(HALF, bowl(), "1 step", folder=tmp_path / "run", settings=settings, watch=Host())
    stored = read_run(tmp_path / "run")
    assert (stored.label, stored.task_label) == ("mine", "two-bowls")
