"""Stages on disk, the draw of rows, and losses with their intervals: no model is needed for
these.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import rejects

from hgms_core import ConfigError
from hgms_core.errors import CheckpointError
from hgms_mix.stages import plan
from hgms_mix.stages.evaluate import difference, means
from hgms_mix.stages.losses import RowLosses
from hgms_mix.stages.sample import write_rows
from hgms_mix.stages.settings import Sample
from hgms_mix.stages.stage_folder import StageFolder
from hgms_mix.stages.work import read_rows

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


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_finished_stage_is_found_by_its_inputs_only_and_others_never_overwrite_it(
    tmp_path: Path,
) -> None:
    first = folder_of(tmp_path, 1, "one")
    done = stage_in(tmp_path).done()
    assert done.facts == {"value": 1}
    assert stage_in(tmp_path, name="finetune").done() is None
    # its digest follows its files
    other = folder_of(tmp_path / "other", 1, "other").done()
    assert other.digest != done.digest == first.done().digest
    second = folder_of(tmp_path, 2, "two")
    places = ("sample", f"sample-{first.key[:8]}")
    assert [(tmp_path / name / "rows").read_text() for name in places] == ["two", "one"]
    # and comes back when its inputs do
    assert (stage_in(tmp_path).done().path / "rows").read_text() == "one"
    assert (tmp_path / f"sample-{second.key[:8]}" / "rows").read_text() == "two"


def test_an_unfinished_stage_is_gone_on_with_and_one_without_a_manifest_begins_again(
    tmp_path: Path,
) -> None:
    stage = stage_in(tmp_path)
    stage.path.mkdir()
    (stage.path / "manifest.json.part").write_text('{"stage": "sam')  # killed at its first file
    assert (stage.done(), stage.begin()) == (None, False)
    assert set(files_of(stage.path)) == {"manifest.json"}
    (stage.path / "half").write_text("half")
    again = stage_in(tmp_path)
    assert (again.done(), again.begin()) == (None, True)
    assert (again.path / "half").read_text() == "half"


def test_damage_is_named_and_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """The facts hold the learned weights: a changed digit would draw other rows."""
    stage = folder_of(tmp_path, 1, "whole")
    rows, manifest = stage.path / "rows", stage.path / "manifest.json"
    sound = manifest.read_text()
    changed = sound.replace('"facts": {\n    "value": 1', '"facts": {\n    "value": 7')
    for path, text in ((rows, "whple"), (manifest, "{"), (manifest, changed)):
        path.write_text(text)
        with rejects("damaged-file", str(path), of=CheckpointError):
            stage_in(tmp_path).done()
        rows.write_text("whole")
        manifest.write_text(sound)
    manifest.unlink()
    with rejects("file-exists", str(stage.path), of=CheckpointError):
        stage_in(tmp_path).begin()


WEIGHTS = {"a": 0.5, "b": 0.25, "c": 0.25}
CAPACITY = {"a": 50, "b": 40, "c": 3}


def drawn(weights: dict[str, float], capacity: dict[str, int], **how: int) -> dict[str, list[int]]:
    seed = how.pop("of", 3)
    chosen = Sample(**{"size": 24, **how}).draw(weights, capacity, seed=seed)
    return {name: rows.tolist() for name, rows in chosen.items()}


def test_rows_are_drawn_without_duplicates_and_whatever_the_order_of_the_sources() -> None:
    chosen = drawn(WEIGHTS, CAPACITY)
    # c gives its three, and the other two share 21 as 2 : 1
    assert {name: len(rows) for name, rows in chosen.items()} == {"a": 14, "b": 7, "c": 3}
    for name, rows in chosen.items():
        assert rows == sorted(set(rows) & set(range(CAPACITY[name])))
    assert drawn(dict(reversed(WEIGHTS.items())), dict(reversed(CAPACITY.items()))) == chosen
    # a larger sample of a source contains the smaller
    small, large = (drawn({"a": 1.0}, {"a": 100}, size=size)["a"] for size in (10, 30))
    assert set(small) < set(large)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_top_rows_are_those_of_a_sort(data: st.DataObject) -> None:
    odd = st.sampled_from([0.0, 1.0, NAN, float("inf"), -float("inf")])
    score = st.one_of(st.floats(-5, 5), odd)
    scores = {name: data.draw(st.lists(score, max_size=8)) for name in ("b", "a", "c")}
    tensors = {name: torch.tensor(each, dtype=torch.float64) for name, each in scores.items()}
    listed = sorted(
        (-value, name, i)
        for name, values in scores.items()
        for i, value in enumerate(values)
        if value == value
    )
    size = data.draw(st.integers(1, max(1, len(listed))))
    if size > len(listed):
        with rejects("too-few-rows", "sample", "size", of=ConfigError):
            Sample(size=size).top(tensors)
    done = Sample(size=size, allow_fewer=True).top(tensors)
    found = sorted((name, int(i)) for name, rows in done.items() for i in rows)
    assert found == sorted((name, i) for _, name, i in listed[:size])
    assert set(done) <= {"b", "a", "c"}


def test_rows_on_disk_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    rows = [{"source": "a", "row": 3, "position": 1, "messages": messages}]
    for name in ("one.gz", "two.gz"):
        write_rows(tmp_path / name, rows)
    assert len(set(files_of(tmp_path).values())) == 1
    assert list(read_rows(tmp_path / "one.gz")) == rows


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


def test_a_dry_run_needs_no_module_that_windows_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    importlib.reload(plan)
    assert plan._peak(torch.device("cpu")) is None
