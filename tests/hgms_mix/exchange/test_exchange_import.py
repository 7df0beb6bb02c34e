"""Configurations of other trainers as mix files: their shares, files, and what is rejected."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.exports import brought, sources
from support.helpers import rejects
from support.small_mixes import fails, report_of, write_rows

from hgms_core import ConfigError, HgmsError

pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")

ALIASES = "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
"""A value of 2^39 texts."""
DIRECTORY = "dataset_dir: .\n"
BOTH = f"dataset: a,b\n{DIRECTORY}"


pytestmark = pytest.mark.usefixtures("data_sets")
CHAT = "path: a.jsonl, type: chat_template"

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


def test_data_sets_of_the_hub_want_their_commits_and_have_no_local_files() -> None:
    """A subset is kept, and a branch is no commit."""
    Path("c.yaml").write_text(
        "datasets:\n- {path: own/er, name: train, fraction: 1}\n"
        "- {path: oth/er, revision: main, fraction: 3}\n"
    )
    done = report_of("mix", "import", "c.yaml", "--from", "trl")
    shares = [(row["from"], row["share"]) for row in done["sources"]]
    assert shares == [("own/er", 0.25), ("oth/er", 0.75)]
    assert "commit of er, er-2" in done["notes"][0]
    assert sources() == {
        "er": {"hub": "own/er", "revision": "COMMIT", "subset": "train"},
        "er-2": {"hub": "oth/er", "revision": "COMMIT"},
    }
    files = f"datasets:\n- {{path: own/er, data_files: a.jsonl}}\n- {JSON}b.jsonl}}\n"
    with rejects("not-supported", "c.yaml", "datasets", 0, "data_files", of=ConfigError):
        brought("trl", files)
    Path("c.yaml").write_text("datasets: 3")
    fails("mix", "import", "c.yaml", "--from", "trl", parts=["(c.yaml: datasets)"])


@pytest.mark.parametrize("pattern", ["*", "[cd]", "?"])
def test_a_pattern_of_files_is_a_source(pattern: str) -> None:
    Path("more").mkdir()
    for name in ("c", "d"):
        Path("more", f"{name}.jsonl").write_text(Path("b.jsonl").read_text())
    text = f"datasets:\n- {JSON}'more/{pattern}.jsonl'}}\n- {JSON}a.jsonl}}\n"
    assert list(brought("trl", text).mixture.values()) == pytest.approx([1 / 3, 2 / 3])
    assert sources() == {"more": {"path": f"more/{pattern}.jsonl"}, "a": {"path": "a.jsonl"}}


def test_files_that_lie_beside_a_list_are_not_taken_from_elsewhere() -> None:
    """Where a trainer looks beside its list only, a file of that name in the working directory is
    another.
    """
    for folder in ("rows", "sub/rows"):
        Path(folder).mkdir(parents=True)
        for name in "ab":
            write_rows(f"{folder}/{name}", [{"instruction": "p", "output": "c"}])
    listed = [{"data_files": f"rows/{name}.jsonl"} for name in "ab"]
    brought("datasets", json.dumps({"datasets": listed}), file="sub/interleave.json")
    assert sources() == {name: {"path": f"sub/rows/{name}.jsonl"} for name in "ab"}


def test_names_that_look_alike_keep_their_rows_and_are_one_line_in_notes() -> None:
    """Both are a-b in a file's name; the one that sorts later is a-b-2."""
    Path("rows").mkdir()
    write_rows("rows/a-b", [{"prompt": "pp", "completion": "cc"}])
    write_rows("rows/a-b-2", [{"prompt": "p", "completion": "c"}])
    one, two = (f'{{source_name: "{name}", target_ratio: 0.5}}' for name in ("a,b", "a b"))
    brought("olmo", f"sources: [{one}, {two}]")
    assert sources() == {"a,b": {"path": "rows/a-b-2.jsonl"}, "a b": {"path": "rows/a-b.jsonl"}}
    pair = '{path: c.jsonl, type: alpaca, "x\\nbudget": 1}, {path: c.jsonl, type: alpaca}'
    notes = brought("axolotl", f"datasets: [{pair}]").notes
    assert notes == ["not imported from datasets.0: 'x\\nbudget'"]
    assert tomllib.loads(Path("mix.toml").read_text())["budget"] == "1 step"


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ("axolotl", "{path: a.jsonl, type: {field_instruction: [1]}}"),
        ("axolotl", f"{{{CHAT}, roles_to_train: 5}}"),
        ("axolotl", f"{{{CHAT}, field_messages: {{a: 1}}}}"),
        ("axolotl", f"{{{CHAT}, message_property_mappings: x}}"),
        ("axolotl", f"{{path: a.jsonl, split: 'train[:{'9' * 400}%]'}}"),
        ("trl", "{path: a.jsonl, columns: [1, null, {a: 1}]}"),
        ("trl", "{path: own/er, fraction: 1, name: {a: 1}}"),
        ("trl", "{path: a.jsonl, split: [1]}"),
        ("llamafactory", {"columns": 3}),
        ("llamafactory", {"formatting": "sharegpt", "tags": [1]}),
        ("ms-swift", "'{'"),
        ("ms-swift", "{frage: {a: 1}}"),
    ],
)
def test_values_of_wrong_types_are_errors(trainer: str, text: Any) -> None:
    config = {
        "llamafactory": BOTH,
        "ms-swift": f"dataset: ['a.jsonl#1', 'b.jsonl#1']\ncolumns: {text}\n",
    }.get(trainer, f"datasets: [{text}, {{path: b.jsonl, fraction: 1}}]")
    more = text if isinstance(text, dict) else {}
    with pytest.raises(HgmsError):
        brought(trainer, config, {"a": {"file_name": "a.jsonl", **more}, "b": {"file_name": "b"}})
    assert not Path("mix.toml").exists()


PAIR = "dataset: [a.jsonl, b.jsonl]\n"
HUB = "datasets:\n- {path: own/er"
WRONG: list[tuple[str, str, str, tuple[str | int, ...]]] = [
    ("trl", "datasets: 3", "wrong-type", ("datasets",)),
    # of a data set of the Hub, whose rows cannot be counted
    ("axolotl", "datasets: [{path: owner/name}]", "wrong-length", ("datasets",)),
    ("trl", "dataset_name: owner/name", "wrong-length", ("datasets",)),
    ("datasets", "datasets: [{data_files: a.jsonl}]", "wrong-length", ("datasets",)),
    ("llamafactory", "dataset: a", "wrong-length", ("dataset",)),
    ("ms-swift", "dataset: 'hf::owner/name'", "wrong-length", ("dataset",)),
    ("olmo", "sources: [{source_name: a, target_ratio: 1}]", "wrong-length", ("sources",)),
    ("trl", "- 1", "wrong-format", ()),
    ("trl", "a: [", "wrong-format", (1,)),
    ("trl", f"{ALIASES}datasets: *a39\n", "too-large", ()),
    ("trl", "datasets: &a [*a]\n", "too-large", ()),
    (
        "trl",
        f"datasets:\n- {JSON}no.jsonl}}\n- {{path: own/er}}",
        "missing-file",
        ("datasets", 0, "data_files"),
    ),
    ("trl", f"{HUB}}}\n- {{path: oth/er}}", "not-supported", ()),
    (
        "trl",
        f"{HUB}, fraction: 1}}\n- {{path: o/er}}",
        "missing-option",
        ("datasets", 1, "fraction"),
    ),
    ("axolotl", f"{HUB}, weight: 3}}\n- {{path: o/er}}", "out-of-range", ("datasets", 0, "weight")),
    ("llamafactory", "dataset: a,b\ndataset_dir: no", "missing-file", ("dataset_dir",)),
    ("llamafactory", f"dataset: [1, 2]\n{DIRECTORY}", "wrong-type", ("dataset",)),
    ("llamafactory", f"{BOTH}max_samples: some", "wrong-value", ("max_samples",)),
    ("llamafactory", f"{BOTH}max_samples: true", "wrong-value", ("max_samples",)),
    ("llamafactory", f"dataset: a,c\n{DIRECTORY}", "wrong-value", ("c", "num_samples")),
    ("llamafactory", f"dataset: a,d\n{DIRECTORY}", "missing-option", ("d",)),
    ("llamafactory", f"dataset: a,bb\n{DIRECTORY}", "unknown-data-set", ("dataset",)),
    ("llamafactory", f"dataset: a,b,a\n{DIRECTORY}", "duplicate-name", ("dataset",)),
    ("ms-swift", "dataset: [nobody/knows#3, a.jsonl]", "not-supported", ("dataset",)),
    ("ms-swift", f"{PAIR}interleave_prob: [1]", "wrong-length", ("interleave_prob",)),
    ("ms-swift", f"{PAIR}interleave_prob: [2, -1]", "out-of-range", ("interleave_prob",)),
    ("ms-swift", f"{PAIR}interleave_prob: [0, 0]", "out-of-range", ("interleave_prob",)),
    ("ms-swift", "dataset: ['a.jsonl#0', 'b.jsonl#0']", "out-of-range", ()),
    ("olmo", "sources: []", "wrong-type", ("sources",)),
    ("olmo", "sources: [{target_ratio: 1}]", "wrong-type", ("sources",)),
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
    ("datasets", "datasets: []", "wrong-type", ("datasets",)),
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
