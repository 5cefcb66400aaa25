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
from typing import Any

import libcst as cst

from fdg.compiler.ir import Statement
from fdg.compiler.methods import Bearing, Method, method_call, operation_of, spread
from fdg.compiler.operations import OPERATIONS
from fdg.compiler.source import Origin, dotted
from fdg.compiler.tree import children, code, find, replaced, subexpressions, yields
from fdg.errors import did_you_mean


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


def lower_plain(bearing: Bearing, method: Method) -> None:
    """Fill `method.body`, of a method or function without component calls: nothing in it needs to be taken apart."""
    suite = method.node.body
    if next(find(suite, cst.Yield, cst.Await), None) is not None:
        origin = method.origin(method.owner.methods[method.name])
        method.body = [Statement("simple", origin, {"node": cst.Pass(), "opaque": "is a generator"})]
    else:
        method.body = Lowering(bearing, method, False).block(suite.body)
