"""Write the generated parts of the pages: ``python docs/generate.py``.

With ``--check`` it only lists stale pages. A generated part is the text between ``<!-- generated:
NAME -->`` and ``<!-- end -->``; the function NAME below returns it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import call_trace
import click
import columns as parquet
import descriptions
import error_codes

import hgms.adapters
import hgms.comparison
import hgms.config
import hgms.integrations
import hgms.report
import hgms.results
import hgms.runs
import hgms.testing as testing
import hgms_core
from hgms.cli import main as cli
from hgms.config.as_table import plain
from hgms.config.invalid import init_fields, spell, type_hints
from hgms.executors.lookup import executor_classes as executors
from hgms.facts import CAPABILITIES, members_of
from hgms.lazy import stub
from hgms.plugins import FIRST_PARTY, Host, Registry, hookspecs, registry
from hgms.runs import config
from hgms.runs.describe import description as describe
from hgms.runs.describe import range_of
from hgms_mix.stages.command import OTHERS

DOCS = Path(__file__).resolve().parent
PROGRAMS = (hgms.adapters, hgms.comparison, hgms.integrations, hgms.report, hgms.results, hgms.runs)
CORE = (hgms_core.capabilities, hgms_core.errors, hgms_core.validators, hgms_core.arguments)
"""Modules of the core in addition to its public names."""
LISTS = ("Parameters", "Attributes", "Returns", "Raises")
"""Sections of numpydoc that contain names with texts."""
NO_COMPONENT = {"hgms_register_commands": "a command", "hgms_step_finished": "observers"}
CODE = re.compile(r"^(```\{code-block\} python\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def commands() -> str:
    """Return the help of each built-in command, and of each command of a group."""
    parent = click.Context(cli, info_name="hgms")
    shown = []
    for name in sorted(Host().programs):
        command = cli.get_command(parent, name)
        assert command is not None
        context = _context(command, name, parent)
        names = sorted(command.list_commands(context)) if isinstance(command, click.Group) else []
        inside = (
            {part: command.get_command(context, part) for part in names}
            if isinstance(command, click.Group)
            else {}
        )
        contexts = [
            _context(below, part, context) for part, below in inside.items() if below is not None
        ] or [context]
        shown += [
            f"## {command_context.command_path}\n\n```text\n{command_context.get_help()}\n```\n"
            for command_context in contexts
        ]
    return "\n".join(shown)


def _context(command: click.Command, name: str, parent: click.Context) -> click.Context:
    return click.Context(
        command, info_name=name, parent=parent, terminal_width=100, max_content_width=100
    )


def run_keys() -> str:
    """Return the keys of a run's configuration, except those of components."""
    top = _meant(_fields(config.RunConfig, skip=("run",)), {"hgms.runs": [config.RunConfig]})
    settings = _meant(_fields(config.RunSettings), {"hgms.runs": [config.RunSettings]})
    budget = _meant(_fields(hgms.config.Budget), {"hgms.config": [hgms.config.Budget]})
    strings = 'As a string: `"60s"`, `"25 steps"`, `"1e5 calls"`; or as a table:'
    return (
        f"## Top level\n\n{_table(top)}\n"
        f"## `[run]`\n\n{_doc(config.RunSettings)}\n\n{_table(settings)}\n"
        f"## `[budget]`\n\n{_doc(hgms.config.Budget)} {strings}\n\n{_table(budget)}"
    )


def component_keys() -> str:
    """Return the keys of each component, by kind."""
    wrappers: dict[str, list[type]] = {}
    components = Registry.load()
    for wrapper in components.wrappers:
        wrappers.setdefault(package_of(wrapper), []).append(wrapper)
    pages = pages_of_packages()
    shown = []
    for kind in registry.KINDS.values():
        shown.append(f"## {kind.label[0].upper()}{kind.label[1:]}s\n")
        for component in _ours(kind.name):
            description = json.loads(json.dumps(describe(component, components)))
            shown.append(f"### `{component.name}`\n\n{_escaped(description['summary'])}\n")
            if component.plugin.name != "core":
                package = component.package
                page = pages[package]
                note = "; its options may change" if component.maturity == "contrib" else ""
                shown.append(
                    f"Maturity: {component.maturity}{note}. Equations, deviations, cost: "
                    f"[`{package}`](../plugins/{page}.md).\n"
                )
            if "parts" in description:
                shown.append(f"```toml\n{_toml(description['name'], description['parts'])}```\n")
                for trait, parts in description["on"].items():
                    shown.append(
                        f"On a task with the trait `{trait}`:\n\n```toml\n"
                        f"{_toml(description['name'], parts)}```\n"
                    )
                continue
            target = component.target
            module = component.package
            if (
                component.plugin.name != "core"
                and getattr(importlib.import_module(module), target.__name__, None) is target
            ):
                shown.append(_directive("py:class", target.__name__, [f":module: {module}"]) + "\n")
            if description["fields"]:
                classes = {module: [target], **(wrappers if target is hgms_core.Pipeline else {})}
                shown.append(_table(_meant(description["fields"], classes)))
    return "\n".join(shown)


def _meant(rows: list[dict[str, Any]], classes: Mapping[str, list[type]]) -> list[dict[str, Any]]:
    """Add the range and meaning of each key to the rows of a table."""
    known = {
        field.alias or field.name: (
            range_of(field.validator),
            descriptions.meanings(cls, module).get(field.name, ""),
        )
        for module, group in classes.items()
        for cls in group
        for field in descriptions.fields(cls)
    }
    return [
        row | dict(zip(("range", "meaning"), known.get(row["name"], ("", "")), strict=True))
        for row in rows
    ]


def hooks() -> str:
    """Return the signature, purpose, time and example of every hook."""
    shown = []
    for name, hook in vars(hookspecs).items():
        if name.startswith("hgms_"):
            arguments = ", ".join(
                f"{parameter.name}: {parameter.annotation}"
                for parameter in inspect.signature(hook).parameters.values()
            )
            returned = inspect.signature(hook).return_annotation
            shown.append(
                f"## `{name}`\n\n```text\n{name}({arguments}) -> {returned}\n```\n\n"
                f"{_with_imports(_whole_doc(hook), hgms_core, hook)}\n"
            )
    return "\n".join(shown)


def api() -> str:
    """Return every public name of hgms_core and its namespaces for components."""
    own = "\n".join(f"### `{module.__name__}`\n\n{_names(module)}" for module in CORE)
    return f"{_names(hgms_core)}\n{own}"


def programs() -> str:
    """Return one table per package of programs with its public names."""
    return "\n".join(f"### `{module.__name__}`\n\n{_names(module)}" for module in PROGRAMS)


def full() -> str:
    """Describe every public name of the core. Protocols have a separate page."""
    return _described((hgms_core, *CORE))


def full_programs() -> str:
    """Describe every public name of the packages of programs."""
    return _described(PROGRAMS)


def _described(modules: tuple[Any, ...]) -> str:
    """Describe the names of each package, with headings if there are several."""
    shown = []
    for module in modules:
        if len(modules) > 1:
            shown.append(
                f"## `{module.__name__}`\n\n{_safe(registry.summary_of(module.__doc__))}\n"
            )
        shown.append(f"```{{py:module}} {module.__name__}\n```\n")
        shown += [_entry(module, name, "#" * (2 + (len(modules) > 1))) for name in _in_full(module)]
    return "\n".join(shown)


def _in_full(module: Any) -> list[str]:
    """Return the names with a long description. Protocols and hooks have separate pages."""
    protocols = {kind.protocol for kind in registry.KINDS.values()}
    return [
        name
        for name in module.__all__
        if not any(getattr(module, name) is protocol for protocol in protocols)
        and not (module is hgms_core.errors and name in hgms_core.__all__)
    ]


def _entry(module: Any, name: str, level: str) -> str:
    """Return the typed signature, docstring, fields and members of one name."""
    thing = getattr(module, name)
    parts = [f"{level} `{name}`"]
    if inspect.isfunction(thing):
        parts += [_directive("py:function", name + descriptions.signature(thing)), _prose(thing)]
    elif descriptions.is_class(thing):
        kind = "py:exception" if issubclass(thing, BaseException) else "py:class"
        both = module is hgms_core and name in hgms_core.errors.__all__
        place = [f":canonical: hgms_core.errors.{name}"] if both else []
        parts += [
            _directive(
                kind, name + (descriptions.signature(thing) if attrs.has(thing) else ""), place
            ),
            _prose(thing),
        ]
        parts.append(_field_table(thing, module.__name__))
        for member in descriptions.members(thing):
            meaning = descriptions.MEANINGS.get(f"{module.__name__}.{name}", {}).get(
                member.name, ""
            )
            parts += [
                _directive(member.directive, member.text, member.options),
                _prose_of(member.doc or meaning),
            ]
    else:
        parts += [
            _directive(*descriptions.value(name, thing)),
            _prose_of(_attribute_docs(module).get(name, "")),
        ]
    return _with_imports("\n\n".join(filter(None, parts)) + "\n", module, thing)


def _directive(name: str, argument: str, options: Iterable[str] = ()) -> str:
    return "\n".join([f"```{{{name}}} {argument}", *options, "```"])


def _field_table(cls: type, module: str) -> str:
    """Return the fields of a class with type, default, range and meaning."""
    meanings = descriptions.meanings(cls, module)
    rows = [
        (
            f"`{field.alias or field.name}`",
            f"`{descriptions.annotation(field.type)}`",
            descriptions.default_of(field),
            range_of(field.validator),
            _safe(meanings.get(field.name, "")),
        )
        for field in descriptions.fields(cls)
    ]
    return _columns(("field", "type", "default", "range", "meaning"), rows)


def _columns(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table without its empty columns."""
    if not rows:
        return ""
    kept = [i for i in range(len(names)) if any(row[i] for row in rows)]
    lines = [
        "| " + " | ".join(row[i].replace("|", "\\|") for i in kept) + " |" for row in (names, *rows)
    ]
    return "\n".join([lines[0], "|" + "---|" * len(kept), *lines[1:]])


def _prose(thing: Any) -> str:
    """Return a docstring as Markdown, without the arguments that the field table contains."""
    parts = (inspect.getdoc(thing) or "").split("\n\n")
    shown = [part for part in parts if not (attrs.has(thing) and part.startswith("Parameters\n-"))]
    return _prose_of("\n\n".join(shown))


def _prose_of(doc: str) -> str:
    """Convert a docstring to Markdown.

    Sections of names become lists; indented text is an equation.
    """
    shown = []
    for part in doc.split("\n\n"):
        match = descriptions.SECTION.match(part)
        if match is not None and match[1] in LISTS:
            entries = descriptions.entries_of(part[match.end() :])
            items = [f"- `{name}`: {text}" if text else f"- `{name}`" for name, text in entries]
            shown.append(f"**{match[1]}**\n\n" + _safe("\n".join(items)))
            continue
        text = part if match is None else part[match.end() :]
        if text.startswith(">>> "):
            shown.append(_paragraph(text))
        elif text.startswith("    "):
            shown.append(f"```text\n{textwrap.dedent(text)}\n```")
        else:
            shown.append(_safe(re.sub(r"\n(?!- )\s*", " ", text)))
    return "\n\n".join(shown)


def _safe(text: str) -> str:
    """Escape the prose of a docstring for Markdown outside of code."""
    plain = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`").replace("::", ":")
    kept = r"(`[^`]*`|(?<!\S)\*\w[\w ]*\*(?!\S))"  # code, and words that are stressed
    return "".join(
        part if i % 2 else re.sub(r"([*_<$\[])", r"\\\1", part)
        for i, part in enumerate(re.split(kept, plain))
    )


def _names(module: Any) -> str:
    """Return a module's public names with the first paragraph of each."""
    notes = _attribute_docs(module)
    places = _places()
    rows = []
    for name in module.__all__:
        thing = getattr(module, name)
        text = notes.get(name) or (
            inspect.getdoc(thing)
            if inspect.isroutine(thing) or descriptions.is_class(thing)
            else ""
        )
        place = places.get((module.__name__, name)) or places["hgms_core", name]
        shown = f"[`{name}`]({place})"
        rows.append(f"| {shown} | {_escaped(registry.summary_of(text))} |")
    return "| name | what it is |\n|---|---|\n" + "\n".join(rows) + "\n"


def _places() -> dict[tuple[str, str], str]:
    """Return the link target of each name.

    Later headings of a page that differ only in case have numbers.
    """
    places = {}
    for page, modules in {"functions.md": (hgms_core, *CORE), "programs.md": PROGRAMS}.items():
        taken: list[str] = []
        for module in modules:
            headings = [module.__name__] * (len(modules) > 1) + _in_full(module)
            for name in headings:
                number = f"-{taken.count(name.lower())}" if name.lower() in taken else ""
                places[module.__name__, name] = f"{page}#{name.lower()}{number}"
                taken.append(name.lower())
    for kind in registry.KINDS.values():
        places["hgms_core", kind.protocol.__name__] = (
            f"protocols.md#{kind.protocol.__name__.lower()}"
        )
    return places


def _attribute_docs(module: Any) -> dict[str, str]:
    """Return the strings below the assignments of a package's modules.

    They document names other than classes and functions.
    """
    docs = {}
    for path in sorted(Path(inspect.getfile(module)).parent.rglob("*.py")):
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
                        docs[target.id] = inspect.cleandoc(str(next_one.value.value))
    return docs


def kinds() -> str:
    """Return the protocol, hook, methods and runnable example of each kind of component."""
    shown = ["```{py:currentmodule} hgms_core\n```"]
    for kind in registry.KINDS.values():
        name = kind.protocol.__name__
        shown += [
            f"## {name}",
            f"Registered by `{kind.hook}`.",
            _directive("py:class", name),
            _with_imports(_whole_doc(kind.protocol), hgms_core, kind.protocol),
        ]
        for member in descriptions.members(kind.protocol):
            shown += [
                _directive(member.directive, member.text, member.options),
                _prose_of(member.doc),
            ]
        rows = [
            (
                f"`{known.__name__}`",
                ", ".join(f"`{name}`" for name in members_of(known)),
                _safe(registry.summary_of(known.__doc__)),
            )
            for known in CAPABILITIES[kind.name]
        ]
        shown += [
            "It may declare these capabilities ([signatures](functions.md)):",
            _columns(("capability", "members", "a component that declares it"), rows),
        ]
    return "\n\n".join(filter(None, shown)) + "\n"


def traits() -> str:
    """Return each trait with its meaning, its tasks, and the methods and parts that need it with
    their default settings.
    """
    components = Registry.load()
    having: dict[str, list[str]] = {}
    needing: dict[str, dict[str, list[str]]] = {"method": {}, "part": {}}
    for kind in registry.KINDS:
        for component in _ours(kind):
            if kind == "task":
                wanted = getattr(component.target, "traits", ())
                place = having
            else:
                try:
                    wanted = hgms.runs.needs(
                        hgms.runs.build_component(
                            component.name, registry.KINDS[kind].protocol, registry=components
                        )
                    )
                except hgms_core.HgmsError:  # it cannot be built from its defaults
                    wanted = ()
                place = needing["method" if kind == "method" else "part"]
            for trait in wanted:
                place.setdefault(trait, []).append(f"`{component.name}`")
    rows = [
        (
            f"`{trait}`",
            _escaped(meaning),
            *(", ".join(place.get(trait, [])) for place in (having, *needing.values())),
        )
        for trait, meaning in hgms.runs.TRAITS.items()
    ]
    return _columns(
        (
            "trait",
            "the problem has",
            "tasks that have it",
            "methods that need it",
            "parts that need it",
        ),
        rows,
    )


def errors() -> str:
    """Return all codes of errors with their messages and places."""
    rows = []
    for code, uses in error_codes.codes().items():
        classes = ", ".join(f"`{name}`" for name in sorted({use.error for use in uses}))
        messages = dict.fromkeys(use.message for use in uses)
        text = "<br>".join(
            f"`{' '.join(message.split()).replace('`', '')}`" for message in messages
        )
        rows.append((f"`{code}`", classes, text))
    return _columns(("code", "class", "messages"), rows)


def step() -> str:
    """Return every call of a run with one outer step, in order."""
    return f"```text\n{call_trace.calls_of_a_step()}\n```\n"


def problem_files() -> str:
    """Return the files that receive the problem in one outer step, in order."""
    rows = [(f"`{name}`", line.replace("``", "`")) for name, line in call_trace.files_of_a_step()]
    return _columns(("file", "content"), rows)


def plugins() -> str:
    """Return the built-in packages by folder, with their contributions and pages."""
    brought: dict[str, list[str]] = {}
    names: dict[tuple[str, str], list[str]] = {}
    for kind in registry.KINDS:
        for component in _ours(kind):
            names.setdefault((component.package, kind), []).append(f"`{component.name}`")
    for (module, kind), components in names.items():
        brought.setdefault(module, []).append(f"{kind} {', '.join(components)}")
    for info in Host.load().infos.values():
        brought.setdefault(info.module, []).extend(
            what for hook, what in NO_COMPONENT.items() if hook in info.hooks
        )
    for name, executor in executors(Host.load()).items():
        brought.setdefault(package_of(executor), []).append(f"executor `{name}`")
    for module, what in _commands():
        brought.setdefault(module, []).append(what)
    shown = []
    pages = []
    root = DOCS.parent / "plugins"
    page_of = pages_of_packages()
    for top in sorted(path.parent.name for path in root.glob("*/__init__.py")):
        packages = [package for package in sorted(page_of) if package.startswith(f"{top}.")]
        shown += [f"### {top}\n\n| package | brings |\n|---|---|"] if packages else []
        for package in packages:
            page = page_of[package]
            pages.append(f"{page} <../plugins/{page}>")
            parts = "; ".join(brought.get(package, ["what others import"]))
            shown.append(f"| [`{package}`](../plugins/{page}.md) | {parts} |")
        shown += [""] if packages else []
    return "\n".join([*shown, "```{toctree}", ":hidden:", "", *pages, "```", ""])


def pages_of_packages() -> dict[str, str]:
    """Map the dotted name of a package to the page that includes its README."""
    root = DOCS.parent / "plugins"
    pages = {}
    for page in (DOCS / "plugins").glob("*.md"):
        match = re.search(r"include\} (\S+)", page.read_text(encoding="utf-8"))
        readme = (page.parent / match[1]).resolve() if match else None
        if readme is None or root not in readme.parents:
            continue
        # adam.md is next to adam.py
        place = readme.parent if readme.name == "README.md" else readme.with_suffix("")
        pages[".".join(place.relative_to(root).parts)] = page.stem
    return pages


def _commands() -> Iterator[tuple[str, str]]:
    """Yield the package and the command of each entry point."""
    for command, entries in sorted(Host().programs.items()):
        yield entries[-1].module, f"`hgms {command}`"
    for name, module in OTHERS.items():
        yield module.rpartition(".")[0], f"`hgms mix {name}`"


def kit() -> str:
    """Return every check of the conformance kit, by kind, with its requirement."""
    every = testing.checks_of_every_kind()
    groups = {
        "Every kind": every,
        **{
            registry.KINDS[kind].label.capitalize() + "s": checks
            for kind, checks in testing.all_checks().items()
        },
    }
    shown = []
    for title, checks in groups.items():
        rows = "\n".join(f"| `{check.name}` | {_escaped(check.demands)} |" for check in checks)
        shown.append(f"## {title}\n\n| check | what is demanded |\n|---|---|\n{rows}\n")
    return "\n".join(shown)


def columns() -> str:
    """Return the columns of the Parquet files that `hgms report` writes."""
    return parquet.tables()


def package_of(cls: type) -> str:
    """Return the package that exports a class, by the name of its module."""
    return cls.__module__.rpartition(".")[0]


def _ours(kind: str) -> list[registry.Component]:
    own = (FIRST_PARTY, None)
    return [
        component
        for component in Registry.load().components(kind)
        if component.plugin.distribution in own
    ]


def _fields(cls: type, skip: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    hints = type_hints(cls)
    rows = []
    for key, attribute in init_fields(cls).items():
        if key not in skip:
            required = attribute.default is attrs.NOTHING
            default = None if required else plain(attribute.default, hints[attribute.name])
            rows.append(
                {
                    "name": key,
                    "type": spell(hints[attribute.name]),
                    "required": required,
                    "default": default,
                }
            )
    return rows


def _table(fields: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"`{row['name']}`",
            _escaped(row["type"]),
            "required" if row["required"] else f"`{_value(row['default'])}`",
            _safe(row["range"]),
            _safe(row["meaning"]),
        )
        for row in fields
    ]
    return _columns(("key", "type", "default", "range", "meaning"), rows) + "\n"


def _value(value: Any) -> str:
    """Format a default as inline TOML."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def _toml(name: str, parts: Mapping[str, Any]) -> str:
    """Format a composition as TOML."""
    lines = ["[method]", f'name = "{name}"']
    for key, value in parts.items():
        lines.append(f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _whole_doc(thing: Any) -> str:
    """Return a docstring as Markdown with paragraphs and the example as code."""
    parts = inspect.cleandoc(thing.__doc__).split("\n\n")
    return "\n\n".join(_paragraph(descriptions.SECTION.sub("", part)) for part in parts)


def _paragraph(part: str) -> str:
    if part.startswith(">>> "):
        code = re.sub(r"^(?!>>>|\.\.\.)", "# ", part, flags=re.MULTILINE)  # its output
        code = re.sub(r"^(>>>|\.\.\.) ?", "", code, flags=re.MULTILINE)
        code = re.sub(r"  # doctest: .*", "", code)
        return "```{code-block} python\n" + code + "\n```"
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(part.split())).replace("``", "`")
    text = re.sub(r" - (?=`)", "\n- ", text)
    return re.sub(r"^Called: (.*)", r"**Called** \1", text)


def _with_imports(text: str, module: Any, thing: Any) -> str:
    """Add to each code block of ``text`` the imports that its doctest gets from its module."""
    return CODE.sub(lambda match: match[1] + _imports_of(match[2], module, thing), text)


def _imports_of(code: str, module: Any, thing: Any) -> str:
    """Return ``code`` below imports of the names that it uses and does not define."""
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    fields = {
        name
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for name in ast.walk(statement)
    }
    defined = {name.id for name in names if isinstance(name.ctx, ast.Store) and name not in fields}
    defined |= {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    defined |= {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own = inspect.getmodule(thing)
    packages: set[str] = set()
    members: dict[str, set[str]] = {}
    for name in {name.id for name in names} - defined:
        found = getattr(own, name, None)
        if inspect.ismodule(found):
            parent, _, last = found.__name__.rpartition(".")
            if parent and last == name:
                members.setdefault(parent, set()).add(name)
            elif not parent:
                packages.add(name)
        elif name in hgms_core.__all__:
            members.setdefault("hgms_core", set()).add(name)
        elif name in getattr(module, "__all__", ()):
            members.setdefault(module.__name__, set()).add(name)
        elif found is not None:
            members.setdefault(own.__name__, set()).add(name)
        elif name == "torch":
            packages.add(name)
    core = next(
        (
            node
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == "hgms_core"
        ),
        None,
    )
    lines = code.splitlines()
    if core is not None:
        members.setdefault("hgms_core", set()).update(alias.name for alias in core.names)
        del lines[core.lineno - 1 : core.end_lineno]
    heads = [f"import {name}" for name in sorted(packages)]
    heads += [
        f"from {parent} import {', '.join(sorted(found))}"
        for parent, found in sorted(members.items())
    ]
    more = not heads or lines[0].startswith(("import ", "from "))
    return "\n".join([*heads, *([] if more else [""]), *lines, ""])


def _doc(thing: Any) -> str:
    return registry.summary_of(thing.__doc__).replace("``", "`")


def _escaped(text: str) -> str:
    """Escape text for Markdown, also inside a table."""
    plain = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"([|*_<])", r"\\\1", plain) if "`" not in plain else plain.replace("|", "\\|")


MAKERS: dict[str, Callable[[], str]] = {
    maker.__name__: maker
    for maker in (
        commands,
        run_keys,
        component_keys,
        hooks,
        kinds,
        traits,
        errors,
        step,
        problem_files,
        api,
        programs,
        full,
        full_programs,
        plugins,
        kit,
        columns,
    )
}


def fresh(text: str) -> str:
    """Return the page with new generated parts."""
    return PART.sub(lambda match: f"{match[1]}\n{MAKERS[match[2]]()}\n{match[3]}", text)


def stale() -> dict[Path, str]:
    """Return the new text of each page and stub that differs from the code."""
    pages = [
        path
        for path in sorted(DOCS.rglob("*.md"))
        if "_build" not in path.parts and "examples" not in path.parts
    ]
    wanted = {path: fresh(path.read_text(encoding="utf-8")) for path in pages} | stubs()
    return {path: text for path, text in wanted.items() if text != _read(path)}


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


NAMESPACES = (
    "hgms",
    "hgms.contrib",
    "hgms.generators",
    "hgms.generators.penalty",
    "hgms.methods",
    "hgms.outer",
    "hgms.solvers",
    "hgms.tasks",
    "hgms_mix.contrib",
    "hgms_mix.methods",
)
"""Packages that load their names at first use (:mod:`hgms.lazy`)."""


def stubs() -> dict[Path, str]:
    """Return the stubs of the lazy namespaces for type checkers, by file."""
    texts = {}
    for name in NAMESPACES:
        package = importlib.import_module(name)
        path = DOCS.parent.joinpath("plugins", *name.split("."), "__init__.pyi")
        texts[path] = stub(name, package.PLACES, getattr(package, "MODULES", ()))
    return texts


def main() -> int:
    pages = stale()
    for path, text in pages.items():
        print(path.relative_to(DOCS.parent))
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    return int(bool(pages) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
