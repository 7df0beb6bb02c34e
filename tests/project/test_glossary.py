"""The glossary: old terms do not return to pages, docstrings, comments and messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

GLOSSARY = {
    r"t(?:old|ell|ells|elling) (?:\w+ )?apart": "distinguished",
    r"ways? back": "backward pass",
    r"(?:go(?:es|ing)?|went) on": "resumes, continues",
    r"taken up": "resumed",
    r"br(?:oken|eaks?) off": "interrupted",
    r"anew": "again; drawn or computed at each use",
    r"made again": "recomputed",
    r"carr(?:y|ies|ied|ying) out": "run, execute",
    r"parted": "split across",
    r"a person": "a user",
    r"seal(?:s|ed)?": "checksums",
    r"stands in": "is in, is stored in",
    r"hears?": "is notified",
    r"by itself": "automatically, by default",
    r"beside": "in addition to, next to",
    r"left out": "skipped, excluded",
    r"refuse[sd]": "rejects, rejected",
    r"(?:is|are|not) ahead of": "outperforms, better than",
    r"as written(?! to)": "eager",
    r"(?:its|their|an|the) own (?:kind|sake)": "separate, custom",
    r"of (?:its|their) own": "separate, custom",
    r"learns? nothing": "does not learn",
}
"""The plain term for each old term."""

OLD = re.compile("|".join(rf"\b{term}\b" for term in GLOSSARY), re.IGNORECASE)
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a page or a module with their lines: no code."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def old_terms(path: Path) -> list[str]:
    return [
        f"{path.name}:{line} {match[0]}"
        for line, text in texts_of(path)
        for match in OLD.finditer(CODE.sub("", text))
    ]


@pytest.mark.parametrize("folder", ["hgms_core", "plugins", "docs", "benchmarks", "."])
def test_no_text_has_an_old_term(folder: str) -> None:
    find = (ROOT / folder).glob if folder == "." else (ROOT / folder).rglob
    paths = [path for pattern in ("*.py", "*.md") for path in find(pattern)]
    paths = [path for path in paths if path.name != "CHANGELOG.md"]
    assert paths
    found = [term for path in paths for term in old_terms(path)]
    assert found == [], "use the plain terms of GLOSSARY"


def test_an_old_term_is_found_in_a_page_a_docstring_and_a_comment(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The run goes on. `goes on` and\n```text\ngoes on\n```\nare code.\n")
    module = tmp_path / "module.py"
    module.write_text('"""Both are told apart."""\n# drawn anew\nx = f"broken off: {1}"\n')
    assert old_terms(page) == ["page.md:1 goes on"]
    assert old_terms(module) == [
        "module.py:1 told apart",
        "module.py:3 broken off",
        "module.py:2 anew",
    ]
