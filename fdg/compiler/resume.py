"""Resume: `train` with boundaries, the places between two turns of its outermost loops where a run can be saved and resumed.

    def train(self):
        if self.msrl.begins(1):                           # not resumed: what stands before loop 1 is to be done
            td = self.msrl.env_reset()
            loss = None
        else:
            td, loss = self.msrl.restored("td", "loss")
        for i in self.msrl.turns(1, range(self.config.iterations)):
            self.msrl.boundary(1, td=td, loss=loss)       # a checkpoint may be taken here, the run may end here
            …
        else:
            self.msrl.ended(1, td=td, loss=loss)          # resumed here, a finished run goes on with more iterations

Everything else stays as it is written, comments and line map included. It works on the text of the driver or, where that is
what runs, on a copy of the user's own `train`. The calls are those of `fdg.runtime.boundary.Boundaries`.

Boundaries are in the loops that make component calls and stand at the top of `train`, in an `if`, in the body of a `with` (it is
entered again) or of a `try`, or in a method that is called once, from such a place. What a `for` runs over is evaluated again
when it depends on the config alone, so that a run can be resumed with more iterations; otherwise its value is kept.
Local variables are saved where they are live; names for `self.msrl`, the config or functions are bound again instead.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from fdg.compiler.repeat import VIEWS, Frame, dotted, endless, is_name_for, is_super
from fdg.compiler.rewrite import PREFIX, Line, Place, Source, Spot, Writer, has_loop, indent_of, own_class
from fdg.compiler.scope import Loop, binds, reads, yields
from fdg.compiler.source import TrainerSource
from fdg.compiler.source import dotted as dotted_name
from fdg.compiler.tree import find
from fdg.errors import CompileError

LineMap = list[tuple[int, str, int]]


@dataclass
class Boundary:
    """A loop with a boundary: its number, where it stands in the user's file, and what is saved there."""

    label: int
    file: str
    line: int
    saves: list[str]


@dataclass
class Resumable:
    """A class whose `train` has boundaries; `source` and `line_map` are for `load_class`."""

    source: str
    line_map: LineMap
    boundaries: list[Boundary]
    notes: list[CompileError] = field(default_factory=list)
    """Loops with component calls that have no boundary, and why."""


def resumable(trainer: TrainerSource, driver: str = "", line_map: LineMap | None = None, file: str = "") -> Resumable:
    """The driver's source with boundaries; without a driver, a class with a copy of the user's own `train`.

    `file` is where a driver's text stands, for lines that have no place in the user's file.

    Raises:
        CompileError: there is no boundary. It names the place and says why.
    """
    if driver:
        places: dict[int, Place] = {line: (name, origin) for line, name, origin in line_map or []}
        lines = [Line(text, places.get(number)) for number, text in enumerate(driver.splitlines(), 1)]
    else:
        lines = own_class(trainer)
    finder = Finder(trainer, Source(lines), file or trainer.module.file, bool(driver))
    finder.run()
    out = Writer(finder.source, finder.spots, finder.repeats).lines(finder.methods)
    text = "\n".join(line.text for line in out) + "\n"
    new_map = [(number, *line.place) for number, line in enumerate(out, 1) if line.place is not None]
    return Resumable(text, new_map, finder.boundaries, finder.notes)


@dataclass(frozen=True)
class Around:
    """What is known where a statement stands."""

    heads: frozenset[str] = frozenset()
    """Names that the contexts around it read when they are entered again."""
    entered: frozenset[str] = frozenset()
    """Names that these contexts bind."""
    known: frozenset[str] = frozenset()
    """Names that statements before it bind again."""


class Finder:
    """Finds the spots of a class: where boundaries are, and what is saved there."""

    def __init__(self, trainer: TrainerSource, source: Source, file: str, driver: bool) -> None:
        self.trainer, self.source, self.file, self.driver = trainer, source, file, driver
        self.methods = {node.name: self.frame(node) for node in source.functions}
        self.spots: dict[str, list[Spot]] = {}
        self.repeats: dict[ast.stmt, list[ast.stmt]] = {}
        """Statements to run again, or what of them is to be run again, instead of saving what they bind."""
        self.boundaries: list[Boundary] = []
        self.notes: list[CompileError] = []
        self.visited: list[str] = []

    def frame(self, node: ast.FunctionDef) -> Frame:
        place = self.source.place(node)
        modules = [owner.module for owner in self.trainer.bases]
        module = next((m for m in modules if place is not None and m.file == place[0]), self.trainer.module)
        return Frame(node, module, self.trainer)

    def run(self) -> None:
        train = self.methods.get("train")
        if train is None:  # the driver was edited
            raise CompileError(f"{PREFIX}{self.file} has no `train` method")
        self.visit(train)
        if not self.boundaries:
            raise self.notes[0] if self.notes else self.no_loop(train)

    def error(self, node: ast.stmt, reason: str, hint: str = "") -> CompileError:
        """A refusal at the user's line."""
        file, line = self.source.place(node) or (self.file, node.lineno)
        text = linecache.getline(file, line).rstrip("\n") or self.source.lines[node.lineno - 1].text
        return CompileError(PREFIX + reason, file=file, line=line, column=len(indent_of(text)), source=text, hint=hint)

    def note(self, node: ast.stmt, reason: str, hint: str = "") -> None:
        self.notes.append(self.error(node, reason, hint))

    def no_loop(self, train: Frame) -> CompileError:
        if self.driver:
            reason = "no loop is left at the driver: under this policy they run inside fragments, as one call"
            return self.error(train.node, reason)
        reason = "`train` has no loop with component calls, between whose turns a run could be saved"
        return self.error(train.node, reason, "for i in range(self.config.iterations): …")

    def visit(self, method: Frame, known: frozenset[str] = frozenset()) -> list[Spot]:
        """The spots of a method, whose loops get their numbers in the order in which they are run."""
        node = method.node
        self.visited.append(node.name)
        if any(map(yields, node.body)):
            self.note(node, f"`{node.name}` is a generator", "a method that returns")
            return []
        spots = self.find(node.body, method, Around(known=known))
        if spots:
            self.spots[node.name] = spots
        return spots

    def find(self, body: Sequence[ast.stmt], method: Frame, around: Around) -> list[Spot]:
        """The spots of a block."""
        spots = []
        for statement in body:
            method.again = around.known
            spot: Spot | None = None
            if isinstance(statement, Loop):
                spot = self.loop(statement, method, around) if self.works(statement, method) else None
            elif parts := method.repeatable(statement):
                self.repeats[statement] = parts
                around = replace(around, known=around.known.union(*(binds(part) for part in parts)))
            elif isinstance(statement, (ast.With, ast.If, ast.Try)) and self.works(statement, method):
                spot = self.compound(statement, method, around)
            elif isinstance(getattr(statement, "value", None), ast.Call):
                spot = self.call(statement, method, around)
            elif not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                self.out_of_reach(statement, method)
            if spot is not None:
                spots.append(spot)
        return spots

    def out_of_reach(self, statement: ast.AST, method: Frame) -> None:
        loop = next((node for node in ast.walk(statement) if isinstance(node, Loop) and self.works(node, method)), None)
        if loop is not None:
            where = "in a `match`, an `except`, a `finally` or the `else` of a `try`"
            self.note(loop, f"the loop stands {where}, where a run cannot go on", "the loop at the top of `train`")

    def works(self, statement: ast.stmt, method: Frame) -> bool:
        """Whether a statement may make component calls."""
        this, bindings = method.this, method.scope.bindings.items()
        names = {this} | {name for name, values in bindings if any(is_name_for(this, value) for value in values)}
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                called = dotted(node.func) or ""
                if called.partition(".")[0] in names and not called.startswith(f"{this}.config."):
                    return True
                if is_super(node) or any(isinstance(part, ast.Name) and part.id == this for part in node.args):
                    return True
        return False

    def compound(self, node: ast.With | ast.If | ast.Try, method: Frame, around: Around) -> Spot | None:
        """A statement that is entered again when the run is resumed inside it."""
        spot = Spot(node)
        if isinstance(node, ast.With):
            read = {name for item in node.items for name in reads(item)}
            bound = {name for item in node.items for name in binds(item)}
            changed = (read | bound) & {name for part in node.body for name in binds(part)}
            if changed:
                if any(isinstance(part, Loop) and self.works(part, method) for part in ast.walk(node)):
                    reason = (
                        f"`{min(changed)}` changes inside this `with`, which is entered again when a run is resumed"
                    )
                    self.note(node, reason, "another name inside the `with`")
                return None
            around = replace(around, heads=around.heads | read, entered=around.entered | bound)
        spot.blocks["body"] = self.find(node.body, method, around)
        if isinstance(node, ast.If):
            spot.blocks["orelse"] = self.find(node.orelse, method, around)
        elif isinstance(node, ast.Try):
            for part in (*node.handlers, *node.orelse, *node.finalbody):
                self.out_of_reach(part, method)
        inner = [child for block in spot.blocks.values() for child in block]
        for child in inner:
            spot.labels += child.labels
            spot.needs |= child.needs
            spot.saves |= child.saves
        spot.maybe = {name for name in spot.saves if any(name in c.maybe or name not in c.saves for c in inner)}
        return spot if inner else None

    def loop(self, node: Loop, method: Frame, around: Around) -> Spot | None:
        """A loop with a boundary, if it can be resumed."""
        spot, scope = Spot(node), method.scope
        again, targets = set(around.heads), set()
        if isinstance(node, ast.For):
            how = self.how(node, method)
            if how is None:
                return None
            spot.once = how == "once"
            targets = set(binds(node.target)) - set(reads(node.target))
            again |= set() if spot.once else set(reads(node.iter))
        label = len(self.boundaries) + 1
        spot.labels = [label]
        spot.ends = isinstance(node, ast.For) or (not endless(node) and method.is_quiet(node.test))
        body = scope.pick((scope.live.body[node] - targets) | again)
        head = scope.pick(scope.live.head[node] | again) if spot.ends else []
        apart = {method.this} | around.entered
        spot.needs = {*body, *head} - apart
        spot.body = [name for name in body if name not in apart | around.known]
        spot.ended = [name for name in head if name not in apart | around.known]
        spot.maybe = {name for name in spot.body if name not in scope.bound.body[node]}
        spot.maybe |= {name for name in spot.ended if name not in scope.bound.ended[node]}
        made = next((name for name in (*spot.body, *spot.ended) if method.is_function(name)), None)
        if made is not None:
            reason = (
                f"`{made}`, a function or method that this loop uses, is bound in several places, and cannot be saved"
            )
            self.note(node, reason, "a method of the trainer, with the condition inside")
            return None
        if spot.once:
            spot.body, spot.ended = ([f"_turns{label}", *names] for names in (spot.body, spot.ended))
        spot.saves = {*spot.body, *spot.ended}
        if spot.ends:
            spot.maybe |= {*spot.body} ^ {*spot.ended}
        file, line = self.source.place(node) or (self.file, node.lineno)
        self.boundaries.append(Boundary(label, file, line, spot.body))
        return spot

    def how(self, node: ast.For, method: Frame) -> str | None:
        """How a `for` is resumed: what it runs over is evaluated `again`, or `once` and saved; None where neither is right."""
        if self.same_again(node.iter, node, method):
            return "again"
        kind = method.kind(node.iter)
        if kind == "items":
            return "once"
        text, word = ast.unparse(node.iter), "sorted" if kind == "set" else "list"
        why = {
            "set": "a set, whose order is another one in another process",
            "iterator": "an iterator, which cannot be begun again in the middle",
            "unknown": "not known to be a list or something else that can be gone through twice",
        }[kind]
        self.note(node, f"the loop runs over `{text}`, {why}", f"for {ast.unparse(node.target)} in {word}({text}):")
        return None

    def same_again(self, node: ast.expr, loop: ast.For, method: Frame) -> bool:
        """Whether an iterable, evaluated again in the middle of the loop, gives the same items in the same order."""
        if method.fixed(node):
            sets = (ast.Set, ast.SetComp)
            return not any(isinstance(part, sets) or method.kind(part) == "set" for part in ast.walk(node))
        changed = {name for part in (loop.target, *loop.body, *loop.orelse) for name in binds(part)}
        if isinstance(node, ast.Name):
            return node.id in method.scope.order and node.id not in changed and method.kind(node) == "items"
        if isinstance(node, ast.Call) and method.qualified(node.func) in ("builtins.enumerate", "builtins.zip"):
            rest = [keyword.value for keyword in node.keywords]
            return all(self.same_again(part, loop, method) for part in node.args) and all(map(method.fixed, rest))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
            return not node.args and self.same_again(node.func.value, loop, method)
        return False

    def call(self, node: ast.stmt, method: Frame, around: Around) -> Spot | None:
        """A call of a method with boundaries."""
        call: ast.Call = node.value  # type: ignore[attr-defined]
        this, name = (dotted(call.func) or "").rpartition(".")[::2]
        called = self.methods.get(name) if this == method.this else None
        if called is None or not has_loop(called.node):
            return None
        simple = (ast.Constant, ast.Name, ast.Attribute, ast.keyword, ast.expr_context, ast.Starred)
        parts = [part for argument in (*call.args, *call.keywords) for part in ast.walk(argument)]
        refused = ("", "")
        if name in self.visited or self.mentions(name) > 1:
            refused = ("is called from more than one place", "the loop in `train` itself")
        elif not all(isinstance(part, simple) for part in parts):
            refused = ("has arguments that would be computed again", f"variables as arguments of `{name}`")
        if refused[0]:
            if any(isinstance(part, Loop) and self.works(part, called) for part in ast.walk(called.node)):
                self.note(node, f"its loop is in `{name}`, which {refused[0]}", refused[1])
            return None
        first = len(self.boundaries)
        # An argument that depends on the config alone is the same again, or what the config says now.
        given = [*zip(called.scope.parameters[1:], call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        fixed = {name for name, value in given if name and method.fixed(value) and called.bound_only([name], None)}
        if not self.visit(called, frozenset(fixed)):
            return None
        scope = method.scope
        names = scope.pick(scope.live.before[node] | around.heads)
        spot = Spot(node, calls=True, labels=[boundary.label for boundary in self.boundaries[first:]])
        spot.needs = {*names} - {method.this} - around.entered
        spot.body = [name for name in names if name in spot.needs - around.known]
        spot.saves = {*spot.body}
        spot.maybe = spot.saves - scope.bound.before[node]
        return spot

    def mentions(self, name: str) -> int:
        """How often a method is named, here or in the user's classes."""
        here = sum(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(self.source.cls))
        names = {
            "self",
            *(frame.this for frame in self.methods.values()),
            *(owner.name for owner in self.trainer.bases),
        }
        there = 0
        for owner in self.trainer.bases:
            for node in find(owner.node, cst.Attribute):
                of = dotted_name(node.value.func) if isinstance(node.value, cst.Call) else dotted_name(node.value)
                there += node.attr.value == name and (of == "super" or of in names)
        return max(here, there)
