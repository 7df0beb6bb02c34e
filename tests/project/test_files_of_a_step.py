"""The number of files to read to follow a problem through one outer step."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))


def test_a_problem_passes_through_few_files() -> None:
    from call_trace import files_of_a_step

    files = [name for name, _ in files_of_a_step()]
    assert {"hgms_core/pipeline.py", "plugins/hgms/hypergradients/implicit.py"} <= set(files)
    assert len(files) <= 9
