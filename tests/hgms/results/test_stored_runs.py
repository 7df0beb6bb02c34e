"""Run folders read back: what is a run, what is left out and why; nothing of a stranger's folder
is trusted.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.helpers import rejects
from support.run_folders import CONFIG, write_run

from hgms.config.control_characters import printable
from hgms.results import read_run, scan, short_names
from hgms_core.errors import CheckpointError, ConfigError

C, S, E = "config.toml", "summary.json", "env.json"
TEXT = CONFIG.format(seed=0, task="ring", rho=0.4, method="halve", lr=0.5, steps=3)


def test_a_run_tells_what_it_was(tmp_path: Path) -> None:
    metrics = '{"value": 0.25, "bad": null}'
    summary = f'{{"status": "done", "outer_steps": 3, "metrics": {metrics}}}'
    files = {"resources.json": '{"peak_memory_bytes": 1024}', S: summary}
    path = tmp_path / "ring" / "halve-0123abcd" / "seed-7"
    write_run(tmp_path, seed=7, path=path, files=files)
    [run], skipped = scan(tmp_path)
    assert (run.path, skipped) == (path, [])
    assert (run.task_name, run.task_label, run.task_version) == ("ring", "ring", "2")
    assert (run.method_name, run.label, run.hash, run.seed) == ("halve", "halve", "0123abcd", 7)
    assert (run.budget, run.status, run.error, run.seconds) == ("3 outer steps", "done", None, 0.75)
    # null in the file: it was not finite
    known = {"value": 0.25, "bad": math.nan}
    assert run.metrics == pytest.approx(known, nan_ok=True)
    assert (run.higher_is_better, run.resources) == ({"value": False}, {"peak_memory_bytes": 1024})


def test_labels_of_the_author_come_before_names_and_a_failed_run_is_a_result(
    tmp_path: Path,
) -> None:
    labels = {'label = "none"': 'label = "mine"\ntask_label = "ring at 0.4"'}
    summary = '{"status": "failed", "error": "it grew", "metrics": {}}'
    write_run(tmp_path, files={S: summary, "steps.jsonl": None}, changed=labels)
    [run], skipped = scan(tmp_path)
    assert (run.label, run.task_label, run.method_name) == ("mine", "ring at 0.4", "halve")
    assert (run.status, run.error, skipped) == ("failed", "it grew", [])


def test_copies_count_once_and_of_other_code_the_newer_run(tmp_path: Path) -> None:
    for name, rho in (("a", 0.4), ("b", 0.4), ("c", 0.6)):
        write_run(tmp_path / name, rho=rho)
    runs, [skipped] = scan([tmp_path / name for name in ("a", "b", "c", "a")])
    assert ([run.task["rho"] for run in runs], skipped.code) == ([0.4, 0.6], "duplicate-run")
    for age, name in enumerate(("d", "e")):
        path = write_run(tmp_path / name, environment={"code": {"method": name}})
        os.utime(path / S, (10.0 - age, 10.0 - age))
    [newer], [older] = scan([tmp_path / "e", tmp_path / "d"])
    assert (newer.environment["code"], older.code) == ({"method": "d"}, "outdated-run")


def test_what_cannot_be_read_as_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("no run")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    for name, code in (("notes", "unreadable-file"), ("photos", "no-runs")):
        with rejects(code, str(tmp_path / name), of=CheckpointError):
            read_run(tmp_path / name)
    with rejects("not-a-folder", str(tmp_path / "notes"), of=ConfigError):
        scan(tmp_path / "notes")


def test_names_tell_equal_labels_apart() -> None:
    tables: dict[str, dict[str, Any]] = {
        "a": {"name": "hg", "solver": {"name": "cg", "rtol": 0.1}},
        "b": {"name": "hg", "solver": {"name": "cg", "rtol": 0.2}},
        "c": {"name": "hg", "solver": {"name": "neumann"}},
        "d": {"name": "other"},
    }
    assert short_names(tables, {"a": "hg", "b": "hg", "c": "hg", "d": "other"}) == {
        "a": "hg (solver.name = cg, solver.rtol = 0.1)",
        "b": "hg (solver.name = cg, solver.rtol = 0.2)",
        "c": "hg (solver.name = neumann, solver.rtol = none)",
        "d": "other",
    }


def test_stages_and_scores_of_a_mix_belong_to_its_run(tmp_path: Path) -> None:
    scores = {"metrics": {"gsm8k": 0.7, "tuned": None}, "higher_is_better": {"gsm8k": True}}
    path = tmp_path / "source-mixture" / "halve-0a1b2c3d" / "seed-3"
    write_run(tmp_path, path=path, seed=3, files={"scores.json": json.dumps(scores)})
    (path / "sample").mkdir()
    (path / "sample" / "env.json").write_text("{}")
    [run], skipped = scan(tmp_path)
    assert (run.path, run.hash, skipped) == (path, "0a1b2c3d", [])
    known = {"gsm8k": 0.7, "value": 0.25, "tuned": math.nan}
    assert dict(run.metrics) == pytest.approx(known, nan_ok=True)
    assert dict(run.higher_is_better) == {"value": False, "gsm8k": True}


@pytest.mark.parametrize(("name", "code"), [(".lease", "no-runs"), ("mix.toml", "unfinished-run")])
def test_a_folder_without_a_run_says_what_it_is(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / name).touch()
    with rejects(code, str(tmp_path), of=CheckpointError):
        read_run(tmp_path)
    with rejects("missing-file", str(tmp_path / "no"), of=ConfigError):
        scan(tmp_path / "no")


def large(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(2**40)  # of holes: it takes no room


def link(file: Path) -> None:
    secret = file.parents[2] / "secret.json"
    secret.write_text('{"password": "hunter2"}')
    file.symlink_to(secret)


DEEP = "[" * 100_000
BAD: list[tuple[str, str | Callable[[Path], object] | None, str, tuple[str, ...]]] = [
    (C, None, "missing-file", (C,)),
    (C, lambda file: file.write_bytes(b"\xff\xfe\x00"), "wrong-format", (C,)),
    (C, "seed = [", "wrong-format", (C,)),
    (C, "seed = 0\n", "wrong-type", (C, "task")),
    (
        C,
        TEXT.replace("outer_steps = 3", "outer_steps = 0"),
        "out-of-range",
        (C, "budget", "outer_steps"),
    ),
    (C, TEXT + f"x = {DEEP}", "too-deep", (C,)),
    (C, TEXT + "a" + ".a" * 100_000 + " = 1", "too-deep", (C,)),
    (C, TEXT + "x = " + "9" * 5000, "wrong-format", (C,)),
    (C, TEXT + "x = 0x" + "f" * 5000, "out-of-range", (C,)),
    (C, TEXT + "x" * 2**20, "too-large", (C,)),
    (C, TEXT.replace("seed = 0", "seed = 1.5"), "wrong-type", (C, "seed")),
    (C, TEXT.replace('"none"', f'"{"x" * 1000}"'), "too-large", (C,)),
    (C, TEXT.partition("[task]")[0] + "task = 3\nmethod = 4\nrun = 5\n", "wrong-type", (C, "task")),
    (C, "run = 3\n" + TEXT.replace("[run]", "[other]"), "wrong-type", (C, "run")),
    (S, None, "unfinished-run", (S,)),
    (S, '{"status": "done', "wrong-format", (S,)),
    (S, '{"status": "done", "metrics": [1]}', "wrong-type", (S, "metrics")),
    (S, '{"status": "done", "metrics": {"a": "x"}}', "wrong-type", (S, "metrics", "a")),
    (S, '{"status": "done", "outer_steps": true}', "wrong-type", (S, "outer_steps")),
    (S, '{"status": "done", "outer_steps": 1.5}', "wrong-type", (S, "outer_steps")),
    (S, '{"status": "done", "cost": {"a": 1e999}}', "out-of-range", (S, "cost", "a")),
    (S, '{"status": "failed", "error": {}}', "wrong-type", (S, "error")),
    (S, "[1]", "wrong-type", (S,)),
    (S, "{}", "wrong-value", (S, "status")),
    (S, '{"status": "' + "x" * 10**6 + '"}', "wrong-value", (S, "status")),
    (S, f'{{"status": {DEEP}', "too-deep", (S,)),
    (E, '{"task": 3}', "wrong-type", (E, "task")),
    (E, '{"task": {"metrics": {"value": "false"}}}', "wrong-type", (E, "task", "metrics", "value")),
    (E, '{"task": {"metric_rows": 3}}', "wrong-type", (E, "task", "metric_rows")),
    (E, '{"task": {"metric_rows": {"a": 3}}}', "wrong-type", (E, "task", "metric_rows", "a")),
    (E, "{", "wrong-format", (E,)),
    (E, f'{{"x": {DEEP}', "too-deep", (E,)),
    (E, '{"x": ' + "[" * 100 + "]" * 100 + "}", "too-deep", (E,)),
    (E, '{"x": ' + "9" * 400 + "}", "out-of-range", (E,)),
    (E, '{"x": ' + "9" * 5000 + "}", "wrong-format", (E,)),
    (E, '{"x": "\\ud800"}', "wrong-format", (E,)),
    (E, link, "not-a-file", (E,)),
    (E, lambda file: file.symlink_to("/dev/zero"), "not-a-file", (E,)),
    (E, os.mkfifo, "not-a-file", (E,)),
    (E, Path.mkdir, "unreadable-file", (E,)),
    (E, large, "too-large", (E,)),
    ("steps.jsonl", None, "missing-file", ("steps.jsonl",)),
    ("scores.json", '{"metrics": 3}', "wrong-type", ("scores.json", "metrics")),
    ("scores.json", '{"metrics": {"a": "b"}}', "wrong-type", ("scores.json", "metrics", "a")),
    ("scores.json", "[]", "wrong-type", ("scores.json",)),
    ("scores.json", "{", "wrong-format", ("scores.json",)),
    (
        "resources.json",
        '{"peak_memory_bytes": "x"}',
        "wrong-type",
        ("resources.json", "peak_memory_bytes"),
    ),
]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize(("name", "content", "code", "place"), BAD)
def test_a_folder_that_is_no_run_is_left_out_with_a_short_reason(
    tmp_path: Path,
    name: str,
    content: str | Callable[[Path], object] | None,
    code: str,
    place: tuple[str, ...],
) -> None:
    good = write_run(tmp_path / "good")
    bad = tmp_path / "bad" / "seed-0"
    write_run(tmp_path, path=bad, files={name: None if callable(content) else content})
    if callable(content):
        content(bad / name)
    runs, [skipped] = scan(tmp_path)
    assert [run.path for run in runs] == [good]
    assert (skipped.path, skipped.code, skipped.place) == (bad, code, place)
    assert len(skipped.reason) < 500


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_an_empty_folder_is_named_and_a_link_out_of_the_folders_is_not_followed(
    tmp_path: Path,
) -> None:
    private = write_run(tmp_path / "private")
    stranger = tmp_path / "stranger"
    (stranger / "mix" / "seed-2").mkdir(parents=True)
    for name in ("mix/seed-0", "seed-1"):
        (stranger / name).symlink_to(private)
    runs, [skipped] = scan(stranger)
    assert (runs, skipped.path.name, skipped.code) == ([], "seed-2", "no-runs")


def test_text_for_a_terminal_holds_nothing_that_it_obeys() -> None:
    hostile = "a\x1b]0;owned\x07\x9b31mb\r\u202ec\udc80\n\td"
    assert printable(hostile) == "a\\x1b]0;owned\\x07\\x9b31mb\\r\\u202ec\\udc80\n\td"
    assert printable("±θ – é 重") == "±θ – é 重"
