"""The plugin host: find, load and check plugins, and look up components by name.

Programs use this package. A plugin only needs the hooks and protocols of ``hgms_core``.

Examples
--------
>>> Registry.load().get("solver", "cg").target.__name__
'CG'
"""

from hgms.plugins.discovery import FIRST_PARTY as FIRST_PARTY
from hgms.plugins.discovery import PluginInfo as PluginInfo
from hgms.plugins.discovery import canonical as canonical
from hgms.plugins.discovery import find_entries as find_entries
from hgms.plugins.discovery import import_plugin as import_plugin
from hgms.plugins.host import LOG as LOG
from hgms.plugins.host import Host as Host
from hgms.plugins.host import describe as describe
from hgms.plugins.registry import KINDS as KINDS
from hgms.plugins.registry import NAME as NAME
from hgms.plugins.registry import Component as Component
from hgms.plugins.registry import Kind as Kind
from hgms.plugins.registry import Registry as Registry
from hgms.plugins.registry import faults_of as faults_of
from hgms.plugins.registry import inside as inside
from hgms.plugins.registry import layers_of as layers_of
from hgms.plugins.registry import method_faults as method_faults
from hgms.plugins.registry import summary_of as summary_of
from hgms.plugins.sandbox import watch_plugin as watch_plugin
