"""Run folders read back: what is a run, what is left out and why, and the rows by column."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.helpers import rejects
from support.made_runs import CONFIG, seal, write_run

from hgms.config.control_characters import printable
from hgms.config.tables import difference
from hgms.results import read_run, scan, scan_sweeps, short_names
from hgms.runs import RunFolder
from hgms_core.errors import CheckpointError, ConfigError


def config() -> str:
    return CONFIG.format(seed=0, task="ring", rho=0.4, method="halve", lr=0.5, steps=3)


def write(folder: Path, seed: int = 0, rho: float = 0.4, **files: Any) -> Path:
    """A finished run of three steps; ``files`` lays other texts over its files
    (``summary_json=…``), None leaves one out.
    """
    path = (
        folder
        if folder.name.startswith("seed-")
        else folder / "ring" / "halve-0123abcd" / f"seed-{seed}"
    )
    return write_run(
        folder,
        seed=seed,
        rho=rho,
        path=path,
        files={key.replace("_", "."): text for key, text in files.items()},
    )


def test_a_run_tells_what_it_was(tmp_path: Path) -> None:
    summary = '{"status": "done", "outer_steps": 3, "metrics": {"value": 0.25, "bad": null}}'
    path = write(
        tmp_path, seed=7, resources_json='{"peak_memory_bytes": 1024}', summary_json=summary
    )
    [run], skipped = scan(tmp_path)
    assert skipped == []
    assert run.path == path
    assert (run.task_name, run.task_label, run.task_version) == ("ring", "ring", "2")
    assert (run.method_name, run.label, run.hash, run.seed, run.budget) == (
        "halve",
        "halve",
        "0123abcd",
        7,
        "3 outer steps",
    )
    assert run.status == "done"
    assert run.error is None
    assert run.metrics["value"] == 0.25
    assert math.isnan(run.metrics["bad"])  # null in the file: it was not finite
    assert run.higher_is_better == {"value": False}
    assert run.resources == {"peak_memory_bytes": 1024}
    assert run.seconds == 0.75
    assert [row["seconds"] for row in run.records()] == [0.0, 0.25, 0.5, 0.75]


def test_labels_of_the_author_come_before_names(tmp_path: Path) -> None:
    text = config().replace('label = "none"', 'label = "mine"\ntask_label = "ring at 0.4"')
    write(tmp_path, config_toml=text)
    [run], _ = scan(tmp_path)
    assert (run.label, run.task_label, run.method_name, run.task_name) == (
        "mine",
        "ring at 0.4",
        "halve",
        "ring",
    )


@pytest.mark.parametrize("fast", [True, False])
def test_columns_with_and_without_the_fast_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    if fast:
        pytest.importorskip("msgspec", reason="the extra report is not installed")
    else:
        monkeypatch.setattr("hgms.results.columns._decoder", lambda wanted: None)
    rows = ['{"step": 0, "metric.value": 1}'] + [
        (
            f'{{"step": {step}, "gap": {step / 8}, "outcome": "converged", "residual": [0.1, 0.3], '
            '"metric.value": 0.5}'
        )
        for step in (1, 2, 3)
    ]
    path = write(tmp_path, steps_jsonl="\n".join(rows) + "\n")
    with (path / "steps.jsonl").open("a") as stream:
        stream.write('{"step": 4, "gap": 0')  # killed while appending
    seal(path)
    columns = read_run(path).columns(
        ["seconds", "gap", "outcome", "residual", "metric.value", "nobody"]
    )
    assert list(columns) == [
        "step",
        "seconds",
        "gap",
        "outcome",
        "residual",
        "metric.value",
        "nobody",
    ]
    np.testing.assert_array_equal(columns["step"], [0, 1, 2, 3])
    np.testing.assert_array_equal(columns["seconds"], [0, 0.25, 0.5, 0.75])
    np.testing.assert_array_equal(columns["gap"], [np.nan, 1 / 8, 2 / 8, 3 / 8])
    np.testing.assert_array_equal(columns["residual"], [np.nan, 0.3, 0.3, 0.3])
    assert columns["outcome"].tolist() == [None, "converged", "converged", "converged"]
    assert np.isnan(columns["nobody"]).all()


def test_a_step_without_its_time_has_none(tmp_path: Path) -> None:
    path = write(
        tmp_path, timings_jsonl='{"step": 0, "seconds": 0.0}\n{"step": 2, "seconds": 0.5}\n'
    )
    np.testing.assert_array_equal(
        read_run(path).columns(["seconds"])["seconds"], [0, np.nan, 0.5, np.nan]
    )


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, steps_jsonl='{"step": 0}\n{"step": 1, "gap"\n{"step": 2}\n')
    with rejects("damaged-file", "steps.jsonl", 2, of=CheckpointError):
        read_run(path).columns(["gap"])


def empty(path: Path) -> None:
    path.mkdir(parents=True)


def binary(path: Path) -> None:
    write(path, config_toml="")
    (path / "config.toml").write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("make", "code", "place"),
    [
        (empty, "no-runs", ()),
        (binary, "wrong-format", ("config.toml",)),
        (lambda path: write(path, config_toml=None), "missing-file", ("config.toml",)),
        (lambda path: write(path, config_toml="seed = ["), "wrong-format", ("config.toml",)),
        (
            lambda path: write(path, config_toml="seed = 0\n"),
            "missing-option",
            ("config.toml", "task"),
        ),
        (
            lambda path: write(
                path, config_toml=config().replace("outer_steps = 3", "outer_steps = 0")
            ),
            "out-of-range",
            ("config.toml", "budget", "outer_steps"),
        ),
        (lambda path: write(path, summary_json=None), "unfinished-run", ("summary.json",)),
        (
            lambda path: write(path, summary_json='{"status": "done'),
            "wrong-format",
            ("summary.json",),
        ),
        (
            lambda path: write(path, summary_json='{"status": "done", "metrics": [1]}'),
            "wrong-type",
            ("summary.json", "metrics"),
        ),
        (
            lambda path: write(path, summary_json='{"status": "done", "metrics": {"a": "x"}}'),
            "wrong-type",
            ("summary.json", "metrics", "a"),
        ),
        (
            lambda path: write(path, summary_json='{"status": "done", "outer_steps": true}'),
            "wrong-type",
            ("summary.json", "outer_steps"),
        ),
        (lambda path: write(path, env_json='{"task": 3}'), "wrong-type", ("env.json", "task")),
        (
            lambda path: write(path, resources_json='{"peak_memory_bytes": "x"}'),
            "wrong-type",
            ("resources.json", "peak_memory_bytes"),
        ),
        (lambda path: write(path, summary_json="[1]"), "wrong-type", ("summary.json",)),
        (lambda path: write(path, summary_json="{}"), "wrong-value", ("summary.json", "status")),
        (lambda path: write(path, steps_jsonl=None), "missing-file", ("steps.jsonl",)),
        (lambda path: write(path, env_json="{"), "wrong-format", ("env.json",)),
    ],
)
def test_what_is_not_a_run_is_named_and_left_out(
    tmp_path: Path, make: Callable[[Path], object], code: str, place: tuple[str, ...]
) -> None:
    good = write(tmp_path / "good")
    bad = tmp_path / "bad" / "seed-0"
    make(bad)
    runs, [skipped] = scan(tmp_path)
    assert [run.path for run in runs] == [good]
    assert skipped.path == bad
    assert (skipped.code, skipped.place) == (code, place)


def test_a_failed_run_is_a_result(tmp_path: Path) -> None:
    write(
        tmp_path,
        summary_json='{"status": "failed", "error": "it grew", "metrics": {}}',
        steps_jsonl=None,
    )
    [run], skipped = scan(tmp_path)
    assert (run.status, run.error, skipped) == ("failed", "it grew", [])


def test_copies_count_once(tmp_path: Path) -> None:
    write(tmp_path / "a", rho=0.4)
    write(tmp_path / "b", rho=0.4)
    write(tmp_path / "c", rho=0.6)
    runs, [skipped] = scan([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert [run.task["rho"] for run in runs] == [0.4, 0.6]
    assert skipped.code == "duplicate-run"
    assert len(scan([tmp_path / "a", tmp_path / "a"])[0]) == 1


def test_trials_of_a_sweep_are_kept_apart(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path / "sweeps" / "ring" / "halve", seed=3)
    (tmp_path / "sweeps" / "ring" / "halve" / "sweep.json").write_text(
        '{"trials": [], "chosen": 0}'
    )
    (tmp_path / "sweeps" / "broken").mkdir()
    (tmp_path / "sweeps" / "broken" / "sweep.json").write_text("{")
    runs, skipped = scan(tmp_path)
    assert [run.seed for run in runs] == [0]
    assert skipped == []
    [found], [damaged] = scan_sweeps(tmp_path)
    assert found.table == {"trials": [], "chosen": 0}
    assert (damaged.code, damaged.place) == ("wrong-format", ("sweep.json",))
    assert [run.seed for run in scan(tmp_path / "sweeps")[0]] == [3]  # asked for by name


@pytest.mark.parametrize("code", ["missing-file", "not-a-folder"])
def test_a_folder_that_is_none(tmp_path: Path, code: str) -> None:
    path = tmp_path / "runs"
    if code == "not-a-folder":
        path.write_text("")
    with rejects(code, str(path), of=ConfigError):
        scan(path)


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
    assert difference([{"a": 1}, {"a": 1}]) == []


# --- mixes
# --------------------------------------------------------------------------------------------------


def test_the_stages_of_a_mix_are_no_runs(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, path=tmp_path / "source-mixture" / "halve-0a1b2c3d" / "seed-3", seed=3
    )
    for stage in ("sample", "finetune", "finetune-99aabbcc"):
        (folder / stage).mkdir()
        (folder / stage / "env.json").write_text("{}")
    [run], skipped = scan(tmp_path)
    assert (run.path, run.hash, skipped) == (folder, "0a1b2c3d", [])


def test_scores_of_a_tuned_model_stand_beside_the_run_s_metrics(tmp_path: Path) -> None:
    scores = {
        "metrics": {"gsm8k_accuracy": 0.7, "tuned_loss": None},
        "higher_is_better": {"gsm8k_accuracy": True},
    }
    write_run(tmp_path, files={"scores.json": json.dumps(scores)})
    [run], _ = scan(tmp_path)
    assert run.metrics["gsm8k_accuracy"] == 0.7
    assert math.isnan(run.metrics["tuned_loss"])
    assert run.metrics["value"] == 0.25
    assert dict(run.higher_is_better) == {"value": False, "gsm8k_accuracy": True}


@pytest.mark.parametrize("scores", ['{"metrics": 3}', '{"metrics": {"a": "b"}}', "[]", "{"])
def test_scores_that_are_none_damage_the_run(tmp_path: Path, scores: str) -> None:
    write_run(tmp_path, files={"scores.json": scores})
    runs, [skipped] = scan(tmp_path)
    assert runs == []
    assert skipped.place[0] == "scores.json"


# --- strangers' folders
# --------------------------------------------------------------------------------------------------


def secret(path: Path) -> None:
    outside = path.parents[1] / "secret.json"
    outside.write_text('{"password": "hunter2"}')
    write(path)
    (path / "env.json").unlink()
    (path / "env.json").symlink_to(outside)


def pipe(path: Path) -> None:
    write(path)
    (path / "env.json").unlink()
    os.mkfifo(path / "env.json")


def endless(path: Path) -> None:
    write(path)
    (path / "env.json").unlink()
    (path / "env.json").symlink_to("/dev/zero")


def directory(path: Path) -> None:
    write(path, env_json=None)
    (path / "env.json").mkdir()


def large(path: Path) -> None:
    write(path)
    with (path / "env.json").open("wb") as stream:
        stream.truncate(2**40)  # of holes: it takes no room


DEEP = "[" * 100_000


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize(
    ("make", "code", "place"),
    [
        (secret, "not-a-file", ("env.json",)),
        (endless, "not-a-file", ("env.json",)),
        (pipe, "not-a-file", ("env.json",)),
        (directory, "unreadable-file", ("env.json",)),
        (large, "too-large", ("env.json",)),
        (
            lambda path: write(path, config_toml=config() + f"x = {DEEP}"),
            "too-deep",
            ("config.toml",),
        ),
        (
            lambda path: write(path, config_toml=config() + "a" + ".a" * 100_000 + " = 1"),
            "too-deep",
            ("config.toml",),
        ),
        (
            lambda path: write(path, config_toml=config() + "x = " + "9" * 5000),
            "wrong-format",
            ("config.toml",),
        ),
        (
            lambda path: write(path, config_toml=config() + "x = 0x" + "f" * 5000),
            "out-of-range",
            ("config.toml",),
        ),
        (
            lambda path: write(path, config_toml=config() + "x" * 2**20),
            "too-large",
            ("config.toml",),
        ),
        (
            lambda path: write(path, config_toml=config().replace("seed = 0", "seed = 1.5")),
            "wrong-type",
            ("config.toml", "seed"),
        ),
        (
            lambda path: write(path, config_toml=config().replace('"none"', f'"{"x" * 1000}"')),
            "too-large",
            ("config.toml",),
        ),
        (lambda path: write(path, env_json=f'{{"x": {DEEP}'), "too-deep", ("env.json",)),
        (
            lambda path: write(path, env_json='{"x": ' + "[" * 100 + "]" * 100 + "}"),
            "too-deep",
            ("env.json",),
        ),
        (
            lambda path: write(path, env_json='{"x": ' + "9" * 400 + "}"),
            "out-of-range",
            ("env.json",),
        ),
        (
            lambda path: write(path, env_json='{"x": ' + "9" * 5000 + "}"),
            "wrong-format",
            ("env.json",),
        ),
        (lambda path: write(path, env_json='{"x": "\\ud800"}'), "wrong-format", ("env.json",)),
        (
            lambda path: write(path, env_json='{"task": {"metrics": {"value": "false"}}}'),
            "wrong-type",
            ("env.json", "task", "metrics", "value"),
        ),
        (
            lambda path: write(path, summary_json=f'{{"status": {DEEP}'),
            "too-deep",
            ("summary.json",),
        ),
        (
            lambda path: write(path, summary_json='{"status": "done", "outer_steps": 1.5}'),
            "wrong-type",
            ("summary.json", "outer_steps"),
        ),
        (
            lambda path: write(path, summary_json='{"status": "done", "oracle_calls": -1}'),
            "out-of-range",
            ("summary.json", "oracle_calls"),
        ),
        (
            lambda path: write(path, summary_json='{"status": "done", "cost": {"a": 1e999}}'),
            "out-of-range",
            ("summary.json", "cost", "a"),
        ),
        (
            lambda path: write(path, summary_json='{"status": "failed", "error": {}}'),
            "wrong-type",
            ("summary.json", "error"),
        ),
        (
            lambda path: write(path, summary_json='{"status": "' + "x" * 10**6 + '"}'),
            "wrong-value",
            ("summary.json", "status"),
        ),
    ],
)
def test_one_stranger_s_folder_is_left_out_with_a_short_reason(
    tmp_path: Path, make: Callable[[Path], object], code: str, place: tuple[str, ...]
) -> None:
    good = write(tmp_path / "good")
    bad = tmp_path / "bad" / "seed-0"
    bad.parent.mkdir()
    make(bad)
    runs, [skipped] = scan(tmp_path)
    assert [run.path for run in runs] == [good]
    assert (skipped.code, skipped.place) == (code, place)
    assert len(skipped.reason) < 500


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_no_folder_is_a_link_out_of_the_folders(tmp_path: Path) -> None:
    private = write(tmp_path / "private")
    stranger = tmp_path / "stranger"
    (stranger / "mix").mkdir(parents=True)
    (stranger / "mix" / "seed-0").symlink_to(private)
    (stranger / "seed-1").symlink_to(private)
    assert scan(stranger)[0] == []


def test_a_digit_that_flipped_in_a_summary_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path)
    RunFolder(path).write_summary({"status": "done", "metrics": {"value": 0.25}})
    assert read_run(path).metrics == {"value": 0.25}
    (path / "summary.json").write_text((path / "summary.json").read_text().replace("0.25", "0.35"))
    _, [skipped] = scan(tmp_path)
    assert (skipped.code, skipped.place) == ("damaged-file", ("summary.json",))


def test_numbers_that_no_double_holds_are_not_finite(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        summary_json=(
            '{"status": "done", "metrics": {"a": 1e999, "b": -Infinity, "c": NaN, "d": 1e308}}'
        ),
    )
    stored = read_run(path).metrics
    assert stored.pop("d") == 1e308
    assert all(map(math.isnan, stored.values()))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\x01b"])
def test_a_source_of_any_name_is_read(tmp_path: Path, name: str) -> None:
    """The fast reader takes no such names."""
    rows = "".join(
        json.dumps({"step": step, f"weight.{name}": step / 4}) + "\n" for step in range(4)
    )
    columns = read_run(write(tmp_path, steps_jsonl=rows)).columns([f"weight.{name}"])
    np.testing.assert_array_equal(columns[f"weight.{name}"], [0, 0.25, 0.5, 0.75])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1e999", math.nan),
        ("9" * 400, math.nan),
        ("9" * 4000, math.nan),
        ("[[1, [2]], 3]", 3.0),
        ("[1, 1e999]", 1.0),
        ("[" * 200 + "5" + "]" * 200, 5.0),
        ("{}", math.nan),
        ("[]", math.nan),
        ("1e308", 1e308),
        ('["a", 2]', 2.0),
    ],
)
@pytest.mark.parametrize("everywhere", [True, False])
def test_odd_values_in_rows_are_numbers_or_none(
    tmp_path: Path, value: str, expected: float, everywhere: bool
) -> None:
    rows = [
        f'{{"step": {step}, "gap": {value if everywhere or step == 1 else 0.5}}}'
        for step in range(3)
    ]
    column = read_run(write(tmp_path, steps_jsonl="\n".join(rows) + "\n")).columns(["gap"])["gap"]
    assert column.dtype == float
    np.testing.assert_array_equal(column, [expected] * 3 if everywhere else [0.5, expected, 0.5])


def test_words_that_look_like_numbers_are_words(tmp_path: Path) -> None:
    rows = "".join(f'{{"step": {step}, "outcome": "{step}"}}\n' for step in range(3))
    assert read_run(write(tmp_path, steps_jsonl=rows)).columns(["outcome"])["outcome"].tolist() == [
        "0",
        "1",
        "2",
    ]


def lines(name: str, *values: object) -> str:
    return "".join(
        json.dumps({"step": step, name: value}) + "\n" for step, value in enumerate(values)
    )


@pytest.mark.parametrize(
    ("files", "code", "place"),
    [
        ({"steps_jsonl": lines("gap", 1, 2, 3) * 2}, "wrong-row", ("steps.jsonl", 4)),
        ({"steps_jsonl": '{"step": 0}\n{"step": 0}\n'}, "wrong-row", ("steps.jsonl", 2)),
        ({"steps_jsonl": '{"step": 0}\n{"gap": 0}\n'}, "wrong-row", ("steps.jsonl", 2)),
        ({"steps_jsonl": '{"step": 0}\n{"step": 1.5}\n'}, "wrong-row", ("steps.jsonl", 2)),
        ({"steps_jsonl": '{"step": -1}\n{"step": 1}\n'}, "wrong-row", ("steps.jsonl", 1)),
        ({"steps_jsonl": '{"step": "0"}\n{"step": "1"}\n'}, "wrong-row", ("steps.jsonl", 1)),
        (
            {"steps_jsonl": lines("oracle_calls", 0, 5, 4)},
            "wrong-value",
            ("steps.jsonl", "oracle_calls"),
        ),
        (
            {"timings_jsonl": lines("seconds", 0, 5, 4, 6)},
            "wrong-value",
            ("timings.jsonl", "seconds"),
        ),
        (
            {"timings_jsonl": lines("seconds", 0, 1, "2", 3)},
            "wrong-type",
            ("timings.jsonl", "seconds"),
        ),
        ({"timings_jsonl": lines("seconds", 0, "1")}, "wrong-type", ("timings.jsonl", "seconds")),
        ({"steps_jsonl": '{"step": 0}\n' + DEEP + "\n"}, "damaged-file", ("steps.jsonl", 2)),
    ],
)
def test_rows_that_no_run_wrote_are_refused(
    tmp_path: Path, files: dict[str, str], code: str, place: tuple[str | int, ...]
) -> None:
    run = read_run(write(tmp_path, **files))
    with rejects(code, *place, of=CheckpointError):
        run.columns(["seconds", "oracle_calls"])


@pytest.mark.parametrize("last", ['"x"', "[]", "9" * 400, "null", "1e999"])
def test_a_clock_that_is_none(tmp_path: Path, last: str) -> None:
    assert math.isnan(
        read_run(write(tmp_path, timings_jsonl=f'{{"step": 0, "seconds": {last}}}\n')).seconds
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"trials": 3}',
        '{"trials": [3]}',
        '{"trials": [{"values": [1]}]}',
        '{"trials": [{"loss": "x"}]}',
        "[" * 10**5,
    ],
)
def test_a_sweep_that_is_none_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "sweep.json").write_text(text)
    stored, [skipped] = scan_sweeps(tmp_path)
    assert stored == []
    assert skipped.place[0] == "sweep.json"


def test_text_for_a_terminal_holds_nothing_that_it_obeys() -> None:
    hostile = "a\x1b]0;owned\x07\x9b31mb\r\u202ec\udc80\n\td"
    assert printable(hostile) == "a\\x1b]0;owned\\x07\\x9b31mb\\r\\u202ec\\udc80\n\td"
    assert printable("±θ – é 重") == "±θ – é 重"


@pytest.mark.parametrize(
    ("names", "code", "place"),
    [
        ([".lease", ".mix.lease", ".lock"], "no-runs", ()),
        (["mix.toml", ".mix.lease"], "unfinished-run", ()),
        (["notes.txt"], "no-runs", ()),
    ],
)
def test_a_folder_without_a_run_says_what_it_is(
    tmp_path: Path, names: list[str], code: str, place: tuple[str, ...]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    with rejects(code, str(tmp_path), *place, of=CheckpointError):
        read_run(tmp_path)
