"""A result belongs to code, data, configuration and seed: a run that is resumed with others is
rejected.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from support.helpers import load_script, rejects

from hgms.cli import main
from hgms.config.fingerprinting import fingerprint, source_digests
from hgms.results import read_run, scan
from hgms.runs import RunConfig, RunFolder, files, run, run_config
from hgms.runs.lease import HeldFolders, Lease, holder
from hgms.runs.provenance import data_of, digests
from hgms.tasks import HyperCleaning, ImbalancedLoss, LogisticCv, RidgeCv
from hgms_core import Problem
from hgms_core.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hgms(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def write_libsvm(path: Path, factor: int = 1) -> None:
    rows = (f"{i * factor % 7 / 3} 1:{i % 5} 2:{i * i % 7} 3:{i % 11}" for i in range(60))
    path.write_text("\n".join(rows) + "\n")


def write_npz(path: Path, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    labels = np.arange(120) % 10
    np.savez(path, images=draw.integers(0, 255, (120, 4, 4), dtype=np.uint8), labels=labels)


RIDGE = """
budget = "2 steps"
task = { name = "ridge-cv", dataset = "libsvm:t.svm" }
method = { name = "hg-implicit", generator.steps = 3 }
run = { threads = 1 }
"""


def test_a_run_is_not_resumed_on_other_data(folder: Path) -> None:
    (folder / "run.toml").write_text(RIDGE)
    write_libsvm(folder / "t.svm")
    assert hgms("run", "run.toml").exit_code == 0
    assert hgms("run", "run.toml", "--resume").exit_code == 0
    write_libsvm(folder / "t.svm", factor=3)
    config = RunConfig.from_toml(RIDGE)
    [path] = folder.glob("runs/ridge-cv/*/seed-0")
    with rejects("data-changed", str(path.relative_to(folder)), of=CheckpointError):
        run_config(config, resume=True)
    with rejects("data-changed", str(path), of=CheckpointError):
        run_config(config, resume=True, path=path)
    done = hgms("run", "run.toml", "--resume")
    assert done.exit_code == 2
    assert str(path.relative_to(folder)) in done.output
    assert hgms("run", "run.toml").exit_code == 0, "it is a new run"
    assert len(list(folder.glob("runs/ridge-cv/*/seed-0"))) == 2
    assert hgms("run", "run.toml", "--resume").exit_code == 0
    write_libsvm(folder / "t.svm")
    assert run_config(config, resume=True, path=path).summary["outer_steps"] == 2


def test_every_task_that_reads_files_has_their_fingerprint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_libsvm(folder / "t.svm")
    write_libsvm(folder / "v.svm")
    write_npz(folder / "i.npz")
    for name in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte.gz"):
        (folder / "mnist").mkdir(exist_ok=True)
        (folder / "mnist" / name).write_text(name)
    monkeypatch.setenv("HGMS_DATA", str(folder))
    counts = {
        RidgeCv(dataset="libsvm:t.svm"): 1,
        LogisticCv(dataset="libsvm:t.svm", validation="libsvm:v.svm"): 2,
        HyperCleaning(dataset="npz:i.npz"): 1,
        HyperCleaning(dataset="idx:mnist"): 2,
        ImbalancedLoss(dataset="mnist"): 2,
    }
    before = {task: data_of(task) for task in counts}
    assert [len(data["made_of"]["files"]) for data in before.values()] == list(counts.values())
    write_libsvm(folder / "v.svm", factor=2)
    write_npz(folder / "i.npz", seed=1)
    (folder / "mnist" / "train-images-idx3-ubyte").write_text("other")
    same = [data_of(task) == before[task] for task in counts]
    assert same == [True, False, False, False, False]
    assert data_of(RidgeCv()) == data_of(HyperCleaning()) == {}


# --- code
# --------------------------------------------------------------------------------------------------

HELPER = "def lower(t, x): return {factor} * ((x - t) ** 2).sum()\n"
PLUGIN = """
import attrs
import far_helper
from hgms_core import CallableSolver, hookimpl

@attrs.frozen(kw_only=True)
class Mine:
    name = "mine"

    def solve(self, matvec, b, x0=None):
        return CallableSolver(lambda matvec, b: far_helper.near(b)).solve(matvec, b)

@hookimpl
def hgms_register_linear_solvers():
    return [Mine]
"""


@pytest.fixture
def modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, from which modules are imported, each test anew."""
    monkeypatch.syspath_prepend(folder)
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def imported(path: Path, source: str) -> ModuleType:
    path.write_text(source)
    return load_script(path.stem, path)


def test_a_module_that_a_loss_calls_is_part_of_the_problem(modules: Path) -> None:
    def problem(factor: float) -> Problem:
        helper = imported(modules / "own_helper.py", HELPER.format(factor=factor))
        return Problem(
            theta0=torch.tensor([3.0, 1.0]),
            x0=torch.zeros(2),
            g=lambda theta, x, b: helper.lower(theta, x),
            f=lambda theta, x, b: 0.5 * ((x - 1) ** 2).sum(),
        )

    def stop(_info: object, record: dict[str, float], _share: float) -> None:
        if record["step"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("hg-implicit", problem(0.5), "3 steps", folder="mine", watch=stop)
    with rejects("other-settings", "mine", of=CheckpointError):
        run("hg-implicit", problem(0.7), "3 steps", folder="mine", resume=True)
    assert len(run("hg-implicit", problem(0.5), "3 steps", folder="mine", resume=True).records) == 4


def test_modules_that_a_plugin_imports_are_part_of_its_digest(modules: Path) -> None:
    (modules / "near_helper.py").write_text("def near(b): return b\n")
    (modules / "far_helper.py").write_text(
        "def near(b):\n    import near_helper as h\n    return h.near(b)\n"
    )
    plugin = imported(modules / "own_plugin.py", PLUGIN)
    names = ["far_helper", "near_helper", "own_plugin"]
    assert list(source_digests("own_plugin")) == names
    before = digests(plugin.Mine())
    assert digests(plugin.Mine()) == before
    (modules / "near_helper.py").write_text("def near(b): return -b\n")
    assert digests(plugin.Mine()).keys() == before.keys()
    assert digests(plugin.Mine()) != before


def test_a_run_is_not_resumed_with_another_plugin(modules: Path) -> None:
    (modules / "far_helper.py").write_text("def near(b): return b\n")
    (modules / "plug.py").write_text(PLUGIN)
    (modules / "run.toml").write_text(
        'task = "quadratic"\nbudget = "2 steps"\nrun = { threads = 1 }\n'
        'method = { name = "hg-implicit", hypergradient.solver.name = "mine" }\n'
    )
    assert hgms("run", "run.toml", "--plugin", "./plug.py").exit_code == 0
    assert hgms("run", "run.toml", "--plugin", "./plug.py", "--resume").exit_code == 0
    (modules / "far_helper.py").write_text("def near(b): return 0.9 * b\n")
    done = hgms("run", "run.toml", "--plugin", "./plug.py", "--resume")
    assert done.exit_code == 2
    assert "hgms_file_plug:Mine" in done.output


def test_relative_and_late_imports_are_found(modules: Path) -> None:
    (modules / "own_package").mkdir()
    for name, text in {
        "__init__": "",
        "first": "from . import second\nfrom .third import value\nimport torch, json\n",
        "second": "",
        "third": "value = 1\n",
        "fourth": "",
    }.items():
        (modules / "own_package" / f"{name}.py").write_text(text)
    importlib.import_module("own_package.first")
    names = ["own_package", "own_package.first", "own_package.second", "own_package.third"]
    assert list(source_digests("own_package.first")) == names


def test_an_import_inside_a_function_counts(modules: Path) -> None:
    def late() -> object:
        import late_helper  # type: ignore[import-not-found]

        return late_helper

    (modules / "late_helper.py").write_text("a = 1\n")
    before = fingerprint(late)
    assert fingerprint(late) == before
    (modules / "late_helper.py").write_text("a = 2\n")
    assert fingerprint(late) != before


# --- files of other runs, and changed files
# --------------------------------------------------------------------------------------------------

BOWL = """
task = "quadratic"
budget = "3 steps"
method = { name = "hg-ms", generator.count = 2 }
run = { threads = 1, diagnose = 1 }
"""


def path_of(seed: int) -> Path:
    [path] = Path().glob(f"runs/quadratic/*/seed-{seed}")
    return path


def finished(*seeds: int) -> list[Path]:
    for seed in seeds:
        run_config(RunConfig.from_toml(f"seed = {seed}\n{BOWL}"))
    return [path_of(seed) for seed in seeds]


def test_the_files_of_another_seed_are_rejected(folder: Path) -> None:
    first, second = finished(0, 1)
    for file in second.iterdir():
        if file.name != "config.toml":
            shutil.copy(file, first)
    with rejects("other-settings", str(first / "summary.json"), of=CheckpointError):
        run_config(RunConfig.from_toml(BOWL), resume=True)
    runs, [skipped] = scan("runs")
    assert [run.seed for run in runs] == [1]
    assert (skipped.code, skipped.place) == ("other-settings", ("summary.json",))
    (first / "summary.json").unlink()
    with rejects("other-settings", str(first / "checkpoint.json"), of=CheckpointError):
        run_config(RunConfig.from_toml(BOWL), resume=True)


def edit(path: Path, line: int, old: bytes, new: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("steps.jsonl", ("steps.jsonl",)),
        ("timings.jsonl", ("timings.jsonl", 2)),
        ("diagnosis.jsonl", ("diagnosis.jsonl", 2)),
    ],
)
def test_a_changed_number_is_found(folder: Path, name: str, place: tuple[str | int, ...]) -> None:
    [path] = finished(0)
    run = read_run(path)
    before = RunFolder(path)
    assert len(before.diagnoses()) == 3
    assert len(run.columns(["seconds"])["seconds"]) == 4
    edit(path / name, 1, b"0.", b"7.")
    if name == "diagnosis.jsonl":
        with rejects("damaged-file", str(path / name), 2, of=CheckpointError):
            before.diagnoses()
    else:
        with rejects("damaged-file", *place, of=CheckpointError):
            read_run(path).columns(["upper_loss"])
        with rejects("damaged-file", *place, of=CheckpointError):
            read_run(path).records()
    done = hgms("report", "runs", "--out", "page.md")
    assert name in done.output + (folder / "page.md").read_text()
    (folder / "run.toml").write_text(BOWL)
    resumed = hgms("run", "run.toml", "--resume")
    assert resumed.exit_code == 2
    assert name in resumed.output


def test_a_summary_without_a_checksum_is_rejected(folder: Path) -> None:
    [path] = finished(0)
    table = json.loads((path / "summary.json").read_bytes())
    del table["checksum"]
    (path / "summary.json").write_text(json.dumps(table))
    with rejects("damaged-file", str(path / "summary.json"), of=CheckpointError):
        RunFolder(path).read_summary()
    _, [skipped] = scan("runs")
    assert (skipped.code, skipped.place) == ("damaged-file", ("summary.json",))


def test_tensors_of_another_size_are_damaged_before_they_are_read(folder: Path) -> None:
    [path] = finished(0)
    [tensors] = path.glob("*.safetensors")
    with tensors.open("r+b") as stream:
        stream.truncate(1 << 43)  # 8 TiB, sparse
    with rejects("damaged-file", str(tensors), of=CheckpointError):
        RunFolder(path).load()


def test_a_finished_run_that_cannot_be_written_to_is_read_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = finished(0)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Lease, "acquire", read_only)
    monkeypatch.setattr(files, "replace_file", read_only)
    result = run_config(RunConfig.from_toml(BOWL), resume=True)
    assert result.summary["outer_steps"] == 3
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    with rejects("cannot-write", of=files.DiskError):
        run_config(RunConfig.from_toml(f"seed = 1\n{BOWL}"))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lease_that_is_no_file_is_rejected(folder: Path, make: Callable[[Path], None]) -> None:
    [path] = finished(0)
    (path / "summary.json").unlink()
    (path / ".lease").unlink(missing_ok=True)
    make(path / ".lease")
    with rejects("not-a-file", str(path / ".lease"), of=CheckpointError):
        run_config(RunConfig.from_toml(BOWL), resume=True)
    assert holder(path) == ""
    assert HeldFolders().free(path)


def test_a_changed_loss_is_named_as_part_of_the_problem(folder: Path) -> None:
    def problem(factor: float) -> Problem:
        return Problem(
            theta0=torch.zeros(2),
            x0=torch.zeros(2),
            g=lambda theta, x, b: factor * ((x - theta) ** 2).sum(),
            f=lambda theta, x, b: ((x - 1) ** 2).sum(),
        )

    run("hg-implicit", problem(0.5), "1 step", folder="mine")
    with rejects("other-settings", "mine", of=CheckpointError) as caught:
        run("hg-implicit", problem(0.7), "1 step", folder="mine", resume=True)
    lines = caught.value.message.splitlines()
    assert lines[1:] == ["the problem has other values or code in g"]
