"""What this plugin takes from the core beyond its public names: it adds a command, so it reads configurations and runs them."""

from __future__ import annotations

from hgms_core.config import RunConfig as RunConfig
from hgms_core.config import lay as lay
from hgms_core.config import plain as plain
from hgms_core.config import read_toml as read_toml
from hgms_core.folder import RunFolder as RunFolder
from hgms_core.folder import replace_file as replace_file
from hgms_core.plots import COLOURS as COLOURS
from hgms_core.progress import Progress as Progress
from hgms_core.registry import overlay as overlay
from hgms_core.runner import Interrupted as Interrupted
from hgms_core.runner import RunInfo as RunInfo
from hgms_core.runner import _Interrupts as Interrupts  # noqa: F401
from hgms_core.runner import device_called as device_called
from hgms_core.runner import environment as environment
from hgms_core.runner import run_config as run_config
from hgms_core.scale import scaled as scaled
from hgms_core.statistics import Interval as Interval
from hgms_core.statistics import paired as paired
from hgms_core.terminal import print_table as print_table
