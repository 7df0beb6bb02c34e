"""Configure Sphinx: Markdown pages, executed notebooks, the furo theme and generated figures."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hgms_core

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "HGMS"
author = "The HGMS developers"
copyright = author
release = hgms_core.__version__
extensions = ["myst_nb", "sphinx_copybutton"]  # the first includes MyST's Markdown
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120  # seconds per cell
nb_execution_in_temp = True  # keeps the files of a notebook out of the pages
nb_merge_streams = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nitpicky = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 72
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"HGMS {release}"
html_math_renderer = "mathml"  # browsers render it without network access or scripts
# Sphinx does not resolve links to files of the repository other than pages (source, licence);
# tests/docs checks them.
suppress_warnings = ["myst.xref_missing"]

# `sphinx-build -b linkcheck docs FOLDER` checks every outside address. These reject programs, or
# require a login.
linkcheck_ignore = [
    r"https://(www\.)?(dl\.acm|jstor|sciencedirect|openreview)\.",
    r"https?://(localhost|127\.0\.0\.1)",
]
linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_workers = 4
linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]  # scripts create its headings

NEW = Path(tempfile.mkdtemp(prefix="hgms-figures-"))


def draw(app: Sphinx) -> None:
    """Draw the figures (docs/figures.py). Different numbers are a warning, so the build fails."""
    whole = Path(app.srcdir) == Path(__file__).parent  # the reference has no figures
    if not whole or app.builder.format != "html" or app.builder.name == "linkcheck":
        return
    sys.path.insert(0, str(Path(__file__).parent))
    import figures
    from sphinx.util import logging

    for line in figures.write(NEW)[:5]:
        logging.getLogger(__name__).warning(
            "figures are stale, run `python docs/figures.py`: %s", line
        )


def show(app: Sphinx, exception: Exception | None) -> None:
    """Copy the new figures into the built pages."""
    for picture in NEW.glob("*.svg"):
        place = Path(app.outdir) / "_images" / picture.name
        if exception is None and place.exists():
            shutil.copyfile(picture, place)
    shutil.rmtree(NEW, ignore_errors=True)


def resolve(app: Sphinx, env: Any, node: Any, contents: Any) -> Any:
    """Link a type of HGMS in a signature to its description, from any package.

    Types of other libraries stay text.
    """
    from sphinx.errors import NoUri
    from sphinx.util.nodes import make_refnode

    if node["refdomain"] != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    places = {
        full: entry
        for full, entry in env.get_domain("py").objects.items()
        if full.rpartition(".")[2] == name
    }
    # for equal names: first the core, then classes
    ours = sorted(
        places, key=lambda full: (full.count("."), not full.startswith("hgms_core."), full)
    )
    # skip methods of classes
    if ours and ours[0].rpartition(".")[0] not in env.get_domain("py").objects:
        entry = places[ours[0]]
        return make_refnode(
            app.builder, node["refdoc"], entry.docname, entry.node_id, contents, ours[0]
        )
    raise NoUri


def formula(translator: Any, node: Any) -> None:
    """Convert TeX to MathML. Unknown commands are a warning, so the build fails."""
    from docutils.nodes import SkipNode
    from latex2mathml.converter import convert
    from sphinx.util import logging

    block = node.tagname == "math_block"
    # the converter supports these, but not after \bigl
    tex = node.astext().replace("\\langle", "⟨").replace("\\rangle", "⟩")
    text = convert(tex, display="block" if block else "inline").replace(
        "<mi>\\arg</mi>", "<mo>arg</mo>"
    )
    for unknown in re.findall(r">(\\\w+)<", text):
        logging.getLogger(__name__).warning(
            "a formula has %s, which has no MathML here", unknown, location=node
        )
    translator.body.append(
        f'<div style="overflow: auto hidden; padding: 0.4em 0">{text}</div>' if block else text
    )
    raise SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("missing-reference", resolve)
    app.connect("builder-inited", draw)
    app.connect("build-finished", show)
