"""A task for HGMS: which features of a table deserve trust? One penalty for each, some features
being known noise.
"""

from __future__ import annotations

from hgms_core import Task, hookimpl
from hgms_feature_penalties.task import FeaturePenalties as FeaturePenalties

hgms_plugin_api = 2  # what hgms_core.PLUGIN_API was when this was written


@hookimpl
def hgms_register_tasks() -> list[type[Task]]:
    return [FeaturePenalties]
