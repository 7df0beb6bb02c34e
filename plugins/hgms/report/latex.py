"""The report's main tables as LaTeX (booktabs), for a paper."""

from __future__ import annotations

import re

from hgms.config.control_characters import printable
from hgms.report.study import Study
from hgms.report.tables import MINUS, Cell, Table, mixture, overview, pairs, scores, summary, work

_TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    MINUS: "$-$",
    "–": "--",
    "·": r"$\cdot$",
    "“": "``",
    "”": "''",
    "ρ": r"$\rho$",
    "θ": r"$\theta$",
    "δ": r"$\delta$",
    "γ": r"$\gamma$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "×": r"$\times$",
    "\n": " ",
    "[": "{[}",
    "*": "{*}",  # after the end of a row, LaTeX would read these two as its arguments
}


def tex(value: str) -> str:
    """Escape every character with a special meaning in LaTeX.

    Examples
    --------
    >>> print(tex("50 % of a_b & c ± 1"))
    50 \\% of a\\_b \\& c $\\pm$ 1
    """
    return "".join(_TEX.get(letter, letter) for letter in printable(value))


def latex(study: Study) -> str:
    r"""Format the results, work and differences of every task as ``table`` environments.

    They need ``\usepackage{booktabs}``.
    """
    parts = [f"% {_comment(study.title)}: {summary(study)}", r"% needs \usepackage{booktabs}"]
    if len(study.sections) > 1:
        parts.append(_tex_table(overview(study), "all", ""))
    for number, section in enumerate(study.sections, start=1):
        name = re.sub(r"[^a-z0-9]+", "-", section.title.casefold()).strip("-") or str(number)
        parts.append(f"% --- {_comment(section.title)}")
        lead = f"{section.title}, {section.budget} per run. "
        shown = (scores(section), mixture(section), work(section), pairs(section))
        parts += [_tex_table(table, name, lead) for table in shown if table.rows]
    return "\n\n".join(parts) + "\n"


def _comment(value: str) -> str:
    return printable(" ".join(value.split()))


def _tex_table(table: Table, name: str, lead: str) -> str:
    def spell_cell(cell: Cell) -> str:
        shown = tex(cell.text)
        if cell.note:
            shown += rf" \emph{{({tex(cell.note)})}}"
        return rf"\textbf{{{shown}}}" if cell.strong else shown

    align = "".join("r" if cell.number else "l" for cell in table.rows[0])
    body = []
    for number, row in enumerate(table.rows):
        if number in table.groups:
            body.append(r"\midrule")
        body.append(" & ".join(map(spell_cell, row)) + r" \\")
    rows = [
        r"\toprule",
        " & ".join(map(tex, table.columns)) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
    ]
    lines = [
        rf"  \caption{{{tex(lead + table.title + '. ' + table.caption)}}}",
        rf"  \label{{tab:{name}-{table.ident}}}",
        rf"  \begin{{tabular}}{{{align}}}",
        *(f"    {row}" for row in rows),
        r"  \end{tabular}",
    ]
    return "\n".join([r"\begin{table}", r"  \centering", *lines, r"\end{table}"])
