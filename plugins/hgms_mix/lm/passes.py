"""Selection of the rows of a batch that share a pass through a model, with little padding.

Rows are sorted by length and cut into passes, each as wide as its longest row. The cost of a pass
is its number of tokens, with padding, plus the number of tokens that the model could process in the
time of starting a pass. Of all ways to cut, the cheapest is selected.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

SECONDS_A_LAYER = 5e-4
"""Fixed time of a pass per layer: Python, and starting kernels.

This is a rule of thumb, from a transformer with adapters.
"""
RATE = {"cpu": 1e11, "cuda": 2e14}
"""Floating-point operations per second of a pass on one core, or on a GPU.

These are rules of thumb, too.
"""


def start_tokens(model: Any) -> int:
    """Return the number of tokens that take as long as starting a pass.

    It depends only on the model and the type of device, so that the same batch is cut identically
    in every run.

    A model of 135 million parameters and 30 layers: 5 on a CPU, 11,000 on a GPU, which needs much
    work at a time. A model of 7 billion parameters on a GPU: 200.
    """
    layers = int(model.config.get_text_config().num_hidden_layers)
    parameters = sum(leaf.numel() for leaf in model.parameters())
    rate = RATE.get(next(model.parameters()).device.type, RATE["cuda"])
    return int(layers * SECONDS_A_LAYER * rate / (2 * parameters))


def needed_lengths(mask: Tensor) -> Tensor:
    """Return the number of relevant columns of each row.

    These are the columns up to its last scored token. The columns after it change no loss.
    """
    columns = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    return (mask * columns).amax(-1).clamp_min(min(2, mask.shape[-1]))


def passes(
    lengths: Tensor, start: int, most: int | None = None, *, equal: bool = False
) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Return the order of a batch's rows and its passes.

    The order is by length, for each candidate of ``[N, B]`` lengths. The passes are (first, last,
    width) of positions in that order. A pass has at most ``most`` rows of a candidate.

    ``equal``: the number of passes, ⌈B / most⌉, depends only on the number of rows. Ranks whose
    batches differ in lengths then go through the model equally often.

    Notes
    -----
    Cost: a sort, and B² additions on the CPU.

    Examples
    --------
    >>> order, cut = passes(torch.tensor([9, 2, 10, 2, 3]), start=4)
    >>> order.tolist(), cut
    ([1, 3, 4, 0, 2], [(0, 3, 3), (3, 5, 10)])
    >>> passes(torch.tensor([9, 2, 10, 2, 3]), start=4, most=2, equal=True)[1]
    [(0, 2, 2), (2, 4, 9), (4, 5, 10)]
    """
    ordered, order = lengths.sort(dim=-1, stable=True)
    widths = ordered.reshape(-1, lengths.shape[-1]).amax(0).cpu().numpy().astype(np.int64)
    count = len(widths)
    if equal:
        ends = [*range(0, count, most or count), count]
    else:
        ends = _cheapest_ends(widths, lengths.numel() // max(count, 1), start, most or count)
    return order, [(first, last, int(widths[last - 1])) for first, last in itertools.pairwise(ends)]


def _cheapest_ends(widths: np.ndarray, candidates: int, start: int, most: int) -> list[int]:
    """Return 0 and the ends of the cheapest passes."""
    cost = np.zeros(len(widths) + 1, np.int64)
    came = [0] * (len(widths) + 1)
    for last in range(1, len(widths) + 1):
        first = max(0, last - most)
        ways = (
            cost[first:last]
            + candidates * widths[last - 1] * np.arange(last - first, 0, -1)
            + start
        )
        came[last] = first + int(ways.argmin())
        cost[last] = ways.min()
    ends = [len(widths)]
    while ends[-1]:
        ends.append(came[ends[-1]])
    return ends[::-1]
