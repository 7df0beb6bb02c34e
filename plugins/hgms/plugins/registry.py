"""The registry: find the component for a name that a user typed.

Only the configuration and the command line use it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
from attrs import frozen

import hgms_core
from hgms.facts import declared_name
from hgms.plugins.discovery import FIRST_PARTY, PluginInfo
from hgms.plugins.host import Host
from hgms_core import (
    CandidateGenerator,
    Composition,
    HyperGradient,
    LinearSolver,
    Method,
    OuterOptimizer,
    Pipeline,
    Selector,
    Task,
)
from hgms_core.annotations import PARTS
from hgms_core.arguments import methods_of
from hgms_core.components import NAME
from hgms_core.errors import ConfigError, HgmsError, PluginError, unknown_name


@frozen
class Kind:
    """A kind of component: its name, its registering hook and its protocol.

    :mod:`hgms_core.protocols` defines the protocols.
    """

    name: str
    hook: str
    protocol: type

    @property
    def with_article(self) -> str:
        return PARTS[self.protocol]

    @property
    def label(self) -> str:
        return self.with_article.split(" ", 1)[1]

    def methods(self) -> dict[str, inspect.Signature]:
        names = methods_of(self.protocol)
        return {name: inspect.signature(getattr(self.protocol, name)) for name in names}


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("generator", "hgms_register_generators", CandidateGenerator),
        Kind("selector", "hgms_register_selectors", Selector),
        Kind("solver", "hgms_register_linear_solvers", LinearSolver),
        Kind("hypergradient", "hgms_register_hypergradients", HyperGradient),
        Kind("outer", "hgms_register_outer_optimizers", OuterOptimizer),
        Kind("task", "hgms_register_tasks", Task),
        Kind("method", "hgms_register_methods", Method),
    )
}


@frozen(kw_only=True)
class Component:
    """A registered class or composition, and the plugin that registers it."""

    kind: Kind
    name: str
    target: type | Composition
    plugin: PluginInfo

    @property
    def summary(self) -> str:
        return (
            self.target.summary
            if isinstance(self.target, Composition)
            else summary_of(self.target.__doc__)
        )

    @property
    def maturity(self) -> str:
        """``"stable"``, ``"contrib"`` (built in, options may change) or ``"third party"``."""
        if self.plugin.distribution != FIRST_PARTY:
            return "third party"
        return "contrib" if "contrib" in self.plugin.module.split(".") else "stable"

    @property
    def package(self) -> str:
        """The package that exports a class: its plugin's module, or that module's package."""
        module = self.plugin.module
        parent = module.rpartition(".")[0]
        is_package = hasattr(sys.modules.get(module), "__path__")
        return parent if parent and not is_package else module

    @property
    def where(self) -> str:
        if isinstance(self.target, Composition):
            return f"{self.plugin.module}: composition {self.name!r}"
        return f"{self.target.__module__}:{self.target.__qualname__}"


class Registry:
    """The components of a host's plugins, by kind and name."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._components: dict[str, dict[str, Component]] = {kind: {} for kind in KINDS}
        self._clashes: dict[tuple[str, str], PluginError] = {}
        core = PluginInfo(
            name="core", module="hgms_core", distribution=FIRST_PARTY, version=hgms_core.__version__
        )
        self._add(Component(kind=KINDS["method"], name=Pipeline.name, target=Pipeline, plugin=core))
        self.wrappers: list[type] = []
        """Classes of methods that wrap another method (:func:`inside`).

        A table may contain their fields at the same level as the fields of the inner pipeline.
        """
        for kind in KINDS.values():
            hooks = sorted(host.implementations(kind.hook), key=lambda pair: _rank(pair[0]))
            returned = [
                (info, target) for info, impl in hooks for target in host.call_hook(info, impl)
            ]
            if kind.name == "method":
                classes = [
                    target.of if isinstance(target, Composition) else target
                    for _, target in returned
                ]
                self.wrappers = list(
                    dict.fromkeys(
                        cls for cls in classes if inside(cls) and not faults_of(kind, cls)
                    )
                )
            for info, target in returned:
                faults = faults_of(kind, target, self.wrappers)
                if faults:
                    message = f"{_describe_target(target)} is not {kind.with_article}"
                    hint = "\n".join(f"- {fault}" for fault in faults)
                    self.host.blame(
                        info, PluginError("incomplete-component", message, hint=hint), part=True
                    )
                else:
                    self._add(Component(kind=kind, name=target.name, target=target, plugin=info))

    @classmethod
    def load(cls, plugins: str | Path | Iterable[str | Path | ModuleType] = ()) -> Registry:
        """Return the registry of all installed plugins and of ``plugins``.

        This takes about 20 ms if the modules of the plugins are already imported.
        """
        return cls(Host.load([plugins] if isinstance(plugins, str | Path) else plugins))

    def components(self, kind: str | None = None) -> list[Component]:
        kinds = KINDS if kind is None else (kind,)
        every = (self.find(kind, name) for kind in kinds for name in sorted(self._components[kind]))
        return [component for component in every if component is not None]

    def find(self, kind: str, name: str) -> Component | None:
        return None if (kind, name) in self._clashes else self._components[kind].get(name)

    def wrappers_of(self, kind: str) -> list[Any]:
        """Return the components of a kind that wrap another one at the same level of a table."""
        return [one.target for one in self._components[kind].values() if inside(one.target)]

    def get(self, kind: str, name: str) -> Component:
        """Return the component, or raise the error for an unknown name.

        The error contains the nearest name, the list of names, and the plugins that did not load.
        """
        if (component := self.find(kind, name)) is None:
            raise self.unknown(kind, name)
        return component

    def unknown(self, kind: str, name: str) -> HgmsError:
        """Return the error for an unknown name, or for a name that two plugins use."""
        if (kind, name) in self._clashes:
            return self._clashes[kind, name].at()
        error = unknown_name(KINDS[kind].label, name, self._components[kind])
        others = [other for other, named in self._components.items() if name in named]
        hints = [*(f"{name!r} is {KINDS[other].with_article}" for other in others), error.hint]
        for info in self.host.failures():
            state = "is incomplete" if info.status == "incomplete" else "did not load"
            hints.append(f"note: plugin {info.name!r} ({info.owner}) {state}: {info.error}")
            hints.append(
                f"install it: {info.install}"
                if info.install
                else "run `hgms plugins -v` for the traceback"
            )
        hints.append(f"run `hgms list {kind}` for their descriptions")
        if not error.did_you_mean:
            hints.append("`--plugin FILE` loads the components of a file")
        return ConfigError(**{**error.as_dict(), "hint": "\n".join(filter(None, hints))})

    def _add(self, component: Component) -> None:
        """Add a component; each name has one owner.

        - A built-in component keeps its name if a third-party plugin registers the same name.
        - If two third-party plugins register the same name, neither is used: the registry cannot
          guess the intended component. A lookup of the name raises the error.
        - If a plugin that the user named (a file) registers an existing name, the error is raised
          immediately.
        """
        known = self._components[component.kind.name]
        other = known.setdefault(component.name, component)
        if other is component:
            return
        error = _clash(other, component)
        if self.host.strict or (component.plugin.vital and not self.host.tolerant):
            raise error
        if other.plugin.vital is component.plugin.vital:
            self._clashes.setdefault((component.kind.name, component.name), error)
        self.host.blame(component.plugin, error, part=True)


def _rank(info: PluginInfo) -> int:
    # built-in plugins first, so that no other plugin can take their names; then third-party
    # plugins; then plugins that the user named
    return 2 if info.distribution is None else int(info.distribution != FIRST_PARTY)


def _clash(first: Component, second: Component) -> PluginError:
    owners = [
        f"{item.where} ({item.plugin.owner}, plugin {item.plugin.name!r})"
        for item in (first, second)
    ]
    others = [item.plugin.name for item in (second, first) if not item.plugin.vital]
    block = "".join(f", or block one with HGMS_DISABLE_PLUGINS={name}" for name in others[:1])
    return PluginError(
        "duplicate-name",
        f"the {first.kind.label} {first.name!r} is registered twice",
        hint="\n".join([*owners, f"rename one{block}"]),
    )


def summary_of(doc: str | None) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split()).rstrip(":")


def inside(cls: object) -> str | None:
    """Return the field of a wrapper that contains the inner method, else None.

    The field has ``metadata={"flat": True}``: in a table, the fields of the wrapper and of the
    inner method are at the same level. The result is None if ``cls`` is not a wrapper.

    Examples
    --------
    >>> from hgms_core import Method
    >>> @attrs.frozen
    ... class Patient:
    ...     method: Method = attrs.field(metadata={"flat": True})
    ...     patience: int = 3
    >>> inside(Patient), inside(Pipeline)
    ('method', None)
    """
    fields = attrs.fields(cls) if inspect.isclass(cls) and attrs.has(cls) else ()
    return next((field.name for field in fields if field.metadata.get("flat")), None)


def layers_of(cls: type, table: Mapping[str, Any]) -> list[type[Any]]:
    """Return the classes with fields in a method's table, innermost first.

    The fields of a wrapper are at the same level as the fields of a pipeline, unless the inner
    method has a separate table.
    """
    field = inside(cls)
    is_method = field is not None and hasattr(cls, "result")
    return [Pipeline, cls] if is_method and field not in table else [cls]


def faults_of(kind: Kind, target: object, wrappers: Iterable[type] = ()) -> list[str]:
    """Return the reasons why ``target`` cannot be registered as this kind.

    A composition of a pipeline may also contain the fields of ``wrappers``.
    """
    if kind.name == "method" and isinstance(target, Composition):
        return [*_name_faults(target.name), *_part_faults(target, wrappers)]
    if not inspect.isclass(target):
        return ["it is an object, not a class; return the class itself, without parentheses"]
    plain = "it is not an attrs class; put @component of hgms_core above it"
    faults = _name_faults(declared_name(target)) + [plain] * (not attrs.has(target))
    variables = [name for name in vars(kind.protocol).get("__annotations__", {}) if name != "name"]
    faults += [
        f"it has no class variable {name!r}" for name in variables if not hasattr(target, name)
    ]
    faults += _declared_faults(target) if kind.name == "task" else []
    for name in ("traits", "needs"):
        if isinstance(names := getattr(target, name, None) or (), str) or not isinstance(
            names, Iterable | property
        ):
            faults.append(
                f"its {name} are {names!r}; write a set of names, such as frozenset({{'sources'}})"
            )
    for name, wanted in kind.methods().items():
        faults += method_faults(target, name, wanted)
    return faults


def _name_faults(name: object) -> list[str]:
    if not isinstance(name, str):
        return ['it has no name; give it a class variable: name: ClassVar[str] = "my-name"']
    return (
        [] if NAME.fullmatch(name) else [f"its name {name!r} is not in kebab-case (like 'my-name')"]
    )


def _declared_faults(target: type) -> list[str]:
    faults = []  # attributes with a type that differs from the protocol
    version, metrics = (getattr(target, name, None) for name in ("version", "metrics"))
    if not isinstance(version, str | None):
        faults.append(f'its version is {version!r}; write a string, such as "1"')
    if metrics is not None and not (
        isinstance(metrics, Mapping) and all(isinstance(up, bool) for up in metrics.values())
    ):
        faults.append(
            f"its metrics are {metrics!r}; write whether higher is better for each, such as "
            '{"test_error": False}'
        )
    return faults


def _part_faults(target: Composition, wrappers: Iterable[type]) -> list[str]:
    layers = layers_of(target.of, target.parts)
    own = {key: part for cls in layers for key, part in _fields_beside(cls, layers[0]).items()}
    known = {
        *own,
        *(
            key
            for cls in wrappers
            if layers[0] is Pipeline
            for key in _fields_beside(cls, Pipeline)
        ),
    }
    faults = [
        "; ".join(unknown_name("part", key, known, label=f"part of a {layers[0].name}").lines())
        for key in target.parts
        if key not in known
    ]
    missing = [
        key
        for key, part in own.items()
        if part.default is attrs.NOTHING and key not in target.parts
    ]
    return faults + [f"it has no part {key!r}" for key in missing]


def _fields_beside(cls: type[Any], first: type) -> dict[str, attrs.Attribute[Any]]:
    return {
        key: part
        for key, part in attrs.fields_dict(cls).items()
        if cls is first or key != inside(cls)
    }


def method_faults(target: type, name: str, wanted: inspect.Signature) -> list[str]:
    """Return the differences between a method and its signature in the protocol.

    The core passes the protocol's parameters by position or by name. Further parameters need
    defaults.
    """
    method = getattr(target, name, None)
    expected = list(wanted.parameters.values())[1:]
    defaults = {
        item.name: "" if item.default is item.empty else f"={item.default!r}" for item in expected
    }
    protocol = f"{name}({', '.join(key + default for key, default in defaults.items())})"
    if not callable(method):
        return [f"it misses the method {protocol}"]
    static = isinstance(inspect.getattr_static(target, name), (staticmethod, classmethod))
    parameters = list(inspect.signature(method).parameters.values())[0 if static else 1 :]
    names = [
        item.name
        for item in parameters
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.POSITIONAL_ONLY)
    ]
    if len(names) < len(expected) and any(item.kind is item.VAR_POSITIONAL for item in parameters):
        return []
    if names[: len(expected)] != list(defaults):
        return [f"its method {name}({', '.join(names)}) should be {protocol}"]
    needed = [
        item
        for item in parameters
        if item.default is item.empty and not item.kind.name.startswith("VAR_")
    ]
    extra = [item.name for item in needed if defaults.get(item.name, "more")]
    return [
        f"its method {name}: the parameter {key!r} needs a default (the protocol is {protocol})"
        for key in extra
    ]


def _describe_target(target: object) -> str:
    if isinstance(target, Composition):
        return f"the composition {target.name!r}"
    return f"{target.__module__}:{target.__qualname__}" if inspect.isclass(target) else repr(target)
