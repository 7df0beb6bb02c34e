"""What programs around components use: scripts, commands of plugins, notebooks. Configurations, runs, comparisons, tables.

A component needs none of this (``hgms_core`` has all that it does); a program that reads configurations, carries out runs and
shows what came of them needs it, and nothing else. Listed in ``__all__``; kept as the plugin API is.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     table = {"task": "quadratic", "method": "hg-ms", "budget": "2 steps", "run": {"out": folder}}
...     result = run_config(RunConfig.from_dict(table))
>>> result.summary["status"], result.summary["outer_steps"]
('done', 2)
"""

from __future__ import annotations

from hgms_core.code import environment
from hgms_core.compare import Comparison, compare
from hgms_core.composition import overlay
from hgms_core.config import RunConfig, RunSettings, lay, load, read_toml, tables_of
from hgms_core.folder import DiskError, RunFolder, appending, replace_file
from hgms_core.launch import device_called, run_config
from hgms_core.plots import COLOURS
from hgms_core.plugins import host
from hgms_core.progress import Progress
from hgms_core.results import Skipped, StoredRun, scan
from hgms_core.runner import Interrupted, Interrupts, RunResult, run
from hgms_core.scale import scaled
from hgms_core.statistics import Interval, paired
from hgms_core.structure import plain
from hgms_core.table import Row, Table, table
from hgms_core.terminal import json_option, plugin_option, print_json, print_table, track_option, trust_option

__all__ = [
    "COLOURS",
    "Comparison",
    "DiskError",
    "Interrupted",
    "Interrupts",
    "Interval",
    "Progress",
    "Row",
    "RunConfig",
    "RunFolder",
    "RunResult",
    "RunSettings",
    "Skipped",
    "StoredRun",
    "Table",
    "appending",
    "compare",
    "device_called",
    "environment",
    "host",
    "json_option",
    "lay",
    "load",
    "overlay",
    "paired",
    "plain",
    "plugin_option",
    "print_json",
    "print_table",
    "read_toml",
    "replace_file",
    "run",
    "run_config",
    "scaled",
    "scan",
    "table",
    "tables_of",
    "track_option",
    "trust_option",
]
