"""What a call does, by what is called.

component call                          the component may change what it is given (`component`)
method of the trainer, own function     read and summarised (`apply`); `@fdg.pure` is believed
function of a library                   by the lists of `purity.py` (`library`)
method of a value                       by the value's kind and the same lists (`method_of_value`)
anything else                           may change all it can reach, and stays at the driver (`unknown`)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import libcst as cst

from fdg.compiler import purity
from fdg.compiler.expressions import Expressions
from fdg.compiler.ir import is_attribute
from fdg.compiler.methods import Method, is_msrl, is_super, match_arguments, method_call, operation_of
from fdg.compiler.operations import OPERATIONS
from fdg.compiler.source import Module, dotted, find_function, qualified_name
from fdg.compiler.tree import code
from fdg.compiler.values import DATA, Kind, Value, combine, element, join_kinds


class Calls(Expressions):
    """Evaluates expressions, those with calls in them too."""

    def on_Call(self, node: cst.Call) -> Value:
        self.calls_open += 1
        try:
            return self.call(node)
        finally:
            self.calls_open -= 1

    def call(self, node: cst.Call) -> Value:
        operation = operation_of(node, self.method)
        if operation is not None:
            return self.component(node, operation)
        target = method_call(node, self.method, self.analysis.trainer)
        if target is not None:
            base = cst.ensure_type(node.func, cst.Attribute).value
            given = node.args if self.is_self(base) or is_super(base) else node.args[1:]  # Base.method(self, …)
            return self.apply(self.analysis.need(*target), given, code(node.func))
        qualified = self.resolve(node.func)
        if qualified is not None:
            return self.library(node, qualified)
        name = dotted(node.func)
        if name is not None and not self.is_local(name) and name in self.module.functions:
            return self.own_function(node, self.module, name)
        if isinstance(node.func, cst.Attribute) and not self.is_self(node.func.value):
            return self.method_of_value(node, node.func)
        return self.unknown(node, f"calls `{code(node.func)}`, which is not known to be pure")

    def arguments(self, node: cst.Call) -> list[Value]:
        return [self.expression(argument.value) for argument in node.args]

    def unknown(self, node: cst.Call, reason: str) -> Value:
        """Anything may happen to what the call can reach."""
        if isinstance(node.func, cst.Attribute):
            base = node.func.value
            found = (
                self.self_attribute(node.func.attr.value, node.func) if self.is_self(base) else self.expression(base)
            )
        else:
            found = self.expression(node.func)
        given = combine(self.arguments(node)).roots
        reached = given | found.roots
        reached = reached.union(*(self.closures.get(name, ()) for name in reached))  # through a stored function
        touched = {name for name in reached if self.may_change(name)}
        self.effects.mutates |= touched
        self.aliases.unite(touched)
        self.effects.captured |= {name for name in given if self.kind_of(name) == "function"}
        self.effects.pin(reason)
        return Value("object" if self.makes_object(node.func) else "unknown", touched)

    def makes_object(self, function: cst.BaseExpression) -> bool:
        """Whether a call makes an object of a class that we do not know: what its methods do, their names do not tell."""
        name, qualified = dotted(function) or "", self.resolve(function) or ""
        if not self.is_local(name) and name in self.module.classes:
            return True
        module, _, last = qualified.rpartition(".")
        return isinstance(getattr(sys.modules.get(module), last, None), type)

    def component(self, node: cst.Call, name: str) -> Value:
        operation = OPERATIONS[name]
        given = combine(self.arguments(node)).roots
        self.effects.calls.append(name)
        touched = {root for root in given if self.may_change(root)}
        if operation.component in ("env", "actor", "learner"):
            self.effects.mutates |= touched  # the component may write into what it is given
        if operation.joins:
            # The step of a log is no value to join: it has to be the same for all actors.
            for argument in node.args[1:] if name == "log" and node.args and not node.args[0].keyword else node.args:
                if isinstance(argument.value, cst.Name):
                    self.effects.joined.add(argument.value.value)
                elif isinstance(argument.value, cst.Attribute) and self.is_self(argument.value.value):
                    self.effects.joined.add(f"self.{argument.value.attr.value}")
        if operation.returns != "data":
            return Value("scalar")
        # With several actors what is joined is a new value, and so is what comes of it (see MSRL.agent_learn).
        shares = operation.per == "actor" or (operation.joins and self.analysis.actors == 1)
        return Value("data", touched if shares else set())

    # what can be read ------------------------------------------------------------------------------------------------

    def self_attribute(self, name: str, node: cst.CSTNode) -> Value:
        found = self.analysis.trainer.find(name)
        if found is not None and name in found[0].properties:  # a call without parentheses
            return self.apply(self.analysis.need(*found), [], f"self.{name}")
        return super().self_attribute(name, node)

    def own_function(self, node: cst.Call, module: Module, name: str) -> Value:
        """A function of the user's: declared pure, or read like a method."""
        marks = {qualified_name(dotted(d.decorator) or "", module) for d in module.functions[name].decorators}
        function = self.analysis.function(module, name)
        if marks & {"fdg.pure", "fdg.api.pure"}:
            self.arguments(node)
            with self.uncounted():  # declared pure: what its body seems to do does not count
                return self.apply(function, node.args, name)
        if marks:
            effects = function.summary.effects
            self.effects.writes |= {changed for changed in effects.writes if changed.startswith("global ")}
            self.effects.mutates |= {changed for changed in effects.mutates if changed.startswith("global ")}
            return self.unknown(node, f"calls `{name}`, which is decorated")
        return self.apply(function, node.args, name)

    def apply(self, method: Method, arguments: Sequence[cst.Arg], name: str) -> Value:
        """A call of something we have read: bind arguments to parameters, take over the summary."""
        summary = method.summary
        bound: dict[str, set[str]] = {}
        kinds: dict[str, Kind] = {}
        for argument, parameters, whole in match_arguments(arguments, method.parameters):
            value = self.expression(argument)
            for parameter in parameters:
                bound.setdefault(parameter, set()).update(value.roots)
                kinds[parameter] = value.kind if whole else "unknown"
        for parameter, kind in kinds.items():
            summary.found[parameter] = join_kinds(summary.found.get(parameter), kind)
        for parameter in method.lasting_defaults - set(bound):
            bound[parameter] = {f"global {method.name}({parameter})"}
            if parameter in summary.mutated | summary.returns.roots:
                self.effects.reads |= bound[parameter]
                self.effects.pin(f"calls `{name}`, whose default for `{parameter}` is one object for all calls")
        effects = summary.effects
        self.effects.reads |= effects.reads
        self.effects.writes |= effects.writes
        self.effects.mutates |= effects.mutates
        self.effects.calls += effects.calls
        self.effects.helpers |= effects.helpers | ({method.key} if effects.calls else set())
        if effects.pinned:
            self.effects.pin(
                effects.pinned if effects.pinned.startswith("calls `") else f"calls `{name}`, which {effects.pinned}"
            )
        for parameter in summary.mutated:
            self.effects.mutates |= {root for root in bound.get(parameter, set()) if self.may_change(root)}
        for group in summary.shared:
            roots = _in_caller(group, bound)
            if len(roots) > 1:
                self.aliases.unite(roots)
        return self.result(summary.returns, bound)

    def result(self, value: Value, bound: dict[str, set[str]]) -> Value:
        """A callee's result in terms of the caller's variables."""
        parts = None if value.parts is None else tuple(self.result(part, bound) for part in value.parts)
        return Value(value.kind if value.kind is not None else "scalar", _in_caller(value.roots, bound), parts)

    # what is known by name -------------------------------------------------------------------------------------------

    def library(self, node: cst.Call, qualified: str) -> Value:
        verdict = purity.judge(qualified)
        if verdict == "unknown":
            found = find_function(qualified, self.module)
            if found is not None:
                return self.own_function(node, *found)
        self.check_getattr(node)
        if verdict != "pure":
            reason = "draws random numbers" if verdict == "draws" else "which is not known to be pure"
            value = self.unknown(node, f"calls `{code(node.func)}`, {reason}")
            return Value("scalar") if purity.is_scalar(qualified) else value
        values = self.arguments(node)
        total = combine(values)
        last = qualified.rpartition(".")[2]
        if values and ((last.endswith("_") and not last.endswith("__")) or qualified == "builtins.next"):
            self.effects.mutates |= values[0].roots
        for argument, value in zip(node.args, values, strict=True):
            if argument.keyword is not None and argument.keyword.value == "out":
                self.effects.mutates |= value.roots
            if value.kind == "function":
                self.effects.reads |= value.roots
        if qualified == "collections.defaultdict":
            return Value(("defaultdict", None), total.roots)
        if purity.is_scalar(qualified):
            return Value("scalar")
        if qualified in ("builtins.sum", "builtins.max", "builtins.min"):
            return Value(element(total.kind) if isinstance(total.kind, tuple) else total.kind, total.roots)
        if qualified == "builtins.range":
            return Value(("container", "scalar"))
        if purity.is_container(qualified):
            return Value(("container", element(total.kind) if total.kind is not None else None), total.roots)
        kind = "data" if qualified.startswith(("torch.", "numpy.", "tensordict.", "torchrl.", "fdg.")) else "unknown"
        options = {argument.keyword.value for argument in node.args if argument.keyword is not None}
        plain = not any(argument.star for argument in node.args) and not options & {"retstep", "ndmin"}
        if plain and purity.is_vector(qualified, [value.kind for value in values]):
            kind = "vector" if qualified.startswith("numpy.") else "tensor vector"
        return Value(kind, set() if purity.is_fresh(qualified) else total.roots)

    def check_getattr(self, node: cst.Call) -> None:
        if dotted(node.func) == "getattr" and any(is_msrl(argument.value, self.method) for argument in node.args):
            raise self.where(node).error(
                "a component call through `getattr` cannot be found by reading the program",
                "self.msrl.<operation>(…), with an `if` where the operation depends on a value",
            )

    def method_of_value(self, node: cst.Call, function: cst.Attribute) -> Value:
        """A method of a local value: known by the value's kind, otherwise anything may happen."""
        name = function.attr.value
        value = self.expression(function.value)
        kind = value.kind
        if kind is None or (kind == "unknown" and name in purity.READERS):  # None: not known yet in this round
            return Value(kind, value.roots | combine(self.arguments(node)).roots)
        if isinstance(kind, tuple) and (name in purity.CONTAINER_MUTATORS or name in purity.CONTAINER_READERS):
            return self.method_of_container(node, name, value)
        if kind in ("scalar", *DATA):
            given = combine(self.arguments(node)).roots
            if name in purity.DATA_READERS:
                if any(argument.keyword is not None and argument.keyword.value == "inplace" for argument in node.args):
                    self.effects.mutates |= value.roots
                if name in ("apply", "named_apply"):
                    self.effects.pin(f"calls `{code(function)}`, whose function is not known to be pure")
                if name == "tolist" and kind in ("vector", "tensor vector"):
                    return Value(("container", "scalar"))
                kept = kind == "scalar" or name in purity.DATA_SAME_SHAPE
                return Value(kind if kept else "data", set() if name in purity.DATA_FRESH else value.roots | given)
            if purity.changes_data(name):
                self.effects.mutates |= value.roots
                if given and value.roots:
                    self.aliases.unite(value.roots | given)
                return Value(kind, value.roots)
        return self.unknown(node, f"calls `{code(function)}`, which is not known to be pure")

    def method_of_container(self, node: cst.Call, name: str, value: Value) -> Value:
        total = combine(self.arguments(node))
        if name in purity.CONTAINER_MUTATORS:
            self.effects.mutates |= value.roots
            if total.kind != "scalar" and total.roots and value.roots:
                self.aliases.unite(value.roots | total.roots)
            if name in ("append", "add", "appendleft", "insert", "setdefault", "update", "extend"):
                inner = element(total.kind) if name in ("extend", "update") else total.kind
                for root in value.roots:
                    if isinstance(self.kinds.get(root), tuple):
                        self.kinds[root] = (value.kind[0], join_kinds(self.kinds[root][1], inner))
                    elif isinstance(self.analysis.kinds.get(root), tuple):
                        self.analysis.learn_kind(root, (value.kind[0], inner))
        kind = element(value.kind)
        if name == "items":
            kind = ("container", ("container", kind))
        elif name in ("keys", "values", "copy"):
            kind = ("container", kind)
        return Value(kind, value.roots)


def _in_caller(names: set[str], bound: dict[str, set[str]]) -> set[str]:
    """Variables of a callee as its caller knows them: attributes as they are, parameters as what is passed for them."""
    return {root for name in names for root in ({name} if is_attribute(name) else bound.get(name, set()))}
