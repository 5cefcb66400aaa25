"""Normalise: a method's source becomes a tree of statements in which every component call stands alone.

`loss = f(a(), self.msrl.agent_learn(self.msrl.replay_buffer_sample(n)))` becomes

    _a1 = a()
    _sample2 = self.msrl.replay_buffer_sample(n)
    _learn3 = self.msrl.agent_learn(_sample2)
    loss = f(_a1, _learn3)

in the order Python evaluates it: what stood before a component call and might notice it is put into a temporary too.
Short circuits, conditional expressions, comprehensions and loop conditions become statements; lambdas, generators and
nested functions that make component calls are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from fdg.compiler.ir import Statement
from fdg.compiler.operations import OPERATIONS
from fdg.compiler.source import ClassSource, Origin, TrainerSource, dotted
from fdg.compiler.tree import children, code, find, is_name, replaced, yields
from fdg.errors import did_you_mean


@dataclass(eq=False)
class Method:
    """One method of the trainer, on its way from source to fragments."""

    owner: ClassSource
    node: cst.FunctionDef
    self_name: str
    parameters: list[str]
    aliases: dict[str, str] = field(default_factory=dict)
    """Local names that stand for `self.msrl` (value "") or for one of its operations."""
    body: list[Statement] = field(default_factory=list)
    contexts: list[cst.WithItem] = field(default_factory=list)
    bound: set[str] | None = None
    """Names that the body binds, found when first asked for."""
    summary: Any = None

    @property
    def name(self) -> str:
        return self.node.name.value

    @property
    def key(self) -> tuple[str, str]:
        return (self.owner.name, self.name)

    def origin(self, node: cst.CSTNode) -> Origin:
        return self.owner.module.origin(node)


def parse_method(owner: ClassSource, node: cst.FunctionDef) -> Method:
    parameters = node.params
    names = [p.name.value for p in (*parameters.posonly_params, *parameters.params)]
    self_name = names[0] if names else ""
    rest = names[1:] + [p.name.value for p in parameters.kwonly_params]
    for star in (parameters.star_arg, parameters.star_kwarg):
        if isinstance(star, cst.Param):
            rest.append(star.name.value)
    return Method(owner, node, self_name, rest)


def is_msrl(node: cst.CSTNode, method: Method) -> bool:
    """Whether an expression is `self.msrl`, or a local name for it."""
    if isinstance(node, cst.Name):
        return method.aliases.get(node.value) == ""
    return (
        isinstance(node, cst.Attribute)
        and node.attr.value == "msrl"
        and isinstance(node.value, cst.Name)
        and node.value.value == method.self_name
    )


def operation_of(node: cst.CSTNode, method: Method) -> str | None:
    """The component call that `node` is, by name, or None."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
        return method.aliases.get(node.func.value) or None
    if not (isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and is_msrl(node.func.value, method)):
        return None
    return node.func.attr.value


def method_call(
    node: cst.CSTNode, method: Method, trainer: TrainerSource
) -> tuple[ClassSource, cst.FunctionDef] | None:
    """The method of the trainer that a call goes to: `self.m()`, `super().m()` or `Base.m(self)`."""
    if not (isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)):
        return None
    base, name = node.func.value, node.func.attr.value
    if isinstance(base, cst.Name) and base.value == method.self_name:
        return trainer.find(name)
    if is_super(base):
        return trainer.find(name, after=method.owner)
    if isinstance(base, cst.Name) and node.args and is_name(node.args[0].value, method.self_name):
        for owner in trainer.bases:
            if owner.name == base.value and owner is not method.owner:
                after = trainer.bases.index(owner) - 1
                return trainer.find(name, after=trainer.bases[after] if after >= 0 else None)
    return None


def is_super(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and is_name(node.func, "super")


def variable(node: cst.CSTNode, method: Method) -> str:
    """The variable that an expression is, or an empty string."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and is_name(node.value, method.self_name):
        return f"self.{node.attr.value}"
    return ""


class _Names(cst.CSTTransformer):
    """Writes aliases of `self.msrl` out in full, and `super()` as `super(Owner, self)`, so that code can move."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        operation = (
            self.method.aliases.get(updated_node.func.value, "") if isinstance(updated_node.func, cst.Name) else ""
        )
        if operation:
            return updated_node.with_changes(func=cst.parse_expression(f"{self.method.self_name}.msrl.{operation}"))
        if is_super(updated_node) and not updated_node.args:
            return cst.parse_expression(f"super({self.method.owner.name}, {self.method.self_name})")
        return updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        if isinstance(updated_node.value, cst.Name) and self.method.aliases.get(updated_node.value.value) == "":
            return updated_node.with_changes(value=cst.parse_expression(f"{self.method.self_name}.msrl"))
        return updated_node


def canonical(node: cst.CSTNode, method: Method) -> cst.CSTNode:
    """The node as generated code writes it: aliases of `self.msrl` and `super()` in full."""
    if not method.self_name:
        return node
    renamed = node.visit(_Names(method))
    assert isinstance(renamed, cst.CSTNode)
    return renamed


class _FindAliases:
    """Finds `msrl = self.msrl` and `act = self.msrl.agent_act`; a name that is also bound otherwise is refused."""

    def __init__(self, method: Method) -> None:
        self.method, self.others = method, {}  # type: ignore[var-annotated]

    def visit_Assign(self, node: cst.Assign) -> None:
        meaning = self.meaning(node.value)
        for target in node.targets:
            if isinstance(target.target, cst.Name):
                name = target.target.value
                if meaning is None:
                    self.others[name] = node
                elif self.method.aliases.setdefault(name, meaning) != meaning:
                    self.others[name] = node

    def meaning(self, value: cst.BaseExpression) -> str | None:
        if is_msrl(value, self.method):
            return ""
        if isinstance(value, cst.Attribute) and is_msrl(value.value, self.method):
            return value.attr.value
        if isinstance(value, cst.Name):
            return self.method.aliases.get(value.value)
        if isinstance(value, cst.Attribute) and isinstance(value.value, cst.Name):
            return value.attr.value if self.method.aliases.get(value.value.value) == "" else None
        return None


class Bearing:
    """Tells which expressions make component calls, directly or through a method of the trainer."""

    def __init__(self, trainer: TrainerSource) -> None:
        self.trainer = trainer
        self.methods: dict[tuple[str, str], Method] = {}
        self._bearing: dict[tuple[str, str], bool] = {}
        self._cache: dict[int, tuple[cst.CSTNode, bool]] = {}

    def method(self, owner: ClassSource, node: cst.FunctionDef) -> Method:
        key = (owner.name, node.name.value)
        if key not in self.methods:
            method = parse_method(owner, node)
            finder = _FindAliases(method)
            for assign in find(node.body, cst.Assign):
                finder.visit_Assign(assign)
            for name, other in finder.others.items():
                if name in method.aliases:
                    raise method.origin(other).error(
                        f"`{name}` is sometimes `self.msrl` and sometimes something else, so its calls cannot be told apart",
                        f"use {method.self_name}.msrl directly, or another name here",
                    )
            self.methods[key] = method
        return self.methods[key]

    def method_bears(self, owner: ClassSource, node: cst.FunctionDef) -> bool:
        key = (owner.name, node.name.value)
        if key not in self._bearing:
            self._bearing[key] = False  # a recursive call adds nothing by itself
            method = self.method(owner, node)
            self._bearing[key] = any(self._bears(call, method) for call in find(node.body, cst.Call))
        return self._bearing[key]

    def _bears(self, call: cst.CSTNode, method: Method) -> bool:
        if operation_of(call, method) is not None:
            return True
        target = method_call(call, method, self.trainer)
        return target is not None and self.method_bears(*target)

    def call(self, node: cst.CSTNode, method: Method) -> bool:
        """Whether this very node is a component call or a call of a method that makes one."""
        return isinstance(node, cst.Call) and self._bears(node, method)

    def within(self, node: cst.CSTNode, method: Method) -> bool:
        """Whether a component call stands anywhere inside."""
        known = self._cache.get(id(node))
        if known is None or known[0] is not node:
            found = any(self._bears(call, method) for call in find(node, cst.Call))
            known = self._cache[id(node)] = (node, found)
        return known[1]


def subexpressions(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The expressions directly inside an expression, in the order Python evaluates them."""
    found: list[cst.BaseExpression] = []
    for child in children(node):
        if (isinstance(node, cst.Attribute) and child is node.attr) or (
            isinstance(node, cst.Arg) and child is node.keyword
        ):
            continue
        if isinstance(child, (cst.StarredElement, cst.StarredDictElement)):
            found.append(child.value)
        elif isinstance(child, cst.BaseExpression):
            found.append(child)
        else:
            found.extend(subexpressions(child))
    return found


def spread(arguments: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Arguments with `*(a, b)` and `**{"k": v}` written out."""
    out: list[cst.Arg] = []
    for argument in arguments:
        value = argument.value
        if argument.star == "*" and isinstance(value, (cst.Tuple, cst.List)):
            if not any(isinstance(item, cst.StarredElement) for item in value.elements):
                out += [cst.Arg(item.value) for item in value.elements]
                continue
        if argument.star == "**" and isinstance(value, cst.Dict):
            keys = [item.key if isinstance(item, cst.DictElement) else None for item in value.elements]
            names = [key.evaluated_value if isinstance(key, cst.SimpleString) else None for key in keys]
            if all(isinstance(name, str) and name.isidentifier() for name in names):
                for name, item in zip(names, value.elements, strict=True):
                    out.append(cst.Arg(item.value, keyword=cst.Name(str(name)), equal=cst.AssignEqual()))
                continue
        out.append(argument)
    return out


def may_take(argument: cst.Arg, index: int, parameters: list[str], given: set[str]) -> list[str]:
    """The parameters that a starred (or surplus) argument may go to."""
    if argument.star == "**":
        return [name for name in parameters if name not in given]
    return parameters[index:] or parameters[-1:]


class Lowering:
    """Turns one method's body into statements."""

    def __init__(
        self, bearing: Bearing, method: Method, join_arguments: bool, spill: frozenset[Any] = frozenset()
    ) -> None:
        self.bearing, self.method, self.join_arguments = bearing, method, join_arguments
        self.spill_at = spill
        """Places of component calls whose arguments have to be computed before, at the driver."""
        self.counter = 0
        self.origin: Origin = method.owner.module.origin(method.owner.methods[method.name])

    # statements ------------------------------------------------------------------------------------------------------

    def block(self, body: Sequence[cst.CSTNode]) -> list[Statement]:
        out: list[Statement] = []
        for node in body:
            self.statement(node, out)
        return out

    def suite(self, suite: cst.BaseSuite) -> list[Statement]:
        return self.block(suite.body)

    def place(self, node: cst.CSTNode) -> Origin:
        """Where a node stands in the user's file; rewritten nodes stand where their statement does."""
        for candidate in (node, *children(node)):
            try:
                self.origin = self.method.origin(candidate)
                return self.origin
            except KeyError:
                continue
        for inner in find(node, cst.Name, cst.Integer):
            try:
                where = self.method.origin(inner)
            except KeyError:
                continue
            text = where.text
            indent = len(text) - len(text.lstrip())
            self.origin = Origin(where.file, where.line, indent, where.end_line, text)
            return self.origin
        return self.origin

    def statement(self, node: cst.CSTNode, out: list[Statement]) -> None:
        start = len(out)
        origin = self.place(node)
        if isinstance(node, cst.BaseSmallStatement):  # of a body on the line of its head
            self.small(node, origin, out)
        elif isinstance(node, cst.SimpleStatementLine):
            for small in node.body:
                self.small(small, self.place(small), out)
        else:
            self.compound(node, origin, out)
        comments = [line.comment.value for line in getattr(node, "leading_lines", ()) if line.comment]
        trailing = getattr(getattr(node, "trailing_whitespace", None), "comment", None)
        if trailing is not None:
            comments.append(trailing.value)
        if comments and len(out) > start:
            out[start].comments = comments

    def has(self, node: cst.CSTNode | None) -> bool:
        return node is not None and self.bearing.within(node, self.method)

    def make(self, kind: str, origin: Origin, parts: dict[str, Any], **blocks: list[Statement]) -> Statement:
        return Statement(kind, origin, parts, blocks)

    def small(self, node: cst.CSTNode, origin: Origin, out: list[Statement]) -> None:
        if isinstance(node, (cst.Assign, cst.AnnAssign)) and self.has(node.value):
            value = node.value
            assert value is not None
            targets = node.targets if isinstance(node, cst.Assign) else []
            node = node.with_changes(value=self.lift_top(value, origin, out))
            for target in targets:
                if self.has(target.target):
                    raise self.first_call(target.target, origin).error(
                        "a component call stands in the target of an assignment",
                        "put its result into a variable on the line before",
                    )
        elif isinstance(node, cst.AugAssign) and (self.has(node.value) or self.has(node.target)):
            node = self.augmented(node, origin, out)
        elif isinstance(node, cst.Expr) and self.has(node.value):
            lifted = self.lift_top(node.value, origin, out)
            node = node.with_changes(value=lifted)
            if isinstance(lifted, (cst.Name, cst.SimpleString)):
                return
        elif isinstance(node, (cst.Return, cst.Raise, cst.Assert, cst.Del)) and self.has(node):
            node = self.sequence(node, origin, out)
        if isinstance(node, cst.Return) and node.value is not None and self.join_arguments:
            # A varying part of the result is computed once per actor, before the return.
            value = node.value
            items = [item.value for item in value.elements] if isinstance(value, cst.Tuple) else [value]
            if not any(isinstance(item, cst.StarredElement) for item in getattr(value, "elements", ())):
                pairs = [(item, self.spill(item, "value", origin, out)) for item in items if not self.atomic(item)]
                node = replaced(node, pairs)
        out.append(self.make("simple", origin, {"node": node}))

    def atomic(self, node: cst.BaseExpression) -> bool:
        return isinstance(node, (cst.BaseNumber, cst.SimpleString, cst.Name)) or (
            isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name)
        )

    def augmented(self, node: cst.AugAssign, origin: Origin, out: list[Statement]) -> cst.BaseSmallStatement:
        if self.has(node.target):
            raise self.first_call(node.target, origin).error(
                "a component call stands in the target of an assignment",
                "put its result into a variable on the line before",
            )
        if isinstance(node.target, cst.Name):
            return node.with_changes(value=self.lift(node.value, origin, out))
        # `a.b += f()` reads a.b before f runs: keep that order, f may change it.
        target = node.target
        parts = [part for part in subexpressions(target) if not self.safe(part, helper=True)]
        target = replaced(target, [(part, self.spill(part, "at", origin, out)) for part in parts])
        held = self.spill(target, "held", origin, out)
        value = self.lift(node.value, origin, out)
        out.append(self.make("simple", origin, {"node": node.with_changes(target=held, value=value)}))
        return cst.Assign([cst.AssignTarget(target)], held)

    def compound(self, node: Any, origin: Origin, out: list[Statement]) -> None:
        if isinstance(node, cst.If):
            test = self.lift(node.test, origin, out) if self.has(node.test) else node.test
            orelse: list[Statement] = []
            if isinstance(node.orelse, cst.If):
                self.statement(node.orelse, orelse)
            elif node.orelse is not None:
                orelse = self.suite(node.orelse.body)
            out.append(self.make("if", origin, {"test": test}, body=self.suite(node.body), orelse=orelse))
        elif isinstance(node, cst.For):
            if node.asynchronous:
                raise origin.error("`async for` cannot be projected", "an ordinary for loop")
            iterator = self.lift(node.iter, origin, out) if self.has(node.iter) else node.iter
            if self.has(node.target):
                raise self.first_call(node.target, origin).error(
                    "a component call stands in a loop's target", "assign inside the loop"
                )
            orelse = self.suite(node.orelse.body) if node.orelse else []
            parts = {"target": node.target, "iter": iterator}
            out.append(self.make("for", origin, parts, body=self.suite(node.body), orelse=orelse))
        elif isinstance(node, cst.While):
            self.while_loop(node, origin, out)
        elif isinstance(node, cst.With):
            if node.asynchronous:
                raise origin.error("`async with` cannot be projected", "an ordinary with statement")
            items = list(node.items)
            for item in items:
                if not self.has(item):
                    continue
                raise self.first_call(item, origin).error(
                    "a component call stands in the head of a `with`",
                    "put its result into a variable on the line before",
                )
            out.append(self.make("with", origin, {"items": items}, body=self.suite(node.body)))
        elif isinstance(node, (cst.Try, cst.TryStar)):
            if isinstance(node, cst.TryStar) and self.has(node):
                raise origin.error("`except*` around component calls cannot be projected", "an ordinary except")
            blocks = {"body": self.suite(node.body)}
            handlers: list[Any] = list(node.handlers)
            for number, handler in enumerate(handlers):
                blocks[f"handler{number}"] = self.suite(handler.body)
            blocks["orelse"] = self.suite(node.orelse.body) if node.orelse else []
            blocks["finalbody"] = self.suite(node.finalbody.body) if node.finalbody else []
            out.append(Statement("try", origin, {"handlers": list(node.handlers)}, blocks))
        elif isinstance(node, cst.Match):
            subject = self.lift(node.subject, origin, out) if self.has(node.subject) else node.subject
            blocks = {}
            for index, case in enumerate(node.cases):
                if self.has(case.guard):
                    raise self.first_call(case.guard or case, origin).error(
                        "a component call stands in a case guard", "an if inside the case"
                    )
                blocks[f"case{index}"] = self.suite(case.body)
            out.append(Statement("match", origin, {"subject": subject, "cases": list(node.cases)}, blocks))
        elif isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            if self.has(node):
                call = next(c for c in find(node, cst.Call) if self.bearing.call(c, self.method))
                raise self.place(call).error(
                    f"a component call stands inside the nested {'function' if isinstance(node, cst.FunctionDef) else 'class'} "
                    f"`{node.name.value}`, whose calls cannot be followed",
                    f"make `{node.name.value}` a method of the trainer",
                )
            out.append(self.make("simple", origin, {"node": node}))
        else:
            raise origin.error(f"{type(node).__name__} cannot be projected")

    def while_loop(self, node: cst.While, origin: Origin, out: list[Statement]) -> None:
        orelse = self.suite(node.orelse.body) if node.orelse else []
        if not self.has(node.test):
            out.append(self.make("while", origin, {"test": node.test}, body=self.suite(node.body), orelse=orelse))
            return
        # The condition makes component calls: test it as the first statement of each turn.
        body: list[Statement] = []
        test = self.lift(node.test, origin, body)
        stop: list[Statement] = [self.make("simple", origin, {"node": cst.Break()})]
        finished = None
        if orelse:
            finished = self.temporary("finished")
            out.append(self.assign(finished, cst.Name("False"), origin))
            stop.insert(0, self.assign(finished, cst.Name("True"), origin))
        negated = cst.UnaryOperation(cst.Not(), parenthesized(test))
        body.append(self.make("if", origin, {"test": negated}, body=stop, orelse=[]))
        body.extend(self.suite(node.body))
        out.append(self.make("while", origin, {"test": cst.Name("True")}, body=body, orelse=[]))
        if finished is not None:
            out.append(self.make("if", origin, {"test": cst.Name(finished)}, body=orelse, orelse=[]))

    # expressions -----------------------------------------------------------------------------------------------------

    def temporary(self, hint: str) -> str:
        self.counter += 1
        return f"_{hint}{self.counter}"

    def assign(self, name: str, value: cst.BaseExpression, origin: Origin) -> Statement:
        return self.make("simple", origin, {"node": cst.Assign([cst.AssignTarget(cst.Name(name))], value)})

    def spill(self, value: cst.BaseExpression, hint: str, origin: Origin, out: list[Statement]) -> cst.Name:
        name = self.temporary(hint)
        out.append(self.assign(name, value, origin))
        return cst.Name(name)

    def safe(self, node: cst.BaseExpression, helper: bool) -> bool:
        """Whether evaluating this later makes no difference to a component call (or helper) that goes first."""
        if isinstance(node, (cst.BaseNumber, cst.SimpleString, cst.Name, cst.Lambda)):
            return True
        name = dotted(node)
        if name is None:
            return False
        head, *rest = name.split(".")
        return head != self.method.self_name or not helper or rest[:1] == ["config"] or rest[:1] == ["msrl"]

    def is_module_state(self, node: cst.BaseExpression) -> bool:
        module = self.method.owner.module
        return isinstance(node, cst.Name) and (node.value in module.constants or node.value in module.state)

    def is_rebound(self, node: cst.BaseExpression) -> bool:
        """Whether a name is one of the module's that a call may bind anew."""
        return isinstance(node, cst.Name) and node.value in self.method.owner.module.state

    def lift_top(self, node: cst.BaseExpression, origin: Origin, out: list[Statement]) -> cst.BaseExpression:
        """Like `lift`, but a component call at the top stays where it is: it is its own statement already."""
        if self.bearing.call(node, self.method):
            return self.component_call(cst.ensure_type(node, cst.Call), origin, out)
        return self.lift(node, origin, out)

    def component_call(self, node: cst.Call, origin: Origin, out: list[Statement]) -> cst.Call:
        name = operation_of(node, self.method)
        if name is not None and name not in OPERATIONS:
            known = [operation for operation in OPERATIONS if operation != "replay_buffer_insert_rows"]
            raise self.at(node, origin).error(f"self.msrl has no operation {name!r}", did_you_mean(name, known))
        node = node.with_changes(
            args=[item.with_changes(comma=cst.MaybeSentinel.DEFAULT) for item in spread(node.args)]
        )
        call = cst.ensure_type(self.sequence(node, origin, out), cst.Call)
        joins = name is not None and OPERATIONS[name].joins
        apart = (origin.file, origin.line, origin.column) in self.spill_at
        if any(next(find(argument.value, cst.NamedExpr), None) is not None for argument in call.args):
            # What `:=` binds is bound once, before the call, wherever the call runs.
            arguments = []
            for argument in call.args:
                if not isinstance(argument.value, (cst.BaseNumber, cst.SimpleString)):
                    argument = argument.with_changes(value=self.spill(argument.value, "value", origin, out))
                arguments.append(argument)
            return call.with_changes(args=arguments)
        if not (joins and self.join_arguments) and not apart:
            return call
        arguments = []
        for argument in call.args:
            state = apart and self.is_module_state(argument.value)
            if state or (not self.safe(argument.value, helper=False) and (apart or not argument.star)):
                argument = argument.with_changes(value=self.spill(argument.value, "value", origin, out))
            arguments.append(argument)
        return call.with_changes(args=arguments)

    def lift(self, node: cst.BaseExpression, origin: Origin, out: list[Statement]) -> cst.BaseExpression:
        """Put the component calls in an expression into statements of their own; returns what is left of it."""
        if not self.has(node):
            return node
        if self.bearing.call(node, self.method):
            origin = self.at(node, origin)
            call = self.component_call(cst.ensure_type(node, cst.Call), origin, out)
            name = operation_of(call, self.method)
            hint = OPERATIONS[name].verb if name in OPERATIONS else cst.ensure_type(call.func, cst.Attribute).attr.value
            return self.spill(call, hint, origin, out)
        if isinstance(node, cst.BooleanOperation):
            return self.short_circuit(node, origin, out)
        if isinstance(node, cst.IfExp):
            test = self.lift(node.test, origin, out)
            name = self.temporary("chosen")
            body: list[Statement] = []
            body.append(self.assign(name, self.lift(node.body, origin, body), origin))
            orelse: list[Statement] = []
            orelse.append(self.assign(name, self.lift(node.orelse, origin, orelse), origin))
            out.append(self.make("if", origin, {"test": test}, body=body, orelse=orelse))
            return cst.Name(name)
        if isinstance(node, cst.NamedExpr):
            value = self.lift(node.value, origin, out)
            target = cst.ensure_type(node.target, cst.Name)
            out.append(self.assign(target.value, value, origin))
            return target
        if isinstance(node, (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)):
            return self.comprehension(node, origin, out)
        if isinstance(node, cst.Lambda):
            raise self.at(node, origin).error(
                "a component call stands inside a lambda, whose calls cannot be followed",
                "a method of the trainer, or the call itself",
            )
        if isinstance(node, (cst.Await, cst.Yield)):
            raise self.at(node, origin).error("`await` and `yield` cannot be projected", "an ordinary call")
        if isinstance(node, cst.Comparison) and any(self.has(part.comparator) for part in node.comparisons[1:]):
            return self.chain(node, origin, out)
        return self.sequence(node, origin, out)

    def first_call(self, node: cst.CSTNode, origin: Origin) -> Origin:
        """Where the first component call in a node stands."""
        call = next((call for call in find(node, cst.Call) if self.bearing.call(call, self.method)), node)
        return self.at(call, origin)

    def at(self, node: cst.CSTNode, origin: Origin) -> Origin:
        try:
            return self.method.origin(node)
        except KeyError:
            return origin

    def sequence(self, node: Any, origin: Origin, out: list[Statement]) -> Any:
        """Lift the parts of a node that Python evaluates one after the other."""
        if self.bearing.call(node, self.method):
            parts = [part for argument in node.args for part in subexpressions(argument)]
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            # A method is looked up on its object before the arguments are evaluated: hold the object, not the method.
            parts = [node.func.value, *(part for argument in node.args for part in subexpressions(argument))]
        else:
            parts = subexpressions(node)
        bearing = [index for index, part in enumerate(parts) if self.has(part)]
        if not bearing:
            return node
        last = bearing[-1]
        helper = any(
            method_call(call, self.method, self.bearing.trainer) is not None
            for part in parts
            for call in find(part, cst.Call)
        )
        walrus = next(find(node, cst.NamedExpr), None) is not None
        pairs = []
        for index, part in enumerate(parts[: last + 1]):
            new = self.lift(part, origin, out)
            unsafe = not self.safe(new, helper) or (walrus and isinstance(new, cst.Name)) or self.is_rebound(new)
            if index < last and unsafe and not (isinstance(node, cst.Call) and part is node.func and dotted(part)):
                new = self.spill(new, "value", origin, out)
            if new is not part:
                pairs.append((part, new))
        return replaced(node, pairs)

    def short_circuit(self, node: cst.BooleanOperation, origin: Origin, out: list[Statement]) -> cst.BaseExpression:
        left = self.lift(node.left, origin, out)
        if not self.has(node.right):
            return node.with_changes(left=left)
        name = self.temporary("either")
        out.append(self.assign(name, left, origin))
        body: list[Statement] = []
        body.append(self.assign(name, self.lift(node.right, origin, body), origin))
        test: cst.BaseExpression = cst.Name(name)
        if isinstance(node.operator, cst.Or):
            test = cst.UnaryOperation(cst.Not(), test)
        out.append(self.make("if", origin, {"test": test}, body=body, orelse=[]))
        return cst.Name(name)

    def chain(self, node: cst.Comparison, origin: Origin, out: list[Statement]) -> cst.BaseExpression:
        """`a < b() < c()`: each step only if the one before held, b() once."""
        name = self.temporary("holds")
        left = self.spill(self.lift(node.left, origin, out), "left", origin, out)
        target = out
        for index, part in enumerate(node.comparisons):
            right = self.spill(self.lift(part.comparator, origin, target), "right", origin, target)
            step = cst.Comparison(left, [part.with_changes(comparator=right)])
            target.append(self.assign(name, step, origin))
            if index + 1 < len(node.comparisons):
                inner: list[Statement] = []
                target.append(self.make("if", origin, {"test": cst.Name(name)}, body=inner, orelse=[]))
                target, left = inner, right
        return cst.Name(name)

    def comprehension(self, node: Any, origin: Origin, out: list[Statement]) -> cst.BaseExpression:
        first = node.for_in
        elements = [node.key, node.value] if isinstance(node, cst.DictComp) else [node.elt]
        inside = [*elements, *first.ifs, *([first.inner_for_in] if first.inner_for_in else [])]
        if not any(self.has(part) for part in inside):
            return node.with_changes(for_in=first.with_changes(iter=self.lift(first.iter, origin, out)))
        if isinstance(node, cst.GeneratorExp):
            raise self.at(node, origin).error(
                "a component call stands inside a generator, which runs it later and elsewhere",
                "a list: [… for …] instead of (… for …)",
            )
        name = self.temporary("items")
        empty = "[]" if isinstance(node, cst.ListComp) else "set()" if isinstance(node, cst.SetComp) else "{}"
        out.append(self.assign(name, cst.parse_expression(empty), origin))
        # The variables of a comprehension are its own: rename them, so that the method's are left alone.
        loops, rename = [], {}
        part = first
        while part is not None:
            for target in find(part.target, cst.Name):
                old = target.value
                rename[old] = self.temporary(old.lstrip("_"))
            loops.append(part)
            part = part.inner_for_in
        renamed = _Rename(rename)

        def build(level: int, block: list[Statement]) -> None:
            if level == len(loops):
                values = [self.lift(_visited(element, renamed), origin, block) for element in elements]
                if isinstance(node, cst.DictComp):
                    text = f"{name}[{code(values[0])}] = {code(values[1])}"
                else:
                    text = f"{name}.{'append' if isinstance(node, cst.ListComp) else 'add'}({code(values[0])})"
                line = cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine)
                block.append(self.make("simple", origin, {"node": line.body[0]}))
                return
            loop = loops[level]
            iterator = loop.iter if level == 0 else loop.iter.visit(renamed)
            body: list[Statement] = []
            parts = {"target": loop.target.visit(renamed), "iter": self.lift(iterator, origin, block)}
            inner = body
            for condition in loop.ifs:
                test = self.lift(_visited(condition.test, renamed), origin, inner)
                nested: list[Statement] = []
                inner.append(self.make("if", origin, {"test": test}, body=nested, orelse=[]))
                inner = nested
            build(level + 1, inner)
            block.append(self.make("for", origin, parts, body=body, orelse=[]))

        build(0, out)
        return cst.Name(name)


def _visited(node: cst.BaseExpression, transformer: cst.CSTTransformer) -> Any:
    return node.visit(transformer)


class _Rename(cst.CSTTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:
        pass

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return updated_node.with_changes(value=self.names.get(updated_node.value, updated_node.value))


def parenthesized(node: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(node, (cst.Name, cst.Call)) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def lower(bearing: Bearing, method: Method, join_arguments: bool, spill: frozenset[Any]) -> None:
    """Fill `method.body`."""
    for decorator in method.node.decorators:
        raise method.origin(method.owner.methods[method.name]).error(
            f"`{method.name}` makes component calls and is decorated with @{code(decorator.decorator)}, which cannot be followed",
            "the method without the decorator; a grad mode goes into the body as `with torch.no_grad():`",
        )
    if method.node.asynchronous:
        raise method.origin(method.owner.methods[method.name]).error(
            f"`{method.name}` is an `async` method and makes component calls", "an ordinary method"
        )
    if yields(method.node.body):
        raise method.origin(method.owner.methods[method.name]).error(
            f"`{method.name}` is a generator and makes component calls", "return a list instead of yielding"
        )
    body = list(method.node.body.body)
    method.body = Lowering(bearing, method, join_arguments, spill).block(body)
