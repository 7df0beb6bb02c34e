"""`hgms mix compare`: tables of tuned models, a process for each mix, and [for.LABEL]."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hgms_cli import main
from hgms_core import ConfigError
from hgms_mix.config import load
from hgms_mix_compare import mixes
from hgms_mix_compare.mixes import Contest, carry_out
from hgms_mix_compare.outcome import Outcome

pytestmark = pytest.mark.plugins

GRID = """
budget = "2 steps"
seeds = [3, 5]
method = ["hg-ms", { name = "hg-ms", label = "other" }, "uniform"]

[task]
name = "source-mixture"
model = { config = { model_type = "gpt2", n_layer = 1 }, tokenizer = "bytes" }
sources = { one = { path = "one.jsonl" }, two = { path = "two.jsonl" } }
validation = { all = { path = "validation.jsonl" } }

[sample]
size = 10

[for.uniform]
sample.size = 24
finetune.epochs = 2
"""


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


def test_values_for_one_method_are_laid_over_its_mix_alone(grid: Path) -> None:
    uniform, other = (load(grid, method=label) for label in ("uniform", "other"))
    assert (uniform.sample.size, uniform.finetune.epochs) == (24, 2)
    assert (other.sample.size, other.finetune.epochs) == (10, 1)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("[for.uniforn]\nsample.size = 3", "unknown method 'uniforn'; did you mean 'uniform'"),
        ("[for.uniform]\ntask.cache = 3", "unknown table 'task'"),
        ("[for.uniform]\nsampel.size = 3", "unknown table 'sampel'; did you mean 'sample'"),
    ],
)
def test_values_for_nobody_or_of_another_table_are_refused(tmp_path: Path, own: str, message: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(GRID.partition("[for.uniform]")[0] + own)
    with pytest.raises(ConfigError, match=message):
        load(path, method="uniform")


def test_compare_passes_over_values_for_one_method(grid: Path) -> None:
    result = CliRunner().invoke(main, ["compare", str(grid), "--dry-run"])
    assert result.exit_code == 0, result.output


def test_a_contest_is_of_all_methods_and_seeds(grid: Path) -> None:
    contest = Contest.of(grid, None, None, None)
    assert contest.labels == ("hg-ms", "other", "uniform")
    assert contest.reference == "uniform"
    assert contest.roles["uniform"] == "floor"
    assert list(contest.mixes())[:4] == [("hg-ms", 3), ("other", 3), ("uniform", 3), ("hg-ms", 5)]
    some = Contest.of(grid, ["other", "hg-ms"], [9], "hg-ms", out="x")
    assert (set(some.labels), some.seeds, some.reference, some.options) == ({"other", "hg-ms"}, (9,), "hg-ms", ("--out", "x"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "uniforn"], "unknown method 'uniforn'; did you mean 'uniform'?"),
        (["--methods", "hg-ms", "--reference", "uniform"], "name it among --methods"),
        (["--seeds", "three"], "write a count"),
    ],
)
def test_bad_words_are_one_message_and_exit_code_2(grid: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["mix", "compare", str(grid), *words])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_file_of_one_method_has_nothing_to_compare(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text('method = "uniform"\n')
    result = CliRunner().invoke(main, ["mix", "compare", str(path)])
    assert result.exit_code == 2
    assert "nothing to compare" in result.output


def report(loss: float, counts: dict[str, int], seconds: list[float | None]) -> dict[str, Any]:
    stages = zip(("reweight", "sample", "finetune"), seconds, strict=True)
    return {
        "folder": "somewhere",
        "test": {"all": {"token_loss": {"value": loss}}},
        "sample": {"size": sum(counts.values()), "counts": counts},
        "stages": {name: {"processor_seconds": spent} for name, spent in stages},
    }


LOSSES = {
    "ours": [1.00, 1.02, 0.98, 1.01, 0.99],
    "theirs": [1.20, 1.21, 1.19, 1.22, 1.18],
    "uniform": [1.21, 1.22, 1.18, 1.23, 1.19],
    "oracle": [0.9, 0.91, 0.92, 0.9, 0.91],
}
ROLES = {"ours": "", "theirs": "", "uniform": "floor", "oracle": "ceiling"}


def outcome(failures: dict[tuple[str, int], str] | None = None) -> Outcome:
    reports = {
        (label, seed): report(loss, {"a": 6, "b": 2 + 2 * seed}, [10.0, 1.0, 5.0 + seed])
        for label, values in LOSSES.items()
        for seed, loss in enumerate(values)
    }
    labels, failures = tuple(LOSSES), failures or {}
    return Outcome(reports=reports, failures=failures, labels=labels, roles=ROLES, reference="uniform")


def test_differences_are_paired_by_seed_and_said_in_words() -> None:
    table = outcome()
    gap = table.pairs("all")["ours", "uniform"]
    assert gap.mean == pytest.approx(-0.206)
    assert gap.excludes_zero
    assert not table.pairs("all")["theirs", "uniform"].excludes_zero
    assert table.verdicts("all") == [
        "all: ours is ahead of every reference that learns nothing",
        "all: theirs is not ahead of uniform",
    ]
    rows = table.rows("all")
    assert [row["method"] for row in rows] == ["ours", "theirs", "uniform", "oracle"]
    assert [row["− uniform"].endswith(" *") for row in rows] == [True, False, False, False]
    assert rows[0]["processor s"] == "16–20"
    assert rows[0]["rows"] == "8–16"


def test_the_mixture_shown_is_that_of_the_rows_drawn() -> None:
    shares = [6 / (8 + 2 * seed) for seed in range(5)]
    assert outcome().mixture("ours") == f"a {sum(shares) / 5:.2f} b {1 - sum(shares) / 5:.2f}"


def test_seconds_that_were_not_counted_are_a_dash() -> None:
    reports = {("ours", 0): report(1.0, {"a": 1}, [10.0, 1.0, None])}
    table = Outcome(reports=reports, failures={}, labels=("ours",), roles={"ours": ""}, reference="ours")
    assert table.rows("all")[0]["processor s"] == "–"


def test_what_is_printed_names_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    outcome({("theirs", 4): "a\nno memory"}).print()
    out = capsys.readouterr().out
    assert "failed: theirs, seed 4: no memory" in out
    assert "5 seeds: a claim needs 10" in out
    json.dumps(outcome().as_dict())


SCRIPT = """#!{python}
import json, sys
words = sys.argv[1:]
label, seed = words[words.index("--method") + 1], int(words[words.index("--seed") + 1])
if label == "other" and seed == 5:
    sys.exit("error: the disk is full")
print(json.dumps({{"folder": label, "test": {{"all": {{"token_loss": {{"value": len(label) + seed}}}}}}, "words": words}}))
"""


def test_a_mix_that_fails_stops_no_other(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(mixes.sys, "executable", str(script))
    lines: list[str] = []
    result = carry_out(Contest.of(grid, None, None, None, out="there"), 2, lines.append)
    assert set(result.reports) == {("hg-ms", 3), ("hg-ms", 5), ("other", 3), ("uniform", 3), ("uniform", 5)}
    assert result.failures == {("other", 5): "error: the disk is full"}
    assert result.losses("all")["uniform"] == {3: 10, 5: 12}
    words = result.reports["uniform", 5]["words"]
    assert words[:4] == ["-m", "hgms_cli", "mix", "all"]
    assert words[words.index("--out") + 1] == "there"
    assert len(lines) == 6


@pytest.mark.extended
def test_the_mixes_are_those_of_hgms_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {"one": range(30), "two": range(30, 60), "validation": range(60, 80), "test": range(80, 90)}
    for name, numbers in rows.items():
        lines = [json.dumps({"prompt": f"{n} twice", "completion": "." if name == "two" else str(2 * n)}) for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    size = "n_layer = 1, n_embd = 8, n_head = 2, n_positions = 40"
    text = GRID.replace("n_layer = 1", size).replace("[sample]", '[task.test]\nall = { path = "test.jsonl" }\n\n[sample]')
    text = text.replace('budget = "2 steps"', 'budget = "2 steps"\nrun = { out = "mixes", threads = 1 }')
    text = text.replace('name = "source-mixture"', 'name = "source-mixture"\ntemplate = "plain"\nmax_length = 40')
    Path("grid.toml").write_text(text)
    words = ["mix", "compare", "grid.toml", "--methods", "hg-ms,uniform", "--json"]
    result = CliRunner().invoke(main, words, env=dict(os.environ))
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert {mix["folder"] for mix in table["mixes"]} >= {str(path.parent) for path in Path("mixes").rglob("report.json")}
    losses = table["tests"]["all"]["losses"]
    alone = CliRunner().invoke(main, ["mix", "grid.toml", "--method", "uniform", "--seed", "5", "--json"])
    assert json.loads(alone.stdout)["test"]["all"]["token_loss"]["value"] == losses["uniform"]["5"]
    assert json.loads(alone.stdout)["sample"]["size"] == 24
