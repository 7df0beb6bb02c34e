"""The notebooks of the gallery run from the first cell to the last, each in a kernel and a
folder of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.extended

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
SECONDS = 120


def read(text: str) -> Any:
    from myst_nb.core.read import read_myst_markdown_notebook

    return read_myst_markdown_notebook(text)


def execute(notebook: Any, folder: Path) -> Any:
    """The notebook with its outputs; an error in a cell is raised."""
    from nbclient import NotebookClient

    # one at a time in a process: what the kernel does is the test's own work
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
    )


LONG = {"cnn-hyperparameters"}
"""It takes as long as the others together, so it belongs to the nightly tier."""


@pytest.mark.nightly
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::ResourceWarning"
)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] if path.stem in LONG else [])
        for path in NOTEBOOKS
    ],
)
def test_the_notebook_runs(path: Path, tmp_path: Path) -> None:
    done = execute(read(path.read_text(encoding="utf-8")), tmp_path)
    shown = [output for cell in done.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in shown for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds, (
        "a notebook of the gallery shows a table and a picture"
    )
    # what a run has to say on stderr belongs on no page
    assert [
        output.text
        for output in shown
        if output.output_type == "stream" and output.name == "stderr"
    ] == []
