"""Studies of made runs that the tests of reports read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.made_runs import write_comparison, write_mixtures

from hgms import report
from hgms.report import Study


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("comparison"))


@pytest.fixture(scope="session")
def study(comparison: Path) -> Study:
    return report.build([comparison])


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = write_mixtures(tmp_path_factory.mktemp("mixtures"), sources=10)
    return report.build([folder], separate=True)
