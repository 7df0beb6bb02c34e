"""``hgms new plugin``: write a new distribution that passes every check from the start."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import click

from hgms.arguments import require
from hgms.cli import json_option, kind_called, print_json
from hgms.plugins import KINDS, NAME, Host, Kind, Registry
from hgms_core import ConfigError, __version__

TEMPLATE = files("hgms.cli.new") / "template"

TESTED_WITH = {
    "generator": "count=2, steps=5, noise=0.5, batch_size=4",
    "selector": "blocks=1",
    "solver": "ridge=0.0, rtol=1e-8, max_steps=300",
    "hypergradient": "lr=0.3, terms=100",
    "outer": "lr=0.2, momentum=0.9",
    "task": "places=12, rows=30",
    "method": "sigma=1.0, steps=30",
}
"""Fields of the second instance in each template's conformance test; the first uses the defaults.
"""


@click.group(short_help="Create a plugin from a template.")
def new() -> None:
    """Create a plugin from a template."""


@new.command(short_help="Create a plugin as a separate distribution.")
@click.argument("name")
@click.option(
    "--kind",
    "word",
    default="solver",
    show_default=True,
    metavar="KIND",
    help=f"One of {', '.join(KINDS)}.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path("."),
    help="The parent of the folder hgms-NAME.  [default: here]",
)
@json_option
def plugin(name: str, word: str, into: Path, as_json: bool) -> None:
    """Write a plugin as a separate distribution.

    The folder hgms-NAME then contains a working component NAME of this KIND, a small real method,
    with tests, a README, an example run and a CI file. It passes every check of the conformance
    kit. Existing files are not overwritten.

    \b
    hgms new plugin minimal-residual --kind solver
    hgms new plugin my-task --kind task --into ~/code
    """
    kind = kind_called(word, ("--kind",))
    check_name(name, kind)
    folder = into / f"hgms-{name}"
    check_folder(folder)
    texts = fill_templates(name, kind)
    for place, (text, _) in texts.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    steps = {
        f"cd {shlex.quote(str(folder))} && pip install -e '.[test]'": (
            "`hgms plugins` then lists it"
        ),
        "pytest": "every check of the kit, and its own tests",
        "hgms run run.toml": "try it",
    }
    if as_json:
        print_json({"folder": str(folder), "files": list(texts), "next": list(steps)})
        return
    contents = {place: purpose for place, (_, purpose) in texts.items()}
    commands = {command: f"# {purpose}" for command, purpose in steps.items()}
    for title, lines in (
        (f"{folder}: a plugin with the {kind.label} {name!r}", contents),
        ("next:", commands),
    ):
        click.echo(title)
        for line, purpose in lines.items():
            click.echo(f"  {line:<{max(map(len, lines))}}  {purpose}")


LAYOUT = {
    "pyproject.toml": ("pyproject.toml", "name, dependencies, and the entry point of the plugin"),
    "README.md": ("README.md", "purpose, source, equations and deviations"),
    "src/@module@.py": ("kinds/@kind@.py", "the component and its hook: replace its algorithm"),
    "tests/test_conformance.py": ("test_conformance.py", "every check of the conformance kit"),
    "tests/test_@module@.py": ("kinds/@kind@.test", "tests of the algorithm: replace them"),
    "run.toml": ("kinds/@kind@.toml", "an example run"),
    "CHANGELOG.md": ("CHANGELOG.md", "changes for users"),
    "LICENSE": ("LICENSE", "choose a licence"),
    ".gitignore": ("gitignore", "files that git ignores"),
    ".github/workflows/tests.yml": ("tests.yml", "CI: installs, tests and checks it on every push"),
}
"""Each file of the distribution: its template and its purpose."""


def fill_templates(name: str, kind: Kind) -> dict[str, tuple[str, str]]:
    """Return the content and the purpose of every file of the distribution, by its path."""
    values = values_of(name, kind)
    files = {}
    for place, (template, purpose) in LAYOUT.items():
        text = _fill_template(_template(_fill_template(template, values)), values)
        files[_fill_template(place, values)] = text, purpose
    return files


def values_of(name: str, kind: Kind) -> dict[str, str]:
    """Return the values for the templates."""
    source = _template(f"kinds/{kind.name}.py")
    summary, _, method = _template(f"kinds/{kind.name}.md").partition("\n\n")
    cls = "".join(word.capitalize() for word in name.split("-"))
    # The module already uses this name.
    if keyword.iskeyword(cls) or re.search(rf"\b{cls}\b", source):
        cls += kind.name.capitalize()
    major, minor = __version__.split(".")[:2]
    return {
        "summary": summary.strip(),
        "method": method.strip(),
        "instances": f"{cls}(), {cls}({TESTED_WITH[kind.name]})",
        "name": name,
        "module": f"hgms_{name.replace('-', '_')}",
        "class": cls,
        "kind": kind.name,
        "label": kind.label,
        "a-kind": kind.with_article,
        "hook": kind.hook,
        # this version of hgms, or a later one below the next minor version
        "hgms": f"hgms>={__version__},<{major}.{int(minor) + 1}",
    }


def _template(part: str) -> str:
    return TEMPLATE.joinpath(f"{part}.tmpl").read_text(encoding="utf-8")


def _fill_template(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def check_name(name: str, kind: Kind) -> None:
    """Reject a name that is not in kebab-case, or that a component or a module already has."""
    require(
        NAME.fullmatch(name) and not name.startswith("hgms-"),
        "wrong-value",
        f"the name {name!r} must be in kebab case, without the prefix hgms-",
        hint="use lower-case words and hyphens, such as 'my-solver'; the distribution is then "
        "hgms-my-solver",
        place=("NAME",),
    )
    registry = Registry(Host.load(tolerant=True))
    if (component := registry.find(kind.name, name)) is not None:
        raise ConfigError(
            "name-taken",
            f"the {kind.label} {name!r} of {component.plugin.owner} already exists",
            place=("NAME",),
            hint=f"choose another name; `hgms describe {kind.name} {name}` describes the existing "
            "one",
        )
    module = f"hgms_{name.replace('-', '_')}"
    require(
        importlib.util.find_spec(module) is None,
        "name-taken",
        f"the name {name!r} requires the module name {module}, and a module of that name can "
        "already be imported",
        place=("NAME",),
        hint="choose another name",
    )


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder exists and is not empty."""
    require(
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
        "file-exists",
        "the path already exists",
        place=(str(folder),),
        hint="choose another name or another folder (--into), or remove it",
    )
