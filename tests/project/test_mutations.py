"""benchmarks/mutations.py: every break can still be made, and the tests that are to catch it are
there. Whether they do, the script says, which takes minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers import load_script

ROOT = Path(__file__).resolve().parents[2]


script = load_script("hgms_benchmark_mutations", ROOT / "benchmarks" / "mutations.py")
TREE = script.Tree(ROOT)
MUTATIONS = script.mutations()


def test_there_are_thirty() -> None:
    assert len({mutation.what for mutation in MUTATIONS}) == 30


@pytest.mark.parametrize(
    "mutation",
    MUTATIONS,
    ids=[f"{number}-{mutation.area}" for number, mutation in enumerate(MUTATIONS, 1)],
)
def test_a_break_stands_in_one_place_and_has_its_tests(mutation: Any) -> None:
    path, broken = mutation.applied(TREE.modules)
    compile(broken, str(path), "exec")
    assert broken != path.read_text(encoding="utf-8")
    assert TREE.nodes(mutation.tests)


def test_what_is_not_there_or_not_once_is_no_break() -> None:
    for changes, message in (
        ({"old": "no such text anywhere", "new": "x"}, "snippet not found"),
        ({"old": "import annotations", "new": "x"}, "snippet found in"),
    ):
        with pytest.raises(script.Trouble, match=message):
            attrs.evolve(MUTATIONS[0], **changes).applied(TREE.modules)
    with pytest.raises(script.Trouble, match="test not found: test_of_nothing"):
        TREE.nodes(["test_of_nothing"])
