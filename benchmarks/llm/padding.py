"""Measure the share of padding in batches of rows drawn evenly from several sources.

python benchmarks/llm/padding.py --tokenizer "$HGMS_DATA/gpt2_bpe" a.jsonl b.jsonl …
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hgms_core import Key
from hgms_mix.lm import Batches, Source
from hgms_mix.lm.passes import needed_lengths, passes
from hgms_mix.lm.tokenizers import load_tokenizer
from hgms_mix.lm.tokens import drawn_table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--cache", type=int, default=500, help="rows of a source")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument(
        "--start",
        type=int,
        nargs="+",
        default=[0, 5, 200],
        help="tokens that starting a pass is worth",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        default=1,
        help="that go through the model together, with separate batches",
    )
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    key = Key(0)
    written = {"template": "alpaca", "max_length": options.max_length}
    tables = []
    for path in options.sources:
        name = Path(path).name
        tables.append(
            drawn_table(
                name,
                Source(path=path, max_bad_rows=10**6),
                tokenizer,
                count=options.cache,
                key=key,
                **written,
            )
        )
        print(
            (
                f"{name}: {tables[-1].size} rows, {float(tables[-1].lengths.double().mean()):.0f} "
                "tokens on average"
            ),
            flush=True,
        )
    batches = Batches(tuple(tables), torch.device("cpu"))
    data = batches.data(tuple(f"{number}" for number in range(len(tables))))
    for size in options.batch:
        real = wide = 0
        cut_to: dict[tuple[int, int | None], list[int]] = {}
        for number in range(options.batches):
            index = data.draw(key.fold("batch", number), size, options.candidates)
            assert index is not None
            mask = batches.rows(index)["mask"]
            lengths = needed_lengths(mask)
            real = real + int(lengths.sum())
            wide = wide + mask.numel()
            for start in options.start:
                for most in (None, 4):
                    _, cut = passes(lengths, start, most)
                    total = cut_to.setdefault((start, most), [0, 0])
                    total[0] += options.candidates * sum(
                        (last - first) * width for first, last, width in cut
                    )
                    total[1] += len(cut)
        print(f"batch {size}: one pass of the full width: {1 - real / wide:.1%} padding")
        for (start, most), (tokens, count) in cut_to.items():
            rows = "any number of rows" if most is None else f"at most {most} rows"
            passed = count / options.batches
            print(
                f"  start {start}, {rows}: {1 - real / tokens:.1%} padding, {passed:.1f} passes, "
                f"{tokens / wide:.0%} of the tokens"
            )


if __name__ == "__main__":
    main()
