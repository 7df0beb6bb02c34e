"""Flat directions of the lower Hessian, and the curvature of the others.

The module estimates their number, and the smallest curvature of the other directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hgms_core import Key, MatVec

DENSE = 256
"""Maximum size of x for which the Hessian is built and all its eigenvalues are computed."""
STEPS = 40
PROBES = 4
"""Number of random starts for Lanczos steps, if x is larger."""
FLAT = 1e-3
"""An eigenvalue counts as zero below this share of the largest eigenvalue, or below the ridge of
the linear solve.
"""


def spectrum(
    matvec: MatVec, like: torch.Tensor, ridge: float, key: Key
) -> tuple[dict[str, Any], int]:
    """Return a row with the spectrum of the lower Hessian, and the number of products used.

    ``matvec`` is a symmetric operator on vectors like ``like``, ``[d]``. The row contains:

    - ``size``: d.
    - ``flat_dimension``: the number k of eigenvalues of magnitude at most ``flat_threshold``. Its
      standard error is ``flat_error`` (0 if all eigenvalues were computed).
    - ``negative_dimension``: the number of eigenvalues below −``flat_threshold``.
    - ``normal_curvature``: the smallest eigenvalue above ``flat_threshold`` (c in the paper's
      Proposition on the geometry of S(θ); inf if there is none).
    - ``normal_inverses``: the sum of 1/λ over the eigenvalues above ``flat_threshold``.
    - ``spectrum``: ``"all"`` if all eigenvalues were computed, else ``"lanczos"``.

    Up to DENSE numbers, all eigenvalues are computed. For more numbers, Lanczos quadrature is used:
    a random start of length 1 has in expectation the share 1/d of its weight on each eigenvector.
    So the weights of the Ritz values up to a threshold, times d, estimate the number of eigenvalues
    below it. The estimate is unbiased except for the smearing of 40 steps.

    Notes
    -----
    Source: Golub and Meurant (2010), Gauss quadrature by Lanczos; Ubaru, Chen and Saad (2017),
    counts by it.

    Examples
    --------
    >>> eigenvalues = torch.tensor([0.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    >>> row, _ = spectrum(lambda v: eigenvalues * v, eigenvalues, 0.0, Key(0))
    >>> row["flat_dimension"], row["normal_curvature"], row["largest"]
    (2.0, 0.5, 2.0)
    """
    size = like.numel()
    if size <= DENSE:
        basis = torch.eye(size, dtype=like.dtype, device=like.device)
        matrix = torch.stack([matvec(row) for row in basis]).detach().double().cpu().numpy()
        values = np.linalg.eigvalsh((matrix + matrix.T) / 2)
        parts = [(values, np.full(size, 1 / size))]
        products = size
    else:
        starts = [
            torch.randn(size, generator=key.fold("probe", i).generator(), dtype=torch.float64)
            for i in range(PROBES)
        ]
        parts = [_quadrature(matvec, start.to(like.device, like.dtype)) for start in starts]
        products = sum(len(values) for values, _ in parts)
    largest, smallest = (float(end([end(values) for values, _ in parts])) for end in (max, min))
    threshold = max(ridge, FLAT * max(abs(largest), abs(smallest)))
    flat = [size * float(weights[np.abs(values) <= threshold].sum()) for values, weights in parts]
    negative = [size * float(weights[values < -threshold].sum()) for values, weights in parts]
    above = [(values > threshold) & (size * weights > 0.5) for values, weights in parts]
    normal = min(
        (
            float(values[kept].min())
            for (values, _), kept in zip(parts, above, strict=True)
            if kept.any()
        ),
        default=np.inf,
    )
    inverses = [
        size * float((weights[kept] / values[kept]).sum())
        for (values, weights), kept in zip(parts, above, strict=True)
    ]
    row = {
        "size": size,
        "largest": largest,
        "smallest": smallest,
        "flat_threshold": threshold,
        "flat_dimension": round(float(np.mean(flat)), 9),
        "flat_error": float(np.std(flat, ddof=1) / len(flat) ** 0.5) if len(flat) > 1 else 0.0,
        "negative_dimension": round(float(np.mean(negative)), 9),
        "normal_curvature": normal,
        "normal_inverses": float(np.mean(inverses)),
        "spectrum": "all" if size <= DENSE else "lanczos",
    }
    return row, products


def _quadrature(matvec: MatVec, start: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Compute Ritz values and their weights from one start, with full reorthogonalisation."""
    vectors = [start / torch.linalg.vector_norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(STEPS):
        product = matvec(vectors[-1]).detach()
        diagonal.append(float(vectors[-1] @ product))
        known = torch.stack(vectors)
        for _ in range(2):
            product = product - known.T @ (known @ product)
        length = float(torch.linalg.vector_norm(product))
        if length <= 1e-10 * max(map(abs, diagonal)) or len(vectors) == STEPS:
            break
        beside.append(length)
        vectors.append(product / length)
    from scipy.linalg import eigh_tridiagonal  # imported only if a run requests a diagnosis

    values, rows = eigh_tridiagonal(np.array(diagonal), np.array(beside))
    return values, rows[0] ** 2
