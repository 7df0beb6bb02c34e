"""Task `sphere`: a manifold of lower minimisers of any dimension, in closed form."""

from __future__ import annotations

from hgms.tasks.sphere.task import Sphere as Sphere
from hgms.tasks.sphere.task import SphereClosedForm as SphereClosedForm
from hgms_core import hookimpl


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [Sphere]
