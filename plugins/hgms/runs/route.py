"""Routes of float32 matrix products: exact float32, or the fastest route of the device.

torch sends float32 products on a CPU to its linear algebra library, which has half the speed of
oneDNN on AMD processors. If bfloat16 is allowed, torch uses oneDNN. On processors without tiles for
bfloat16 (AMX), oneDNN still computes in float32. On processors with AMX, the products lose half of
their digits. The choice is therefore measured and not derived from processor names:
:func:`hgms.runs.calibrated`.
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
"""Value of ``torch.set_float32_matmul_precision`` for ``fast``, by device type: bfloat16 in oneDNN,
TF32 on a GPU.
"""


@contextmanager
def matrix_route(route: Route, device: torch.device | str = "cpu") -> Iterator[None]:
    """Compute the float32 products inside ``with matrix_route("fast"):`` on this route.

    Afterwards the earlier setting is restored.

    ``exact`` is float32 arithmetic. ``fast`` allows the fastest route of the device: on a CPU
    bfloat16, which on processors without AMX means oneDNN in float32; on a GPU TF32. Other devices
    have one route. The setting belongs to torch and applies to the whole process. Inside, torch's
    older and newer names for it agree. The earlier value, set by either name, is restored at the
    end, also after an exception.

    Notes
    -----
    Source: torch.set_float32_matmul_precision and torch.backends.*.matmul.fp32_precision.

    Examples
    --------
    >>> with matrix_route("fast"):
    ...     torch.get_float32_matmul_precision()
    'medium'
    >>> torch.get_float32_matmul_precision()
    'highest'
    """
    one_of("route", route, ROUTES)
    backends = [getattr(torch.backends, name).matmul for name in ("mkldnn", "cuda")]
    before = [_precision_of(backend) for backend in backends]
    for backend in backends:
        backend.fp32_precision = (
            "ieee"  # torch raises an error for the older setting if a newer one differs
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


def _precision_of(backend: Any) -> str:
    """Return the precision that was set for this backend.

    The result is "none" if the backend uses the common setting, which its value does not show.
    """
    values = set()
    for general in ("ieee", "tf32"):
        with torch.backends.flags(fp32_precision=general):
            values.add(backend.fp32_precision)
    return values.pop() if len(values) == 1 else "none"
