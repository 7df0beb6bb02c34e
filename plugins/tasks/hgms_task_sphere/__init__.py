"""Task `sphere`: a manifold of lower minimisers of any dimension, with everything in closed form."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_task_sphere.task import Sphere as Sphere
from hgms_task_sphere.task import SphereClosedForm as SphereClosedForm


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [Sphere]
