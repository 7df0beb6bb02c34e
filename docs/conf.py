"""Sphinx: Markdown pages and executed notebooks, the furo theme, and pictures of real runs
(docs/figures.py).
"""

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
extensions = ["myst_nb", "sphinx_copybutton"]  # the first brings MyST's Markdown along
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120  # seconds a cell
nb_execution_in_temp = True  # what a notebook writes does not land among the pages
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
html_math_renderer = (
    "mathml"  # browsers show it by themselves: a page needs no network and no script
)
# Links to files of the repository that are no pages (source, licence) are not Sphinx's to resolve;
# tests/docs follows them.
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
linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]  # its headings are made by scripts

NEW = Path(tempfile.mkdtemp(prefix="hgms-figures-"))


def draw(app: Sphinx) -> None:
    """Runs what the figures show. Numbers that are not those beside the committed pictures are a
    warning, so an error.
    """
    whole = Path(app.srcdir) == Path(__file__).parent  # not the reference alone, which shows none
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
    """The pages get the pictures just made."""
    for picture in NEW.glob("*.svg"):
        place = Path(app.outdir) / "_images" / picture.name
        if exception is None and place.exists():
            shutil.copyfile(picture, place)
    shutil.rmtree(NEW, ignore_errors=True)


def resolve(app: Sphinx, env: Any, node: Any, contents: Any) -> Any:
    """A type of ours in a signature leads to where it is described, whichever package it is in.
    Types of others stay text.
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
    # of equal names the core's, then those of classes
    ours = sorted(
        places, key=lambda full: (full.count("."), not full.startswith("hgms_core."), full)
    )
    # no method of a class
    if ours and ours[0].rpartition(".")[0] not in env.get_domain("py").objects:
        entry = places[ours[0]]
        return make_refnode(
            app.builder, node["refdoc"], entry.docname, entry.node_id, contents, ours[0]
        )
    raise NoUri


def formula(translator: Any, node: Any) -> None:
    """TeX as MathML. A command that the converter does not know would stand on the page as it
    is: a warning, so an error.
    """
    from docutils.nodes import SkipNode
    from latex2mathml.converter import convert
    from sphinx.util import logging

    block = node.tagname == "math_block"
    # known alone, but not behind \bigl
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
