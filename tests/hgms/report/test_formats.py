"""Every format of a report: whole, escaped, and sound with a stranger's rows and names."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import CONFIG, write_run

import hgms.report as report
from hgms.report import Study
from hgms.report.formats import WRITERS
from hgms.report.latex import latex
from hgms.report.paper import draw_curves

HOSTILE = "x</script>| <b>a</b>\r# b\n\n# c\x1b[31m\u202e $\\frac{ $ [l](http://e) &lt; *k* ~s~"


def rows_with(**fields: Any) -> str:
    rows = [{"step": step, "metric.value": 0.5, **fields} for step in range(4)]
    return "".join(json.dumps(row) + "\n" for row in rows)


ODD = {"task": "ring", "rho": "1979-05-27", "method": "halve", "lr": "[inf, nan, [{a = 1}]]"}
LARGE = '"metrics": {"value": 1e308, "other": -1e308}, "oracle_calls": 1e18'


@pytest.mark.extended
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("steps.jsonl", rows_with(selected=300_000_000)),
        ("steps.jsonl", rows_with(gap="x", residual=["x"], iterations={}, outcome=3, selected="x")),
        (
            "steps.jsonl",
            rows_with(gap=1e308, residual=1e308, iterations=10**400, upper_loss=-1e308),
        ),
        ("steps.jsonl", rows_with(outcome="\ud800", **{'weight.a"b': 0.5, "weight.\ud800": 0.5})),
        ("summary.json", f'{{"status": "done", {LARGE}}}'),
        ("resources.json", '{"peak_memory_bytes": 1e18}'),
        ("config.toml", CONFIG.format(seed=1, steps=3, **ODD)),
    ],
)
def test_odd_rows_are_reported_in_every_format(tmp_path: Path, file: str, text: str) -> None:
    for seed in (0, 1):
        write_run(tmp_path, method="uniform", seed=seed)
    write_run(tmp_path, seed=1, value=1.2, files={file: text})
    study = report.build([tmp_path])
    for suffix in report.SUFFIXES:
        report.write(study, tmp_path / f"r{suffix}")


@pytest.mark.extended
def test_a_label_is_text_in_every_format(tmp_path: Path) -> None:
    for method, label, value in (("halve", "none", 0.5), ("x", HOSTILE, 0.001)):
        labels = {'label = "none"': f"label = {json.dumps(label)}"}
        for seed in (0, 1):
            write_run(tmp_path, method=method, seed=seed, value=value, changed=labels)
    study = report.build([tmp_path])
    assert [entry.label for entry in study.sections[0].entries] == [HOSTILE, "halve"]
    draw_curves(study, tmp_path / "r.svg")
    for text in (latex(study), (tmp_path / "r.svg").read_text()):
        assert ("halve" in text, set(text) & set("\x1b\r\u202e")) == (True, set())
    page = WRITERS[".html"](study)
    assert ("<b>a</b>" in page, "x</script>" in page) == (False, False)
    assert all("x</script>" not in picture for picture in pictures(page))


def pictures(page: str) -> list[str]:
    """The SVG images of a page."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return [base64.b64decode(text).decode() for text in found]


@pytest.mark.extended
def test_the_page_is_whole_and_asks_for_nothing(study: Study) -> None:
    page = WRITERS[".html"](study)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)|@import|url\(""", page)
    parts = ["default-src 'none'", "the hypergradient is not finite &amp; &lt;lost&gt;"]
    parts += ["Failed runs", "Skipped folders", "Environment"]
    assert [part for part in parts if part not in page] == []
    drawn = pictures(page)
    assert len(drawn) == page.count('class="plot') == 2 + 2 * 2  # two of the overview
    assert all("hg-ms" in picture for picture in drawn)


def test_latex_is_balanced_and_escaped(study: Study, tmp_path: Path) -> None:
    write_run(tmp_path, method="a_b & c%", value=0.2, metric="test_accuracy")
    for text in (latex(study), latex(report.build([tmp_path]))):
        bare = re.sub(r"\\[\\{}&%_#$]", "", text)
        assert (bare.count("{"), bare.count("$") % 2) == (bare.count("}"), 0)
        tabular = r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}"
        for align, body in re.findall(tabular, text, re.DOTALL):
            rows = [line for line in body.splitlines() if line.endswith(r"\\")]
            assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(align) - 1}
    assert (text.isascii(), r"a\_b \& c\%" in text) == (True, True)


def test_parquet_holds_a_row_for_each_run(study: Study, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    runs = parquet.read_table(report.write(study, tmp_path / "new" / "r.parquet")).to_pylist()
    assert len(runs) == 24
    of_run = {"method": "hg-ms", "setting.task.rho": "0.4", "seed": 1, "metric.value": 0.10}
    of_run |= {"status": "done", "oracle_calls": 120, "setting.method.lr": "0.5"}
    assert len([row for row in runs if of_run.items() <= row.items()]) == 1
    [failed] = [row for row in runs if row["status"] == "failed"]
    assert (failed["metric.value"], "not finite" in failed["error"]) == (None, True)
