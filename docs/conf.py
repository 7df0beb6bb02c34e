"""Sphinx: Markdown pages, the furo theme, nothing else."""

from __future__ import annotations

import hgms_core

project = "HGMS"
author = "The HGMS developers"
copyright = author
release = hgms_core.__version__
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_title = f"HGMS {release}"
# Links to files of the repository that are no pages (source, licence) are not Sphinx's to resolve.
suppress_warnings = ["myst.xref_missing"]
