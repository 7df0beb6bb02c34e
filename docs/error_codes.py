"""The codes of all errors, read from the calls in the source: ``codes()``."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hgms_core", "plugins/hgms", "plugins/hgms_mix")
CODE = re.compile(r"[a-z]+(-[a-z]+)*")
BASES = ("HgmsError", "Exception")
HELPERS = {"fail": "ConfigError", "reject": "ConfigError", "require": "ConfigError"}
"""Functions that raise an error of this class, with its code as an argument."""

UNKNOWN = ("unknown_name", "require_known")
"""Functions that raise ``unknown-KIND``, with the kind as their first argument."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@attrs.frozen(order=True)
class Use:
    """One call that creates an error."""

    code: str
    error: str
    message: str
    place: str


def codes() -> dict[str, list[Use]]:
    """Return all uses by code, in alphabetical order."""
    trees = [
        ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    errors = error_classes(trees)
    table: dict[str, set[Use]] = defaultdict(set)
    for tree in trees:
        for use in uses(tree, errors):
            table[use.code].add(use)
    return {code: sorted(table[code]) for code in sorted(table)}


def error_classes(trees: list[ast.Module]) -> set[str]:
    """Return the names of HgmsError and of all its subclasses."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"HgmsError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def uses(tree: ast.Module, errors: set[str]) -> Iterator[Use]:
    """Yield the errors that the functions of a module create."""
    yield from _uses_in(tree, tree, errors)


def _uses_in(node: ast.AST, function: ast.AST, errors: set[str]) -> Iterator[Use]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield from _uses_in(child, child, errors)
            continue
        if isinstance(child, ast.Call) and (use := _use(child, function, errors)):
            yield use
        yield from _uses_in(child, function, errors)


def _use(call: ast.Call, function: ast.AST, errors: set[str]) -> Use | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    place = next((_text(item.value) for item in call.keywords if item.arg == "place"), "")
    if name in UNKNOWN and call.args and isinstance(call.args[0], ast.Constant):
        kind = str(call.args[0].value)
        return Use(f"unknown-{kind.replace(' ', '-')}", "ConfigError", f"unknown {kind} <name>", "")
    helper = name in HELPERS and isinstance(call.func, ast.Name)
    if name not in errors and not helper:
        return None
    for position, argument in enumerate(call.args[:-1]):
        code = getattr(argument, "value", None)
        if isinstance(code, str) and CODE.fullmatch(code):
            message = _text(_assigned(call.args[position + 1], function, call.lineno))
            classes = [item.value for item in call.keywords if helper and item.arg == "error"]
            error = _text(classes[0]).strip("<>") if classes else HELPERS.get(name, name)
            return Use(code, error, message, place)
    return None


def _assigned(node: ast.expr, function: ast.AST, line: int) -> ast.expr:
    """Return the last value that a local variable had above a line."""
    if not isinstance(node, ast.Name):
        return node
    values = [
        item.value
        for item in ast.walk(function)
        if isinstance(item, ast.Assign)
        and item.lineno < line
        and any(isinstance(target, ast.Name) and target.id == node.id for target in item.targets)
    ]
    return values[-1] if values else node


def _text(node: ast.expr) -> str:
    """Return a string with ``<name>`` in place of each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value) if isinstance(node.value, ast.Name | ast.Attribute) else "<…>"
    if isinstance(node, ast.Name):
        return f"<{node.id}>"
    if isinstance(node, ast.Attribute):
        return f"<{node.attr}>"
    if isinstance(node, ast.Tuple):
        return ".".join(_text(part) for part in node.elts)
    return "<…>"
