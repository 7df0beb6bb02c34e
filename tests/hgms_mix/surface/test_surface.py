"""Response surfaces over mixtures: designs, closed forms with known noise, and tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import numpy as np
import pytest
from support.helpers import rejects
from support.small_mixes import fails, right

from hgms_core import ConfigError, DataError, Key

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
from hgms_mix.surface.outliers import gone_wrong
from hgms_mix.surface.proxy import rank_correlation, words
from hgms_mix.surface.recommend import Gap, gap
from hgms_mix.surface.words import sentences

BEST = np.array([0.6, 0.3, 0.1])
UNIFORM = np.full(3, 1 / 3)


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


def test_a_design_has_repeated_anchors_and_begins_with_the_shorter_one() -> None:
    short = design(UNIFORM, points=18, repeats=3, shrink=0.1, seed=4)
    long = design(UNIFORM, points=40, repeats=3, shrink=0.1, seed=4)
    assert long[:18] == short
    weights = np.array([point.weights for point in long])
    assert weights.min() >= 0
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-12)
    anchors = [point for point in long if point.role != "fill"]
    assert len(anchors) == 12
    assert (0.933334, 0.033333, 0.033333) in {point.weights for point in anchors}
    assert len({point.seed for point in long}) == 40  # chance is never shared
    other = design(UNIFORM, points=18, repeats=3, shrink=0.1, seed=5)
    assert [point.weights for point in other[12:]] != [point.weights for point in short[12:]]


def test_the_rest_has_the_moments_of_a_dirichlet_distribution() -> None:
    prior = np.array([0.5, 0.3, 0.2])
    points = spread(prior, 4096, Key(1))
    alpha = 3 * prior
    np.testing.assert_allclose(points.mean(0), prior, atol=2e-3)
    np.testing.assert_allclose(points.var(0), prior * (1 - prior) / (alpha.sum() + 1), atol=2e-3)


def test_too_few_points_are_refused() -> None:
    with rejects("out-of-range", "surface", "points", of=ConfigError):
        design(UNIFORM, points=14, repeats=3, shrink=0.1, seed=0)


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


def test_the_minimum_of_a_bowl_is_found_and_told_apart(found: Findings) -> None:
    weights = found.recommendation.weights
    assert np.abs(weights - BEST).sum() < 0.25
    assert bowl(weights, 1.0) - 2 < 0.02
    assert found.apart
    gap = found.recommendation.against_prior
    assert gap.low <= bowl(weights, 1.0) - bowl(UNIFORM, 1.0) <= gap.high
    assert found.recommendation.against_best.low < 0.02
    region = found.recommendation.region
    assert (region[:, 0] <= BEST + 0.05).all()
    assert (region[:, 1] >= BEST - 0.05).all()
    assert (region[:, 1] - region[:, 0]).max() < 0.8


def test_leave_one_out_errors_are_those_of_fits_without_the_mixture(found: Findings) -> None:
    """The closed form, against processes of the same parameters."""
    from sklearn.gaussian_process import GaussianProcessRegressor

    surface = found.surface
    left = 5
    keep = np.arange(len(surface.losses)) != left
    errors, variances = [], []
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
    runs = tried(0, 1.0, 0.0)
    losses = {"loss": runs.mixtures[:, 0]}
    findings = learn(attrs.evolve(runs, metrics=losses), SurfaceSettings())
    assert findings.recommendation.weights[0] == pytest.approx(0, abs=0.01)
    assert findings.apart


def test_a_flat_surface_is_not_told_apart() -> None:
    """:func:`test_coverage_over_a_hundred_surfaces` has more, also bowls."""
    findings = learn(tried(10, 0.0, 0.05), SurfaceSettings())
    gap = findings.recommendation.against_prior
    assert gap.low <= 0 <= gap.high
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
    loss, other = runs.metrics["loss"], 1 + runs.mixtures[:, 2]
    both = attrs.evolve(runs, metrics={"loss": loss, "target": other, "test_x": -loss})
    # a metric may be called target
    findings = learn(both, SurfaceSettings(targets={"loss": 3.0, "target": 1.0}))
    assert findings.targets == {"loss": 0.75, "target": 0.25}
    # the minimum of ¾ |ω − best|² + ¼ ω_c over the simplex: ω − best = (1, 1, −2)/18, which is ω_c
    # = 0 with the rest beside
    assert np.abs(findings.recommendation.weights - np.array([0.65, 0.35, 0.0])).sum() < 0.3
    assert set(findings.differences) == {"loss", "target", "test_x"}
    # another metric's leave-one-out errors widen that metric's difference
    of_test = fit(runs.mixtures, -loss, Key(0).fold("surface", "fit", "test_x"))
    plain = gap(attrs.evolve(of_test, widening=1.0), findings.recommendation.weights, UNIFORM)
    width = findings.differences["test_x"].high - findings.differences["test_x"].low
    assert width == pytest.approx(of_test.widening * (plain.high - plain.low))
    with rejects("unknown-metric", "surface", "targets", "los", of=ConfigError) as caught:
        learn(both, SurfaceSettings(targets={"los": 1.0}))
    assert caught.value.did_you_mean == ("loss",)


def test_runs_that_diverged_or_have_no_finite_loss_are_set_aside_and_named() -> None:
    runs = tried(0, 1.0, 0.02)
    losses, other = runs.metrics["loss"].copy(), runs.metrics["loss"].copy()
    losses[[3, 17]] = 9.0, np.nan  # one of the repeats of uniform, and a mixture that was run once
    other[20] = np.inf
    spoilt = attrs.evolve(runs, metrics={"loss": losses, "test_x": other})
    findings = learn(spoilt, SurfaceSettings())
    assert findings.aside.names == ("run-3", "run-17", "run-20")
    assert findings.lost[0] == 9.0
    assert len(findings.runs.names) == 21
    assert np.abs(findings.recommendation.weights - BEST).sum() < 0.3
    assert findings.apart
    assert "run-17 nan" in next(sentences(findings))
    nothing = attrs.evolve(runs, metrics={"loss": losses * np.nan})
    with rejects("too-few-rows", "runs", "mixtures", of=ConfigError):
        learn(nothing, SurfaceSettings())


def test_caution_that_costs_loss_is_said(found: Findings) -> None:
    worse = Gap(value=0.2, low=0.1, high=0.3, below=0.0)
    recommendation = attrs.evolve(found.recommendation, against_best=worse)
    said = "\n".join(sentences(attrs.evolve(found, recommendation=recommendation)))
    assert "recommended − best tried: +0.200 [+0.100, +0.300]: worse than the best" in said


@pytest.mark.parametrize("steepness", [0.0, 1.0])
def test_a_steep_surface_is_no_reason_to_set_runs_aside(steepness: float) -> None:
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
    found = findings.recommendation.against_prior
    assert found.high < 0
    # a 95 % interval misses now and then, and this one just does: by at most half its half width
    truth = bowl(findings.recommendation.weights, 1.0) - bowl(UNIFORM, 1.0)
    assert abs(truth - found.value) < 1.5 * (found.high - found.value)


def test_tables_come_back_as_they_were(tmp_path: Path) -> None:
    runs = tried(0, 1.0, 0.1)
    paths = tmp_path / "ratios.csv", tmp_path / "metrics.csv"
    write_runs(runs, *paths)
    again = read_runs(*paths)
    assert (again.names, again.sources) == (runs.names, runs.sources)
    np.testing.assert_allclose(again.mixtures, runs.mixtures, atol=1e-15)
    assert again.metrics["loss"].tolist() == runs.metrics["loss"].tolist()


def test_tables_as_olmix_has_them_are_read(tmp_path: Path) -> None:
    """An index column of pandas, run_id in one file, runs that only one has, an empty cell."""
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
    ("ratios", "code", "place"),
    [
        ("name,x,y\ns,0.5,0.5\n", "missing-column", ("r.csv",)),
        ("run,x,y\np,0.5,0.7\n", "wrong-row", ("r.csv",)),
        ("run,x,y\np,0.5,half\n", "wrong-row", ("r.csv", 2)),
        ("run,x,y\np,0.5\n", "wrong-row", ("r.csv", 2)),
        ("run,x,y\np,0.5,0.5\np,0.5,0.5\n", "duplicate-name", ("r.csv", 3)),
        ("run,x,y\nq,0.5,0.5\n", "no-rows", ("m.csv",)),
        ("run,x,x\np,0.5,0.5\n", "duplicate-name", ("r.csv",)),
        (None, "missing-file", ("r.csv",)),
        ("run,x,y\np,0.5,\udcff\n", "wrong-format", ("r.csv",)),
    ],
)
def test_bad_tables_are_named_with_their_lines(
    ratios: str | None,
    code: str,
    place: tuple[str | int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if ratios is not None:
        Path("r.csv").write_text(ratios, errors="surrogateescape")
    Path("m.csv").write_text("run,loss\np,1.0\n")
    with rejects(code, *place, of=DataError):
        read_runs(Path("r.csv"), Path("m.csv"))


TABLES = ("--ratios", "r.csv", "--metrics", "m.csv")


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_runs(tried(0, 1.0, 0.02), Path("r.csv"), Path("m.csv"))


@pytest.mark.usefixtures("tables")
def test_the_command_fits_tables_and_writes_what_it_says() -> None:
    done = right("mix", "surface", *TABLES, "--out", "s")
    assert "better than uniform" in done.stdout
    assert Path("s/surface.png").stat().st_size > 10_000
    report = json.loads(Path("s/surface.json").read_bytes())
    assert report["told_apart_from_prior"] is True
    assert sum(report["recommended"].values()) == pytest.approx(1)
    assert Path("s/ratios.csv").read_bytes() == Path("r.csv").read_bytes()


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ((), "CONFIG"),
        (("--ratios", "r.csv"), "--metrics"),
        ((*TABLES, "--target", "loss=x"), "--target loss=x"),
        ((*TABLES, "--target", "lost"), "(surface.targets.lost)"),
        ((*TABLES, "--prior", "rows"), "(surface.prior)"),
        ((*TABLES, "--prior", "a=1,d=1"), "(surface.prior.d)"),
        ((*TABLES, "--prior", "a=inf,b=1"), "(surface.prior)"),
        ((*TABLES, "--points", "30"), "CONFIG"),
        ((*TABLES, "--set", "surface.point=3"), "(surface.point)"),
        ((*TABLES, "--set", "sample.size=3"), "(sample)"),
    ],
)
def test_bad_calls_leave_with_2(arguments: tuple[str, ...], place: str) -> None:
    fails("mix", "surface", *arguments, parts=[place])


def test_ranks_of_the_larger_model_are_compared_and_said_in_words() -> None:
    from scipy.stats import spearmanr

    generator = np.random.default_rng(0)
    mine = generator.standard_normal(30)
    theirs = mine + generator.standard_normal(30)
    correlation = rank_correlation(mine, theirs, Key(0))
    assert correlation.value == pytest.approx(spearmanr(mine, theirs).statistic)
    assert correlation.low < correlation.value < correlation.high
    assert rank_correlation(mine[:9], -mine[:9], Key(0)).high == -1
    for difference, said in (
        (math.nan, "the best of them and rows diverged"),
        (-math.inf, "rows diverged"),
    ):
        table = words(correlation, difference, "rows")
        assert table["sentence"].endswith(f"; {said}")
        assert table["best_minus_prior"] is None
