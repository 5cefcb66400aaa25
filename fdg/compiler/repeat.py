"""What of a method can be run again when a run is resumed, and what has to be saved.

On Python's own tree, with what `purity.py` knows of libraries. Whatever is not known to be the same again is saved, or refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

import libcst as cst

from fdg.compiler import purity
from fdg.compiler.scope import Loop, Scope, binds, outside, pairs
from fdg.compiler.source import Module, TrainerSource, qualified_name
from fdg.compiler.tree import code, find

ITEMS = {f"builtins.{name}" for name in ("range", "list", "tuple", "dict", "sorted", "str", "bytes")} | {
    f"collections.{name}" for name in ("deque", "OrderedDict", "Counter", "defaultdict")
}
PLAIN = {
    f"builtins.{name}" for name in ("range", "min", "max", "abs", "round", "pow", "int", "float", "bool", "str", "len")
}
LOOKS = ("replay_buffer_size", "fetch", "gather", "all", "any", "mean", "sum")
"""Calls of `self.msrl` that change nothing."""
LEAVES = (ast.Name, ast.Attribute, ast.Subscript)
VIEWS = ("items", "keys", "values")


class Frame:
    """One method: its local variables, and what can be said of its expressions."""

    def __init__(self, node: ast.FunctionDef, module: Module, trainer: TrainerSource) -> None:
        self.node, self.module, self.trainer = node, module, trainer
        self.scope = Scope(node)
        self.this = self.scope.parameters[0] if self.scope.parameters else "self"
        self.again: frozenset[str] = frozenset()
        """Local variables that can be bound again, by running their one statement again."""

    def qualified(self, node: ast.expr) -> str | None:
        """What a name of a library stands for."""
        name = dotted(node)
        head = (name or "").partition(".")[0]
        if name is None or head in self.scope.order:
            imported = self.scope.bindings.get(head, [])
            if name is None or len(imported) != 1 or not isinstance(imported[0], (ast.Import, ast.ImportFrom)):
                return None
            return _imported(imported[0], head) + name[len(head) :]
        return qualified_name(name, self.module)

    def fixed(self, node: ast.AST, hidden: frozenset[str] = frozenset()) -> bool:
        """Whether an expression depends on constants and the config alone, so that it can be evaluated again at any time."""
        if isinstance(node, (ast.Constant, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)):
            return True
        if isinstance(node, ast.Name):
            if node.id in hidden or node.id in self.again or node.id == self.this:
                return True
            return node.id not in self.scope.order and (self.qualified(node) is not None or self.is_constant(node.id))
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == self.this:
                return node.attr in ("config", "msrl") or self.is_method(node.attr)
            return self.fixed(node.value, hidden)
        if isinstance(node, ast.Call):
            parts = [*node.args, *(keyword.value for keyword in node.keywords)]
            if not all(self.fixed(part, hidden) for part in parts):
                return False
            name = self.qualified(node.func)
            if name is not None:
                return purity.judge(name) == "pure"
            if not isinstance(node.func, ast.Attribute) or self.is_msrl(node.func.value):
                return False
            return node.func.attr in purity.READERS and self.fixed(node.func.value, hidden)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            hidden |= {name for part in node.generators for name in binds(part.target)}
        elif isinstance(node, ast.comprehension):
            return all(self.fixed(part, hidden) for part in (node.iter, *node.ifs))
        elif not isinstance(node, (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Slice,
                                   ast.Tuple, ast.List, ast.Dict, ast.Starred)):  # fmt: skip
            return False
        return all(self.fixed(child, hidden) for child in ast.iter_child_nodes(node))

    def is_method(self, name: str) -> bool:
        found = self.trainer.find(name)
        return found is not None and name not in found[0].properties

    def is_msrl(self, node: ast.AST) -> bool:
        """Whether an expression is `self.msrl`, or a local name for it."""
        values = self.scope.bindings.get(node.id, []) if isinstance(node, ast.Name) else [node]
        return any(isinstance(value, ast.Attribute) and dotted(value) == f"{self.this}.msrl" for value in values)

    def is_constant(self, name: str) -> bool:
        """Whether a name of the module is a function, a class, or a value that nobody can change."""
        module = self.module
        if name in module.state:
            return False
        if name in module.functions or name in module.classes:
            return True
        value = _parsed(module.constants[name]) if name in module.constants else None
        kinds = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator, ast.expr_context)
        return value is not None and all(isinstance(node, kinds) for node in ast.walk(value))

    def kind(self, node: ast.AST | None, seen: frozenset[str] = frozenset()) -> str:
        """What an expression is to a loop: `items` that can be gone through again, in the same order; iterator, set, unknown."""
        if isinstance(node, (ast.Tuple, ast.List, ast.Dict, ast.ListComp, ast.DictComp)):
            return "items"
        if isinstance(node, (ast.Set, ast.SetComp)):
            return "set"
        if isinstance(node, ast.GeneratorExp):
            return "iterator"
        if isinstance(node, ast.Constant):
            return "items"
        if isinstance(node, ast.IfExp):
            return _join(self.kind(node.body, seen), self.kind(node.orelse, seen))
        if isinstance(node, ast.BinOp):
            kinds = {self.kind(node.left, seen), self.kind(node.right, seen)}
            return "items" if "items" in kinds else "unknown"
        if isinstance(node, ast.Subscript):
            kept = isinstance(node.slice, ast.Slice) or self.fixed(node.value)
            return self.kind(node.value, seen) if kept else "unknown"
        if isinstance(node, ast.Call):
            return self.kind_of_call(node, seen)
        if isinstance(node, ast.Name):
            name = node.id
            if name in seen:
                return "items"  # its other bindings decide
            if name in self.scope.order:
                bound = [self.kind(value, seen | {name}) for value in self.scope.bindings[name]]
                return _join(*bound)
            constant = self.module.constants.get(name) if name not in self.module.state else None
            return "unknown" if constant is None else self.kind(_parsed(constant), seen | {name})
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.this:
            key = f"self.{node.attr}"
            if node.attr == "config" or key in seen:
                return "items"
            values = self.attribute_values(node.attr)
            return _join(*(self.kind(value, seen | {key}) for value in values)) if values else "unknown"
        if isinstance(node, ast.Attribute):
            return "items" if self.fixed(node) else "unknown"  # a field of the config
        return "unknown"

    def kind_of_call(self, node: ast.Call, seen: frozenset[str]) -> str:
        name = self.qualified(node.func)
        if name in ITEMS:
            return "items"
        if name in ("builtins.set", "builtins.frozenset"):
            return "set"
        if name is not None and name.startswith(("torch.", "numpy.")) and purity.judge(name) == "pure":
            return "items"
        if name is not None and (name.startswith("itertools.") or purity.is_container(name) or name == "builtins.iter"):
            return "iterator"
        if isinstance(node.func, ast.Attribute):
            if ast.unparse(node.func) == f"{self.this}.msrl.fetch" and len(node.args) == 1:
                return self.kind(node.args[0], seen)
            if node.func.attr in (*VIEWS, "split", "tolist", "splitlines"):
                return "items"
            if node.func.attr == "copy":
                return self.kind(node.func.value, seen)
            called = self.trainer.find(node.func.attr) if dotted(node.func.value) == self.this else None
            if called is not None and next(find(called[1].body, cst.Yield), None) is not None:
                return "iterator"
        if isinstance(node.func, ast.Name) and node.func.id in self.module.functions:
            if next(find(self.module.functions[node.func.id].body, cst.Yield), None) is not None:
                return "iterator"
        return "unknown"

    def attribute_values(self, name: str) -> list[ast.AST | None]:
        """What is assigned to an attribute of the trainer; None for what cannot be told."""
        values: list[ast.AST | None] = []
        for owner in self.trainer.bases:
            for node in find(owner.node, cst.Assign, cst.AnnAssign, cst.AugAssign):
                targets = [item.target for item in node.targets] if isinstance(node, cst.Assign) else [node.target]
                for target in targets:
                    if any(attribute.attr.value == name for attribute in find(target, cst.Attribute)):
                        whole = isinstance(target, cst.Attribute) and not isinstance(node, cst.AugAssign)
                        values.append(_parsed(node.value) if whole and node.value is not None else None)
        return values

    def repeatable(self, node: ast.stmt, within: ast.stmt | None = None) -> list[ast.stmt]:
        """What of a statement binds names to something that must not be saved, or need not, and can just be run again."""
        if isinstance(node, ast.If):
            parts = [*node.body, *node.orelse]
            whole = self.fixed(node.test) and all(self.repeatable(part, within or node) == [part] for part in parts)
            return [node] if whole else []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return [node] if self.bound_only(binds(node), within) else []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            before = outside(node) if isinstance(node, ast.FunctionDef) else [*node.decorator_list, *node.bases]
            return [node] if self.bound_only(binds(node), within) and all(self.fixed(part) for part in before) else []
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            return [node] if self.bound_only(binds(node), within) and self.is_plain(node.value) else []
        if not isinstance(node, ast.Assign):
            return []
        each = [(name, value) for name, value in pairs(node) if self.bound_only([name.id], within)]
        each = [(name, value) for name, value in each if self.is_plain(value)]
        targets = [part for target in node.targets for part in ast.walk(target) if isinstance(part, LEAVES)]
        if each and len(each) == len(targets):
            return [node]
        return [ast.copy_location(ast.Assign([name], value), node) for name, value in each]

    def bound_only(self, names: Iterable[str], within: ast.stmt | None) -> bool:
        """Whether names are bound once, or only within a statement."""
        inside = list(binds(within)) if within is not None else []
        return all(len(self.scope.bindings.get(name, [])) <= max(inside.count(name), 1) for name in names)

    def is_function(self, name: str) -> bool:
        """Whether a local variable may be a function made here, or a method: what cannot be saved."""
        for value in self.scope.bindings.get(name, []):
            this, method = (dotted(value) or "").rpartition(".")[::2] if isinstance(value, ast.Attribute) else ("", "")
            if this == self.this and (method == "msrl" or self.is_method(method)):
                return True
            if this == f"{self.this}.msrl" or isinstance(value, (ast.Lambda, ast.FunctionDef, ast.ClassDef)):
                return True
        return False

    def is_quiet(self, test: ast.expr) -> bool:
        """Whether a condition only looks, so that it can be asked once more."""
        for node in ast.walk(test):
            if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
                return False
            if isinstance(node, ast.Call):
                name = self.qualified(node.func)
                looks = isinstance(node.func, ast.Attribute) and node.func.attr in (*LOOKS, *purity.READERS)
                if not looks and (name is None or name == "builtins.next" or purity.judge(name) != "pure"):
                    return False
        return True

    def is_plain(self, value: ast.expr) -> bool:
        """Whether an expression can be evaluated again at any time, and makes no object that could be changed."""
        if isinstance(value, ast.Lambda):
            return all(self.fixed(part) for part in outside(value))
        made = any(isinstance(node, (ast.List, ast.Dict, ast.ListComp, ast.GeneratorExp)) for node in ast.walk(value))
        names = [self.qualified(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)]
        known = all(name is not None and (name in PLAIN or purity.is_scalar(name)) for name in names)
        return known and not made and self.fixed(value)


def _join(*kinds: str) -> str:
    return (
        kinds[0] if len(set(kinds)) == 1 else next((kind for kind in ("iterator", "set") if kind in kinds), "unknown")
    )


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def _imported(node: ast.Import | ast.ImportFrom, name: str) -> str:
    for alias in node.names:
        if (alias.asname or alias.name.partition(".")[0]) == name:
            if isinstance(node, ast.ImportFrom):
                return f"{node.module}.{alias.name}"
            return alias.name if alias.asname else name
    return name


def _parsed(node: cst.CSTNode) -> ast.AST:
    return ast.parse(code(node).strip(), mode="eval").body


def is_name_for(this: str, value: Any) -> bool:
    """Whether a value is the trainer, its `msrl` or a method of one of them."""
    name = dotted(value) if isinstance(value, ast.expr) else None
    return name is not None and name.split(".")[0] == this and name.split(".")[1:2] != ["config"]


def is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def endless(node: Loop) -> bool:
    return isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and bool(node.test.value)
