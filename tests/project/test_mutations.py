"""benchmarks/mutations.py: every mutation can still be planted. Whether the tests catch it, the
script says, which takes an hour.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.helpers import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.extended
def test_a_hundred_mutations_can_be_planted() -> None:
    script = load_script("hgms_benchmark_mutations", ROOT / "benchmarks" / "mutations.py")
    planted = script.mutations()
    assert len({mutation.what for mutation in planted}) == len(planted) >= 100
    texts = script.texts(ROOT)
    for mutation in planted:
        path, broken = mutation.applied(texts)
        compile(broken, str(path), "exec")
        assert broken != texts[path]
