"""``hgms new plugin``: a distribution of one's own that passes every check from the first minute. Parse, fill in, write."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import keyword
import re
import shlex
import unicodedata
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import click

from hgms_cli import json_option, kind_called, print_json
from hgms_core import ConfigError, __version__
from hgms_core.host import Host, canonical
from hgms_core.registry import KINDS, NAME, Kind, Registry

TEMPLATE = files("hgms_new") / "template"

FILES: dict[str, tuple[str, str]] = {
    "pyproject.toml": ("pyproject.toml", "its name, its dependencies, and the entry point that makes it a plugin"),
    "README.md": ("README.md", "what it does, where it is from, where it deviates"),
    "src/@module@.py": ("kinds/@kind@.py", "the component and its hook: replace the algorithm by yours"),
    "tests/test_conformance.py": ("test_conformance.py", "every check of the conformance kit"),
    "tests/test_@module@.py": ("kinds/@kind@.test", "what is known about the algorithm"),
    "run.toml": ("kinds/@kind@.toml", "a run to try it in"),
    "CHANGELOG.md": ("CHANGELOG.md", "what changed, for those who use it"),
    "LICENSE": ("LICENSE", "to be chosen"),
    ".gitignore": ("gitignore", "what does not belong into a repository"),
    ".github/workflows/tests.yml": ("tests.yml", "installs, tests and checks it on every push"),
}
"""Each file of the distribution: the template it is made from, and what it is for."""

TESTED_WITH = {
    "generator": "count=2, steps=5, noise=0.5, batch_size=4",
    "selector": "blocks=1",
    "solver": "ridge=0.0, rtol=1e-8, max_steps=300",
    "hypergradient": "lr=0.3, terms=100",
    "outer": "lr=0.2, momentum=0.9",
    "task": "places=12, rows=30",
    "method": "sigma=1.0, steps=5",
}
"""The fields of the second instance in each template's conformance test; the first has the defaults."""


@click.group()
def new() -> None:
    """Start something of your own from a template."""


@new.command()
@click.argument("name")
@click.option("--kind", default="solver", show_default=True, metavar="KIND", help=f"One of {', '.join(KINDS)}.")
@click.option(
    "--into", type=click.Path(path_type=Path), default=Path("."), help="Where the folder hgms-NAME is made.  [default: here]"
)
@json_option
def plugin(name: str, kind: str, into: Path, as_json: bool) -> None:
    """Write a plugin as a distribution of its own.

    The folder hgms-NAME then holds one working component called NAME, a small real method of the asked KIND, with its tests, a
    README, a run to try it in and a CI file. It passes every check of the conformance kit as it is, and is yours to change.
    Nothing that exists is overwritten.

    \b
    hgms new plugin minimal-residual --kind solver
    hgms new plugin my-task --kind task --into ~/code
    """
    wanted = kind_called(kind)
    check_name(name, wanted)
    folder = into / f"hgms-{name}"
    check_folder(folder)
    texts = filled(name, wanted)
    for place, text in texts.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    steps = {
        f"cd {shlex.quote(str(folder))} && pip install -e '.[test]'": "`hgms plugins` then lists it",
        "pytest": "every check of the kit, and its own tests",
        "hgms run run.toml": "try it",
    }
    if as_json:
        print_json({"folder": str(folder), "files": list(texts), "next": list(steps)})
        return
    contents = dict(zip(texts, (purpose for _, purpose in FILES.values()), strict=True))
    commands = {command: f"# {purpose}" for command, purpose in steps.items()}
    for title, lines in ((f"{folder}: a plugin with the {wanted.label} {name!r}", contents), ("next:", commands)):
        click.echo(title)
        for line, purpose in lines.items():
            click.echo(f"  {line:<{max(map(len, lines))}}  {purpose}")


def filled(name: str, kind: Kind) -> dict[str, str]:
    """Every file of the distribution by its place in it."""
    source = _template(f"kinds/{kind.name}.py")
    summary, _, method = _template(f"kinds/{kind.name}.md").partition("\n\n")
    cls = "".join(word.capitalize() for word in name.split("-"))
    if keyword.iskeyword(cls) or re.search(rf"\b{cls}\b", source):  # the module uses that word for something else
        cls += kind.name.capitalize()
    values = {
        "name": name,
        "module": f"hgms_{name.replace('-', '_')}",
        "class": cls,
        "kind": kind.name,
        "label": kind.label,
        "a-kind": kind.with_article,
        "hook": kind.hook,
        "summary": summary.strip(),
        "method": method.strip(),
        "instances": f"{cls}(), {cls}({TESTED_WITH[kind.name]})",
        "hgms": ".".join(__version__.split(".")[:2]),
    }
    return {_filled(place, values): _filled(_template(_filled(part, values)), values) for place, (part, _) in FILES.items()}


def _template(part: str) -> str:
    return TEMPLATE.joinpath(f"{part}.tmpl").read_text(encoding="utf-8")


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def check_name(name: str, kind: Kind) -> None:
    """Refuses a name that is not in kebab-case, and one that would meet another component, plugin, module or distribution."""
    if not NAME.fullmatch(name) or name.startswith("hgms-"):
        near = kebab(name)
        what = "begins with hgms-, which is put before it anyway" if NAME.fullmatch(name) else "is not in kebab-case"
        hint = f"did you mean {near!r}?" if near else "write for example 'my-solver'"
        raise ConfigError(
            f"the name {name!r} {what}; {hint}\n  it names the component, and with hgms- before it the distribution"
        )
    advice = "choose another name"
    host = Host.load(tolerant=True)
    owners = {component.name: component.plugin for component in Registry(host).components(kind.name)}
    if name in owners:
        raise ConfigError(
            f"there is a {kind.label} {name!r} already, of {owners[name].owner}\n"
            f"  {advice}; `hgms describe {kind.name} {name}` shows what is there"
        )
    twin = next((info for info in host.infos.values() if canonical(info.name) == name), None)
    if twin is not None:
        raise ConfigError(f"there is a plugin {twin.name!r} already, of {twin.owner}\n  {advice}; `hgms plugins` lists them")
    module = f"hgms_{name.replace('-', '_')}"
    with contextlib.suppress(ImportError):  # of a name that the core says has moved
        if importlib.util.find_spec(module) is not None:
            raise ConfigError(f"its module would be {module}, and a module of that name can be imported already\n  {advice}")
    try:
        version = importlib.metadata.version(f"hgms-{name}")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ConfigError(f"a distribution hgms-{name} {version} is installed already\n  {advice}, or uninstall it first")


def kebab(text: str) -> str:
    """The nearest right spelling of a name; empty where nothing is left of it.

    >>> kebab("My_SteepestSolver 2"), kebab("hgms-Lévy"), kebab("42")
    ('my-steepest-solver-2', 'levy', '')
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", plain)
    words = re.sub(r"[^a-z0-9]+", "-", spaced.lower()).removeprefix("hgms-")
    return re.sub(r"^[^a-z]+", "", words).rstrip("-")


def check_folder(folder: Path) -> None:
    """Refuses a place where something is already, or where no folder can be."""
    if folder.parent.exists() and not folder.parent.is_dir():
        raise ConfigError(f"{folder.parent} is a file; --into takes a folder (it is made where there is none)")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is there already, and a file\n  move it, or choose another name or another folder (--into)"
        )
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if names:
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        raise ConfigError(
            f"{folder} is there already and not empty ({shown}); nothing is overwritten\n"
            "  choose another name or another folder (--into), or remove what is there"
        )
