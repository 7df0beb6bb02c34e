"""Holm's rule is that of statsmodels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from hgms.results.statistics import paired_differences

pytestmark = pytest.mark.nightly


def test_a_pair_s_interval_excludes_zero_where_multipletests_rejects() -> None:
    random = np.random.default_rng(7)
    rejected = 0
    for _ in range(20):
        rows = random.normal([[1.5], [0], [0], [0]], 1, (4, 5))
        pairs = list(itertools.combinations(range(4), 2))
        chances = [stats.ttest_rel(rows[i], rows[j]).pvalue for i, j in pairs]
        expected = multipletests(chances, alpha=0.05, method="holm")[0].tolist()
        result = paired_differences(
            {str(i): dict(enumerate(row.tolist())) for i, row in enumerate(rows)}
        )
        assert [result[str(i), str(j)].excludes_zero for i, j in pairs] == expected
        rejected += sum(expected)
    assert 0 < rejected < 60
