"""Response surfaces over mixtures: designs, closed forms with known noise, and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from support.helpers import rejects

from hgms_core import ConfigError, Key

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'hgms[sklearn]'")

from hgms_mix.surface import Findings, Runs, SurfaceSettings, design, fit, learn, words, write_runs
from hgms_mix.surface.design import spread
from hgms_mix.surface.learn import weighted_losses
from hgms_mix.surface.noise import noise_of
from hgms_mix.surface.outliers import find_diverged
from hgms_mix.surface.recommend import Gap, gap
from hgms_mix.surface.report import write

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


def test_a_design_has_repeated_anchors_begins_with_the_shorter_one_and_fills_as_dirichlet() -> None:
    def points(count: int, seed: int = 4) -> list[Any]:
        return design(UNIFORM, points=count, repeats=3, shrink=0.1, seed=seed)

    short, long = points(18), points(40)
    assert long[:18] == short
    weights = np.array([point.weights for point in long])
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-12)
    anchors = [point.weights for point in long if point.role != "fill"]
    assert (len(anchors), (0.933334, 0.033333, 0.033333) in anchors) == (12, True)
    assert len({point.seed for point in long}) == 40  # chance is never shared
    assert [point.weights for point in points(18, seed=5)[12:]] != [p.weights for p in short[12:]]
    prior = np.array([0.5, 0.3, 0.2])
    filled = spread(prior, 4096, Key(1))
    np.testing.assert_allclose(filled.mean(0), prior, atol=2e-3)
    np.testing.assert_allclose(filled.var(0), prior * (1 - prior) / (3 + 1), atol=2e-3)


def test_one_variance_is_pooled_and_several_are_told_apart_but_not_out_of_chance() -> None:
    generator = np.random.default_rng(0)
    places = np.vstack([UNIFORM, np.eye(3)])

    def found(true: Any, freedom: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Sample variances, what is made of them, and how far that distinguishes them."""
        sample = true * generator.chisquare(freedom, 4) / freedom
        noise = noise_of(places, sample, np.full(4, freedom))
        return sample, noise.variance(places), noise.spread

    sample, pooled, spread = found(0.01, 40)
    assert spread <= 0.25
    np.testing.assert_allclose(pooled, sample.mean(), rtol=0.25)
    several = found(np.array([0.01, 0.0001, 0.01, 0.01]), 40)[1]
    assert several[1] < min(0.15 * several[2], several[0])
    np.testing.assert_allclose(several[2:], 0.01, rtol=0.8)
    few = np.array([found(1.0, 2)[1] for _ in range(50)])
    # of the sample variances themselves it is far more
    assert np.median(few.max(1) / few.min(1)) < 3


def test_the_minimum_of_a_bowl_is_found_and_told_apart(found: Findings) -> None:
    best = found.recommendation
    assert np.abs(best.weights - BEST).sum() < 0.25
    assert bowl(best.weights, 1.0) - 2 < 0.02
    assert found.apart
    true = bowl(best.weights, 1.0) - bowl(UNIFORM, 1.0)
    assert best.against_prior.low <= true <= best.against_prior.high
    assert best.against_best.low < 0.02
    low, high = best.region.T
    assert ((low <= BEST + 0.05) & (high >= BEST - 0.05)).all()
    assert (high - low).max() < 0.8


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
    np.testing.assert_allclose(
        surface.leave_one_out_errors()[left], error / np.sqrt(variance), rtol=1e-6
    )


def test_functions_are_drawn_from_the_posterior(found: Findings) -> None:
    surface = attrs.evolve(found.surface, widening=2.0)
    places = np.vstack([UNIFORM, BEST])
    drawn = surface.draws(places, 20_000, Key(0))
    mean, covariance = surface.posterior(places)
    deviations = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.03 * deviations.max())
    np.testing.assert_allclose(drawn.std(0), deviations, rtol=0.04)


@pytest.mark.extended
def test_losses_without_noise_have_a_surface_and_a_flat_one_is_not_told_apart() -> None:
    """Posterior variances are then as small as the rounding errors of the prior's."""
    runs = tried(0, 1.0, 0.0)
    plane = attrs.evolve(runs, metrics={"loss": runs.mixtures[:, 0]})
    findings, flat = (learn(each, SurfaceSettings()) for each in (plane, tried(10, 0.0, 0.05)))
    assert findings.recommendation.weights[0] == pytest.approx(0, abs=0.01)
    gap = flat.recommendation.against_prior
    assert gap.low <= 0 <= gap.high
    assert (findings.apart, flat.apart) == (True, False)


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


@pytest.mark.extended
def test_targets_are_weighted_test_sets_never_decide_and_diverged_runs_are_set_aside() -> None:
    runs = tried(3, 1.0, 0.01)
    loss, other = runs.metrics["loss"].copy(), 1 + runs.mixtures[:, 2]
    of_test = -loss
    loss[[3, 17]] = 9.0, np.nan  # one of the repeats of uniform, and a mixture that was run once
    of_test[20] = np.inf
    spoilt = attrs.evolve(runs, metrics={"loss": loss, "target": other, "test_x": of_test})
    assert spoilt.deciding == ["loss", "target"]
    # a metric may be called target
    findings = learn(spoilt, SurfaceSettings(targets={"loss": 3.0, "target": 1.0}))
    assert findings.targets == {"loss": 0.75, "target": 0.25}
    assert findings.aside.names == ("run-3", "run-17", "run-20")
    assert len(findings.runs.names) == 21
    # the minimum of ¾ |ω − best|² + ¼ ω_c over the simplex: ω − best = (1, 1, −2)/18, which is ω_c
    # = 0 with the rest beside
    assert np.abs(findings.recommendation.weights - np.array([0.65, 0.35, 0.0])).sum() < 0.3
    assert set(findings.differences) == {"loss", "target", "test_x"}
    nothing = attrs.evolve(runs, metrics={"loss": loss * np.nan})
    with rejects("too-few-rows", "runs", "mixtures", of=ConfigError):
        learn(nothing, SurfaceSettings())


@pytest.mark.parametrize("steepness", [0.0, 1.0])
def test_a_steep_surface_is_no_reason_to_set_runs_aside(steepness: float) -> None:
    for runs in (tried(seed, 1.0 - steepness, 0.01) for seed in range(5)):
        losses = runs.metrics["loss"] - steepness * np.log(runs.mixtures[:, 0] + 0.01)
        assert not find_diverged(runs.mixtures, losses).any()


@pytest.mark.extended
def test_without_repeats_the_noise_is_a_parameter() -> None:
    runs = tried(6, 1.0, 0.03)
    first = np.zeros(len(runs.names), dtype=bool)
    first[np.unique(runs.mixtures, axis=0, return_index=True)[1]] = True
    findings = learn(runs.only(first), SurfaceSettings())
    assert findings.surface.noise is None
    assert findings.recommendation.against_prior.high < 0


def test_tables_have_all_digits(tmp_path: Path) -> None:
    ratios, metrics = tmp_path / "ratios.csv", tmp_path / "metrics.csv"
    runs = tried(0, 1.0, 0.1)
    write_runs(runs, ratios, metrics)
    shares, losses = (np.genfromtxt(path, delimiter=",", names=True) for path in (ratios, metrics))
    np.testing.assert_array_equal(np.column_stack([shares[name] for name in "abc"]), runs.mixtures)
    assert losses["loss"].tolist() == runs.metrics["loss"].tolist()


@pytest.mark.extended
def test_findings_are_written_with_a_picture(tmp_path: Path) -> None:
    write(learn(tried(0, 1.0, 0.02), SurfaceSettings()), tmp_path / "s", say=None)
    assert (tmp_path / "s/surface.png").stat().st_size > 10_000
    report = json.loads((tmp_path / "s/surface.json").read_bytes())
    assert report["told_apart_from_prior"] is True
    assert sum(report["recommended"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("settings", "code", "place"),
    [
        ({"targets": {"lost": 1.0}}, "unknown-source", ("targets", "lost")),
        ({"prior": {"a": 1.0, "d": 1.0}}, "unknown-source", ("prior", "d")),
    ],
)
def test_settings_of_other_names_are_refused(
    settings: Any, code: str, place: tuple[str, ...]
) -> None:
    with rejects(code, "surface", *place, of=ConfigError):
        learn(tried(0, 1.0, 0.02), SurfaceSettings(**settings))


def gap_of(value: float, half: float) -> Gap:
    return Gap(value=value, low=value - half, high=value + half, below=0.5)


@pytest.mark.parametrize(
    ("best", "count"), [((-0.2, 0.1), 4), ((0.2, 0.1), 4), ((0.0, 0.1), 4), ((0.0, 0.0), 3)]
)
def test_sentences_say_the_gaps_and_the_runs_that_are_set_aside(
    found: Findings, best: tuple[float, float], count: int
) -> None:
    """Nothing is said of the best mixture where it is the recommended one."""
    whole = attrs.evolve(
        found,
        recommendation=attrs.evolve(
            found.recommendation, against_best=gap_of(*best), against_prior=gap_of(0.3, 0.1)
        ),
    )
    said = list(words.sentences(whole))
    assert len(said) == count
    assert words.verdict(gap_of(0.3, 0.1), "uniform") == said[0]
    assert len({words.verdict(gap_of(value, 0.1), "uniform") for value in (-0.3, 0, 0.3)}) == 3
    assert (words.spell(gap_of(*best)) in said[1]) == (count == 4)
    noise = attrs.evolve(whole, surface=attrs.evolve(found.surface, noise=None))
    assert len(list(words.sentences(noise))) == count
    aside = attrs.evolve(whole, aside=found.runs.only(found.runs.mixtures[:, 0] > 0.9))
    first, *others = words.sentences(aside)
    assert others == said
    assert f"{aside.aside.names[0]} {weighted_losses(aside.aside, aside.targets)[0]:.4g}" in first


def test_a_report_of_several_targets_has_a_row_for_each_and_for_their_mean(
    found: Findings, capsys: pytest.CaptureFixture[str]
) -> None:
    several = attrs.evolve(
        found,
        targets={"loss": 0.75, "other": 0.25},
        differences={"loss": gap_of(-0.5, 0.1), "other": gap_of(0.25, 0.1)},
        recommendation=attrs.evolve(found.recommendation, against_prior=gap_of(-0.3, 0.06)),
    )
    report = {"files": ["a.png"], "next": "hgms mix more"}
    words.show(several, report)
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines()]
    gaps = {"loss -0.500 [-0.600, -0.400]", "other +0.250 [+0.150, +0.350]"}
    assert {*gaps, f"{words.TARGET} -0.300 [-0.360, -0.240]", "a.png"} <= set(lines)
    assert lines[-1].endswith("hgms mix more")
