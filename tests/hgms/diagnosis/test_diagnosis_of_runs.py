"""What is diagnosed beside a run: files, the command and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.run_folders import write_run

import hgms.report as report
from hgms.cli import main
from hgms.diagnosis import Diagnosis
from hgms.report.page import html as page_of
from hgms.runs import RunConfig, RunFolder, run_config
from hgms_core import Record

CONFIG = """
budget = "7 steps"
task = { name = "quadratic", features = 4, rows = 20, validation_rows = 1 }
method = { name = "hg-ms", generator.steps = 3, keep = "best" }
run = { diagnose = 2, checkpoint_seconds = 0 }
"""
KEPT = ("steps.jsonl", "summary.json", "checkpoint-7.safetensors", "diagnosis.jsonl")


def bytes_of(folder: Path, names: tuple[str, ...] = KEPT) -> list[bytes]:
    return [(folder / name).read_bytes() for name in names]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "on"
    run_config(RunConfig.from_toml(CONFIG), path=path)
    return path


@pytest.mark.extended
def test_a_run_ends_with_the_same_bytes_and_hash_whether_it_is_diagnosed(
    finished: Path, tmp_path: Path
) -> None:
    plain = RunConfig.from_toml(CONFIG.replace("diagnose = 2, ", ""))
    run_config(plain, path=tmp_path / "off")
    assert bytes_of(finished, KEPT[:3]) == bytes_of(tmp_path / "off", KEPT[:3])
    assert not (tmp_path / "off" / "diagnosis.jsonl").exists()
    assert plain.config_hash == RunConfig.from_toml(CONFIG).config_hash


def test_a_resumed_run_has_the_diagnosis_of_an_uninterrupted_one(
    finished: Path, tmp_path: Path
) -> None:
    def stop(info: Any, record: Record, share: float) -> None:
        if record["step"] == 5:
            raise RuntimeError("enough")

    config = RunConfig.from_toml(CONFIG)
    path = tmp_path / config.path
    with pytest.raises(RuntimeError, match="enough"):
        run_config(config, path=path, watch=stop)
    folder = RunFolder(path)
    # of a step whose checkpoint was not written before the kill
    folder.append_diagnosis({"step": 6})
    result = run_config(config, path=path, resume=True)
    assert bytes_of(path) == bytes_of(finished)
    again = run_config(config, path=path, resume=True)  # read back
    assert again.diagnosis.rows == result.diagnosis.rows == folder.diagnoses()
    # the command says the warnings
    (tmp_path / "run.toml").write_text(CONFIG)
    words = ["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "runs")]
    told = json.loads(CliRunner().invoke(main, [*words, "--resume", "--json"]).output)
    assert told["warnings"] == Diagnosis(folder.diagnoses()).warnings != []


def test_warnings_say_in_how_many_steps_and_by_how_much() -> None:
    rows = [
        {
            "step": 1,
            "bias": 0.1,
            "residual": 2.0,
            "curvature": -1.0,
            "choice_ratio": 0.5,
            "gain_differentiation": 0.1,
        },
        {
            "step": 2,
            "bias": 0.8,
            "residual": 0.1,
            "curvature": 1.0,
            "choice_ratio": 5.0,
            "gain_differentiation": -0.2,
        },
        {
            "step": 3,
            "bias": None,
            "longer_cosine": 0.2,
            "double_cosine": 0.9,
            "log10_candidates_to_halve": 30.0,
        },
    ]
    sentences = Diagnosis(rows).warnings
    assert len(sentences) == 8


def test_a_report_shows_what_was_diagnosed(tmp_path: Path) -> None:
    rows = [{"step": step, "bias": bias} for step, bias in ((2, 0.8), (4, 0.2))]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_run(tmp_path, method="hg-ms", files={"diagnosis.jsonl": text})
    _, _, shown = page_of(report.build([tmp_path])).partition("Trust in the hypergradients")
    assert "<strong>hg-ms</strong>: the lower level is not solved in 1 of 2" in shown
