"""The pages say what the code does: their blocks run, their generated parts are fresh, their
links lead somewhere.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.processes import SCRIPTS, Server

from hgms.cli import main

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
TEXTS = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((DOCS / "examples").glob("*/README.md")),
]


def called(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def scripts() -> Iterator[Server]:
    """Starts scripts in processes of their own, into which torch is imported already. Our packages
    are not: what a page does not import is not there."""
    server = Server(SCRIPTS)
    yield server
    server.close()


@pytest.mark.extended
@pytest.mark.parametrize("page", RUN, ids=called)
def test_the_blocks_of_the_page_run(page: Path, tmp_path: Path, scripts: Server) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    done = scripts.run(tmp_path, str(folder), str(HERE / "run_page.py"), str(page))
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
def test_generated_parts_are_fresh() -> None:
    done = python(str(DOCS / "generate.py"), "--check", cwd=ROOT)
    assert done.returncode == 0, (
        f"run `python docs/generate.py`; stale:\n{done.stdout}{done.stderr}"
    )


@functools.cache
def prose(page: Path) -> str:
    return re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


@functools.cache
def anchors(page: Path) -> set[str]:
    """What a link can lead to on a page: its headings, spelt as GitHub and MyST spell them, the
    second of one name with -1.
    """
    anchors_: set[str] = set()
    included = re.findall(r"^```{include} (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    text = "\n".join(
        prose(source) for source in (page, *(page.parent / where for where in included))
    )
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        anchors_.add(
            next(
                candidate
                for candidate in (name, *(f"{name}-{i}" for i in range(1, 100)))
                if candidate not in anchors_
            )
        )
    return anchors_


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in re.findall(r"\]\(((?!https://)[^)\s]+)\)", prose(page)):
        where, _, anchor = link.partition("#")
        target = page.parent / where if where else page
        heading = anchor and target.suffix == ".md"
        if not target.exists() or (heading and anchor not in anchors(target)):
            found.append(link)
    return found


def test_links_lead_somewhere() -> None:
    assert {called(page): links for page in TEXTS if (links := broken(page))} == {}


def test_a_link_to_a_heading_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `name`, and f(x)\n\n```text\n# no heading\n```\n\n## Twice\n\n## Twice\n"
        "[a](#twice-1)\n[b](gone.md#x)\n"
    )
    assert anchors(page) == {"a-name-and-fx", "twice", "twice-1"}
    assert broken(page) == ["gone.md#x"]


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {DOCS / "index.md"}
    for page in PAGES[1:]:
        for tree in re.findall(
            r"^```{toctree}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            listed |= {
                page.parent / f"{line}.md"
                for line in re.findall(r"^(?!:)(?:.*<)?([^<>\n]+)>?$", tree, re.MULTILINE)
            }
    assert listed == set(PAGES[1:])


def test_every_key_of_a_run_is_documented(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    method = 'method = { name = "hg-ms", keep = "best" }'
    config.write_text(f'budget = "2 steps"\ntask = "quadratic"\n{method}\n')
    words = ["run", str(config), "--out", str(tmp_path / "runs"), "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    folder = Path(json.loads(result.stdout)["folder"])
    page = (DOCS / "reference" / "run-folder.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([\w.<>-]+)`", page))
    lines = [
        *(folder / "steps.jsonl").read_text().splitlines(),
        (folder / "summary.json").read_text(),
    ]
    keys = {key for line in lines for key in json.loads(line) if not key.startswith("metric.")}
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert keys | {re.sub(r"-\d+\.", "-<step>.", name) for name in names} <= documented


def test_the_readme_has_two_commands_that_ci_and_tox_run() -> None:
    """Its first two blocks, one line each: they install the tested versions and the right extras;
    then CI runs the extended tier.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^```(\w+)$", readme, re.MULTILINE)[:2] == ["bash", "bash"]
    demo, tests = re.findall(r"^```bash\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[:2]
    assert (demo.count("\n"), tests.count("\n")) == (1, 1)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"demo", "test"} <= set(project["optional-dependencies"])
    assert "-c constraints.txt '.[demo]'" in demo
    assert "-c constraints.txt -e '.[test]'" in tests
    assert demo.rstrip().endswith("/bin/hgms demo")
    assert tests.rstrip().endswith("/bin/pytest -n 2")
    assert "\ncommands = pytest -n 2 {posargs}\n" in (ROOT / "tox.ini").read_text()
    command = [ROOT / ".ci" / "run", "--print"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.startswith(demo + tests)
    (rest,) = shown.splitlines()[2:]
    assert rest.endswith("-m 'extended and not nightly'")
