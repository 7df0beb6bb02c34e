"""A task for HGMS: one penalty per feature of a table, with known noise features."""

from __future__ import annotations

from hgms_core import Task, hookimpl
from hgms_feature_penalties.task import FeaturePenalties as FeaturePenalties

hgms_plugin_api = 2  # the supported hgms_core.PLUGIN_API


@hookimpl
def hgms_register_tasks() -> list[type[Task]]:
    return [FeaturePenalties]
