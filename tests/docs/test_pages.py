"""The pages say what the code does: their blocks run, their generated parts are fresh, their
links lead somewhere.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fakes import json_of
from support.processes import SCRIPTS, Server

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HERE = Path(__file__).parent
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in DOCS.rglob("*.md") if not {"_build", "examples"} & set(path.parts)),
]
RUN = [
    page
    for page in PAGES
    if re.search(r"^```(python|console)", page.read_text(encoding="utf-8"), re.MULTILINE)
]
SLOW = {
    "compare",
    "first-run",
    "hand-over",
    "tune",
    "compose-in-python",
    "index",
    "mix-data",
    "mix-methods",
    "mixture-surface",
    "notebooks",
    "plugin-package",
    "programs",
    "report",
    "your-module",
}
"""Pages that take more than some seconds: `tox -e docs` runs them, the extended tier does not."""
TEXTS = [
    *PAGES,
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *sorted((DOCS / "examples").glob("*/README.md")),
]


def called(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def scripts() -> Iterator[Server]:
    """Starts scripts in processes of their own, into which torch is imported already. Our packages
    are not: what a page does not import is not there."""
    server = Server(SCRIPTS)
    yield server
    server.close()


@pytest.mark.extended
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.nightly if page.stem in SLOW else ()) for page in RUN],
    ids=called,
)
def test_the_blocks_of_the_page_run(page: Path, tmp_path: Path, scripts: Server) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    done = scripts.run(tmp_path, str(folder), str(HERE / "run_page.py"), str(page))
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
def test_generated_parts_are_fresh() -> None:
    command = [sys.executable, str(DOCS / "generate.py"), "--check"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300, check=False
    )
    assert done.returncode == 0, (
        f"run `python docs/generate.py`; stale:\n{done.stdout}{done.stderr}"
    )


@functools.cache
def prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """What a link can lead to on a page: its headings, spelt as GitHub and MyST spell them, the
    second of one name with -1.
    """
    included = re.findall(r"^```{include} (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    texts = [prose(source) for source in (page, *(page.parent / where for where in included))]
    counts: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", "\n".join(texts), re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        counts[re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")] += 1
    return {name + (f"-{i}" if i else "") for name in counts for i in range(counts[name])}


def leads_nowhere(page: Path, link: str) -> bool:
    where, _, anchor = link.partition("#")
    target = page.parent / where if where else page
    heading = anchor and target.suffix == ".md"
    return not target.exists() or bool(heading and anchor not in anchors(target))


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    links = re.findall(r"\]\(((?!https://)[^)\s]+)\)", prose(page))
    return [link for link in links if leads_nowhere(page, link)]


def test_links_lead_somewhere() -> None:
    assert {called(page): links for page in TEXTS if (links := broken(page))} == {}


def test_every_page_is_in_the_table_of_contents() -> None:
    tree = re.compile(r"^```{toctree}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    entry = re.compile(r"^(?!:)(?:.*<)?([^<>\n]+)>?$", re.MULTILINE)
    listed = {
        (page.parent / f"{line}.md").resolve()
        for page in PAGES[1:]
        for part in tree.findall(page.read_text(encoding="utf-8"))
        for line in entry.findall(part)
    }
    assert {DOCS / "index.md", *listed} == set(PAGES[1:])


def test_every_key_of_a_run_is_documented(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    method = 'method = { name = "hg-ms", keep = "best" }'
    config.write_text(f'budget = "2 steps"\ntask = "quadratic"\n{method}\n')
    folder = Path(json_of("run", config, "--out", tmp_path / "runs")["folder"])
    page = (DOCS / "reference" / "run-folder.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([\w.<>-]+)`", page))
    rows = (folder / "steps.jsonl").read_text().splitlines()
    lines = [*rows, (folder / "summary.json").read_text()]
    keys = {key for line in lines for key in json.loads(line) if not key.startswith("metric.")}
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert keys | {re.sub(r"-\d+\.", "-<step>.", name) for name in names} <= documented


def test_the_readme_has_two_commands_that_ci_and_tox_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (_, demo), (_, tests) = blocks[:2]
    assert tests.endswith("/bin/pytest -n 2\n")
    assert "\ncommands = pytest -n 2 {posargs}\n" in (ROOT / "tox.ini").read_text()
    command = [ROOT / ".ci" / "run", "--print"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.startswith(demo + tests)
