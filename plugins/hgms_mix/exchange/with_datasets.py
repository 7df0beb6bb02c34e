"""The library ``datasets``: ``interleave_datasets`` with probabilities and a stopping strategy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hgms.store import replace_file
from hgms_mix.exchange.messages import dialogues, only_last
from hgms_mix.exchange.sample import Sampled
from hgms_mix.exchange.trainer import Trainer, write_rows

LOAD = '''"""The sample as one data set: each row once, its sources interleaved by their shares."""

import json
from pathlib import Path

from datasets import Dataset, interleave_datasets, load_dataset

HERE = Path(__file__).resolve().parent


def load() -> Dataset:
    plan = json.loads((HERE / "interleave.json").read_text(encoding="utf-8"))
    parts = [
        load_dataset("json", data_files=str(HERE / part["data_files"]), split="train")
        for part in plan["datasets"]
    ]
    return interleave_datasets(
        parts,
        probabilities=plan["probabilities"],
        seed=plan["seed"],
        stopping_strategy=plan["stopping_strategy"],
    )


if __name__ == "__main__":
    print(load())
'''


def write(sample: Sampled, folder: Path) -> Sequence[str]:
    parts = [
        {"name": part.name, "data_files": write_rows(folder, part, dialogues(sample, part))}
        for part in sample.parts
    ]
    plan = {
        "datasets": parts,
        "probabilities": [sample.shares[part.name] for part in sample.parts],
        "stopping_strategy": "all_exhausted_without_replacement",
        "seed": sample.seed,
    }
    replace_file(
        folder / "interleave.json", json.dumps(plan, indent=2, ensure_ascii=False).encode()
    )
    replace_file(folder / "load.py", LOAD.encode())
    return only_last(sample)


def whole(sample: Sampled) -> Mapping[str, str]:
    return {
        name: f"probability {weight:.6g}, `first_exhausted`"
        for name, weight in sample.weights.items()
    }


DATASETS = Trainer(
    name="datasets",
    files=("interleave.json", "load.py"),
    meaning=(
        "`probabilities` are the chances that the next row comes from a source, until "
        "`stopping_strategy` ends it: "
        "`first_exhausted` at the first source that has no more rows, `all_exhausted` when each "
        "row was there once (rows of "
        "small sources then repeat), `all_exhausted_without_replacement` when each row was there "
        "exactly once"
    ),
    command="python load.py",
    write=write,
    whole=whole,
)
