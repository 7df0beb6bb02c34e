"""First-order effects of source rows on validation rows, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from hgms.arguments import require
from hgms_core import ConfigError, Data, Key, Loss, Problem, Sources, Tree, gradient
from hgms_core.errors import Place

FEWEST = 4
"""Minimum number of blocks. With fewer blocks their spread is not reliable."""


@frozen(kw_only=True, eq=False)
class Alignments:
    """First-order effects of blocks of source rows on blocks of validation rows.

    ``gains`` are the inner products ⟨∇f_v, ∇ℓ_{s,m}⟩ over ‖∇f‖², ``[V, S, M]``, averaged over the
    states. The value 1 is the effect of a step on the validation rows themselves. ``cosines`` are
    the same inner products over ‖∇f‖ ‖∇ℓ_s‖. ``losses`` are the mean losses of the validation
    blocks at each state, ``[states, V]``.
    """

    gains: Tensor
    cosines: Tensor
    losses: Tensor


def alignments(
    problem: Problem,
    states: Sequence[Tree],
    key: Key,
    *,
    validation_blocks: int = 24,
    source_blocks: int = 8,
    rows: int = 4,
    memory: int = 2**30,
) -> Alignments:
    """Measure how each block of validation rows aligns with each block of each source.

    Validation rows have the role ``differentiate``. The alignment is measured at each of the
    ``states`` of x. Blocks are disjoint; ``key`` determines the drawn rows.

    Gradients of the source blocks are stored in float32, or in float64 if x is float64. If they
    need more than ``memory`` bytes of float32, each gradient is folded: coordinates at distance k
    are added under random signs. Folding keeps inner products unbiased, with an error of at most
    ‖a‖ ‖b‖ / √k, for k numbers per gradient.

    Raises
    ------
    ConfigError
        For a problem without sources or with fewer than 4 rows of a kind.

    Notes
    -----
    Cost: (V + S·M) gradients of ``rows`` rows per state.
    """
    sources = problem.find(Sources)
    if sources is None:
        raise ConfigError("not-supported", f"{problem!r} has no data sources", place=("problem",))
    data = problem.upper_data["differentiate"]
    checked = _blocks(
        data.size,
        validation_blocks,
        rows,
        key.fold("validation"),
        "validation rows of the role 'differentiate'",
        ("upper_data", "differentiate"),
    )
    pool = []
    first = 0
    for name, size in problem.lower_data.strata or ():
        pool.append(
            first
            + _blocks(
                size,
                source_blocks,
                rows,
                key.fold("source", name),
                f"rows of the source {name!r}",
                ("sources", name),
            )
        )
        first += size
    fewest = min(len(numbers) for numbers in pool)
    pool = [numbers[:fewest] for numbers in pool]
    most = max(memory // (4 * fewest * len(pool)), 1024)
    gains = []
    cosines = []
    losses = []

    def slope_at(loss: Loss, x: Tree, data: Data, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return ∇_x of the loss on these rows, folded, and the loss."""
        grads, value = gradient(loss, problem.theta0, x, data.rows(index.to(data.device)))
        return fold(grads, most, key.fold("fold")), value

    for x in states:
        held = torch.stack(
            [
                torch.stack(
                    [slope_at(sources.pooled, x, problem.lower_data, block)[0] for block in numbers]
                )
                for numbers in pool
            ]
        )
        products = []
        values = []
        total = torch.zeros_like(held[0, 0])
        for block in checked:
            folded, value = slope_at(problem.f, x, data, block)
            products.append(held @ folded)
            values.append(value)
            total += folded
        inner = torch.stack(products).double().cpu()
        mean = float((total / len(checked)).norm())
        length = held.mean(1).norm(dim=1).double().cpu()
        gains.append(inner / max(mean, 1e-30) ** 2)
        cosines.append(inner / (max(mean, 1e-30) * length.clamp_min(1e-30)).unsqueeze(1))
        losses.append(torch.stack(values).double().cpu())
    return Alignments(
        gains=torch.stack(gains).mean(0),
        cosines=torch.stack(cosines).mean(0),
        losses=torch.stack(losses),
    )


def _blocks(size: int, blocks: int, rows: int, key: Key, what: str, place: Place) -> Tensor:
    """Select disjoint blocks of row numbers, ``[blocks, rows]``.

    If there are too few rows, the number of rows per block is reduced first, then the number of
    blocks.
    """
    require(
        size >= FEWEST,
        "too-few-rows",
        f"uncertainty estimates require at least {FEWEST} {what}, but there are {size}",
        place=place,
    )
    count = min(blocks, size)
    share = max(1, min(rows, size // count))
    return torch.randperm(size, generator=key.generator())[: count * share].reshape(count, share)


def fold(leaves: Sequence[Tensor], most: int, key: Key) -> Tensor:
    """Return a gradient as a vector of at most ``most`` numbers.

    A longer gradient is folded under random signs, which are the same for all gradients.
    """
    flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
    flat = flat if flat.dtype == torch.float64 else flat.float()
    if len(flat) <= most:
        return flat
    folded = torch.zeros(most, dtype=flat.dtype, device=flat.device)
    generator = key.generator()
    for piece in flat.split(most):
        signs = torch.randint(2, (len(piece),), generator=generator, dtype=torch.int8)
        folded[: len(piece)] += (signs.to(flat) * 2 - 1) * piece
    return folded
