"""What evaluating an expression yields and does, and what assigning its value does.

`expression` walks an expression as Python would. It returns a `Value`, what is known of the result, and adds what happens on the
way to `self.effects`. Calls are in `calls.py`, which adds them to this.
"""

from __future__ import annotations

from typing import Any

import libcst as cst

from fdg.compiler.analysis import Analysis
from fdg.compiler.bindings import target_names
from fdg.compiler.ir import EVERYTHING
from fdg.compiler.methods import Method, is_msrl, variable
from fdg.compiler.names import Names
from fdg.compiler.source import dotted
from fdg.compiler.tree import code, subexpressions
from fdg.compiler.values import DATA, Value, combine, element, join_kinds, objects


class Expressions(Names):
    """Evaluates the expressions of one method, `on_Name` those that are a `cst.Name` and so on."""

    def __init__(self, analysis: Analysis, method: Method) -> None:
        super().__init__(analysis, method)
        self.strong = True
        """Whether what is evaluated here is evaluated on every path."""
        self.calls_open = 0
        """How many calls the expression is an argument of."""

    def expression(self, node: cst.CSTNode) -> Value:
        handler = getattr(self, f"on_{type(node).__name__}", None)
        if handler is not None:
            return handler(node)
        return combine(map(self.expression, subexpressions(node)), "scalar")

    def quiet(self, node: cst.BaseExpression) -> Value:
        """A value's kind and roots, its effects being counted already."""
        with self.uncounted():
            return self.expression(node)

    def optional(self, node: cst.BaseExpression) -> Value:
        """A part that is not always evaluated: what it binds is bound on some paths only."""
        strong, self.strong = self.strong, False
        value = self.expression(node)
        self.strong = strong
        return value

    # names and their parts -------------------------------------------------------------------------------------------

    def on_Name(self, node: cst.Name) -> Value:
        name = node.value
        for scope in reversed(self.inner):
            if name in scope:
                return Value(scope[name].kind, set(scope[name].roots))
        if name in self.locals:
            if name in self.method.aliases:
                raise self.where(node).error(
                    f"`{name}` stands for self.msrl and is passed on here: the calls made there cannot be seen",
                    f"call {self.method.self_name}.msrl.<operation>(…) in a method of the trainer",
                )
            self.effects.reads.add(name)
            kind = self.kinds.get(name)
            return Value(kind, set() if kind == "scalar" else {name})
        if self.is_self(node):
            self.effects.reads.add(EVERYTHING)
            self.effects.mutates.add(EVERYTHING)
            self.effects.pin("passes `self` on")
            return Value("unknown", {EVERYTHING})
        return self.module_name(name)

    def on_Attribute(self, node: cst.Attribute) -> Value:
        if is_msrl(node, self.method):
            raise self.where(node).error(
                "`self.msrl` is passed on here: the calls made there cannot be seen",
                "call self.msrl.<operation>(…) directly in a method of the trainer",
            )
        if is_msrl(node.value, self.method):
            raise self.where(node).error(
                f"`{code(node)}` is passed on here without being called, so the call cannot be seen",
                f"{code(node)}(…) in a method of the trainer",
            )
        if self.is_self(node.value):
            return self.self_attribute(node.attr.value, node)
        if self.resolve(node) is not None:
            return Value("function")
        value = self.expression(node.value)
        if value.kind == "config" and node.attr.value != "config":
            return Value("scalar")
        return Value("data" if value.kind in DATA else value.kind if value.kind == "scalar" else "unknown", value.roots)

    def self_attribute(self, name: str, node: cst.CSTNode) -> Value:
        """An attribute of the trainer: a variable, or a method that is not called here."""
        found = self.analysis.trainer.find(name)
        if found is not None:
            if self.analysis.bearing.method_bears(*found):
                raise self.where(node).error(
                    f"`self.{name}` makes component calls and is passed on without being called, so they cannot be seen",
                    f"self.{name}(…) in a method of the trainer",
                )
            self.effects.reads.add(EVERYTHING)
            self.effects.pin(f"passes the method `{name}` on")
            return Value("function", {EVERYTHING})
        self.effects.reads.add(f"self.{name}")
        kind = self.analysis.attribute_kind(f"self.{name}")
        return Value(kind, set() if kind == "scalar" else {f"self.{name}"})

    def on_Subscript(self, node: cst.Subscript) -> Value:
        value = self.expression(node.value)
        self.subscripts(node)
        if isinstance(value.kind, tuple) and value.kind[0] == "defaultdict":
            self.effects.mutates |= value.roots  # looking a key up may insert it
        # A vector by None or a mask is no number: only what runs over one gets its parts.
        kind = "data" if value.kind in DATA else element(value.kind)
        return Value(kind, value.roots if kind != "scalar" else set())

    def subscripts(self, node: cst.Subscript) -> None:
        for part in node.slice:
            for inner in subexpressions(part):
                self.expression(inner)

    # operators and displays ------------------------------------------------------------------------------------------

    def on_BinaryOperation(self, node: cst.BinaryOperation) -> Value:
        values = [self.expression(node.left), self.expression(node.right)]
        if isinstance(node.operator, cst.Multiply):  # how often a container is repeated says nothing of its parts
            repeated = [value for value in values if isinstance(value.kind, tuple)]
            values = repeated if len(repeated) == 1 and "scalar" in [value.kind for value in values] else values
        value = combine(values)
        # Adding, repeating and merging containers keeps their parts; other results are new.
        keeps = isinstance(node.operator, (cst.Add, cst.Multiply, cst.BitOr)) and value.kind not in ("scalar", *DATA)
        return value if keeps else Value(value.kind)

    def on_UnaryOperation(self, node: cst.UnaryOperation) -> Value:
        value = self.expression(node.expression)
        return Value("scalar" if isinstance(node.operator, cst.Not) else value.kind)

    def on_Comparison(self, node: cst.Comparison) -> Value:
        kind = combine(map(self.expression, subexpressions(node)), "scalar").kind
        return Value("scalar" if isinstance(kind, tuple) else kind)

    def on_BooleanOperation(self, node: cst.BooleanOperation) -> Value:
        return combine([self.expression(node.left), self.optional(node.right)])

    def on_IfExp(self, node: cst.IfExp) -> Value:
        self.expression(node.test)
        return combine([self.optional(node.body), self.optional(node.orelse)])

    def on_NamedExpr(self, node: cst.NamedExpr) -> Value:
        value = self.expression(node.value)
        inner, self.inner = self.inner, []  # it binds a name of the method, wherever it stands
        self.bind(node.target, value)
        self.inner = inner
        return Value(value.kind, value.roots | {cst.ensure_type(node.target, cst.Name).value})

    def on_Tuple(self, node: Any) -> Value:
        """A tuple, list, set or dict that is written out."""
        starred = {
            item.value for item in node.elements if isinstance(item, (cst.StarredElement, cst.StarredDictElement))
        }
        values = [self.part(part) if part in starred else self.expression(part) for part in subexpressions(node)]
        plain = isinstance(node, cst.Tuple) and not starred
        return Value(("container", combine(values).kind), objects(values), tuple(values) if plain else None)

    on_List = on_Set = on_Dict = on_Tuple

    def on_FormattedString(self, node: cst.FormattedString) -> Value:
        for part in subexpressions(node):
            self.expression(part)
        return Value("scalar")

    on_ConcatenatedString = on_FormattedString

    def part(self, node: cst.BaseExpression) -> Value:
        """What is known of the values that a loop over an expression gets."""
        value = self.expression(node)
        one = Value(element(value.kind), value.roots)
        if not isinstance(node, cst.Call) or any(argument.star for argument in node.args):
            return one
        qualified = self.resolve(node.func)
        given = [argument.value for argument in node.args if argument.keyword is None]
        with self.uncounted():
            if qualified == "builtins.zip":
                one.parts = tuple(map(self.part, given))
            elif qualified == "builtins.enumerate" and given:
                one.parts = (Value("scalar"), self.part(given[0]))
        return one

    # scopes of their own ---------------------------------------------------------------------------------------------

    def on_Lambda(self, node: cst.Lambda) -> Value:
        parameters = (*node.params.params, *node.params.kwonly_params, *node.params.posonly_params)
        before = set(self.effects.reads)
        self.inner.append({parameter.name.value: Value(None) for parameter in parameters})
        self.expression(node.body)
        self.inner.pop()
        captured = {name for name in self.effects.reads - before if name in self.locals}
        if not self.calls_open:  # not handed to a call that uses it at once: stored for later
            self.effects.captured |= captured
            self.effects.pin("stores a function")
        return Value("function", captured)

    def on_ListComp(self, node: Any) -> Value:
        """A comprehension of any sort, or a generator."""
        part = node.for_in
        while part is not None:
            value = self.part(part.iter)
            if part is node.for_in:  # only what the first loop runs over is evaluated outside
                self.inner.append({})
            self.inner[-1].update((name, Value(None)) for name in target_names(part.target))
            self.bind(part.target, value)
            for condition in part.ifs:
                self.optional(condition.test)
            part = part.inner_for_in
        elements = [node.key, node.value] if isinstance(node, cst.DictComp) else [node.elt]
        values = [self.optional(item) for item in elements]
        self.inner.pop()
        return Value(("container", combine(values).kind), objects(values))

    on_SetComp = on_DictComp = on_GeneratorExp = on_ListComp

    def on_Yield(self, node: cst.Yield) -> Value:
        self.effects.pin("yields")
        return Value()

    def on_Await(self, node: cst.Await) -> Value:
        self.effects.pin("awaits")
        return Value()

    # assignments -----------------------------------------------------------------------------------------------------

    def bind(self, target: cst.CSTNode, value: Value, source: cst.BaseExpression | None = None) -> None:
        """Assign a value to a target; `source` is the expression that it is the value of."""
        if isinstance(target, cst.Name):
            self.bind_name(target.value, value)
        elif isinstance(target, (cst.Tuple, cst.List)):
            self.bind_parts(target, value, source)
        elif isinstance(target, cst.Attribute) and self.is_self(target.value):
            if target.attr.value == "msrl":
                raise self.where(target).error("`self.msrl` is set by the run and must not be assigned", "another name")
            name = f"self.{target.attr.value}"
            self.analysis.learn_kind(name, value.kind)
            self.bind_variable(name, value)
        elif isinstance(target, (cst.Attribute, cst.Subscript)):
            self.not_of_the_class(target)
            self.write_into(target, value)

    def not_of_the_class(self, target: cst.Attribute | cst.Subscript) -> None:
        """Refuse state in attributes of the trainer's class: fragments are classes of their own, derived from it."""
        if not isinstance(target, cst.Attribute) or self.method.name == "__init__":
            return
        owner, name = target.value, target.attr.value
        own = (
            isinstance(owner, cst.Call)
            and dotted(owner.func) == "type"
            and any(self.is_self(a.value) for a in owner.args)
        )
        own |= isinstance(owner, cst.Attribute) and owner.attr.value == "__class__" and self.is_self(owner.value)
        own |= (
            isinstance(owner, cst.Name)
            and not self.is_local(owner.value)
            and any(owner.value == base.name and self.module is base.module for base in self.analysis.trainer.bases)
        )
        if own:
            raise self.where(target).error(
                f"`{code(target)}` is set on the trainer's class, and each fragment has a class of its own: they would not "
                "see the same value",
                f"self.{name}, set in __init__",
            )

    def bind_name(self, name: str, value: Value) -> None:
        if self.inner and name in self.inner[-1]:
            self.inner[-1][name] = Value(join_kinds(self.inner[-1][name].kind, value.kind), value.roots)
        elif name in self.globals:
            self.effects.pin(f"writes the module's `{name}`")
            self.effects.writes.add(f"global {name}")
            self.analysis.learn_kind(f"global {name}", value.kind)
        else:
            self.kinds[name] = join_kinds(self.kinds.get(name), value.kind)
            self.bind_variable(name, value)

    def bind_variable(self, name: str, value: Value) -> None:
        self.effects.writes.add(name)
        if self.strong:
            self.effects.strong.add(name)
        if value.kind != "scalar" and value.roots:
            self.aliases.unite({name} | value.roots)

    def bind_parts(self, target: cst.Tuple | cst.List, value: Value, source: cst.BaseExpression | None) -> None:
        """`a, b = …`: part by part where the parts are known."""
        sources = source.elements if isinstance(source, (cst.Tuple, cst.List)) else ()
        starred = any(isinstance(entry, cst.StarredElement) for entry in target.elements)
        opposite = not starred and not any(isinstance(item, cst.StarredElement) for item in sources)
        for index, entry in enumerate(target.elements):
            if opposite and len(sources) == len(target.elements):
                self.bind(entry.value, self.quiet(sources[index].value), sources[index].value)
            elif value.parts is not None and len(value.parts) == len(target.elements) and not starred:
                self.bind(entry.value, value.parts[index])
            elif isinstance(entry, cst.StarredElement):
                self.bind(entry.value, Value(("container", element(value.kind)), value.roots))
            else:
                self.bind(entry.value, Value(element(value.kind), value.roots))

    def write_into(self, target: cst.Attribute | cst.Subscript, value: Value) -> None:
        """`a.b = …` and `a[i] = …`: the object is changed, and may hold the value."""
        base = self.expression(target.value)
        if isinstance(target, cst.Subscript):
            self.subscripts(target)
        self.effects.mutates |= base.roots
        if value.kind != "scalar" and value.roots and base.roots:
            self.aliases.unite(base.roots | value.roots)
        for root in base.roots:
            if isinstance(self.kinds.get(root), tuple):
                self.kinds[root] = (self.kinds[root][0], join_kinds(self.kinds[root][1], value.kind))
        if not base.roots:
            self.effects.pin(f"writes into `{code(target)}`, an object that is not a variable")

    def places(self, target: cst.CSTNode) -> set[str]:
        """The variables that an assignment's target binds or writes into."""
        if isinstance(target, (cst.Tuple, cst.List)):
            return {place for entry in target.elements for place in self.places(entry.value)}
        name = variable(target, self.method)
        if not name and isinstance(target, (cst.Attribute, cst.Subscript)):
            return self.places(target.value)
        return {name} - {""}
