"""Stages on disk, the draw of rows, and losses with their intervals: no model is needed for
these.
"""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import rejects

from hgms_core import CheckpointError, ConfigError
from hgms_mix.stages import plan
from hgms_mix.stages.evaluate import difference, means
from hgms_mix.stages.losses import RowLosses
from hgms_mix.stages.sample import Sample, read_rows, write_rows
from hgms_mix.stages.stage import StageFolder

NAN = float("nan")


def stage_in(folder: Path, value: float = 1, name: str = "sample") -> StageFolder:
    return StageFolder(name=name, path=folder / "sample", inputs={"value": value})


def folder_of(folder: Path, value: int, text: str = "x") -> StageFolder:
    """A finished stage that wrote one file."""
    stage = stage_in(folder, value)
    assert stage.done() is None
    stage.begin()
    (stage.path / "rows").write_text(text)
    stage.finish([stage.path / "rows"], {"value": value})
    return stage


def test_a_finished_stage_is_found_by_its_inputs_only(tmp_path: Path) -> None:
    stage = folder_of(tmp_path, 1)
    again = stage_in(tmp_path).done()
    assert again is not None
    assert again.facts == {"value": 1}
    assert stage_in(tmp_path, 2).done() is None
    assert stage_in(tmp_path, name="finetune").done() is None
    # its digest follows its files
    other = folder_of(tmp_path / "other", 1, "other").done()
    assert other is not None
    assert other.digest != again.digest == stage.done().digest


def test_an_unfinished_stage_is_gone_on_with(tmp_path: Path) -> None:
    stage = stage_in(tmp_path)
    assert stage.begin() is False
    (stage.path / "half").write_text("half")
    again = stage_in(tmp_path)
    assert again.done() is None
    assert again.begin() is True
    assert (again.path / "half").read_text() == "half"


def test_a_stage_killed_while_it_wrote_its_first_file_begins_again(tmp_path: Path) -> None:
    stage = stage_in(tmp_path)
    stage.path.mkdir()
    (stage.path / "manifest.json.part").write_text('{"stage": "sam')
    assert stage.done() is None
    assert stage.begin() is False
    assert [path.name for path in stage.path.iterdir()] == ["manifest.json"]


def test_other_inputs_never_overwrite_and_come_back_when_they_come_back(tmp_path: Path) -> None:
    first = folder_of(tmp_path, 1, "one")
    second = folder_of(tmp_path, 2, "two")
    assert (tmp_path / "sample" / "rows").read_text() == "two"
    assert (tmp_path / f"sample-{first.key[:8]}" / "rows").read_text() == "one"
    done = stage_in(tmp_path).done()
    assert done is not None
    assert (done.path / "rows").read_text() == "one"
    assert (tmp_path / f"sample-{second.key[:8]}" / "rows").read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "sample",
        f"sample-{second.key[:8]}",
    ]


@pytest.mark.parametrize("harm", ["missing", "shorter"])
def test_a_stage_whose_files_are_not_whole_is_made_again(harm: str, tmp_path: Path) -> None:
    stage = folder_of(tmp_path, 1, "whole")
    (stage.path / "rows").unlink() if harm == "missing" else (stage.path / "rows").write_text("wh")
    assert stage_in(tmp_path).done() is None


def test_a_flipped_bit_in_what_a_stage_wrote_is_named(tmp_path: Path) -> None:
    stage = folder_of(tmp_path, 1, "whole")
    (stage.path / "rows").write_text("whple")
    before = {path.name: path.read_bytes() for path in stage.path.iterdir()}
    with rejects("damaged-file", str(stage.path / "rows"), of=CheckpointError) as caught:
        stage.done()
    assert str(stage.path) in (caught.value.hint or "")
    assert {path.name: path.read_bytes() for path in stage.path.iterdir()} == before


def test_a_changed_digit_in_a_manifest_is_named(tmp_path: Path) -> None:
    """The facts hold the learned weights: a changed one would draw other rows."""
    path = folder_of(tmp_path, 1).path / "manifest.json"
    path.write_text(
        path.read_text().replace('"facts": {\n    "value": 1', '"facts": {\n    "value": 7')
    )
    with rejects("damaged-file", str(path), of=CheckpointError):
        stage_in(tmp_path).done()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "[[1, 2]]",
        '{"key": 3}',
        '{"key": "KEY", "status": "done"}',
        "[" * 100_000,
        '{"key": "KEY", "status": "done", "facts": {}, "outputs": {"rows": 3}}',
    ],
    ids=["half", "list", "null", "pairs", "number", "no-outputs", "nested", "output"],
)
def test_a_manifest_of_another_shape_is_named(text: str, tmp_path: Path) -> None:
    stage = folder_of(tmp_path, 1)
    (stage.path / "manifest.json").write_text(text.replace("KEY", stage.key))
    with rejects("damaged-file", str(stage.path / "manifest.json"), of=CheckpointError):
        stage.done()


def test_an_infinite_setting_is_written_and_read_again(tmp_path: Path) -> None:
    stage = stage_in(tmp_path, float("inf"))
    stage.begin()
    stage.finish([], {"value": NAN})
    assert stage.done() is not None


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "thesis.tex").write_text("mine")
    with rejects("file-exists", str(tmp_path / "sample"), of=CheckpointError):
        stage_in(tmp_path).begin()
    assert (tmp_path / "sample" / "thesis.tex").read_text() == "mine"


WEIGHTS = {"a": 0.5, "b": 0.25, "c": 0.25}
CAPACITY = {"a": 50, "b": 40, "c": 3}


def test_rows_are_drawn_without_duplicates_and_whatever_the_order_of_the_sources() -> None:
    chosen = Sample(size=24).draw(WEIGHTS, CAPACITY, seed=3)
    # c gives its three, and the other two share 21 as 2 : 1
    assert {name: len(rows) for name, rows in chosen.items()} == {"a": 14, "b": 7, "c": 3}
    for name, rows in chosen.items():
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert 0 <= int(rows.min()) <= int(rows.max()) < CAPACITY[name]
    turned = Sample(size=24).draw(
        dict(reversed(WEIGHTS.items())), dict(reversed(CAPACITY.items())), seed=3
    )
    assert {name: rows.tolist() for name, rows in turned.items()} == {
        name: rows.tolist() for name, rows in chosen.items()
    }
    other = Sample(size=24).draw(WEIGHTS, CAPACITY, seed=4)
    assert other["a"].tolist() != chosen["a"].tolist()
    assert Sample(size=24, seed=3).draw(WEIGHTS, CAPACITY, seed=99)["a"].equal(chosen["a"])
    # a larger sample of a source contains the smaller
    small, large = (Sample(size=n).draw({"a": 1.0}, {"a": 100}, seed=0)["a"] for n in (10, 30))
    assert set(small.tolist()) < set(large.tolist())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_top_rows_are_those_of_a_sort(data: st.DataObject) -> None:
    score = st.one_of(
        st.floats(-5, 5), st.sampled_from([0.0, 1.0, NAN, float("inf"), -float("inf")])
    )
    scores = {name: data.draw(st.lists(score, max_size=8)) for name in ("b", "a", "c")}
    listed = [
        (-value, name, i)
        for name, values in scores.items()
        for i, value in enumerate(values)
        if value == value
    ]
    if not listed:
        return
    size = data.draw(st.integers(1, len(listed)))
    done = Sample(size=size).top(
        {name: torch.tensor(values, dtype=torch.float64) for name, values in scores.items()}
    )
    expected = sorted(listed)[:size]
    assert sorted((name, int(i)) for name, rows in done.items() for i in rows) == sorted(
        (name, i) for _, name, i in expected
    )
    assert list(done) == ["b", "a", "c"]


def test_a_ranking_of_too_few_rows_is_rejected_or_gives_fewer() -> None:
    scores = {"a": torch.tensor([1.0, NAN, 2.0]), "b": torch.tensor([3.0])}
    with rejects("too-few-rows", "sample", "size", of=ConfigError):
        Sample(size=4).top(scores)
    fewer = Sample(size=4, allow_fewer=True).top(scores)
    assert {name: rows.tolist() for name, rows in fewer.items()} == {"a": [0, 2], "b": [0]}


def test_rows_on_disk_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    rows = [
        {"source": "a", "row": 3, "position": 1, "messages": [{"role": "user", "content": "Grüße"}]}
    ]
    write_rows(tmp_path / "one.gz", rows)
    write_rows(tmp_path / "two.gz", rows)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()
    assert list(read_rows(tmp_path / "one.gz")) == rows
    assert json.loads(gzip.decompress((tmp_path / "one.gz").read_bytes())) == rows[0]


def test_intervals_of_losses_hold_their_values_and_pair_the_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 30, (200,), generator=generator)
    level = 2 + torch.rand(200, generator=generator, dtype=torch.float64)
    theirs = RowLosses(total=level * tokens, tokens=tokens)
    ours = RowLosses(total=(level - 0.1) * tokens, tokens=tokens)
    done = means(ours)
    assert (done["rows"], done["tokens"]) == (200, int(tokens.sum()))
    assert done["token_loss"]["value"] == pytest.approx(float(ours.total.sum() / tokens.sum()))
    assert done["example_loss"]["value"] == pytest.approx(float((level - 0.1).mean()))
    # the bootstrap's half-width of a mean is 1.96 s/√n up to its own noise
    half = (done["example_loss"]["high"] - done["example_loss"]["low"]) / 2
    assert half == pytest.approx(1.96 * float(level.std()) / 200**0.5, rel=0.1)
    # what the rows have in common cancels: every row is lower by the same 0.1
    gap = difference(ours, theirs)
    assert (gap["value"], gap["low"], gap["high"]) == pytest.approx((-0.1, -0.1, -0.1))


def test_a_dry_run_needs_no_module_that_windows_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    importlib.reload(plan)
    assert plan._peak(torch.device("cpu")) is None
    stages = {"sample": {"seconds": None, "bytes": 1}}
    counts = {"step_seconds": 1.0, "reading_seconds": 1.0, "rows": {"tested": 1}}
    plan.show({"stages": stages, "peak_bytes": None, **counts})
    assert "peak memory of what was tried: unknown" in capsys.readouterr().out
