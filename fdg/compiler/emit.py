"""Emit: one Python class per fragment, and a driver; readable, with the user's comments, and a map to the user's lines.

A fragment is a subclass of the user's trainer: methods that one fragment can run alone are inherited as they are, and
each region is a method. The driver is a subclass too: what it overrides is `train` and the helpers whose work is spread
over several fragments. Every emitted line remembers the line it stems from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

from fdg.compiler.analysis import Analysis
from fdg.compiler.cut import Cutter, RegionPlan
from fdg.compiler.ir import Statement, is_attribute, walk
from fdg.compiler.methods import Method, canonical, method_call
from fdg.compiler.ports import Handles, direct_nodes, passed_on
from fdg.compiler.source import Origin
from fdg.compiler.tree import code, find, is_name
from fdg.graph import Port

INDENT = "    "


@dataclass
class Text:
    """Emitted lines, each with the user's line it stems from."""

    lines: list[str] = field(default_factory=list)
    origins: list[tuple[int, str, int]] = field(default_factory=list)

    def add(self, depth: int, text: str, origin: Origin | None = None) -> None:
        for line in text.split("\n"):
            self.lines.append(INDENT * depth + line if line else "")
            if origin is not None:
                self.origins.append((len(self.lines), origin.file, origin.line))

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


def argument(name: str) -> str:
    """How a variable is called as a parameter: `self.best` -> `self_best`."""
    return name.replace(".", "_")


class _Fetch(cst.CSTTransformer):
    """Puts `self.msrl.fetch(…)` around reads of variables that may be handles."""

    def __init__(self, names: set[str], self_name: str, direct: list[cst.BaseExpression]) -> None:
        self.names, self.self_name = names, self_name
        self.direct = {id(node) for node in direct}

    def wrap(self, node: cst.BaseExpression) -> cst.BaseExpression:
        return cst.Call(cst.parse_expression(f"{self.self_name}.msrl.fetch"), [cst.Arg(node)])

    def visit_AssignTarget_target(self, node: cst.AssignTarget) -> None:
        pass

    def leave_AssignTarget(self, original_node: cst.AssignTarget, updated_node: cst.AssignTarget) -> cst.AssignTarget:
        if isinstance(original_node.target, (cst.Name, cst.Tuple, cst.List)) or self.is_attribute(original_node.target):
            return updated_node.with_changes(target=original_node.target)
        return updated_node

    def leave_AugAssign(self, original_node: cst.AugAssign, updated_node: cst.AugAssign) -> cst.AugAssign:
        return updated_node.with_changes(target=original_node.target)

    def leave_AnnAssign(self, original_node: cst.AnnAssign, updated_node: cst.AnnAssign) -> cst.AnnAssign:
        return updated_node.with_changes(target=original_node.target)

    def leave_NamedExpr(self, original_node: cst.NamedExpr, updated_node: cst.NamedExpr) -> cst.NamedExpr:
        return updated_node.with_changes(target=original_node.target)

    def leave_Del(self, original_node: cst.Del, updated_node: cst.Del) -> cst.Del:
        return original_node

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_CompFor(self, original_node: cst.CompFor, updated_node: cst.CompFor) -> cst.CompFor:
        return updated_node.with_changes(target=original_node.target)

    def leave_Param(self, original_node: cst.Param, updated_node: cst.Param) -> cst.Param:
        return updated_node.with_changes(name=original_node.name)

    def is_attribute(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Attribute) and is_name(node.value, self.self_name)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        if self.is_attribute(original_node):
            plain = original_node
            found = f"self.{plain.attr.value}" in self.names and id(original_node) not in self.direct
            return self.wrap(plain) if found else plain
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        found = original_node.value in self.names and id(original_node) not in self.direct
        return self.wrap(updated_node) if found else updated_node


class _Labels(cst.CSTTransformer):
    """Writes `f"{x=}"` as `f"x={x!r}"`: the label must stay when the expression is rewritten."""

    def leave_FormattedString(
        self, original_node: cst.FormattedString, updated_node: cst.FormattedString
    ) -> cst.FormattedString:
        parts: list[cst.BaseFormattedStringContent] = []
        for part in updated_node.parts:
            if isinstance(part, cst.FormattedStringExpression) and part.equal is not None:
                label = code(part.whitespace_before_expression) + code(part.expression) + code(part.equal)
                parts.append(cst.FormattedStringText(label + code(part.whitespace_after_expression)))
                conversion = part.conversion or ("r" if part.format_spec is None else None)
                part = part.with_changes(equal=None, conversion=conversion)
            parts.append(part)
        return updated_node.with_changes(parts=parts)


class Emitter:
    """Writes the driver and the fragments of one cut program."""

    def __init__(self, analysis: Analysis, cutter: Cutter, handles: Handles, mixed: list[Method]) -> None:
        self.analysis, self.cutter, self.handles, self.mixed = analysis, cutter, handles, mixed
        self.trainer = analysis.trainer
        self.mixed_keys = {method.key for method in mixed}
        self.turn: set[str] | None = None
        """Inside a per-actor statement: the names that are the actor's own."""

    # text ------------------------------------------------------------------------------------------------------------

    def header(self, text: Text, what: str) -> None:
        source = Path(self.trainer.module.file).name
        text.add(0, f"# {what} of {self.trainer.name} ({source}) under `{self.cutter.policy.name}`.")
        text.add(0, "# Generated; this is the code that runs.")
        text.add(0, "")
        text.add(0, "")

    def driver(self) -> Text:
        text = Text()
        self.header(text, "The driver")
        text.add(0, f"class {self.trainer.name}_driver({self.trainer.name}):")
        for index, method in enumerate(self.mixed):
            if index:
                text.add(0, "")
            node = method.owner.methods[method.name]
            origin = method.origin(node)
            name = self.driver_name(method)
            parameters = code(node.params)
            returns = f" -> {code(node.returns.annotation)}" if node.returns else ""
            text.add(1, f"def {name}({parameters}){returns}:", origin)
            if method is self.analysis.train:
                self.promote(text, 2, self.handles.interfaces.promoted, set(), method, origin)
            self.block(text, 2, method.body, method, driver=True)
        return text

    def driver_name(self, method: Method) -> str:
        """A method keeps its name where calls on self find it; what only `super()` reaches gets its class's name."""
        found = self.trainer.find(method.name)
        return method.name if found and found[0] is method.owner else f"{method.name}_of_{method.owner.name}"

    def fragment(self, name: str, plans: list[RegionPlan]) -> Text:
        text = Text()
        components = " + ".join(self.cutter.policy.fragments[name])
        self.header(text, f"Fragment `{name}` ({components})")
        text.add(0, f"class {self.trainer.name}_{name}({self.trainer.name}):")
        if not plans:
            text.add(1, '"""No region: nothing in the program runs here."""')
        for index, plan in enumerate(plans):
            if index:
                text.add(0, "")
            self.region(text, plan)
        return text

    def region(self, text: Text, plan: RegionPlan) -> None:
        method = plan.method
        this = method.self_name
        first, last = plan.lines
        origin = plan.statements[0].origin
        names = ", ".join([this, *(argument(port.name) for port in plan.inputs)])
        text.add(1, f"def {plan.name}({names}):", origin)
        place = f"{Path(origin.file).name}:{first}" + (f"-{last}" if last != first else "")
        text.add(2, f'"""{place}"""')
        for line in self.imports(plan):
            text.add(2, line, origin)
        for port in plan.inputs:
            if port.name not in plan.company:  # which may not have come, and is returned as it is
                self.unpack(text, 2, port, this, origin)
        depth = 2
        for context in plan.contexts:
            items = ", ".join(code(canonical(item, method)).rstrip(", ") for item in context.parts["items"])
            text.add(depth, f"with {items}:", context.origin)
            depth += 1
        self.block(text, depth, plan.statements, method, driver=False)
        if plan.outputs:
            values = ", ".join(
                argument(port.name) if port.name in plan.company else self.current(port, this) for port in plan.outputs
            )
            text.add(2, f"return {values}", plan.statements[-1].origin)

    def unpack(self, text: Text, depth: int, port: Port, this: str, origin: Origin) -> None:
        """Give a parameter the name that the user's code uses."""
        if is_attribute(port.name):
            if port.maybe_unbound:
                text.add(depth, f"if {argument(port.name)} is not _unbound:", origin)
                depth += 1
            text.add(depth, f"{this}.{port.name[5:]} = {argument(port.name)}", origin)
        elif port.maybe_unbound:
            text.add(depth, f"if {port.name} is _unbound:", origin)
            text.add(depth + 1, f"del {port.name}", origin)

    def pack(
        self, text: Text, depth: int, outputs: list[Port], inputs: set[str], this: str, origin: Origin, call: str
    ) -> None:
        """Bind what a call returns; what it left unassigned keeps its value."""
        targets = []
        for port in outputs:
            own = f"{this}.{port.name[5:]}" if is_attribute(port.name) else port.name
            kept = port.maybe_unbound and (is_attribute(port.name) or port.name not in inputs)
            targets.append((own, f"new_{argument(port.name)}" if kept else own, port))
        names = ", ".join(target for _, target, _ in targets)
        text.add(depth, f"{names} = {call}" if names else call, origin)
        for own, target, port in targets:
            if target != own:
                text.add(depth, f"if {target} is not _unbound:", origin)
                text.add(depth + 1, f"{own} = {target}", origin)
            elif port.maybe_unbound:
                text.add(depth, f"if {own} is _unbound:", origin)
                text.add(depth + 1, f"del {own}", origin)

    def imports(self, plan: RegionPlan) -> list[str]:
        """The method's own imports that a region's statements refer to."""
        inside = [s.parts["node"] for s in walk(plan.statements) if s.kind == "simple"]
        if any(isinstance(node, (cst.Import, cst.ImportFrom)) for node in inside):
            return []
        used = {
            name.value
            for statement in walk(plan.statements)
            for part in statement.parts.values()
            for node in (part if isinstance(part, list) else [part])
            if isinstance(node, cst.CSTNode)
            for name in find(node, cst.Name)
        }
        from fdg.compiler.source import imported_names

        return [
            code(statement.parts["node"])
            for statement in walk(plan.method.body)
            if statement.kind == "simple"
            and isinstance(statement.parts["node"], (cst.Import, cst.ImportFrom))
            and set(imported_names(statement.parts["node"])) & used
        ]

    def current(self, port: Port, this: str) -> str:
        if is_attribute(port.name):
            name = port.name[5:]
            return f'getattr({this}, "{name}", _unbound)' if port.maybe_unbound else f"{this}.{name}"
        if port.maybe_unbound and self.turn is not None and port.name not in self.turn:
            # A variable of the function around this one is among its `locals()` only if it is named.
            return f'{port.name} if "{port.name}" in locals() else _unbound'
        return f'locals().get("{port.name}", _unbound)' if port.maybe_unbound else port.name

    # statements ------------------------------------------------------------------------------------------------------

    def block(self, text: Text, depth: int, body: list[Statement], method: Method, driver: bool) -> None:
        if not body:
            text.add(depth, "pass")
        for statement in body:
            for comment in statement.comments:
                text.add(depth, comment)
            self.statement(text, depth, statement, method, driver)

    def print(self, node: cst.CSTNode, statement: Statement, method: Method, driver: bool, head: bool = False) -> str:
        """An expression or small statement as generated code."""
        if driver and method.key in self.handles.names:
            passed = set() if head else passed_on(statement, self.analysis, method)
            reads = statement.head.reads - passed - statement.head.mutates
            names = self.handles.names[method.key] & reads
            if names:
                direct = [] if head else direct_nodes(statement, self.analysis, method)
                if not direct:
                    node = node.visit(_Labels())  # type: ignore[assignment]
                node = node.visit(_Fetch(names, method.self_name, direct))  # type: ignore[assignment]
            node = node.visit(_HelperNames(self, method))  # type: ignore[assignment]
        return code(canonical(node, method)).strip()

    def statement(self, text: Text, depth: int, statement: Statement, method: Method, driver: bool) -> None:
        kind, parts, blocks, origin = statement.kind, statement.parts, statement.blocks, statement.origin
        if kind == "region":
            self.call(text, depth, parts["plan"], statement, method)
            return
        if kind == "each":
            self.each(text, depth, statement, method)
            return
        if driver:
            self.promote(text, depth, parts.get("promote", set()), parts.get("bound", set()), method, origin)
            self.settle(text, depth, statement, method)
            self.take(text, depth, statement, method)
        if kind == "simple":
            text.add(depth, self.print(parts["node"], statement, method, driver), origin)
            return
        show = lambda node: self.print(node, statement, method, driver, head=True)  # noqa: E731
        if kind == "if":
            self.if_chain(text, depth, statement, method, driver, "if")
        elif kind == "for":
            text.add(depth, f"for {code(parts['target'])} in {show(parts['iter'])}:", origin)
            self.block(text, depth + 1, blocks["body"], method, driver)
            self.orelse(text, depth, blocks["orelse"], method, driver)
        elif kind == "while":
            text.add(depth, f"while {show(parts['test'])}:", origin)
            self.block(text, depth + 1, blocks["body"], method, driver)
            self.orelse(text, depth, blocks["orelse"], method, driver)
        elif kind == "with":
            text.add(depth, f"with {', '.join(show(item).rstrip(', ') for item in parts['items'])}:", origin)
            self.block(text, depth + 1, blocks["body"], method, driver)
        elif kind == "try":
            text.add(depth, "try:", origin)
            self.block(text, depth + 1, blocks["body"], method, driver)
            for index, handler in enumerate(parts["handlers"]):
                name = f" as {code(handler.name.name)}" if handler.name else ""
                text.add(depth, f"except {code(handler.type)}{name}:" if handler.type else "except:", origin)
                self.block(text, depth + 1, blocks[f"handler{index}"], method, driver)
            self.orelse(text, depth, blocks["orelse"], method, driver)
            self.orelse(text, depth, blocks["finalbody"], method, driver, "finally")
        elif kind == "match":
            text.add(depth, f"match {show(parts['subject'])}:", origin)
            for index, case in enumerate(parts["cases"]):
                guard = f" if {show(case.guard)}" if case.guard is not None else ""
                text.add(depth + 1, f"case {code(case.pattern).strip()}{guard}:", origin)
                self.block(text, depth + 2, blocks[f"case{index}"], method, driver)

    def if_chain(self, text: Text, depth: int, statement: Statement, method: Method, driver: bool, word: str) -> None:
        test = self.print(statement.parts["test"], statement, method, driver, head=True)
        text.add(depth, f"{word} {test}:", statement.origin)
        self.block(text, depth + 1, statement.blocks["body"], method, driver)
        orelse = statement.blocks["orelse"]
        if (
            len(orelse) == 1
            and orelse[0].kind == "if"
            and not orelse[0].comments
            and orelse[0].origin.text.lstrip().startswith("elif")
        ):
            if not (driver and self.handles.taken(orelse[0], method)):
                self.if_chain(text, depth, orelse[0], method, driver, "elif")
                return
        self.orelse(text, depth, orelse, method, driver)

    def orelse(
        self, text: Text, depth: int, block: list[Statement], method: Method, driver: bool, word: str = "else"
    ) -> None:
        if block:
            text.add(depth, f"{word}:")
            self.block(text, depth + 1, block, method, driver)

    def take(self, text: Text, depth: int, statement: Statement, method: Method) -> None:
        """Bring objects to the driver, those with a share in each other in one message."""
        this, origin = method.self_name, statement.origin
        interfaces = self.handles.interfaces
        bound = statement.parts.get("bound", set()) - interfaces.unsent.get(method.key, set()) | interfaces.certain
        together = []
        for name in self.handles.taken(statement, method):
            if self.turn is not None and name not in self.turn:  # not this actor's own: nothing to take
                continue
            target = f"{this}.{name[5:]}" if is_attribute(name) else name
            if name in bound:
                together.append(target)
                continue
            there = f'hasattr({this}, "{name[5:]}")' if is_attribute(name) else f'"{name}" in locals()'
            text.add(depth, f"if {there}:", origin)
            text.add(depth + 1, f"{target} = {this}.msrl.take({target})", origin)
        if together:
            names = ", ".join(together)
            text.add(depth, f"{names} = {this}.msrl.take({names})", origin)

    def promote(self, text: Text, depth: int, names: set[str], bound: set[str], method: Method, origin: Origin) -> None:
        """Give each actor its own of global objects that are about to become varying."""
        if not names:
            return
        certain = self.handles.interfaces.certain
        ports = [
            Port(name, maybe_unbound=name not in (certain if is_attribute(name) else bound)) for name in sorted(names)
        ]
        this = method.self_name
        values = ", ".join(f'"{port.name}": {self.current(port, this)}' for port in ports)
        self.pack(text, depth, ports, names, this, origin, f"{this}.msrl.per_actor({{{values}}})")

    def settle(self, text: Text, depth: int, statement: Statement, method: Method) -> None:
        """Bring objects that share parts to the driver before a helper changes one of them."""
        bound, certain = statement.parts.get("bound", set()), self.handles.interfaces.certain
        for group in statement.parts.get("settle", ()):
            names = [name for name in group if name in self.handles.names.get(method.key, set())]
            if len(names) > 1:
                ports = [Port(n, maybe_unbound=n not in (certain if is_attribute(n) else bound)) for n in names]
                values = ", ".join(self.current(port, method.self_name) for port in ports)
                text.add(depth, f"{method.self_name}.msrl.settle({values})", statement.origin)

    def call(self, text: Text, depth: int, plan: RegionPlan, statement: Statement, method: Method) -> None:
        this = method.self_name
        arguments = ", ".join(f"{argument(port.name)}={self.current(port, this)}" for port in plan.inputs)
        call = f"{this}.msrl.{plan.fragment}.{plan.name}({arguments})"
        inputs = {port.name for port in plan.inputs}
        self.pack(text, depth, plan.outputs, inputs, this, statement.origin, call)

    def each(self, text: Text, depth: int, statement: Statement, method: Method) -> None:
        """Once per actor, at the driver."""
        this, origin = method.self_name, statement.origin
        inputs, outputs = statement.parts["inputs"], statement.parts["outputs"]
        name = f"line_{origin.line}"
        text.add(depth, f"def {name}({', '.join(argument(port.name) for port in inputs)}):  # once per actor", origin)
        for port in inputs:
            self.unpack(text, depth + 1, port, this, origin)
        self.turn = {port.name for port in inputs} | statement.head.writes
        self.block(text, depth + 1, statement.blocks["body"], method, driver=True)
        self.turn = None
        if outputs:
            text.add(depth + 1, f"return {', '.join(self.current(port, this) for port in outputs)}", origin)
        arguments = "".join(f", {argument(port.name)}={self.current(port, this)}" for port in inputs)
        alike = "".join(f"{at}, " for at, port in enumerate(outputs) if not port.varying)
        call = f"{this}.msrl.each_actor({name}, {len(outputs)}{f', ({alike.rstrip()})' if alike else ''}{arguments})"
        self.pack(text, depth, outputs, {port.name for port in inputs}, this, origin, call)


class _HelperNames(cst.CSTTransformer):
    """Points calls of `super().helper()` at the driver's version of that helper."""

    def __init__(self, emitter: Emitter, method: Method) -> None:
        self.emitter, self.method = emitter, method

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        target = method_call(original_node, self.method, self.emitter.trainer)
        if target is None or (target[0].name, target[1].name.value) not in self.emitter.mixed_keys:
            return updated_node
        called = self.emitter.analysis.need(*target)
        name = self.emitter.driver_name(called)
        arguments = updated_node.args
        base = cst.ensure_type(original_node.func, cst.Attribute).value
        if isinstance(base, cst.Name) and base.value != self.method.self_name:
            arguments = arguments[1:]
        return updated_node.with_changes(func=cst.parse_expression(f"{self.method.self_name}.{name}"), args=arguments)
