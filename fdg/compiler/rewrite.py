"""Text of a class, as lines that know where they come from, and how boundaries are written into it.

Line     a line of code and its place in the user's file
Source   a class as lines and as Python's own tree
Spot     a statement with boundaries inside: what `resume.py` found, for `Writer`
Writer   the methods with their spots rewritten; everything else stays as it is, comments and layout included
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import libcst as cst

from fdg.compiler.repeat import Frame, endless, is_super
from fdg.compiler.scope import Loop, binds, parameters, reads
from fdg.compiler.source import ClassSource, Module, TrainerSource

Place = tuple[str, int] | None
INDENT = "    "
WIDTH = 120
PREFIX = "this trainer cannot be checkpointed: "


@dataclass(frozen=True)
class Line:
    """A line of generated code and where it comes from; `text` of a line inside a string must not be indented."""

    text: str
    place: Place = None
    in_string: bool = False

    def deeper(self, base: str) -> Line:
        if self.in_string or not self.text.strip():
            return self
        inside = self.text.startswith(base)
        text = base + INDENT + self.text[len(base) :] if inside else INDENT + self.text
        return Line(text, self.place, self.in_string)


def mark_strings(lines: list[Line]) -> list[Line]:
    """Note which lines begin inside a string."""
    inside: set[int] = set()
    text = "\n".join(line.text for line in lines) + "\n"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    return [Line(line.text, line.place, number in inside) for number, line in enumerate(lines, 1)]


def _splice(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """A line with some spans (in bytes, as ast counts) replaced."""
    data = text.encode()
    for start, end, new in sorted(edits, reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def indent_of(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return decorators[0].lineno if decorators else node.lineno


def last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def call_lines(indent: str, function: str, arguments: list[str], place: Place, after: str = "") -> list[Line]:
    """A call as lines, folded where it is long."""
    text = f"{indent}{function}({', '.join(arguments)}){after}"
    if len(text) <= WIDTH:
        return [Line(text, place)]
    lines = [Line(f"{indent}{function}(", place)]
    row = ""
    for argument in arguments:
        if row and len(indent + INDENT + row + argument) + 1 > WIDTH:
            lines.append(Line(f"{indent}{INDENT}{row.rstrip()}", place))
            row = ""
        row += f"{argument}, "
    return [*lines, Line(f"{indent}{INDENT}{row.rstrip()}", place), Line(f"{indent}){after}", place)]


class Source:
    """A class as lines and as Python's own tree; bodies on the line of their head get lines of their own."""

    def __init__(self, lines: list[Line]) -> None:
        while True:
            self.lines = mark_strings(lines)
            tree = ast.parse("\n".join(line.text for line in lines))
            self.cls = next(node for node in tree.body if isinstance(node, ast.ClassDef))
            self.functions = [node for node in self.cls.body if isinstance(node, ast.FunctionDef)]
            split = next(self.one_liners(self.functions), None)
            if split is None:
                break
            lines = split

    def one_liners(self, body: Sequence[ast.stmt]) -> Iterator[list[Line]]:
        """The lines with one body that stood on the line of its head on a line of its own."""
        for statement in body:
            if not isinstance(statement, (ast.For, ast.While, ast.With, ast.If, ast.Try, ast.FunctionDef)):
                continue
            for name in ("body", "orelse", "finalbody"):
                block = getattr(statement, name, [])
                if not block:
                    continue
                number, data = block[0].lineno, self.lines[block[0].lineno - 1].text.encode()
                before = data[: block[0].col_offset].decode()
                if before.strip() and not (name == "orelse" and self.is_elif(block)):
                    place = self.lines[number - 1].place
                    indent = indent_of(self.lines[statement.lineno - 1].text) + INDENT
                    rest = data[block[0].col_offset :].decode()
                    yield [
                        *self.lines[: number - 1],
                        Line(before.rstrip(), place),
                        Line(indent + rest, place),
                        *self.lines[number:],
                    ]
                if not isinstance(statement, Loop):
                    yield from self.one_liners(block)

    def between(self, first: int, last: int) -> list[Line]:
        return self.lines[first - 1 : last]

    def indent(self, node: ast.stmt) -> str:
        return indent_of(self.lines[first_line(node) - 1].text)

    def is_elif(self, body: Sequence[ast.stmt]) -> bool:
        line = self.lines[body[0].lineno - 1].text.encode()
        return isinstance(body[0], ast.If) and line[body[0].col_offset :].startswith(b"elif")

    def start(self, body: Sequence[ast.stmt]) -> int:
        """Where a block begins: with the comments above its first statement."""
        line = first_line(body[0])
        while not self.lines[line - 2].text.strip() or self.lines[line - 2].text.lstrip().startswith("#"):
            line -= 1
        return line

    def place(self, node: ast.stmt) -> Place:
        return self.lines[node.lineno - 1].place


@dataclass(eq=False)
class Spot:
    """A statement on the way to boundaries: a loop with one, a call of a method with some, or a statement around them."""

    node: Any
    labels: list[int] = field(default_factory=list)
    needs: set[str] = field(default_factory=set)
    """Local variables to have again when the run is resumed inside."""
    saves: set[str] = field(default_factory=set)
    """Those of them that a point has to hold."""
    maybe: set[str] = field(default_factory=set)
    """Those that may be unbound."""
    blocks: dict[str, list[Spot]] = field(default_factory=dict)
    ends: bool = False
    """Of a loop: whether its end is a boundary as well; it is not where to ask for a further turn would have effects."""
    once: bool = False
    """Of a `for`: what it runs over is evaluated once, and saved."""
    body: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Of a loop: what is saved when a turn begins, and when there is none."""
    calls: bool = False
    """Whether it is a call of a method with boundaries; `body` is what is saved of the caller."""


class Writer:
    """Writes boundaries into a class."""

    def __init__(self, source: Source, spots: dict[str, list[Spot]], repeats: dict[ast.stmt, list[ast.stmt]]) -> None:
        self.source, self.spots, self.repeats = source, spots, repeats

    def lines(self, methods: dict[str, Frame]) -> list[Line]:
        """The class, with the spots of each method."""
        out: list[Line] = []
        position = 1
        for node in self.source.functions:
            if node.name in self.spots:
                out += self.source.between(position, self.source.start(node.body) - 1)
                out += self.block(node.body, self.spots[node.name], methods[node.name], True)
                position = last_line(node) + 1
        return out + self.source.between(position, len(self.source.lines))

    def block(self, body: Sequence[ast.stmt], spots: list[Spot], method: Frame, top: bool = False) -> list[Line]:
        """A block, with what stands before a spot under the condition that it is still to be done."""
        indent = self.source.indent(body[0])
        at = {spot.node: spot for spot in spots}
        lead: list[Line] = []
        done: list[Line] = []
        repeat: list[ast.stmt] = []
        position, leading = self.source.start(body), True
        for index, statement in enumerate(body):
            last = last_line(statement)
            alone = index + 1 == len(body) or first_line(body[index + 1]) > last
            if statement in at:
                spot, leading = at[statement], False
                comments = self.source.between(position, first_line(statement) - 1)
                if spot.once:
                    items = ast.unparse(spot.node.iter)
                    done.append(Line(f"{indent}_turns{spot.labels[0]} = {items}", self.source.place(statement)))
                done = [*self.guard(done, spot, repeat, method, indent, top), *comments, *self.spot(spot, method)]
            else:
                parts = self.repeats.get(statement, [])
                stays = parts == [statement] or isinstance(statement, ast.Global) or (top and _is_text(statement))
                leading = leading and alone and stays
                if leading:
                    lead += self.source.between(position, last)
                else:
                    done += self.source.between(position, last)
                    repeat += parts
            position = max(position, last + 1)
        return lead + done

    def guard(
        self, done: list[Line], spot: Spot, repeat: list[ast.stmt], method: Frame, indent: str, top: bool
    ) -> list[Line]:
        """What stands before a spot, and what is done instead when the run is resumed there."""
        place, this = self.source.place(spot.node), method.this
        instead = self.restore(spot, method, indent + INDENT) if top and spot.saves else []
        needs = set(spot.needs)
        chosen: list[ast.stmt] = []
        for statement in reversed(repeat):
            if needs & set(binds(statement)):
                chosen.insert(0, statement)
                needs |= set(reads(statement))
        for statement in chosen:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.If)):
                lines = self.source.between(first_line(statement), last_line(statement))
                instead += [line.deeper(indent) for line in lines]
            else:
                instead.append(Line(f"{indent}{INDENT}{ast.unparse(statement)}", self.source.place(statement)))
        label = min(spot.labels)
        if any(line.text.strip() and not line.text.lstrip().startswith("#") for line in done):
            condition = [Line(f"{indent}if {this}.msrl.begins({label}):", place)]
            other = [Line(f"{indent}else:", place), *instead] if instead else []
            return condition + [line.deeper(indent) for line in done] + other
        condition = [Line(f"{indent}if not {this}.msrl.begins({label}):", place)] if instead else []
        return done + condition + instead

    def restore(self, spot: Spot, method: Frame, indent: str) -> list[Line]:
        place = self.source.place(spot.node)
        names = sorted(spot.saves, key=[*method.scope.order, *sorted(spot.saves)].index)
        quoted = [f'"{name}"' for name in names]
        lines = call_lines(indent, f"{', '.join(names)} = {method.this}.msrl.restored", quoted, place)
        for name in names:
            if name in spot.maybe:
                lines += [Line(f"{indent}if {name} is _unbound:", place), Line(f"{indent}{INDENT}del {name}", place)]
        return lines

    def spot(self, spot: Spot, method: Frame) -> list[Line]:
        """A statement with boundaries inside."""
        node, this = spot.node, method.this
        first, last = first_line(node), last_line(node)
        if spot.calls:
            indent, method_name = self.source.indent(node), f'"{node.value.func.attr}"'
            arguments = [method_name, *_values(spot.body, spot)]
            head = call_lines(indent, f"with {this}.msrl.calling", arguments, self.source.place(node), ":")
            return head + [line.deeper(indent) for line in self.source.between(first, last)]
        body_start, body_end = self.source.start(node.body), last_line(node.body[-1])
        if isinstance(node, (ast.With, ast.Try)):
            head = self.source.between(first, body_start - 1)
            return head + self.block(node.body, spot.blocks["body"], method) + self.source.between(body_end + 1, last)
        if isinstance(node, ast.If):
            return self.condition(spot, method)
        inner, outer = self.source.indent(node.body[0]), self.source.indent(node)
        label = spot.labels[0]
        head = self.source.between(first, body_start - 1)
        if spot.once:
            head = self.edited(head, first, node.iter, f"{this}.msrl.turns({label}, _turns{label})")
        elif isinstance(node, ast.For):
            bare = isinstance(node.iter, ast.Tuple) and node.iter.elts[0].col_offset == node.iter.col_offset
            opening, closing = ("(", ")") if bare else ("", "")
            head = self.edited(head, first, node.iter, None, f"{this}.msrl.turns({label}, {opening}", f"{closing})")
        elif not endless(node):
            head = self.edited(head, first, node.test, None, f"{this}.msrl.again({label}) or (", ")")
        lines = head + self.saving(inner, "boundary", spot.body, spot, this) + self.source.between(body_start, body_end)
        if not spot.ends:
            return lines + self.source.between(body_end + 1, last)
        if not node.orelse:
            lines.append(Line(f"{outer}else:", self.source.place(node)))
            return lines + self.saving(outer + INDENT, "ended", spot.ended, spot, this)
        start = self.source.start(node.orelse)
        lines += self.source.between(body_end + 1, start - 1)
        lines += self.saving(self.source.indent(node.orelse[0]), "ended", spot.ended, spot, this)
        return lines + self.source.between(start, last)

    def condition(self, spot: Spot, method: Frame) -> list[Line]:
        """An `if` that goes where the run is resumed, without asking its condition."""
        node, this = spot.node, method.this
        first, last = first_line(node), last_line(node)
        body_start, body_end = self.source.start(node.body), last_line(node.body[-1])
        there, other = ([label for child in spot.blocks[name] for label in child.labels] for name in ("body", "orelse"))
        before = f"{this}.msrl.resumes({', '.join(map(str, there))}) or " if there else ""
        before += f"not {this}.msrl.resumes({', '.join(map(str, other))}) and " if other else ""
        lines = self.edited(self.source.between(first, body_start - 1), first, node.test, None, f"{before}(", ")")
        body = self.source.between(body_start, body_end)
        lines += self.block(node.body, spot.blocks["body"], method) if there else body
        if not other:
            return lines + self.source.between(body_end + 1, last)
        start = self.source.start(node.orelse)
        lines += self.source.between(body_end + 1, start - 1)
        if self.source.is_elif(node.orelse):
            return lines + self.condition(spot.blocks["orelse"][0], method)
        return lines + self.block(node.orelse, spot.blocks["orelse"], method)

    def saving(self, indent: str, call: str, names: list[str], spot: Spot, this: str) -> list[Line]:
        """A call that gets the local variables to save."""
        arguments = [str(spot.labels[0]), *_values(names, spot)]
        return call_lines(indent, f"{this}.msrl.{call}", arguments, self.source.place(spot.node))

    def edited(
        self, head: list[Line], first: int, part: ast.expr, new: str | None, before: str = "", after: str = ""
    ) -> list[Line]:
        """The lines of a head with an expression replaced, or with text around it."""
        start, end = part.lineno - first, (part.end_lineno or 0) - first
        left, right = part.col_offset, part.end_col_offset or 0
        if new is not None:
            text = head[start].text.encode()[:left].decode() + new + head[end].text.encode()[right:].decode()
            return [*head[:start], replace(head[start], text=text), *head[end + 1 :]]
        head = list(head)
        for line, column, text in ((end, right, after), (start, left, before)):
            head[line] = replace(head[line], text=_splice(head[line].text, [(column, column, text)]))
        return head


def _values(names: list[str], spot: Spot) -> list[str]:
    return [f'{name}=locals().get("{name}", _unbound)' if name in spot.maybe else f"{name}={name}" for name in names]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# The user's own class -----------------------------------------------------------------------------------------------


def own_class(trainer: TrainerSource) -> list[Line]:
    """A subclass with copies of `train` and of the methods with loops that it calls once."""
    found = trainer.find("train")
    if found is None:
        node = trainer.bases[0].node
        raise trainer.module.origin(node).error(f"{PREFIX}{trainer.name} has no `train` method")
    file = Path(found[0].module.file).name
    lines = [
        Line(f"# `train` of {trainer.name} ({file}), with boundaries: places where a checkpoint may be taken."),
        Line("# Generated; this is the code that runs."),
        Line(""),
        Line(""),
        Line(f"class {trainer.name}_resumable({trainer.name}):"),
    ]
    copies = _copies(trainer, *found, "train", [])
    for index, copy in enumerate(copies):
        lines += [Line("")] * bool(index) + copy
    return lines


def _copies(
    trainer: TrainerSource, owner: ClassSource, node: cst.FunctionDef, name: str, done: list[str]
) -> list[list[Line]]:
    """A method under a name, and the methods it calls at places where boundaries may be."""
    module = owner.module
    method = _python(module, node)
    if method.decorator_list:
        hint = "the method without the decorator; a context as `with` in its body"
        raise module.origin(node).error(f"{PREFIX}`{method.name}` is decorated", hint)
    this = next(iter(parameters(method)), "self")
    edits: dict[int, list[tuple[int, int, str]]] = {}

    def edit(start: ast.expr, end: ast.expr, text: str) -> None:
        if start.lineno != end.end_lineno:
            where = replace(module.origin(node), line=start.lineno, text=module.lines[start.lineno - 1])
            raise where.error(f"{PREFIX}this call of `super` spans lines", f"{ast.unparse(end)}(…), on one line")
        edits.setdefault(start.lineno, []).append((start.col_offset, end.end_col_offset or 0, text))

    more: list[list[Line]] = []
    renamed: set[ast.AST] = set()
    done.append(name)
    for call in _calls_at_places(method.body):
        assert isinstance(call.func, ast.Attribute)
        base, called = call.func.value, call.func.attr
        target = trainer.find(called, after=owner) if is_super(base) else trainer.find(called)
        if target is None or not (is_super(base) or (isinstance(base, ast.Name) and base.id == this)):
            continue
        new = f"{called}_of_{target[0].name}" if is_super(base) else called
        if new in done or target[1].decorators or not has_loop(_python(target[0].module, target[1])):
            continue
        more += _copies(trainer, *target, new, done)
        if is_super(base):
            edit(base, call.func, f"{this}.{new}")
            renamed.add(base)
    for inner in ast.walk(method):
        if isinstance(inner, ast.Call) and is_super(inner) and not inner.args and inner not in renamed:
            edit(inner, inner, f"super({owner.name}, {this})")
        elif isinstance(inner, ast.Attribute) and inner.attr.startswith("__") and not inner.attr.endswith("__"):
            right = inner.end_col_offset or 0
            private = (right - len(inner.attr.encode()), right, f"_{owner.name.lstrip('_')}{inner.attr}")
            edits.setdefault(inner.end_lineno or 0, []).append(private)
    if name != method.name:
        start = module.lines[method.lineno - 1].encode().index(b"def ") + 4
        edits.setdefault(method.lineno, []).append((start, start + len(method.name.encode()), name))
    numbers = range(method.lineno, (method.end_lineno or 0) + 1)
    plain = mark_strings([Line(_splice(module.lines[n - 1], edits.get(n, [])), (module.file, n)) for n in numbers])
    old = indent_of(plain[0].text)
    copy = []
    for line in plain:
        if not line.in_string and line.text.strip():
            rest = line.text[len(old) :] if line.text.startswith(old) else line.text.lstrip()
            line = replace(line, text=INDENT + rest)
        copy.append(line)
    return [copy, *more]


@lru_cache(maxsize=16)
def _tree(module: Module) -> ast.Module:
    return ast.parse("\n".join(module.lines))


def _python(module: Module, node: cst.FunctionDef) -> ast.FunctionDef:
    """A method as Python's own parser sees it."""
    where = module.positions[node]
    for found in ast.walk(_tree(module)):
        if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)) and found.name == node.name.value:
            if where.start.line <= found.lineno <= where.end.line:
                if isinstance(found, ast.AsyncFunctionDef):
                    raise module.origin(node).error(f"{PREFIX}`{found.name}` is async", f"def {found.name}(…)")
                return found
    raise AssertionError(node.name.value)


def has_loop(method: ast.FunctionDef) -> bool:
    return any(isinstance(node, Loop) for node in ast.walk(method)) or bool(list(_calls_at_places(method.body)))


def _calls_at_places(body: Sequence[ast.stmt]) -> Iterator[ast.Call]:
    """Method calls that are statements of their own, at places where boundaries may be."""
    for statement in body:
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            yield value
        elif isinstance(statement, (ast.With, ast.Try)):
            yield from _calls_at_places(statement.body)
        elif isinstance(statement, ast.If):
            yield from _calls_at_places([*statement.body, *statement.orelse])
