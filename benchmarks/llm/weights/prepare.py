"""The one source of the denoising grid that no file of $HGMS_DATA has: German prompts whose
answers' letters are shuffled.

    python benchmarks/llm/weights/prepare.py FOLDER        then export HGMS_WEIGHTS=FOLDER

Rows are those of the German Alpaca from number 5,200 of the permutation with seed 0 on, which the
grid uses for nothing else. Within an answer all characters but white space change places, by a
generator seeded by the row's number.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
from pathlib import Path

FIRST = 5200


def shuffled(text: str, seed: int) -> str:
    """The text with its characters in another order; white space stays where it is.

    >>> shuffled("ab cd", 1) != "ab cd", sorted(shuffled("ab cd", 1)) == sorted("ab cd")
    (True, True)
    """
    letters = [letter for letter in text if not letter.isspace()]
    random.Random(seed).shuffle(letters)
    following = iter(letters)
    return "".join(letter if letter.isspace() else next(following) for letter in text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    from hgms_mix.lm.examples import select_rows
    from hgms_mix.lm.sources import Source

    path = Path(os.environ["HGMS_DATA"], "alpaca_de", "alpaca_de_6000.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "shuffled.jsonl").open("w", encoding="utf-8") as stream:
        for number in select_rows(
            path.name, len(rows), Source(path=str(path), shuffle_seed=0, skip=FIRST)
        ).tolist():
            row = {**rows[number], "output": shuffled(rows[number]["output"], number)}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
