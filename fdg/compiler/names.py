"""What the names in a method stand for while it is evaluated.

local       a parameter, or bound somewhere in the body
inner       bound by an enclosing comprehension or lambda
import      imported in the body
global      declared `global` in the body
the rest    names of the module: imports, functions and classes, constants, or state (`global NAME` in effects)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import libcst as cst

from fdg.compiler.analysis import Analysis
from fdg.compiler.ir import Effects, is_attribute, walk
from fdg.compiler.methods import Method
from fdg.compiler.source import Origin, dotted, imported_names, qualified_name
from fdg.compiler.tree import subexpressions
from fdg.compiler.values import Aliases, Kind, Value, join_kinds


class Names:
    """The names of one method, and what has been found out of them so far."""

    def __init__(self, analysis: Analysis, method: Method) -> None:
        self.analysis, self.method = analysis, method
        self.module = method.owner.module
        self.aliases = Aliases()
        self.kinds: dict[str, Kind] = {}
        self.closures: dict[str, set[str]] = {}
        """What a function of the method's own may change when it is called, by the variable that it is stored in."""
        self.imports: dict[str, str] = {}
        self.globals: set[str] = set()
        for statement in walk(method.body):
            node = statement.parts.get("node")
            if isinstance(node, (cst.Import, cst.ImportFrom)):
                self.imports.update(imported_names(node))
            elif isinstance(node, cst.Global):
                self.globals.update(item.name.value for item in node.names)
            elif isinstance(node, cst.Nonlocal):
                raise statement.origin.error("`nonlocal` cannot be projected", "an attribute of self")
        self.locals = (set(method.parameters) | method.bound) - self.globals - set(self.imports)
        self.inner: list[dict[str, Value]] = []
        """Names bound by enclosing comprehensions and lambdas, the innermost last."""
        self.effects = Effects()
        """Of the statement that is being evaluated."""
        self.origin: Origin | None = None
        """Where it stands."""

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is evaluated inside has no effects: they are counted already, or do not count."""
        kept, self.effects = self.effects, Effects()
        yield
        self.effects = kept

    def where(self, node: cst.CSTNode) -> Origin:
        try:
            return self.module.origin(node)
        except KeyError:
            assert self.origin is not None
            return self.origin

    def is_self(self, node: cst.CSTNode) -> bool:
        return bool(self.method.self_name) and isinstance(node, cst.Name) and node.value == self.method.self_name

    def is_local(self, name: str) -> bool:
        return name in self.locals or any(name in scope for scope in self.inner)

    def kind_of(self, name: str) -> Kind:
        return self.analysis.attribute_kind(name) if is_attribute(name) else self.kinds.get(name)

    def may_change(self, name: str) -> bool:
        """Whether a variable's object is one that can be changed in place."""
        return self.kind_of(name) not in ("scalar", "config", "function")

    def resolve(self, node: cst.CSTNode) -> str | None:
        """The qualified name an expression stands for, when it is not a local value."""
        name = dotted(node)
        if name is None:
            return None
        head = name.partition(".")[0]
        if self.is_local(head) or head == self.method.self_name:
            return None
        return qualified_name(name, self.module, self.imports)

    def module_name(self, name: str) -> Value:
        """A name of the module: free to read where it is a constant, module state otherwise."""
        if name in ("True", "False", "None", "__name__", "NotImplemented", "Ellipsis"):
            return Value("scalar")
        if name in self.imports or self.resolve(cst.Name(name)) is not None:
            return Value("function")
        if name in self.module.functions or name in self.module.classes:
            return Value("function")
        value = self.module.constants.get(name)
        if name not in self.module.state and (_constant(value) if value is not None else self.is_plain_global(name)):
            return Value("scalar")
        self.effects.reads.add(f"global {name}")
        self.effects.pin(f"reads the module's `{name}`")
        first = "scalar" if isinstance(value, (cst.BaseNumber, cst.BaseString)) else "unknown"
        kind = join_kinds(first, self.analysis.kinds.get(f"global {name}"))
        return Value(kind, set() if kind == "scalar" else {f"global {name}"})

    def is_plain_global(self, name: str) -> bool:
        """Whether a name that the module's source does not bind is a number or a string in the module itself."""
        namespace = self.module.namespace
        return namespace is not None and isinstance(namespace.get(name), (int, float, str, bool, type(None)))


def _constant(node: cst.BaseExpression) -> bool:
    """Whether a module-level value is one that nobody can change."""
    if isinstance(node, (cst.BaseNumber, cst.BaseString)) or dotted(node) in ("True", "False", "None"):
        return True
    if isinstance(node, (cst.Tuple, cst.UnaryOperation, cst.BinaryOperation)):
        return all(_constant(part) for part in subexpressions(node))
    return isinstance(node, cst.Call) and dotted(node.func) in ("torch.device", "float", "int", "frozenset", "range")
