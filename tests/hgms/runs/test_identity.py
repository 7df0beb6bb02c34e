"""A result belongs to code, data, configuration and seed: a run that is resumed with others is
rejected.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.descent import files as contents
from support.fakes import call
from support.helpers import load_script, rejects

from hgms import store
from hgms.adapters import from_losses
from hgms.config.fingerprinting import fingerprint
from hgms.plugins import Registry
from hgms.results import read_run, scan
from hgms.runs import RunConfig, RunFolder, run, run_config
from hgms.runs.provenance import data_of
from hgms.store import HeldFolders, Lease, holder
from hgms.tasks import HyperCleaning, ImbalancedLoss, LogisticCv, RidgeCv
from hgms_core import Problem
from hgms_core.errors import CheckpointError

REGISTRY = Registry.load()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(text: str) -> RunConfig:
    return RunConfig.from_toml(text, registry=REGISTRY)


BOWL = """
task = "quadratic"
budget = "3 steps"
run = { threads = 1, diagnose = 1 }

[method]
name = "hg-ms"
generator.count = 2
"""

# --- data


def write_libsvm(path: Path, factor: int = 1) -> None:
    rows = (f"{i * factor % 7 / 3} 1:{i % 5} 2:{i * i % 7} 3:{i % 11}" for i in range(60))
    path.write_text("\n".join(rows) + "\n")


RIDGE = """
budget = "2 steps"
task = { name = "ridge-cv", dataset = "libsvm:t.svm" }
method = { name = "hg-implicit", generator.steps = 3 }
run = { threads = 1 }
"""


def test_a_run_is_not_resumed_on_other_data(folder: Path) -> None:
    write_libsvm(folder / "t.svm")
    ridge = config(RIDGE)
    run_config(ridge)
    [path] = Path("runs").glob("ridge-cv/*/seed-0")
    write_libsvm(folder / "t.svm", factor=3)
    for place in (path, path.absolute()):
        with rejects("data-changed", str(place), of=CheckpointError):
            run_config(ridge, resume=True, path=place)
    assert run_config(config(RIDGE)).info.resumed_from == 0, "it is a new run"
    assert len(list(path.parents[1].glob("*/seed-0"))) == 2
    write_libsvm(folder / "t.svm")
    assert run_config(ridge, resume=True, path=path).summary["outer_steps"] == 2


def test_every_task_that_reads_files_has_their_fingerprint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["t.svm", "v.svm", "i.npz"]
    names += [f"mnist/{name}" for name in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte.gz")]
    (folder / "mnist").mkdir()
    for name in names:
        (folder / name).write_text(name)
    monkeypatch.setenv("HGMS_DATA", str(folder))
    counts = {
        RidgeCv(dataset="libsvm:t.svm"): 1,
        LogisticCv(dataset="libsvm:t.svm", validation="libsvm:v.svm"): 2,
        HyperCleaning(dataset="npz:i.npz"): 1,
        HyperCleaning(dataset="idx:mnist"): 2,
        ImbalancedLoss(dataset="mnist"): 2,
    }
    before = {task: data_of(task) for task in counts}
    assert [len(data["data_fingerprint"]["files"]) for data in before.values()] == list(
        counts.values()
    )
    for name in names[1:4]:
        (folder / name).write_text("other")
    same = [data_of(task) == before[task] for task in counts]
    assert same == [True, False, False, False, False]
    assert data_of(RidgeCv()) == data_of(HyperCleaning()) == {}


# --- code

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


def test_a_run_is_not_resumed_with_another_loss_or_a_module_that_it_calls(modules: Path) -> None:
    def problem(lower: float, scale: float = 0.5) -> Problem:
        path = modules / "own_helper.py"
        path.write_text(f"def lower(t, x): return {lower} * ((x - t) ** 2).sum()\n")
        helper = load_script(path.stem, path)
        return from_losses(
            theta0=torch.tensor([3.0, 1.0]),
            x0=torch.zeros(2),
            g=lambda theta, x, b: helper.lower(theta, x),
            f=lambda theta, x, b: scale * ((x - 1) ** 2).sum(),
        )

    options: dict[str, Any] = {"folder": "mine", "settings": {"checkpoint_seconds": 0}}
    stop = Mock(side_effect=[False, False, ZeroDivisionError])
    with pytest.raises(ZeroDivisionError):
        run("hg-implicit", problem(0.5), "3 steps", watch=stop, **options)
    for changes in ((0.7,), (0.5, 0.7)):
        with rejects("other-settings", "mine", of=CheckpointError) as caught:
            run("hg-implicit", problem(*changes), "3 steps", resume=True, **options)
    assert "task.identity.f: " in caught.value.message
    resumed = run("hg-implicit", problem(0.5), "3 steps", resume=True, **options)
    assert [row["step"] for row in resumed.records] == [0, 1, 2, 3]


def test_a_run_is_not_resumed_with_another_plugin_or_a_module_that_it_imports(
    modules: Path,
) -> None:
    (modules / "far_helper").mkdir()
    for name, source in {
        "plug": PLUGIN,
        "far_helper/__init__": "from . import second\nfrom .third import near\n",
        "far_helper/second": "",
        "far_helper/third": "def near(b):\n    import late_helper as h\n    return h.near(b)\n",
        "late_helper": "def near(b): return b\n",
    }.items():
        (modules / f"{name}.py").write_text(source)
    text = BOWL + 'hypergradient.solver.name = "mine"\n'
    own = RunConfig.from_toml(text, registry=Registry.load([modules / "plug.py"]))
    run_config(own)
    assert run_config(own, resume=True).summary["status"] == "done"
    (modules / "late_helper.py").write_text("def near(b): return -b\n")
    with rejects("code-changed", of=CheckpointError) as caught:
        run_config(own, resume=True)
    assert "hgms_file_plug:Mine" in caught.value.message


# --- files of other runs, and changed files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished runs of two seeds."""
    out = tmp_path_factory.mktemp("made") / "runs"
    for seed in (0, 1):
        path = out / "quadratic" / "hg-ms" / f"seed-{seed}"
        run_config(config(f"seed = {seed}\n{BOWL}"), path=path)
    return out


@pytest.fixture
def path(folder: Path, made: Path) -> Path:
    """The folder of the run of seed 0, beside that of seed 1."""
    shutil.copytree(made, folder / "runs")
    return folder / "runs" / "quadratic" / "hg-ms" / "seed-0"


def resume(path: Path) -> Any:
    return run_config(config(BOWL), resume=True, path=path)


def test_a_configuration_is_run_in_its_dtype(folder: Path) -> None:
    text = BOWL.replace("diagnose = 1", 'dtype = "float64"')
    assert {leaf.dtype for leaf in run_config(config(text)).x.values()} == {torch.float64}


def test_the_files_of_another_seed_are_rejected(path: Path) -> None:
    for file in (path.parent / "seed-1").iterdir():
        if file.name != "config.toml":
            shutil.copy(file, path)
    with rejects("other-settings", str(path / "manifest.json"), of=CheckpointError):
        resume(path)
    [other], [skipped] = scan("runs")
    assert (other.seed, skipped.code, skipped.place) == (1, "other-settings", ("manifest.json",))
    (path / "summary.json").unlink()
    with rejects("other-settings", str(path / "manifest.json"), of=CheckpointError):
        resume(path)


@pytest.mark.parametrize(
    "name", ["steps.jsonl", "timings.jsonl", "diagnosis.jsonl", "summary.json"]
)
def test_a_changed_number_is_found(path: Path, name: str) -> None:
    place = name
    reads: list[Callable[[], Any]] = [
        lambda: read_run(path).columns(["upper_loss"])["upper_loss"],
        lambda: read_run(path).records(),
    ]
    if name == "diagnosis.jsonl":
        reads, place = [RunFolder(path).diagnoses], str(path / name)
    if name == "summary.json":
        reads = [lambda: read_run(path).summary]
        place = ""
    assert all(len(read()) >= 3 for read in reads)
    data = (path / name).read_bytes()
    start = data.index(b"\n") if name.endswith("l") else 0
    (path / name).write_bytes(data[:start] + data[start:].replace(b"0.", b"7.", 1))
    for read in reads:
        with rejects("damaged-file", *([place] if place else []), of=CheckpointError):
            read()
    with rejects("damaged-file", of=CheckpointError) as caught:
        resume(path)
    assert caught.value.place[0] == str(path / name)
    done = call("report", "runs", "--out", "page.html")
    assert name in done.output + Path("page.html").read_text()


def test_a_finished_run_that_cannot_be_written_to_is_read_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(path)

    read_only = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr(Lease, "acquire", read_only)
    monkeypatch.setattr(store, "replace_file", read_only)
    assert resume(path).summary["outer_steps"] == 3
    assert contents(path) == before
    with rejects("cannot-write", of=store.DiskError):
        run_config(config(f"seed = 2\n{BOWL}"))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lease_that_is_no_file_is_rejected(path: Path, make: Callable[[Path], None]) -> None:
    (path / "summary.json").unlink()
    (path / ".lease").unlink(missing_ok=True)
    make(path / ".lease")
    with rejects("not-a-file", str(path / ".lease"), of=CheckpointError):
        resume(path)
    assert holder(path) == ""
    assert HeldFolders().free(path)


def test_a_digest_of_code_is_the_same_before_and_after_a_lazy_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "lazy_package").mkdir()
    (folder / "lazy_package" / "__init__.py").write_text("from . import part\n")
    (folder / "lazy_package" / "part.py").write_text("x = 1\n")
    (folder / "lazy_loss.py").write_text(
        "def loss(t, x, b):\n    import lazy_package\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    loss = importlib.import_module("lazy_loss").loss
    before = fingerprint(loss)
    loss(1, 2, 3)
    assert "lazy_package.part" in sys.modules
    assert fingerprint(loss) == before
    (folder / "lazy_package" / "part.py").write_text("x = 2\n")
    assert fingerprint(loss) != before
