"""Stages on disk, the draw of rows, and losses with their intervals: no model is needed for
these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import rejects

from hgms.store import Folder
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError
from hgms_mix.stages.evaluate import difference, means
from hgms_mix.stages.graph import Runner, Stage
from hgms_mix.stages.losses import RowLosses
from hgms_mix.stages.sample import compress
from hgms_mix.stages.settings import Sample
from hgms_mix.stages.tuned_model import read_rows

NAN = float("nan")


def copy_text(work: Folder, *, text: str) -> Any:
    """A stage of one file."""
    started = (work.path / "half").exists()
    work.write("half", b"")
    work.write("text", text.encode())
    return {"length": len(text), "resumed": started}


def count_words(work: Folder, source: Path, *, least: int) -> Any:
    words = [word for word in source.read_text().split() if len(word) >= least]
    (work.path / "words").mkdir(exist_ok=True)
    for word in words:
        work.write(f"words/{word}", b"")
    return {"words": len(words)}


COPY = Stage(name="copy", version="1", function=copy_text, writes=("text",))
COUNT = Stage(
    name="count",
    version="1",
    function=count_words,
    reads={"source": COPY.output("text")},
    writes=("words",),
)
OTHER = attrs.evolve(COPY, version="2")


def runner(
    root: Path, lines: list[str] | None = None, text: str = "to be or", least: int = 1
) -> Any:
    log = (lambda line: None) if lines is None else lines.append
    return Runner(root=root, values={"text": text, "least": least, "unused": 3}, log=log)


def test_a_finished_stage_is_found_by_its_inputs_only_and_others_never_overwrite_it(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    done = runner(tmp_path, lines).run(COUNT)
    assert [line.partition(" (")[0] for line in lines] == ["copy: starts", "count: starts"]
    assert (done.facts["words"], done.facts["inputs"]) == (3, {"least": 1})
    assert sorted(done.files) == ["words/be", "words/or", "words/to"]
    assert done.path.name == f"count-{done.key[:8]}"
    # the same inputs
    lines.clear()
    assert runner(tmp_path, lines).run(COUNT) == done
    assert [line.partition(" (")[0] for line in lines] == [
        "copy: done before",
        "count: done before",
    ]
    assert runner(tmp_path).find(COUNT) == done
    # other settings, another version, another earlier result: another folder
    for changes in ({"least": 3}, {"text": "not to be"}):
        assert runner(tmp_path, **changes).find(COUNT) is None
        other = runner(tmp_path, **changes).run(COUNT)
        assert (other.facts["words"] == done.facts["words"]) == ("text" in changes)
        assert other.path != done.path
    assert runner(tmp_path).folder(OTHER).path != runner(tmp_path).folder(COPY).path
    assert runner(tmp_path).run(COUNT) == done


def test_an_interrupted_stage_resumes_in_its_folder(tmp_path: Path) -> None:
    def cut(work: Folder, *, text: str) -> Any:
        copy_text(work, text=text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner(tmp_path).run(attrs.evolve(COPY, function=cut))
    lines: list[str] = []
    assert runner(tmp_path).find(COPY) is None
    done = runner(tmp_path, lines).run(COPY)
    assert lines == ["copy: resumes"]
    assert (done.facts["resumed"], done.facts["processor_seconds"]) == (True, None)
    # a missing file: the stage runs again
    (done.path / "text").unlink()
    assert runner(tmp_path).run(COPY).facts["processor_seconds"] is not None


def test_damage_is_named(tmp_path: Path) -> None:
    """The facts hold the learned weights: a changed digit would draw other rows."""
    done = runner(tmp_path).run(COPY)
    text, manifest = done.path / "text", done.path / "manifest.json"
    sound = manifest.read_text()
    for path, new in (
        (text, "so be or"),
        (manifest, "{"),
        (manifest, sound.replace('"length": 8', '"length": 7')),
    ):
        path.write_text(new)
        with rejects("damaged-file", str(path), of=CheckpointError):
            runner(tmp_path).run(COPY)
        text.write_text("to be or")
        manifest.write_text(sound)
    assert runner(tmp_path).run(COPY) == done


def test_a_stage_that_does_not_write_a_declared_file_is_not_done(tmp_path: Path) -> None:
    with rejects("unreadable-file", of=CheckpointError):
        runner(tmp_path).run(attrs.evolve(COPY, writes=("text", "more")))
    assert runner(tmp_path).find(COPY) is None


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
        return
    done = Sample(size=size).top(tensors)
    found = sorted((name, int(i)) for name, rows in done.items() for i in rows)
    assert found == sorted((name, i) for _, name, i in listed[:size])
    assert set(done) <= {"b", "a", "c"}


def test_rows_on_disk_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    rows = [{"source": "a", "row": 3, "position": 1, "messages": messages}]
    for name in ("one.gz", "two.gz"):
        (tmp_path / name).write_bytes(compress(rows))
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
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
