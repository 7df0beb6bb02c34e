"""What fits what: every promise of a built-in task is checked on its problem; `hgms compat` and
`hgms check-gradient`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from click.testing import CliRunner
from support.helpers import F64, normal, rejects, spd

from hgms.cli import main
from hgms.runs import RunConfig, run_config
from hgms.runs import traits as compat
from hgms.runs.traits import ensure_fits, similar_traits
from hgms.testing.gradient_check import check_problem
from hgms_core import ConfigError, Problem, Ravel, Tree
from hgms_core.hypergrad import curvature, upper_gradients
from hgms_core.registry import Registry

CPU = torch.device("cpu")
TASKS = {item.name: item.target for item in Registry.load().components("task")}


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    return {}


def small_mixture(folder: Path) -> Any:
    """The one task that has no defaults, on two small files of text and a small GPT-2."""
    pytest.importorskip("transformers", reason="the extra llm is not installed")
    pytest.importorskip("peft", reason="the extra llm is not installed")
    from hgms_mix.lm import BaseModel, Lora, Source, SourceMixture

    def source(name: str, answers: str) -> Any:
        path = folder / f"{name}.jsonl"
        rows = [
            {"prompt": f"{number} and {name}", "completion": answer}
            for number, answer in enumerate(answers)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Source(path=str(path))

    return SourceMixture(
        sources={"letters": source("letters", "abcdefgh"), "dots": source("dots", "......")},
        validation={"held": source("held", "ijklmnopqr")},
        model=BaseModel(
            config={
                "model_type": "gpt2",
                "n_layer": 1,
                "n_head": 2,
                "n_embd": 8,
                "n_positions": 64,
            },
            tokenizer="bytes",
        ),
        adapter=Lora(rank=2, alpha=4.0, dropout=0.0),
        template="plain",
        max_length=48,
        reference={"letters": 1.0, "dots": 0.0},
    )


def problem_of(problems: dict[str, Problem], name: str, folder: Path) -> Problem:
    if name not in problems:
        task = small_mixture(folder) if name == "source-mixture" else TASKS[name]()
        problems[name] = task.problem(0, CPU, F64)
    return problems[name]


def near(tree: Tree, seed: int) -> Tree:
    return {
        name: leaf + 0.1 * normal(*leaf.shape, seed=seed + i)
        for i, (name, leaf) in enumerate(tree.items())
    }


# --- the promises of tasks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_promises_exactly_what_its_problem_has(
    name: str, problems: dict[str, Problem], tmp_path: Path
) -> None:
    traits = TASKS[name].traits
    problem = problem_of(problems, name, tmp_path)
    named = {f"reference:{reference}" for reference in problem.references}
    assert traits <= set(compat.TRAITS) | named
    theta = near(problem.theta0, 10)
    x = near(problem.x0, 20)

    above = problem.upper_data["differentiate"].batch(None)
    _, direct, _ = upper_gradients(lambda t, y: problem.f(t, y, above), theta, x)
    assert ("direct-upper" in traits) == (float(Ravel.of(direct).ravel(direct).norm()) > 0)

    rows = problem.lower_data.size
    assert ("per-example-losses" in traits) == (rows > 0)
    assert ("sources" in traits) == (problem.sources is not None)
    assert ("row-weights" in traits) == (problem.rows is not None)
    if problem.sources is not None:  # ℓ_s is the mean over the rows of source s, and g their mix
        whole = problem.lower_data.batch(None)
        examples = problem.sources.examples(x, whole)
        means = torch.stack(
            [examples[whole["source"] == i].mean() for i in range(len(problem.sources.names))]
        )
        assert torch.allclose(problem.sources.losses(x, whole), means, rtol=1e-10)
        assert torch.isclose(
            problem.g(theta, x, whole), problem.sources.weights(theta) @ means, rtol=1e-10
        )
    elif rows:  # g on many rows is the mean of g on each
        some = torch.arange(min(rows, 7))
        single = [
            problem.g(theta, x, problem.lower_data.batch(some[i : i + 1])) for i in range(len(some))
        ]
        assert torch.isclose(
            problem.g(theta, x, problem.lower_data.batch(some)),
            torch.stack(single).mean(),
            rtol=1e-10,
        )

    assert ("reference:clean" in traits) == ("clean" in problem.references)
    assert ("closed-form" in traits) == hasattr(TASKS[name], "closed_form")
    assert ("stop-rows" in traits) == ("stop" in problem.upper_data)
    assert "few-upper" not in traits or Ravel.of(problem.theta0).size <= 1000
    assert torch.isfinite(problem.f(theta, x, problem.upper_data["stop"].batch(None)))


@pytest.mark.parametrize(
    "name", sorted(name for name, task in TASKS.items() if "smooth-lower" in task.traits)
)
def test_a_smooth_lower_loss_has_the_second_derivative_that_differences_of_its_gradient_say(
    name: str, problems: dict[str, Problem], tmp_path: Path
) -> None:
    problem = problem_of(problems, name, tmp_path)
    theta = near(problem.theta0, 30)
    x = near(problem.x0, 40)
    batch = problem.lower_data.batch(
        None if problem.lower_data.size == 0 else torch.arange(min(problem.lower_data.size, 50))
    )
    at = curvature(lambda y: problem.g(theta, y, batch), x)
    v = normal(at.spec.size, seed=50)
    # a step so small that no unit of a ReLU network switches
    step = 1e-8
    flat = at.spec.ravel(x)
    ends = [
        curvature(
            lambda y: problem.g(theta, y, batch), at.spec.unravel(flat + s * step * v)
        ).gradient
        for s in (1, -1)
    ]
    cells = (ends[0] - ends[1]) / (2 * step)
    assert float((at.matvec(v) - cells).norm()) <= 1e-4 * float(cells.norm())


def test_every_task_makes_promises() -> None:
    assert all(isinstance(task.traits, frozenset) for task in TASKS.values())


# --- the needs of methods
# --------------------------------------------------------------------------------------------------


@attrs.frozen
class Kinked:
    """A task without second derivatives."""

    name: ClassVar[str] = "kinked"
    traits: ClassVar[frozenset[str]] = frozenset({"stop-rows"})


@attrs.frozen
class Silent:
    name: ClassVar[str] = "silent"


def build(name: str, **fields: Any) -> Any:
    from hgms.runs import built
    from hgms_core.protocols import Method

    return built(name, Method, [f"method.{key}={value}" for key, value in fields.items()])


@pytest.mark.parametrize(
    ("method", "part"),
    [("hg-implicit", "implicit"), ("hg-baseline", "unrolled"), ("darts", None), ("uniform", None)],
)
def test_estimators_with_hessians_need_a_smooth_lower_level(method: str, part: str | None) -> None:
    lacking = compat.missing_traits(build(method), Kinked())
    assert lacking == ({"smooth-lower": part} if part else {})


def test_what_is_lacking_is_one_sentence_and_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        ensure_fits(build("hg-ms"), Kinked(), "my-method")
    assert str(caught.value) == (
        "method 'my-method' cannot run on task 'kinked': it requires a lower loss that is twice "
        "differentiable in x (almost everywhere is enough) (its part 'implicit') (method)\n"
        "  run `hgms compat` to list the methods that fit each task"
    )
    assert compat.missing_traits(build("hg-ms"), Silent()) is None
    ensure_fits(build("hg-ms"), Silent())


def test_keeping_the_best_needs_data_to_stop_by_and_a_reference_needs_the_reference() -> None:
    assert compat.needs(build("hg-ms"))["stop-rows"] == "pipeline"
    assert "stop-rows" not in compat.needs(build("hg-ms", keep="last"))
    assert "reference:clean" in compat.needs(build("oracle-clean"))


# --- hgms compat
# --------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_compat_prints_every_method_against_every_task() -> None:
    result = CliRunner().invoke(main, ["compat", "--json"])
    assert result.exit_code == 0, result.output
    rows = {(row["method"], row["task"]): row for row in json.loads(result.output)}
    methods = {item.name for item in Registry.load().components("method")}
    assert set(rows) == {(method, task) for method in methods for task in TASKS}
    assert rows["hg-ms", "sphere"] == {"method": "hg-ms", "task": "sphere", "fits": True, "why": ""}
    assert rows["oracle-clean", "hyper-cleaning"]["fits"] is True
    assert rows["oracle-clean", "quadratic"]["fits"] is False
    why = rows["oracle-clean", "quadratic"]["why"]
    assert compat.TRAITS["reference:clean"] in why
    assert rows["pipeline", "quadratic"]["fits"] is None

    shown = CliRunner().invoke(main, ["compat"]).output.splitlines()
    line = next(line for line in shown if line.strip().startswith("oracle-clean "))
    assert line.split().count("no") == len(
        [task for task in TASKS.values() if "reference:clean" not in task.traits]
    )
    assert line.split().count("ok") == len(TASKS) - line.split().count("no")
    reasons = " ".join(" ".join(shown).split())
    assert re.search(
        r"\bpipeline, [\w, -]*: it cannot be built from its defaults alone \(every task\)", reasons
    )
    assert f"oracle-clean, oracle-joint: {why} (all but" in reasons


# --- hgms check-gradient
# --------------------------------------------------------------------------------------------------

A = spd(4, seed=1)
B = normal(4, 3, seed=2)
C = normal(4, seed=3)


def quadratic(**fields: Any) -> Problem:
    """g = ½xᵀAx − xᵀBθ, f = ½‖x − c‖² + sin θ₀: x* = A⁻¹Bθ."""
    usual: dict[str, Any] = {
        "theta0": {"t": normal(3, seed=4)},
        "x0": {"x": torch.zeros(4, dtype=F64)},
        "g": lambda t, x, _: 0.5 * x["x"] @ A @ x["x"] - x["x"] @ B @ t["t"],
        "f": lambda t, x, _: 0.5 * (x["x"] - C).square().sum() + torch.sin(t["t"][0]),
    }
    return Problem(**(usual | fields))


class Exact:
    """The closed form of :func:`quadratic`; wrong by a factor in the hypergradient, or in the
    solution, if asked.
    """

    def __init__(self, factor: float = 1.0, shift: float = 0.0) -> None:
        self.factor = factor
        self.shift = shift

    def solution(self, theta: Tree) -> Tree:
        return {"x": torch.linalg.solve(A, B @ theta["t"]) + self.shift}

    def hypergradient(self, theta: Tree) -> Tree:
        direct = torch.zeros(3, dtype=F64)
        direct[0] = torch.cos(theta["t"][0])
        return {
            "t": self.factor * (direct + B.T @ torch.linalg.solve(A, self.solution(theta)["x"] - C))
        }


def test_the_formula_agrees_with_differences_of_the_re_solved_lower_level() -> None:
    report = check_problem(quadratic(), points=2)
    assert report.agrees
    assert [(row.point, row.direction) for row in report.rows] == [
        (p, f"θ[{i}]") for p in range(2) for i in range(3)
    ]
    assert max(row.error for row in report.rows) < 1e-8
    expected = Exact().hypergradient(quadratic().theta0)["t"]
    assert [row.hypergradient for row in report.rows[:3]] == pytest.approx(
        expected.tolist(), rel=1e-9
    )
    with_closed_form = check_problem(quadratic(), Exact(), points=1)
    assert with_closed_form.agrees
    assert "closed form ok" in with_closed_form.notes[0]


def test_a_wrong_hypergradient_is_a_mismatch() -> None:
    report = check_problem(quadratic(), Exact(factor=1.001), points=1)
    assert not report.agrees
    assert "closed form MISMATCH (relative error 1.0e-03)" in report.notes[0]
    assert report.verdict.startswith("MISMATCH: 1 of 3")

    class Frozen(torch.autograd.Function):
        """θ as it is, with a derivative that is 10 % too large."""

        @staticmethod
        def forward(t: torch.Tensor) -> torch.Tensor:
            return t.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
            return 1.1 * slope

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
            return 1.1 * tangent

    wrong = quadratic(
        f=lambda t, x, _: 0.5 * (x["x"] - C).square().sum() + torch.sin(Frozen.apply(t["t"])[0])
    )
    report = check_problem(wrong, points=1)
    assert [row.verdict for row in report.rows] == ["MISMATCH", "ok", "ok"]
    assert not report.agrees


def test_a_closed_form_that_does_not_solve_the_lower_level_is_found_out() -> None:
    report = check_problem(quadratic(), Exact(shift=0.1), points=1)
    assert report.verdict == "nothing could be checked"
    assert "the closed form's solution does not solve the lower level" in report.notes[0]


def test_what_cannot_be_compared_is_said() -> None:
    flat = quadratic(g=lambda t, x, _: 0.5 * (x["x"][:2] - t["t"][:2]).square().sum())
    assert (
        "the lower solution is not unique (2 flat directions of 4)"
        in check_problem(flat, points=1).notes[0]
    )
    kink = quadratic(
        g=lambda t, x, _: (x["x"] - t["t"][0]).abs().sum() + 0.5 * x["x"].square().sum(),
        theta0={"t": 0.3 * A[0, :3]},
    )
    assert "the lower level was not solved" in check_problem(kink, points=1).notes[0]
    unbounded = quadratic(g=lambda t, x, _: (x["x"] * t["t"][0]).sum())
    assert not check_problem(unbounded, points=1).agrees
    saddle = quadratic(
        g=lambda t, x, _: (
            x["x"][0] ** 2 - x["x"][1] ** 2 + x["x"][1] ** 4 + x["x"][2:].square().sum()
        )
    )
    assert "it is a saddle, not a minimiser" in check_problem(saddle, points=1).notes[0]
    large = quadratic(x0={"x": torch.zeros(3001, dtype=F64)})
    with rejects("too-large", "task", of=ConfigError):
        check_problem(large)


def test_flat_directions_that_the_upper_loss_does_not_see_are_no_hindrance() -> None:
    """A softmax whose bias no penalty holds: adding a number to all of it changes neither loss."""
    a = normal(12, 3, seed=5)
    label = torch.arange(12) % 3

    def error(x: Tree, rows: slice) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(a[rows] @ x["w"] + x["b"], label[rows])

    softmax = quadratic(
        theta0={"t": torch.zeros(1, dtype=F64)},
        x0={"w": torch.zeros(3, 3, dtype=F64), "b": torch.zeros(3, dtype=F64)},
        g=lambda t, x, _: error(x, slice(0, 8)) + 0.1 * t["t"].exp().sum() * x["w"].square().sum(),
        f=lambda t, x, _: error(x, slice(8, 12)),
    )
    report = check_problem(softmax, points=1)
    assert report.agrees, report
    assert "point 0: 1 flat direction of 12, along which f has no slope" in report.notes[0]


def test_a_lower_level_with_many_minimisers_is_checked_where_the_best_one_is_known() -> None:
    result = CliRunner().invoke(main, ["check-gradient", "sphere", "--points", "2", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["agrees"] is True
    assert len(report["rows"]) == 6
    assert max(row["error"] for row in report["rows"]) < 1e-6


@pytest.mark.extended
def test_the_command_prints_rows_and_a_verdict_and_compares_a_methods_estimator() -> None:
    small = [
        "--set",
        "task.train_size=20",
        "--set",
        "task.hidden=0",
        "--set",
        "task.omega=0.05",
        "--points",
        "1",
    ]
    result = CliRunner().invoke(
        main, ["check-gradient", "hyper-cleaning", *small, "--directions", "2"]
    )
    assert result.exit_code == 0, result.output
    assert "random 1" in result.output
    assert "agrees: 2 directions within 0.0001" in result.output

    exact = [
        "--method",
        "hg-implicit",
        "--set",
        "method.hypergradient.solver.ridge=0.0",
        "--points",
        "1",
        "--directions",
        "1",
    ]
    exact += [
        "--set",
        "method.hypergradient.solver.rtol=1e-12",
        "--set",
        "method.hypergradient.solver.max_steps=500",
    ]
    report = json.loads(
        CliRunner().invoke(main, ["check-gradient", "quadratic", *exact, "--json"]).output
    )
    note = next(note for note in report["notes"] if "estimator 'implicit'" in note)
    assert float(note.split("off by ")[1].split()[0]) < 1e-6
    path = CliRunner().invoke(
        main, ["check-gradient", "quadratic", "--method", "hg-baseline", "--points", "1"]
    )
    assert "estimator 'unrolled': it differentiates a path" in path.output


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["quadratik"], "'quadratik' (task.name)\n  did you mean 'quadratic'?"),
        (["quadratic", "--set", "task.rows=0"], "rows=0 must be at least 1 (task.rows)"),
        (["quadratic", "--set", "rows=5"], "(--set rows=5)"),
        (["quadratic", "--set", "method.keep=last"], "(--set method.keep=last)"),
        (["hyper-cleaning", "--set", "task.hidden=100"], "at most 3000 (task)"),
    ],
)
def test_what_was_typed_wrong_is_explained(arguments: list[str], shown: str) -> None:
    result = CliRunner().invoke(main, ["check-gradient", *arguments])
    assert result.exit_code == 2
    assert shown in result.output


def test_a_single_run_is_checked_too_before_its_folder_is_made(tmp_path: Path) -> None:
    text = (
        'budget = "1 step"\ntask = "hyper-cleaning"\nmethod = "tpe"\n'
        f"run.out = {json.dumps(str(tmp_path / 'runs'))}\n"
    )
    with rejects("not-supported", "method", of=ConfigError):
        run_config(RunConfig.from_toml(text))
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_trait_is_told_with_the_one_that_is_meant() -> None:
    lacking = {"source": "", "my-own": ""}
    assert similar_traits(lacking) == ["sources"]
