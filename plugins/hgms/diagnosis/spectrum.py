"""Flat directions of the lower Hessian, and the curvature of the others.

The module estimates their number, and the smallest curvature of the other directions.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

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


@frozen(kw_only=True)
class Spectrum:
    """Eigenvalue counts of the lower Hessian, with their cost.

    - ``size`` is d.
    - ``flat`` is the number k of eigenvalues of magnitude at most ``threshold``. Its standard error
      is ``flat_error`` (0 if all eigenvalues were computed).
    - ``negative`` is the number of eigenvalues below −``threshold``.
    - ``normal`` is the smallest eigenvalue above ``threshold`` (c in the paper's Proposition on the
      geometry of S(θ); inf if there is none).
    - ``inverses`` is the sum of 1/λ over the eigenvalues above ``threshold``.
    - ``products`` is the number of Hessian products used.
    """

    size: int
    largest: float
    smallest: float
    threshold: float
    flat: float
    flat_error: float
    negative: float
    normal: float
    inverses: float
    products: int

    @property
    def exact(self) -> bool:
        return self.size <= DENSE


def spectrum(matvec: MatVec, like: torch.Tensor, ridge: float, key: Key) -> Spectrum:
    """Compute the spectrum of the symmetric operator on vectors like ``like``, ``[d]``.

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
    >>> of = spectrum(lambda v: eigenvalues * v, eigenvalues, 0.0, Key(0))
    >>> of.flat, of.normal, of.largest
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
    error = float(np.std(flat, ddof=1) / len(flat) ** 0.5) if len(flat) > 1 else 0.0
    return Spectrum(
        size=size,
        largest=largest,
        smallest=smallest,
        threshold=threshold,
        flat=round(float(np.mean(flat)), 9),
        flat_error=error,
        negative=round(float(np.mean(negative)), 9),
        normal=normal,
        inverses=float(np.mean(inverses)),
        products=products,
    )


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
