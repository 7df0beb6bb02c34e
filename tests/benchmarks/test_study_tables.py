"""docs/reference/study-results.md: its tables are those of the records."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.helpers import load_script

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


study = load_script("hgms_study_tables", ROOT / "benchmarks" / "study" / "tables.py")
PAGE = study.PAGE.read_text(encoding="utf-8")


def test_every_table_on_the_page_is_what_the_records_make() -> None:
    assert study.page(PAGE) == PAGE
    assert sorted(match[1] for match in study.MARKED.finditer(PAGE)) == sorted(study.TABLES)
