"""Configurations of other trainers as mix files: their shares, files, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exports import brought, sources
from support.helpers import rejects
from support.small_mixes import report_of

from hgms_core import ConfigError

pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")

DIRECTORY = "dataset_dir: .\n"
BOTH = f"dataset: a,b\n{DIRECTORY}"


pytestmark = pytest.mark.usefixtures("data_sets")

JSON = "{path: json, data_files: "
RAW = "type: {field_instruction: frage, field_output: antwort}"


@pytest.mark.parametrize(
    ("trainer", "text", "shares"),
    [
        # a share of each file: 10 rows and 10 rows
        (
            "axolotl",
            f"datasets:\n- {{path: a.jsonl, {RAW}, weight: 0.25}}\n- {{path: b.jsonl, {RAW}}}\n",
            [0.5, 0.5],
        ),
        # fractions are of the mixture
        (
            "trl",
            f"datasets:\n- {JSON}a.jsonl, fraction: 3}}\n- {JSON}b.jsonl, fraction: 1}}\n",
            [0.75, 0.25],
        ),
        ("trl", f"datasets:\n- {JSON}a.jsonl}}\n- {JSON}b.jsonl}}\n", [0.8, 0.2]),
        # probabilities count where it interleaves
        ("llamafactory", BOTH + "mix_strategy: concat\n", [0.8, 0.2]),
        (
            "llamafactory",
            BOTH + "mix_strategy: interleave_once\ninterleave_probs: 0.1,0.9\n",
            [0.8, 0.2],
        ),
        (
            "llamafactory",
            BOTH + "mix_strategy: interleave_under\ninterleave_probs: 0.1,0.9\n",
            [0.1, 0.9],
        ),
        # rows behind the file
        ("ms-swift", "dataset:\n- a.jsonl#20\n- b.jsonl#60\n", [0.25, 0.75]),
        ("ms-swift", "dataset: [a.jsonl, b.jsonl]\ninterleave_prob: [0.5, 0.5]\n", [0.5, 0.5]),
        ("ms-swift", "dataset: [a.jsonl, b.jsonl]\n", [0.8, 0.2]),
    ],
)
def test_shares_are_the_rows_that_a_trainer_takes(
    trainer: str, text: str, shares: list[float]
) -> None:
    """Computed by hand from what each trainer documents of its weights."""
    assert list(brought(trainer, text).mixture.values()) == pytest.approx(shares)


def test_data_sets_of_the_hub_want_their_commits() -> None:
    """A subset is kept, and a branch is no commit."""
    Path("c.yaml").write_text(
        "datasets:\n- {path: own/er, name: train, fraction: 1}\n"
        "- {path: oth/er, revision: main, fraction: 3}\n"
    )
    done = report_of("mix", "import", "c.yaml", "--from", "trl")
    shares = [(row["from"], row["share"]) for row in done["sources"]]
    assert shares == [("own/er", 0.25), ("oth/er", 0.75)]
    assert sources() == {
        "er": {"hub": "own/er", "revision": "COMMIT", "subset": "train"},
        "er-2": {"hub": "oth/er", "revision": "COMMIT"},
    }


WRONG: list[tuple[str, str, str, tuple[str | int, ...]]] = [
    ("trl", "datasets: 3", "wrong-type", ("datasets",)),
    # of a data set of the Hub, whose rows cannot be counted
    ("axolotl", "datasets: [{path: owner/name}]", "wrong-length", ("datasets",)),
    ("trl", "dataset_name: owner/name", "wrong-length", ("datasets",)),
    ("datasets", "datasets: [{data_files: a.jsonl}]", "wrong-length", ("datasets",)),
    ("llamafactory", "dataset: a", "wrong-length", ("dataset",)),
    ("ms-swift", "dataset: 'hf::owner/name'", "wrong-length", ("dataset",)),
    ("olmo", "sources: [{source_name: a, target_ratio: 1}]", "wrong-length", ("sources",)),
    ("trl", "a: [", "wrong-format", (1,)),
    ("trl", "datasets: &a [*a]\n", "too-large", ()),
    (
        "trl",
        f"datasets:\n- {JSON}no.jsonl}}\n- {{path: own/er}}",
        "missing-file",
        ("datasets", 0, "data_files"),
    ),
    ("trl", "datasets:\n- {path: own/er}\n- {path: oth/er}", "not-supported", ()),
    (
        "trl",
        "datasets:\n- {path: own/er, fraction: 1}\n- {path: o/er}",
        "missing-option",
        ("datasets", 1, "fraction"),
    ),
    (
        "axolotl",
        "datasets:\n- {path: own/er, weight: 3}\n- {path: o/er}",
        "out-of-range",
        ("datasets", 0, "weight"),
    ),
    ("llamafactory", "dataset: a,b\ndataset_dir: no", "missing-file", ("dataset_dir",)),
    ("llamafactory", f"{BOTH}max_samples: some", "wrong-value", ("max_samples",)),
    ("llamafactory", f"dataset: a,c\n{DIRECTORY}", "wrong-value", ("c", "num_samples")),
    ("llamafactory", f"dataset: a,d\n{DIRECTORY}", "missing-option", ("d",)),
    ("llamafactory", f"dataset: a,bb\n{DIRECTORY}", "unknown-data-set", ("dataset",)),
    ("llamafactory", f"dataset: a,b,a\n{DIRECTORY}", "duplicate-name", ("dataset",)),
    ("ms-swift", "dataset: [nobody/knows#3, a.jsonl]", "not-supported", ("dataset",)),
    (
        "ms-swift",
        "dataset: [a.jsonl, b.jsonl]\ninterleave_prob: [1]",
        "wrong-length",
        ("interleave_prob",),
    ),
    (
        "ms-swift",
        "dataset: [a.jsonl, b.jsonl]\ninterleave_prob: [2, -1]",
        "out-of-range",
        ("interleave_prob",),
    ),
    (
        "ms-swift",
        "dataset: [a.jsonl, b.jsonl]\ninterleave_prob: [0, 0]",
        "out-of-range",
        ("interleave_prob",),
    ),
    ("ms-swift", "dataset: ['a.jsonl#0', 'b.jsonl#0']", "out-of-range", ()),
    (
        "olmo",
        "sources: [{source_name: a}, {source_name: b}]",
        "wrong-type",
        ("sources", "target_ratio"),
    ),
    (
        "trl",
        f"datasets:\n- {JSON}[3]}}\n- {{path: own/er}}",
        "wrong-type",
        ("datasets", 0, "data_files"),
    ),
    (
        "datasets",
        "datasets: [{data_files: c.yaml}, {data_files: c.yaml}]\nprobabilities: [1]",
        "wrong-length",
        ("probabilities",),
    ),
]


@pytest.mark.parametrize(("trainer", "text", "code", "place"), WRONG)
def test_a_configuration_that_cannot_be_read_is_rejected(
    trainer: str, text: str, code: str, place: tuple[str | int, ...]
) -> None:
    info: dict[str, Any] = {name: {"file_name": "c.jsonl"} for name in "ab"}
    info |= {"c": {**info["a"], "num_samples": "many"}, "d": {"file_name": 3}}
    file = str(Path.cwd() / "dataset_info.json") if place[:1] in (("c",), ("d",)) else "c.yaml"
    with rejects(code, file, *place, of=ConfigError):
        brought(trainer, text, info)
    assert not Path("mix.toml").exists()
