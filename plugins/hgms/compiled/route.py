"""How float32 matrix products are computed: exactly as float32, or on the fastest route the device
has.

torch sends float32 products on a CPU to its linear algebra library, which on processors of AMD runs
at half the speed of oneDNN. Allowed to compute in bfloat16, torch takes oneDNN, and where the
processor has no tiles for bfloat16 (AMX) oneDNN computes in float32 all the same. On one that has
them the products lose half of their digits. So the choice is measured, not guessed from names:
:func:`hgms.compiled.calibrated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from hgms_core.errors import one_of

Route = Literal["exact", "fast"]
ROUTES: tuple[Route, ...] = ("exact", "fast")

ALLOWED: Mapping[str, str] = {"cpu": "medium", "cuda": "high"}
"""What ``fast`` is called in ``torch.set_float32_matmul_precision``, by type of device: bfloat16
in oneDNN, TF32 on a GPU.
"""


@contextmanager
def matrix_route(route: Route, device: torch.device | str = "cpu") -> Iterator[None]:
    """``with matrix_route("fast"):`` the float32 products inside are computed on this route; after
    it, as before.

    ``exact`` is float32 arithmetic. ``fast`` allows what the device has: on a CPU bfloat16, which
    on processors without AMX means oneDNN in float32; on a GPU TF32. Other devices have one route.
    The setting is torch's, of the whole process, and the older and the newer names for it agree
    inside; what was set before, by either, is back at the end, also after an exception.

    >>> with matrix_route("fast"):
    ...     torch.get_float32_matmul_precision()
    'medium'
    >>> torch.get_float32_matmul_precision()
    'highest'

    Source: torch.set_float32_matmul_precision and torch.backends.*.matmul.fp32_precision.
    """
    one_of("route", route, ROUTES)
    backends = [getattr(torch.backends, name).matmul for name in ("mkldnn", "cuda")]
    before = [_own(backend) for backend in backends]
    for backend in backends:
        backend.fp32_precision = (
            "ieee"  # torch refuses to tell the older setting where a newer one disagrees
        )
    older = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(
            ALLOWED.get(torch.device(device).type, "highest") if route == "fast" else "highest"
        )
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _own(backend: Any) -> str:
    """The precision that was set for this backend; "none" where it follows the one for all,
    which its value does not tell.
    """
    values = set()
    for general in ("ieee", "tf32"):
        with torch.backends.flags(fp32_precision=general):
            values.add(backend.fp32_precision)
    return values.pop() if len(values) == 1 else "none"
