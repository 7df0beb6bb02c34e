"""Response surfaces over mixtures: closed forms with known noise, tables, and a small mix end to
end.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.helpers import rejects

from hgms.cli import main
from hgms_core import ConfigError, DataError, Key, NumericalError
from hgms_core.registry import Registry

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'hgms[sklearn]'")

from hgms_mix.surface import (
    Findings,
    Runs,
    SurfaceSettings,
    design,
    fit,
    learn,
    read_runs,
    write_runs,
)
from hgms_mix.surface.design import spread
from hgms_mix.surface.noise import noise_of
from hgms_mix.surface.proxy import rank_correlation, words
from hgms_mix.surface.recommend import Gap, gap
from hgms_mix.surface.words import sentences

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    )
]
BEST = np.array([0.6, 0.3, 0.1])
UNIFORM = np.full(3, 1 / 3)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["mix", "surface", *arguments])


def bowl(mixtures: np.ndarray, curvature: float) -> np.ndarray:
    """A quadratic with its minimum of 2 at BEST."""
    return 2 + curvature * ((mixtures - BEST) ** 2).sum(-1)


def tried(seed: int, curvature: float, noise: float) -> Runs:
    """The runs of a design whose losses are the bowl's, with noise."""
    points = design(UNIFORM, points=24, repeats=3, shrink=0.1, seed=seed)
    mixtures = np.array([point.weights for point in points])
    losses = bowl(mixtures, curvature) + noise * np.random.default_rng(seed).standard_normal(
        len(points)
    )
    names = tuple(f"run-{number}" for number in range(len(points)))
    return Runs(names=names, sources=("a", "b", "c"), mixtures=mixtures, metrics={"loss": losses})


@pytest.fixture(scope="module")
def found() -> Findings:
    return learn(tried(0, 1.0, 0.02), SurfaceSettings())


# -- the design
# --------------------------------------------------------------------------------------------------


def test_a_design_has_repeated_anchors_and_begins_with_the_shorter_one() -> None:
    short = design(UNIFORM, points=18, repeats=3, shrink=0.1, seed=4)
    long = design(UNIFORM, points=40, repeats=3, shrink=0.1, seed=4)
    assert long[:18] == short
    weights = np.array([point.weights for point in long])
    assert weights.min() >= 0
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-12)
    anchors = [point for point in long if point.role != "fill"]
    assert len(anchors) == 12
    assert {point.weights for point in anchors if point.role == "vertex"} >= {
        (0.933334, 0.033333, 0.033333)
    }
    assert len({point.seed for point in long}) == 40  # chance is never shared
    assert [
        point.weights for point in design(UNIFORM, points=18, repeats=3, shrink=0.1, seed=5)[12:]
    ] != [point.weights for point in short[12:]]


def test_the_rest_has_the_moments_of_a_dirichlet_distribution() -> None:
    prior = np.array([0.5, 0.3, 0.2])
    points = spread(prior, 4096, Key(1))
    alpha = 3 * prior
    np.testing.assert_allclose(points.mean(0), prior, atol=2e-3)
    np.testing.assert_allclose(points.var(0), prior * (1 - prior) / (alpha.sum() + 1), atol=2e-3)


def test_too_few_points_are_refused_with_what_is_needed() -> None:
    with rejects("out-of-range", "surface", "points", of=ConfigError) as caught:
        design(UNIFORM, points=14, repeats=3, shrink=0.1, seed=0)
    assert str(caught.value) == (
        "points=14 must be at least 15: 4 anchors x 3 repeats + 3 (surface.points)\n"
        "  increase points, or decrease repeats"
    )


# -- the noise
# --------------------------------------------------------------------------------------------------


def test_one_variance_is_pooled_and_several_are_told_apart() -> None:
    generator = np.random.default_rng(0)
    places = np.vstack([UNIFORM, np.eye(3)])
    freedom = np.full(4, 40)
    alike = 0.01 * generator.chisquare(40, 4) / 40
    noise = noise_of(places, alike, freedom)
    assert noise.spread <= 0.25
    np.testing.assert_allclose(noise.variance(places), alike.mean(), rtol=0.25)
    apart = np.array([0.01, 0.0001, 0.01, 0.01]) * generator.chisquare(40, 4) / 40
    several = noise_of(places, apart, freedom).variance(places)
    assert several[1] < 0.15 * several[2]
    assert several[1] < several[0]
    np.testing.assert_allclose(several[2:], 0.01, rtol=0.8)


def test_few_repeats_do_not_make_a_difference_out_of_chance() -> None:
    generator = np.random.default_rng(1)
    places = np.vstack([UNIFORM, np.eye(3)])
    ratios = []
    for _ in range(50):
        variance = noise_of(places, generator.chisquare(2, 4) / 2, np.full(4, 2)).variance(places)
        ratios.append(variance.max() / variance.min())
    assert np.median(ratios) < 3  # of the sample variances themselves it is far more


# -- the surface
# --------------------------------------------------------------------------------------------------


def test_the_minimum_of_a_bowl_is_found_and_told_apart(found: Findings) -> None:
    weights = found.recommendation.weights
    assert np.abs(weights - BEST).sum() < 0.25
    assert bowl(weights, 1.0) - 2 < 0.02
    gap = found.recommendation.against_prior
    assert found.apart
    assert gap.low <= bowl(weights, 1.0) - bowl(UNIFORM, 1.0) <= gap.high
    assert found.recommendation.against_best.low < 0.02
    region = found.recommendation.region
    assert (region[:, 0] <= BEST + 0.05).all()
    assert (region[:, 1] >= BEST - 0.05).all()
    assert (region[:, 1] - region[:, 0]).max() < 0.8


def test_leave_one_out_errors_are_those_of_fits_without_the_mixture(found: Findings) -> None:
    """The closed form, against processes of the same parameters that never saw it."""
    from sklearn.gaussian_process import GaussianProcessRegressor

    surface = found.surface
    left = 5
    keep = np.arange(len(surface.losses)) != left
    errors = []
    variances = []
    for member in surface.members:
        other = GaussianProcessRegressor(member.kernel_, alpha=member.alpha[keep], optimizer=None)
        other.fit(member.X_train_[keep], member.y_train_[keep])
        mean, deviation = other.predict(member.X_train_[left : left + 1], return_std=True)
        errors.append(member.y_train_[left] - mean[0])
        variances.append(deviation[0] ** 2 + member.alpha[left])
    error = surface.weights @ np.array(errors)
    variance = surface.weights @ (np.array(variances) + (np.array(errors) - error) ** 2)
    np.testing.assert_allclose(surface.left_out()[left], error / np.sqrt(variance), rtol=1e-6)


def test_functions_are_drawn_from_the_posterior(found: Findings) -> None:
    surface = attrs.evolve(found.surface, widening=2.0)
    places = np.vstack([UNIFORM, BEST])
    drawn = surface.draws(places, 20_000, Key(0))
    mean, covariance = surface.posterior(places)
    deviations = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.03 * deviations.max())
    np.testing.assert_allclose(drawn.std(0), deviations, rtol=0.04)


def test_losses_without_noise_have_a_surface() -> None:
    """Posterior variances are then as small as the rounding errors of the prior's."""
    runs = attrs.evolve(tried(0, 1.0, 0.0), metrics={"loss": tried(0, 1.0, 0.0).mixtures[:, 0]})
    findings = learn(runs, SurfaceSettings())
    assert findings.recommendation.weights[0] == pytest.approx(0, abs=0.01)
    assert findings.apart


@pytest.mark.parametrize("curvature", [1.0, 0.0])
def test_intervals_cover_and_a_flat_surface_is_not_told_apart(curvature: float) -> None:
    """Two seeds of each; :func:`test_coverage_over_a_hundred_surfaces` has more."""
    for seed in range(2):
        findings = learn(tried(10 + seed, curvature, 0.05), SurfaceSettings())
        gap = findings.recommendation.against_prior
        weights = findings.recommendation.weights
        assert gap.low <= bowl(weights, curvature) - bowl(UNIFORM, curvature) <= gap.high
        if curvature == 0:
            assert not findings.apart


@pytest.mark.nightly
def test_coverage_over_a_hundred_surfaces() -> None:
    covered = apart = 0
    for seed in range(100):
        findings = learn(tried(1000 + seed, 1.0 if seed % 2 else 0.0, 0.05), SurfaceSettings())
        curvature = float(seed % 2)
        gap = findings.recommendation.against_prior
        weights = findings.recommendation.weights
        covered += gap.low <= bowl(weights, curvature) - bowl(UNIFORM, curvature) <= gap.high
        apart += curvature == 0 and findings.apart
    assert covered >= 90
    assert apart <= 5


@pytest.mark.nightly
def test_coverage_over_a_hundred_surfaces_of_the_prior() -> None:
    """On functions drawn from the prior itself intervals cover as often as they promise: neither
    less, nor always.
    """
    from sklearn.gaussian_process.kernels import Matern

    from hgms_mix.surface.process import CENTRES

    runs = tried(0, 0.0, 0.0)
    covered = 0
    places = np.vstack([UNIFORM, runs.mixtures, spread(UNIFORM, 256, Key(0))])
    for seed in range(100):
        generator = np.random.default_rng(seed)
        trend, bend, white = (
            np.exp(generator.normal(*CENTRES[part])) for part in ("trend", "bend", "white")
        )
        lengths = np.exp(generator.normal(*CENTRES["length"], size=3))
        covariance = trend**2 * (1 + places @ places.T) + bend**2 * Matern(lengths, nu=2.5)(places)
        values, vectors = np.linalg.eigh(covariance)
        truth = vectors @ (np.sqrt(np.maximum(values, 0)) * generator.standard_normal(len(places)))
        losses = truth[1:25] + white * truth[1:25].std() * generator.standard_normal(24)
        surface = fit(runs.mixtures, losses, Key(seed))
        best = 1 + int(surface.mean(places[1:]).argmin())
        difference = gap(surface, places[best], UNIFORM)
        covered += difference.low <= truth[best] - truth[0] <= difference.high
    assert 88 <= covered <= 99


def test_several_targets_are_weighted_and_test_sets_never_decide() -> None:
    runs = tried(3, 1.0, 0.01)
    other = 1 + runs.mixtures[:, 2]
    both = Runs(
        names=runs.names,
        sources=runs.sources,
        mixtures=runs.mixtures,
        metrics={"loss": runs.metrics["loss"], "other": other, "test_x": -runs.metrics["loss"]},
    )
    findings = learn(both, SurfaceSettings(targets={"loss": 3.0, "other": 1.0}))
    assert findings.targets == {"loss": 0.75, "other": 0.25}
    # the minimum of ¾ |ω − best|² + ¼ ω_c over the simplex: ω − best = (1, 1, −2)/18, which is ω_c
    # = 0 with the rest beside
    expected = BEST + np.array([1, 1, -2]) / 18
    np.testing.assert_allclose(expected.sum(), 1)
    assert np.abs(findings.recommendation.weights - np.array([0.65, 0.35, 0.0])).sum() < 0.3
    assert set(findings.differences) == {"loss", "other", "test_x"}
    named = attrs.evolve(both, metrics={"target": other, "loss": runs.metrics["loss"]})
    means = learn(named, SurfaceSettings(targets={"target": 1.0, "loss": 3.0})).surface.mean(
        runs.mixtures
    )
    # whatever a metric is called
    np.testing.assert_allclose(means, findings.surface.mean(runs.mixtures), atol=0.01)
    with rejects("unknown-metric", "surface", "targets", "los", of=ConfigError) as caught:
        learn(both, SurfaceSettings(targets={"los": 1.0}))
    assert caught.value.did_you_mean == ("loss",)


def test_runs_that_diverged_are_set_aside_and_named() -> None:
    runs = tried(0, 1.0, 0.02)
    losses = runs.metrics["loss"].copy()
    losses[[3, 17]] = 9.0, 7.5  # one of the repeats of uniform, and a mixture that was run once
    spoilt = Runs(
        names=runs.names, sources=runs.sources, mixtures=runs.mixtures, metrics={"loss": losses}
    )
    findings = learn(spoilt, SurfaceSettings())
    assert findings.aside.names == ("run-3", "run-17")
    assert findings.lost == [9.0, 7.5]
    assert len(findings.runs.names) == 22
    assert np.abs(findings.recommendation.weights - BEST).sum() < 0.25
    assert findings.apart


def test_runs_without_a_finite_loss_are_set_aside_and_named() -> None:
    runs = tried(0, 1.0, 0.02)
    losses = runs.metrics["loss"].copy()
    other = runs.metrics["loss"].copy()
    losses[3], other[17] = np.nan, np.inf
    findings = learn(
        attrs.evolve(runs, metrics={"loss": losses, "test_x": other}), SurfaceSettings()
    )
    assert findings.aside.names == ("run-3", "run-17")
    assert findings.apart
    assert "run-3 nan" in next(sentences(findings))
    with rejects("too-few-rows", "runs", "mixtures", of=ConfigError) as caught:
        learn(attrs.evolve(runs, metrics={"loss": losses * np.nan}), SurfaceSettings())
    assert "there are 0, without 24 runs" in caught.value.message


def test_every_metric_has_the_width_of_its_own_misses() -> None:
    """Not only the target: another metric's leave-one-out errors widen that metric's difference."""
    runs = tried(0, 1.0, 0.02)
    metrics = {"smooth": bowl(runs.mixtures, 1.0), "test_x": runs.metrics["loss"]}
    findings = learn(attrs.evolve(runs, metrics=metrics), SurfaceSettings())
    of_metric = fit(runs.mixtures, metrics["test_x"], Key(0).fold("surface", "fit", "test_x"))
    assert of_metric.widening > 1.02
    plain = gap(attrs.evolve(of_metric, widening=1.0), findings.recommendation.weights, UNIFORM)
    width = findings.differences["test_x"].high - findings.differences["test_x"].low
    assert width == pytest.approx(of_metric.widening * (plain.high - plain.low))


def test_caution_that_costs_loss_is_said(found: Findings) -> None:
    worse = Gap(value=0.2, low=0.1, high=0.3, below=0.0)
    cautious = attrs.evolve(
        found, recommendation=attrs.evolve(found.recommendation, against_best=worse)
    )
    assert (
        "recommended − best tried: +0.200 [+0.100, +0.300]: worse than the best that was tried"
        in "\n".join(sentences(cautious))
    )


@pytest.mark.parametrize("steepness", [0.0, 1.0])
def test_a_steep_surface_is_no_reason_to_set_runs_aside(steepness: float) -> None:
    from hgms_mix.surface.outliers import gone_wrong

    for seed in range(5):
        runs = tried(seed, 1.0 - steepness, 0.01)
        losses = runs.metrics["loss"] - steepness * np.log(runs.mixtures[:, 0] + 0.01)
        assert not gone_wrong(runs.mixtures, losses).any()


def test_without_repeats_the_noise_is_a_parameter() -> None:
    runs = tried(6, 1.0, 0.03)
    distinct = np.unique(runs.mixtures, axis=0, return_index=True)[1]
    fewer = Runs(
        names=tuple(runs.names[i] for i in distinct),
        sources=runs.sources,
        mixtures=runs.mixtures[distinct],
        metrics={"loss": runs.metrics["loss"][distinct]},
    )
    findings = learn(fewer, SurfaceSettings())
    assert findings.surface.noise is None
    gap = findings.recommendation.against_prior
    weights = findings.recommendation.weights
    assert gap.high < 0
    # a 95 % interval misses now and then, and this one just does: by no more than half its half
    # width
    assert abs(bowl(weights, 1.0) - bowl(UNIFORM, 1.0) - gap.value) < 1.5 * (gap.high - gap.value)


# -- the tables
# --------------------------------------------------------------------------------------------------


def test_tables_come_back_as_they_were(tmp_path: Path) -> None:
    runs = tried(0, 1.0, 0.1)
    paths = tmp_path / "ratios.csv", tmp_path / "metrics.csv"
    write_runs(runs, *paths)
    again = read_runs(*paths)
    assert (again.names, again.sources) == (runs.names, runs.sources)
    np.testing.assert_allclose(again.mixtures, runs.mixtures, atol=1e-15)
    assert again.metrics["loss"].tolist() == runs.metrics["loss"].tolist()


def test_tables_as_olmix_has_them_are_read(tmp_path: Path) -> None:
    """The header of its README, an index column of pandas, run_id in one file, runs that only
    one file has, an empty cell.
    """
    (tmp_path / "r.csv").write_text(
        "Unnamed: 0,run,name,index,x,y\n0,p,s-0,0,0.25,0.75\n1,q,s-1,1,0.5,0.498\n2,r,s-2,2,1,0\n"
    )
    (tmp_path / "m.csv").write_text(
        "run_id,name,index,arc\nq,s-1,1,1.5\np,s-0,0,1.25\nr,s-2,2,\nz,s-9,9,1\n"
    )
    lines: list[str] = []
    runs = read_runs(tmp_path / "r.csv", tmp_path / "m.csv", lines.append)
    assert lines == ["2 of 4 runs are not in both files with all metrics, and left out: r, z"]
    assert (runs.names, runs.sources) == (("p", "q"), ("x", "y"))
    np.testing.assert_allclose(runs.mixtures[1], np.array([0.5, 0.498]) / 0.998)
    assert runs.metrics["arc"].tolist() == [1.25, 1.5]


@pytest.mark.parametrize(
    ("ratios", "code", "place", "value"),
    [
        ("name,x,y\ns,0.5,0.5\n", "missing-column", ("r.csv",), "name, x, y"),
        ("run,x,y\np,0.5,0.7\n", "wrong-row", ("r.csv",), "1.2"),
        ("run,x,y\np,0.5,half\n", "wrong-row", ("r.csv", 2), "'half'"),
        ("run,x,y\np,0.5\n", "wrong-row", ("r.csv", 2), "2 cells"),
        ("run,x,y\np,0.5,0.5\np,0.5,0.5\n", "duplicate-name", ("r.csv", 3), "'p'"),
        ("run,x,y\nq,0.5,0.5\n", "no-rows", ("m.csv",), "r.csv"),
        ("run,x,x\np,0.5,0.5\n", "duplicate-name", ("r.csv",), "'x'"),
        (None, "missing-file", ("r.csv",), "exist"),
        ("run,x,y\np,0.5,\udcff\n", "wrong-format", ("r.csv",), "UTF-8"),
    ],
)
def test_bad_tables_are_named_with_their_lines(
    ratios: str | None,
    code: str,
    place: tuple[str | int, ...],
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if ratios is not None:
        Path("r.csv").write_text(ratios, errors="surrogateescape")
    Path("m.csv").write_text("run,loss\np,1.0\n")
    with rejects(code, *place, of=DataError) as caught:
        read_runs(Path("r.csv"), Path("m.csv"))
    assert value in caught.value.message


def test_the_command_fits_tables_and_writes_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tried(0, 1.0, 0.02), Path("r.csv"), Path("m.csv"))
    done = call("--ratios", "r.csv", "--metrics", "m.csv", "--out", "s")
    assert done.exit_code == 0, done.output
    assert "better than uniform" in done.stdout
    assert Path("s/surface.png").stat().st_size > 10_000
    report = json.loads(Path("s/surface.json").read_bytes())
    assert report["told_apart_from_prior"] is True
    assert sum(report["recommended"].values()) == pytest.approx(1)
    assert Path("s/ratios.csv").read_bytes() == Path("r.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ([], "CONFIG"),
        (["--ratios", "r.csv"], "--metrics"),
        (["--ratios", "r.csv", "--metrics", "m.csv", "--target", "loss=x"], "--target loss=x"),
        (["--ratios", "r.csv", "--metrics", "m.csv", "--target", "lost"], "(surface.targets.lost)"),
        (["--ratios", "r.csv", "--metrics", "m.csv", "--prior", "rows"], "(surface.prior)"),
        (["--ratios", "r.csv", "--metrics", "m.csv", "--prior", "a=1,d=1"], "(surface.prior.d)"),
        (["--ratios", "r.csv", "--metrics", "m.csv", "--prior", "a=inf,b=1"], "(surface.prior)"),
        (["--ratios", "r.csv", "--metrics", "m.csv", "--points", "30"], "CONFIG"),
        (
            ["--ratios", "r.csv", "--metrics", "m.csv", "--set", "surface.point=3"],
            "(surface.point)",
        ),
        (["--ratios", "r.csv", "--metrics", "m.csv", "--set", "sample.size=3"], "(sample)"),
    ],
)
def test_bad_calls_leave_with_2(
    arguments: list[str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tried(0, 1.0, 0.02), Path("r.csv"), Path("m.csv"))
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert place in done.stderr
    assert "Traceback" not in done.output


# -- end to end
# --------------------------------------------------------------------------------------------------

MIX = f"""
seed = 1
{(Path(__file__).resolve().parents[2] / "tiny_mix.toml").read_text()}
[task.sources.echo]
path = "echo.jsonl"
[sample]
size = 24
[finetune]
lr = 3e-2
micro_batch = 6
accumulation = 1
save_every = 2
[surface]
points = 11
repeats = 2
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
    )
    pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")
    monkeypatch.chdir(tmp_path)

    def write(name: str, first: int, count: int, answer: str | None = None) -> None:
        rows = [
            {"prompt": f"{n // 40} + {n % 40} =", "completion": answer or str(n)}
            for n in range(first, first + count)
        ]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("sums", 0, 40)
    write("dots", 100, 40, ".")
    write("echo", 200, 40, "echo")
    write("validation", 300, 12)
    write("test", 400, 12)
    Path("mix.toml").write_text(MIX)
    return tmp_path


def losses(folder: Path) -> dict[str, Any]:
    records = (
        json.loads(path.read_bytes()) for path in folder.glob("runs/mix/surface/runs/*/run.json")
    )
    return {record["key"]: record["metrics"] for record in records}


def test_a_design_is_run_once_and_goes_on_where_it_was_broken_off(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.surface.runs import DesignRuns

    keep = DesignRuns.run
    begun = []

    def interrupted(self: DesignRuns, point: Any) -> Any:
        begun.append(point)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return keep(self, point)

    with monkeypatch.context() as patched:
        patched.setattr(DesignRuns, "run", interrupted)
        broken = call("mix.toml")
    assert broken.exit_code == 130, broken.output
    assert "run the same command" in broken.stderr
    assert not list(here.rglob("steps.jsonl"))  # nothing is learned
    assert "warning" not in broken.stderr
    first = losses(here)
    assert len(first) == 2
    dry = call("mix.toml", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "11 runs, 2 of them finished; the others take" in dry.stdout
    done = call("mix.toml")
    assert done.exit_code == 0, done.output
    assert "2 of 11 runs done before" in done.stderr
    assert "[11/11]" in done.stderr
    every = losses(here)
    assert len(every) == 11
    assert {key: every[key] for key in first} == first
    wide = '{model_type = "gpt2", n_layer = 1, n_embd = 16, n_head = 2, n_positions = 40}'
    larger = f'finetune.model={{config = {wide}, tokenizer = "bytes"}}'
    again = call("mix.toml", "--json", "--check", "4", "--set", larger)
    assert again.exit_code == 0, again.output
    report = json.loads(again.stdout)
    assert report["check"]["mixtures"] == 4
    assert -1 <= report["check"]["rank_correlation"]["value"] <= 1
    assert "[4/4]" in again.stderr
    every_too = losses(here)
    assert len(every_too) == 15
    assert {key: every_too[key] for key in every} == every
    assert "11 of 11 runs done before" in again.stderr
    assert report["targets"] == {"validation_sums": 1.0}
    assert set(report["differences_by_metric"]) == {"validation_sums", "test_sums"}
    assert not list(here.glob("runs/mix/surface/runs/*/finetune/adapter"))
    tables = read_runs(Path("runs/mix/surface/ratios.csv"), Path("runs/mix/surface/metrics.csv"))
    assert sorted(tables.metrics["validation_sums"]) == sorted(
        row["validation_sums"] for row in every.values()
    )
    # a prior's run has a third of its rows of each source; a repeat another seed, so another loss
    prior = [number for number, row in enumerate(tables.mixtures) if np.allclose(row, 1 / 3)]
    assert len(prior) == 2
    assert (
        tables.metrics["validation_sums"][prior[0]] != tables.metrics["validation_sums"][prior[1]]
    )


def test_a_run_broken_off_in_fine_tuning_ends_with_the_same_losses(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.stages.checkpoints import LossLog
    from hgms_mix.surface.runs import DesignRuns
    from hgms_mix.surface.train import load, points_of

    plan = load(Path("mix.toml"))
    runs = DesignRuns(config=plan.config, folder=Path("whole"))
    point = points_of(plan, runs)[-1]
    whole = runs.run(point)
    assert whole.seconds is not None
    assert whole.tokens > 0
    np.testing.assert_allclose(whole.mixture, point.weights, atol=1 / 24)
    keep = LossLog.append

    def interrupt(self: Any, row: Any, steps: int) -> None:
        keep(self, row, steps)
        if row["step"] == 1:
            self.interrupts.number = 2

    broken = DesignRuns(config=plan.config, folder=Path("broken"))
    with monkeypatch.context() as patched:
        patched.setattr(LossLog, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            broken.run(point)
    assert broken.finished(point) is None
    again = broken.run(point)
    assert again.metrics == whole.metrics
    assert again.seconds is None  # nobody knows what went before
    assert broken.finished(point) == again


def test_a_run_is_the_same_as_a_job_of_values_alone(here: Path) -> None:
    """As another machine carries it out, which has read nothing yet; what another process is at
    is left to that.
    """
    from hgms.executors import BUSY
    from hgms_mix.stages import claimed
    from hgms_mix.surface import jobs
    from hgms_mix.surface.runs import DesignRuns
    from hgms_mix.surface.train import load, points_of

    plan = load(Path("mix.toml"), ["task.validation.more.path=test.jsonl"])
    alone, runs = (DesignRuns(config=plan.config, folder=Path(name)) for name in ("alone", "runs"))
    point = points_of(plan, alone)[-1]
    piece = jobs.piece(runs, point)
    job = piece.job()
    arguments = json.loads(json.dumps(job.arguments))
    jobs._KNOWN.clear()
    with claimed(piece.path):
        assert jobs.work(arguments, lambda **event: None) == BUSY
    assert piece.finished() is None
    heard: list[dict[str, Any]] = []
    assert jobs.work(arguments, lambda **event: heard.append(event)) == {}
    assert {event["event"] for event in heard} == {"stage", "step"}
    other = piece.finished()
    own = alone.run(point)
    assert attrs.evolve(other, seconds=own.seconds) == own
    before = [path.stat().st_mtime_ns for path in piece.path.rglob("*.json")]
    assert jobs.work(arguments, heard.append) == {}  # another process asked at the same time
    assert [path.stat().st_mtime_ns for path in piece.path.rglob("*.json")] == before


@pytest.mark.nightly  # the same executor as the runs of a null test, whose own test is quicker
@pytest.mark.extended
def test_processes_make_the_surface_of_one(here: Path) -> None:
    one = call("mix.toml", "--json", "--out", "one")
    both = call("mix.toml", "--json", "--out", "both", "--jobs", "2")
    assert [done.exit_code for done in (one, both)] == [0, 0], both.output
    assert both.stderr.count(" after ") == 11
    ours = json.loads(one.stdout)
    theirs = json.loads(both.stdout)
    for report in (ours, theirs):
        for key in ("folder", "next", "files"):
            report.pop(key, None)
    assert ours == theirs
    for name in ("ratios.csv", "metrics.csv"):
        assert (
            Path("one/mix/surface", name).read_bytes()
            == Path("both/mix/surface", name).read_bytes()
        )


def test_what_it_costs_is_measured_where_nothing_is_finished(here: Path) -> None:
    dry = call("mix.toml", "--dry-run", "--json")
    assert dry.exit_code == 0, dry.output
    cost = json.loads(dry.stdout)["surface"]
    assert (cost["runs"], cost["finished"], cost["basis"]) == (11, 0, "a short run")
    assert cost["seconds"] == pytest.approx(11 * cost["seconds_each"])
    assert 0 < cost["seconds_each"] < 60
    rows = [len(f"{n // 40} + {n % 40} ={n}") for n in range(40)]
    assert cost["tokens"] > 11 * 24 * min(rows)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--check", "4"], "(finetune.model)"),
        (["--points", "8"], "(surface.points)"),
        (["--set", "sample.seed=1"], "(sample.seed)"),
        (["--set", "surface=3"], "(mix.toml: surface)"),
        (["--set", "surface={point=3}"], "surface.point)"),
        (["--set", "task=quadratic"], "(task.name)"),
        (["--target", "dots=1"], "(surface.targets.dots)"),
        (["--ratios", "r.csv"], "CONFIG"),
    ],
)
def test_bad_plans_leave_with_2_before_anything_runs(
    arguments: list[str], place: str, here: Path
) -> None:
    done = call("mix.toml", *arguments)
    assert done.exit_code == 2, done.output
    assert place in done.stderr
    assert not Path("runs").exists()


def test_a_run_that_diverges_is_recorded_and_too_many_are_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.stages.checkpoints import LossLog
    from hgms_mix.surface.runs import DesignRuns
    from hgms_mix.surface.train import carried, load, points_of

    def diverge(self: Any, row: Any, steps: int) -> None:
        raise NumericalError("not-finite", "the loss of fine-tuning step 1 is nan")

    plan = load(Path("mix.toml"))
    runs = DesignRuns(config=plan.config, folder=Path("design"))
    points = points_of(plan, runs)[-2:]
    with monkeypatch.context() as patched:
        patched.setattr(LossLog, "append", diverge)
        first = runs.run(points[0])
        other = DesignRuns(config=plan.config, folder=Path("other"))
        # though no run comes after it
        with rejects("diverged", "finetune", "lr", of=NumericalError):
            carried(other, points[:1], lambda line: None, diverging=0)
    assert not first.is_finite
    assert set(first.metrics) == {"validation_sums", "test_sums"}
    np.testing.assert_allclose(first.mixture, points[0].weights, atol=1 / 24)
    assert str(runs.finished(points[0])) == str(first)  # as text: nan is not itself
    outcomes = carried(runs, points, lambda line: None, diverging=1)
    assert [outcome.is_finite for outcome in outcomes] == [False, True]
    with rejects("diverged", "finetune", "lr", of=NumericalError):
        carried(runs, points, lambda line: None, diverging=0)


def test_only_rows_that_are_drawn_become_tokens(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.lm import tokens
    from hgms_mix.surface.runs import DesignRuns
    from hgms_mix.surface.train import load, points_of

    looked: list[int] = []
    keep = tokens.Tokenising.__call__

    def count(self: Any, rows: Any) -> Any:
        looked.append(len(rows))
        return keep(self, rows)

    monkeypatch.setattr(tokens.Tokenising, "__call__", count)
    # another length than other tests have, so that nothing is in the cache
    plan = load(Path("mix.toml"), ["sample.size=6", "finetune.micro_batch=2", "task.max_length=39"])
    runs = DesignRuns(config=plan.config, folder=Path("design"))
    point = points_of(plan, runs)[0]
    assert not looked
    assert runs.run(point).tokens > 0
    assert max(looked) == 12  # of validation and test; a source of 40 rows gives 2


@pytest.mark.parametrize("method", ["", 'method = [{name = "hg-ms", label = "ours"}, "uniform"]'])
def test_the_next_command_can_be_run_as_it_stands(method: str, here: Path) -> None:
    from hgms_mix.surface.train import following, load

    text = (
        Path("mix.toml").read_text().replace("[task.sources.echo]", '[task.sources."my echo\'s"]')
    )
    Path("mix.toml").write_text(method + text)
    plan = load(Path("mix.toml"), ["finetune.lr=1e-2", "surface.repeats=2"], seed=3, out="there")
    runs = attrs.evolve(tried(0, 1.0, 0.02), sources=("sums", "dots", "my echo's"))
    words = shlex.split(following(plan, learn(runs, SurfaceSettings())))
    assert words[:3] == ["hgms", "mix", "mix.toml"]
    done = CliRunner().invoke(main, [*words[1:], "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["seed"] == 3
    assert Path(report["folder"]).parts[0] == "there"
    assert {row["source"]: row["weight"] for row in report["sources"]}["sums"] > 0.5


@pytest.mark.parametrize(
    ("gap", "said"),
    [(math.nan, "the best of them and rows diverged"), (-math.inf, "rows diverged")],
)
def test_a_larger_model_that_diverged_at_the_prior_is_said_in_words(gap: float, said: str) -> None:
    table = words(rank_correlation(np.arange(4.0), np.arange(4.0), Key(0)), gap, "rows")
    assert table["sentence"].endswith(f"; {said}")
    assert table["best_minus_prior"] is None


def test_ranks_of_the_larger_model_are_compared() -> None:
    from scipy.stats import spearmanr

    generator = np.random.default_rng(0)
    mine = generator.standard_normal(30)
    theirs = mine + generator.standard_normal(30)
    correlation = rank_correlation(mine, theirs, Key(0))
    assert correlation.value == pytest.approx(spearmanr(mine, theirs).statistic)
    assert correlation.low < correlation.value < correlation.high
    assert rank_correlation(mine, -mine, Key(0)).high == -1


def test_the_next_command_has_the_plugins_and_the_consent_of_this_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.surface.train import load

    monkeypatch.setenv("HGMS_TRUST_REMOTE_CODE", "1")
    (here / "mine.py").write_text(
        "from hgms_core import hookimpl\n@hookimpl\ndef hgms_ready(): pass\n"
    )
    plan = load(Path("mix.toml"), registry=Registry.load(["mine.py"]))
    assert plan.options[-3:] == ("--plugin", "mine.py", "--trust-remote-code")
