"""Writes the generated parts of these pages from the code: ``python docs/generate.py`` (``--check`` only says what is stale).

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; the function NAME below makes it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import click
import columns as parquet
import traced
from click.testing import CliRunner

import hgms_compare
import hgms_core
import hgms_loops
import hgms_report
import hgms_results
import hgms_run
import hgms_testing as testing
from hgms_cli import main as cli
from hgms_core import hookspecs, registry
from hgms_core.host import FIRST_PARTY, Host
from hgms_core.registry import Registry
from hgms_run import config

DOCS = Path(__file__).resolve().parent
PROGRAMS = (hgms_compare, hgms_loops, hgms_report, hgms_results, hgms_run)
NO_COMPONENT = {"hgms_register_commands": "a command", "hgms_step_finished": "observers"}
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def commands() -> str:
    """The help of each command of ours; of a group, that of the commands in it."""
    parent = click.Context(cli, info_name="hgms")
    shown = []
    for name in sorted(Host().programs):
        command = cli.get_command(parent, name)
        assert command is not None
        context = _context(command, name, parent)
        inside = command.commands if isinstance(command, click.Group) else {}
        contexts = [_context(inside[part], part, context) for part in sorted(inside)] or [context]
        shown += [
            f"## {command_context.command_path}\n\n```text\n{command_context.get_help()}\n```\n" for command_context in contexts
        ]
    return "\n".join(shown)


def _context(command: click.Command, name: str, parent: click.Context) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, terminal_width=100, max_content_width=100)


def run_keys() -> str:
    """The keys of a run's configuration that are not a component's."""
    top = _fields(config.RunConfig, skip=("run",))
    settings = _fields(config.RunSettings)
    budget = _fields(hgms_core.Budget)
    strings = 'As a string: `"60s"`, `"25 steps"`, `"1e5 calls"`; or as a table:'
    return (
        f"## Top level\n\n{_table(top)}\n"
        f"## `[run]`\n\n{_doc(config.RunSettings)}\n\n{_table(settings)}\n"
        f"## `[budget]`\n\n{_doc(hgms_core.Budget)} {strings}\n\n{_table(budget)}"
    )


def component_keys() -> str:
    """Each component's keys, by kind."""
    shown = []
    for kind in registry.KINDS.values():
        shown.append(f"## {kind.label[0].upper()}{kind.label[1:]}s\n")
        for component in _ours(kind.name):
            description = _json_of("describe", kind.name, component.name)
            shown.append(f"### `{component.name}`\n\n{_escaped(description['summary'])}\n")
            if component.plugin.name != "core":
                name = component.plugin.name
                shown.append(f"Equations, deviations, cost: [plugin `{name}`](../plugins/{name}.md).\n")
            if "parts" in description:
                shown.append(f"```toml\n{_toml(description['name'], description['parts'])}```\n")
                for trait, parts in description["on"].items():
                    shown.append(f"On a task with the trait `{trait}`:\n\n```toml\n{_toml(description['name'], parts)}```\n")
            elif description["fields"]:
                shown.append(_table(description["fields"]))
    return "\n".join(shown)


def hooks() -> str:
    """Every hook: its signature, purpose, when it is called, an example, and since when there is one."""
    shown = []
    for name, hook in vars(hookspecs).items():
        if name.startswith("hgms_"):
            arguments = ", ".join(
                f"{parameter.name}: {parameter.annotation}" for parameter in inspect.signature(hook).parameters.values()
            )
            returned = inspect.signature(hook).return_annotation
            shown.append(f"## `{name}`\n\n```text\n{name}({arguments}) -> {returned}\n```\n\n{_whole_doc(hook)}\n")
    return "\n".join(shown)


def api() -> str:
    """Every public name of hgms_core, for components."""
    return _names(hgms_core, "0.1")


def programs() -> str:
    """Every public name of the packages of programs, a table each."""
    return "\n".join(f"### `{module.__name__}`\n\n{_names(module, '0.2')}" for module in PROGRAMS)


def full() -> str:
    """The public functions and classes of which there is more to say than a line, each with its whole docstring."""
    shown = []
    for module in (hgms_core, *PROGRAMS):
        for name in _in_full(module):
            thing = getattr(module, name)
            written = f"from {module.__name__} import {name}\n\n{name}{_bare(inspect.signature(thing))}"
            shown.append(f"## `{name}`\n\n```{{code-block}} python\n{written}\n```\n\n{_prose(thing)}\n")
    return "\n".join(shown)


def _in_full(module: Any) -> list[str]:
    """The names that the page `functions.md` has. Protocols and hooks have pages of their own; an error says all in a line."""
    protocols = {kind.protocol for kind in registry.KINDS.values()}
    names = []
    for name in module.__all__:
        thing = getattr(module, name)
        described = inspect.isfunction(thing) or (inspect.isclass(thing) and not issubclass(thing, Exception))
        if described and thing not in protocols and "\n\n" in (inspect.getdoc(thing) or "").partition("\n\n.. versionadded")[0]:
            names.append(name)
    return names


def _bare(signature: inspect.Signature) -> str:
    """Names and defaults, in lines of no more than 100 characters."""
    arguments, star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            arguments.append("*")
            star = True
        plain = parameter.default is None or isinstance(parameter.default, str | int | float)
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}" if plain else "=..."
        arguments.append(
            {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name + default
        )
        star = star or parameter.kind is parameter.VAR_POSITIONAL
    inside = ", ".join(arguments)
    return (
        f"({inside})"
        if len(inside) < 80
        else "(\n" + textwrap.fill(inside, 90, initial_indent="    ", subsequent_indent="    ") + "\n)"
    )


def _prose(thing: Any) -> str:
    """A docstring as Markdown. What is indented below a line is a list if that line is a heading, else an equation."""
    shown = []
    for part in inspect.getdoc(thing).split("\n\n"):
        head, _, rest = part.partition("\n")
        if part.startswith((">>> ", ".. versionadded:: ")):
            shown.append(_paragraph(part))
        elif part.startswith("    "):
            shown.append(f"```text\n{textwrap.dedent(part)}\n```")
        elif rest.startswith("    ") and head.endswith(":"):
            items = re.split(r"\n(?=\S)", textwrap.dedent(rest))
            listed = [re.sub(r"^([\w, ]+):(?= )", r"- `\1`:", " ".join(item.split())) for item in items]
            text = "\n".join(listed) if listed[0].startswith("- ") else " ".join(rest.split())
            shown.append(f"**{head}**\n\n{_safe(text)}")
        else:
            shown.append(_safe(re.sub(r"\n(?!- )\s*", " ", part)))
    return "\n\n".join(shown)


def _safe(text: str) -> str:
    """Prose of a docstring whose signs mean nothing to Markdown outside of code."""
    plain = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`").replace("::", ":")
    kept = r"(`[^`]*`|(?<!\S)\*\w[\w ]*\*(?!\S))"  # code, and words that are stressed
    return "".join(part if i % 2 else re.sub(r"([*_<$\[])", r"\\\1", part) for i, part in enumerate(re.split(kept, plain)))


def _names(module: Any, first: str) -> str:
    """A module's public names: first paragraph, and since when (``first`` where nothing else is said)."""
    notes = _attribute_docs()
    places = _places()
    rows = []
    for name in module.__all__:
        thing = getattr(module, name)
        documented = name not in notes
        text = registry.summary_of(thing.__doc__ if documented else notes[name])
        since = re.search(r"versionadded:: (\S+)", (thing.__doc__ or "") if documented else "")
        shown = f"[`{name}`]({places[name]})" if name in places else f"`{name}`"
        rows.append(f"| {shown} | {_escaped(text)} | {since[1] if since else first} |")
    return "| name | what it is | since |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _places() -> dict[str, str]:
    """Where each name is described in full; of two headings that differ in case, the second is numbered."""
    places = {kind.protocol.__name__: f"protocols.md#{kind.protocol.__name__.lower()}" for kind in registry.KINDS.values()}
    taken: list[str] = []
    for name in [name for module in (hgms_core, *PROGRAMS) for name in _in_full(module)]:
        places[name] = f"functions.md#{name.lower()}" + (f"-{taken.count(name.lower())}" if name.lower() in taken else "")
        taken.append(name.lower())
    return places


def _attribute_docs() -> dict[str, str]:
    """The strings below the assignments of the core's modules: what documents a name that is no class or function."""
    docs = {}
    for path in sorted(Path(inspect.getfile(hgms_core)).parent.glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, next_one in itertools.pairwise(body):
            if isinstance(next_one, ast.Expr) and isinstance(next_one.value, ast.Constant):
                targets = (
                    statement.targets
                    if isinstance(statement, ast.Assign)
                    else [statement.target]
                    if isinstance(statement, ast.AnnAssign)
                    else []
                )
                for target in targets:
                    if isinstance(target, ast.Name):
                        docs[target.id] = str(next_one.value.value)
    return docs


def kinds() -> str:
    """Each kind of component: its protocol, its hook, its methods and an example that runs."""
    shown = []
    for kind in registry.KINDS.values():
        methods = "\n".join(f"{name}{_signature(signature)}" for name, signature in kind.methods().items())
        text = _whole_doc(kind.protocol)
        shown.append(f"## {kind.protocol.__name__}\n\nRegistered by `{kind.hook}`.\n\n```text\n{methods}\n```\n\n{text}\n")
    return "\n".join(shown)


def _signature(signature: inspect.Signature) -> str:
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    return f"({', '.join(map(str, bare))}) -> {signature.return_annotation}"


def step() -> str:
    """Every call of a run with one outer step, in order, as they happened in one."""
    return f"```text\n{traced.calls_of_a_step()}\n```\n"


def plugins() -> str:
    """The built-in packages by folder, what each brings, and their pages."""
    brought: dict[str, list[str]] = {}
    names: dict[tuple[str, str], list[str]] = {}
    for kind in registry.KINDS:
        for component in _ours(kind):
            names.setdefault((component.plugin.module, kind), []).append(f"`{component.name}`")
    for (module, kind), components in names.items():
        brought.setdefault(module, []).append(f"{kind} {', '.join(components)}")
    for info in Host.load().infos.values():
        brought.setdefault(info.module, []).extend(what for hook, what in NO_COMPONENT.items() if hook in info.hooks)
    for command, entries in sorted(Host().programs.items()):
        brought.setdefault(entries[-1].module, []).append(f"`hgms {command}`")
    shown, pages = [], []
    for wing in ("algorithms", "tasks", "language", "programs"):
        shown.append(f"### {wing.capitalize()}\n\n| package | brings |\n|---|---|")
        for package in sorted(path.parent.name for path in (DOCS.parent / "plugins" / wing).glob("*/__init__.py")):
            page = package.removeprefix("hgms_").replace("_", "-")
            pages.append(f"{page} <plugins/{page}>")
            shown.append(f"| [`{package}`](plugins/{page}.md) | {'; '.join(brought.get(package, ['what others import']))} |")
        shown.append("")
    return "\n".join([*shown, "```{toctree}", ":hidden:", "", *pages, "```", ""])


def kit() -> str:
    """Every check of the conformance kit, by kind, with what it demands."""
    every = testing.checks_of_every_kind()
    groups = {
        "Every kind": every,
        **{registry.KINDS[kind].label.capitalize() + "s": checks for kind, checks in testing.all_checks().items()},
    }
    shown = []
    for title, checks in groups.items():
        rows = "\n".join(f"| `{check.name}` | {_escaped(check.demands)} |" for check in checks)
        shown.append(f"## {title}\n\n| check | what is demanded |\n|---|---|\n{rows}\n")
    return "\n".join(shown)


def columns() -> str:
    """The columns of the Parquet files that `hgms report` writes."""
    return parquet.tables()


def _ours(kind: str) -> list[registry.Component]:
    own = (FIRST_PARTY, None)
    return [component for component in Registry.load().components(kind) if component.plugin.distribution in own]


def _json_of(*arguments: str) -> Any:
    """What the command line answers as JSON."""
    result = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def _fields(cls: type, skip: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    hints = hgms_run.type_hints(cls)
    rows = []
    for key, attribute in hgms_run.init_fields(cls).items():
        if key not in skip:
            required = attribute.default is attrs.NOTHING
            default = None if required else hgms_run.plain(attribute.default, hints[attribute.name])
            rows.append({"name": key, "type": hgms_run.spell(hints[attribute.name]), "required": required, "default": default})
    return rows


def _table(fields: list[dict[str, Any]]) -> str:
    rows = []
    for row in fields:
        default = "required" if row["required"] else f"`{_value(row['default'])}`"
        rows.append(f"| `{row['name']}` | {_escaped(row['type'])} | {default} |")
    return "| key | type | default |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _value(value: Any) -> str:
    """A default as TOML writes it inline."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def _toml(name: str, parts: Mapping[str, Any]) -> str:
    """A composition as the TOML that would spell it out."""
    lines = ["[method]", f'name = "{name}"']
    for key, value in parts.items():
        lines.append(f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _whole_doc(thing: Any) -> str:
    """A docstring as Markdown: paragraphs, the example as code, since when."""
    return "\n\n".join(map(_paragraph, inspect.cleandoc(thing.__doc__).split("\n\n")))


def _paragraph(part: str) -> str:
    if part.startswith(">>> "):
        code = re.sub(r"^(?!>>>|\.\.\.)", "# ", part, flags=re.MULTILINE)  # what it gives
        code = re.sub(r"^(>>>|\.\.\.) ?", "", code, flags=re.MULTILINE)
        return "```{code-block} python\n" + code + "\n```"
    if part.startswith(".. versionadded:: "):
        return f"*Since {part.removeprefix('.. versionadded:: ')}.*"
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(part.split())).replace("``", "`")
    text = re.sub(r" - (?=`)", "\n- ", text)
    return re.sub(r"^Called: (.*)", r"**Called** \1", text)


def _doc(thing: Any) -> str:
    return registry.summary_of(thing.__doc__).replace("``", "`")


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, also inside a table."""
    plain = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"([|*_<])", r"\\\1", plain) if "`" not in plain else plain.replace("|", "\\|")


MAKERS: dict[str, Callable[[], str]] = {
    maker.__name__: maker
    for maker in (commands, run_keys, component_keys, hooks, kinds, step, api, programs, full, plugins, kit, columns)
}


def fresh(text: str) -> str:
    """The page with its generated parts made anew."""
    return PART.sub(lambda match: f"{match[1]}\n{MAKERS[match[2]]()}\n{match[3]}", text)


def stale() -> dict[Path, str]:
    """Pages that differ from what the code says, with what they should be."""
    pages = [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts and "examples" not in path.parts]
    wanted = {path: fresh(path.read_text(encoding="utf-8")) for path in pages}
    return {path: text for path, text in wanted.items() if text != path.read_text(encoding="utf-8")}


def main() -> int:
    pages = stale()
    for path, text in pages.items():
        print(path.relative_to(DOCS))
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    return int(bool(pages) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
