"""Random trainers, as source text, of toy components: what the compiler is tested with.

    @examples(100)
    @given(programs(actors=1))
    def test(program):
        outcome = run_reference(program.load(), program.config())

    python tests/strategies.py 7 --actors 2        prints the program of a seed
    python tests/strategies.py --count 300         counts the constructs in 300 programs

A program is grown statement by statement. Each variable has a *kind* that never changes, so every read is of a value
that exists and fits; each place knows how often it can run at most, so the component calls of a run are bounded.

    num flag nums stats tensor batch result     global: int, bool, list and dict of int, tensor, TensorDicts
    vnum vector vectors td tds                  varying: int, tensor of E rows, list of it, the environment's TensorDict

With `actors=1` there is no difference between the two. With more, statements under a varying condition are per-actor
ones, what is global changes only under global conditions, and lines with `agent_learn` or `log` end in a comment that
tells the reference which arguments vary.
"""

from __future__ import annotations

import ast
import atexit
import hashlib
import importlib
import itertools
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

CALLS = 150
"""Component calls a program may make at most, counted over all loops."""
VARYING = ("vnum", "vector", "vectors", "td", "tds")

HEADER = """\
import contextlib
import random

import numpy as np
import torch
from fdg import pure, step_mdp
from toy import ToyTrainer, advance, digest, fold, row

COUNTER = 0
HISTORY = [{history}]
TABLE = {{"n": {n}, "m": 1}}

"""
FUNCTIONS = """
def bump(by=1):
    global COUNTER
    COUNTER = (COUNTER * 3 + by) % 1009
    return COUNTER


def note(items, x):
    items.append(x)
    return len(items)


def tweak(stats, by):
    stats["n"] = (stats["n"] * 2 + by) % 997
    HISTORY.append(by)


def shift(tensor):
    tensor.add_({n})
    return tensor.sum()


@pure
def blend(a, b):
    return (a * 3 + b * 5) % {modulus}


@contextlib.contextmanager
def scope(name):
    HISTORY.append(len(name))
    try:
        yield HISTORY
    finally:
        TABLE["m"] += 1


class Decoy:
    calls = 0

    def agent_act(self, x):  # named like a component call, and none
        self.calls += 1
        return (x + self.calls) % 17

    def log(self, *args):
        HISTORY.append(len(args))

DECOY = Decoy()


def start(td):
{start}    return td
"""


# Choices -----------------------------------------------------------------------------------------------------------


class Chooser:
    """All random choices of a program, from one source of bounded integers. Smaller means simpler, for shrinking."""

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below

    def chance(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def pick(self, items: Any) -> Any:
        items = list(items)
        return items[self.below(len(items))]

    def weighted(self, options: list[tuple[int, Any]]) -> Any:
        at = self.below(sum(weight for weight, _ in options))
        for weight, item in options:
            if at < weight:
                return item
            at -= weight
        raise AssertionError


# Programs ----------------------------------------------------------------------------------------------------------

_folder: Path | None = None
_serial = itertools.count()


def folder() -> Path:
    """Where programs are written; on the import path, removed when Python ends."""
    global _folder
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="programs-"))
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)
        sys.path.insert(0, str(_folder))
    return _folder


class Program:
    """A trainer as source text: `train` and its helpers in one file, a base class maybe in another."""

    def __init__(self, source: str, base: str, actors: int, envs: int, seed: int, features: Counter[str]) -> None:
        self.source, self.base, self.actors, self.envs, self.seed = source, base, actors, envs, seed
        self.features = features

    def load(self) -> type:
        """The trainer class, from modules imported afresh: no run sees what another left in them."""
        importlib.invalidate_caches()
        number = next(_serial)
        source = self.source
        if self.base:
            base = write(f"base_{number}_{short(self.base)}", self.base)
            source = source.replace("from base import", f"from {base} import")
        return importlib.import_module(write(f"program_{number}_{short(source)}", source)).Program

    def config(self, **changes: Any) -> Any:
        """The toy config this program is to be run with."""
        from toy import ToyConfig

        return ToyConfig(**{"actors": self.actors, "envs": self.envs, "seed": self.seed, **changes})

    def __str__(self) -> str:
        head = f"# program: actors={self.actors} envs={self.envs} seed={self.seed}"
        base = f"# --- base.py ---\n{self.base}# --- program.py ---\n" if self.base else ""
        return f"{head}\n{base}{self.source}"

    def __repr__(self) -> str:
        return f"Program(…)\n{self}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        for line in repr(self).split("\n"):
            printer.text(line)
            printer.break_()


def short(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:8]


def write(name: str, source: str) -> str:
    (folder() / f"{name}.py").write_text(source)
    return name


@st.composite
def programs(draw: Any, actors: int = 1, extras: frozenset[str] = frozenset()) -> Program:
    """Trainers that are valid for so many actors. `extras`: see `Maker`."""
    return Maker(Chooser(lambda n: draw(st.integers(0, n - 1))), actors, extras).program()


def examples(count: int) -> settings:
    """Settings for a property test: so many programs, always the same ones.

    A failure is shown as it was found. With FDG_SHRINK=1 it is made smaller first, which can take five minutes.
    """
    phases = [Phase.explicit, Phase.generate] + [Phase.shrink] * bool(os.environ.get("FDG_SHRINK"))
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=count, deadline=None, derandomize=True, phases=phases, suppress_health_check=slow)


def program_of(seed: int, actors: int = 1, extras: frozenset[str] = frozenset()) -> Program:
    """The program of a seed, without hypothesis."""
    generator = random.Random(f"{seed}/{actors}")
    return Maker(Chooser(generator.randrange), actors, extras).program()


# The generator -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a statement stands: how often it can run, how deep, and what it may do there."""

    times: int = 1
    depth: int = 0
    loop: bool = False
    """`break` and `continue` belong to a loop that we are in."""
    per_actor: bool = False
    """Under a varying condition, A > 1: only per-actor statements."""
    calls: bool = True
    """Component calls are allowed."""
    leave: bool = True
    """`return` is allowed."""


@dataclass
class Helper:
    """A method of the trainer that statements may call."""

    name: str
    kind: str
    cost: int
    returns: tuple[str, ...]
    per_actor: bool
    home: str
    owner: str = "self"


@dataclass
class Function:
    """The method being written."""

    returns: Callable[[Place], str]
    names: list[dict[str, str]] = field(default_factory=lambda: [{}])
    fixed: set[str] = field(default_factory=set)
    spellings: dict[str, str] = field(default_factory=dict)
    cost: int = 0
    budget: int = 24
    """Component calls this method may make, at most."""
    room: int = 30
    lines: list[str] = field(default_factory=list)
    indent: int = 2


class Maker:
    """Grows one program.

    extras:
        "evaluate"  evaluations in between
        "except"    try/except around statements that may raise
        "unknown"   with several actors: unmarked module functions applied to varying values
    """

    def __init__(self, choose: Chooser, actors: int, extras: frozenset[str] = frozenset()) -> None:
        self.c, self.actors, self.extras = choose, actors, extras
        self.many = actors > 1
        self.features: Counter[str] = Counter()
        self.helpers: list[Helper] = []
        self.attributes: dict[str, str] = {}
        self.function: Function
        self.counts: Counter[str] = Counter()
        self.state: dict[str, str] = {}  # of td variables in straight-line code: acted, stepped
        self.hints: list[str] = []
        self.hinted = False
        self.last_data = self.forced = ""
        self.has_buffer = False
        self.used: set[str] = set()  # names of helpers that are called

    # --- the whole

    def program(self) -> Program:
        c = self.c
        self.keys = [key for key in ("x_a", "x_b") if c.chance(40)]
        self.direct = c.chance(75)
        self.carry = c.chance(45)
        self.attributes = {"self.best": "num", "self.stats": "stats", "self.items": "nums"}
        if self.carry:
            self.attributes["self.carry"] = "vector"  # train sets it before it calls any helper
        split = c.chance(25)
        based = split or c.chance(45)
        base_methods, methods = [], []
        if based:
            base_methods = self.methods(c.between(1, 2), "Base")
            if c.chance(40):
                base_methods.append(self.base_train())
        methods += self.methods(c.between(0, 3), "Program")
        if based and self.helpers and c.chance(60):
            methods += self.override()
        train = self.train()
        init = self.init()
        parent = "Base" if based else "ToyTrainer"
        own = (
            f"class Program({parent}):\n"
            + "\n\n".join([*([] if based else [init]), *self.shuffled(methods), train])
            + "\n"
        )
        ancestor = "class Base(ToyTrainer):\n" + "\n\n".join([init, *base_methods]) + "\n" if based else ""
        if split:
            self.f("base in another file")
            source = self.header(own).replace("from toy import", "from base import Base\nfrom toy import", 1) + own
            base = self.header(ancestor) + ancestor
        else:
            classes = (f"{ancestor}\n\n" if based else "") + own
            source, base = self.header(classes) + classes, ""
        return Program(source, base, self.actors, c.between(1, 3), c.between(0, 9), self.features)

    def header(self, body: str) -> str:
        """Imports, module data, and those module functions that the classes below use."""
        c = self.c
        start = "".join(f"    {line}\n" for line in self.columns("td"))
        history = ", ".join(str(c.between(0, 9)) for _ in range(c.between(0, 2)))
        filled = {"history": history, "n": c.between(1, 5), "modulus": c.pick([101, 37, 61]), "start": start}
        functions = FUNCTIONS.format(**filled).strip("\n").split("\n\n\n")
        named = [(re.search(r"^(?:def|class) (\w+)", text, re.MULTILINE), text) for text in functions]
        used = [text for name, text in named if name and re.search(rf"\b{name.group(1)}\b", body, re.IGNORECASE)]
        return "\n\n\n".join([HEADER.format(**filled).rstrip("\n"), *used, ""])

    def init(self) -> str:
        c = self.c
        lines = ["    def __init__(self, config):", "        super().__init__(config)"]
        lines.append(f"        self.best = {c.between(0, 5)}")
        lines.append(f'        self.stats = {{"n": {c.between(0, 3)}, "m": 0}}')
        lines.append("        self.items = []" if c.chance(70) else "        self.items = self.history = [1]")
        return "\n".join(lines)

    def shuffled(self, items: list[str]) -> list[str]:
        items = list(items)
        return [items.pop(self.c.below(len(items))) for _ in range(len(items))]

    def f(self, *names: str) -> None:
        self.features.update(names)

    # --- lines and names

    def emit(self, text: str) -> None:
        if self.hinted and self.many:
            text += f"  # varying: {' '.join(self.hints)}".rstrip()
        self.hints, self.hinted = [], False
        self.function.lines.append("    " * self.function.indent + text)

    @contextmanager
    def indented(self) -> Iterator[None]:
        """A block of its own: names made in it are not read after it."""
        function = self.function
        function.indent += 1
        function.names.append({})
        self.state.clear()
        before = len(function.lines)
        yield
        if len(function.lines) == before:
            self.emit("pass")  # no room left
        self.state.clear()
        function.names.pop()
        function.indent -= 1

    @contextmanager
    def method(self, function: Function) -> Iterator[Function]:
        outer = getattr(self, "function", None)
        self.function = function
        self.state.clear()
        function.names[0].update(self.attributes)
        if self.c.chance(35):
            function.fixed |= {"HISTORY", "TABLE"}
            function.names[0].update({"HISTORY": "nums", "TABLE": "stats"})
        yield function
        self.state.clear()
        if outer is not None:
            self.function = outer

    def names(self, kind: str) -> list[str]:
        """Variables of a kind that can be read here."""
        kinds = [kind]
        if kind == "num" and not self.many:
            kinds.append("vnum")
        if kind == "vnum":
            kinds.append("num")
        return [name for names in self.function.names for name, its in names.items() if its in kinds]

    def new(self, kind: str, stem: str = "", fixed: bool = False) -> str:
        """A fresh variable."""
        stem = stem or {"num": "n", "vnum": "k", "vector": "v", "vectors": "vs", "tensor": "g"}.get(kind, kind)
        self.counts[stem] += 1
        name = stem if stem == "td" and self.counts[stem] == 1 else f"{stem}{self.counts[stem]}"
        self.function.names[-1][name] = kind
        if fixed:
            self.function.fixed.add(name)
        return name

    def target(self, place: Place, kind: str, again: int = 60) -> str:
        """A variable to assign: mostly one that exists."""
        if kind == "num" and place.per_actor:
            kind = "vnum"
        own = [name for names in self.function.names for name, its in names.items() if its == kind]
        own = [name for name in own if name not in self.function.fixed]
        if place.per_actor:
            own = [name for name in own if kind in VARYING]
        if own and self.c.chance(again):
            return self.c.pick(own)
        return ""  # made by the caller after the value was written, so that the value does not read it

    def assign(self, place: Place, kind: str, value: str, again: int = 60) -> str:
        """Write `name = value`; returns the name."""
        name = self.target(place, kind, again)
        if not name:
            name = self.new("vnum" if kind == "num" and place.per_actor else kind)
        self.emit(f"{name} = {value}")
        self.state.pop(name, None)
        return name

    def affords(self, place: Place, calls: int = 1) -> bool:
        return place.calls and self.function.cost + calls * place.times <= self.function.budget

    def spend(self, place: Place, calls: int = 1) -> None:
        self.function.cost += calls * place.times

    def call(self, place: Place, operation: str, arguments: str) -> str:
        """A component call, in one of the spellings this method knows."""
        self.spend(place)
        bound = self.function.spellings.get(operation)
        if bound and self.c.chance(70):
            self.f("bound method alias")
            return f"{bound}({arguments})"
        if "msrl" in self.function.spellings and self.c.chance(80):
            self.f("msrl alias")
            return f"msrl.{operation}({arguments})"
        return f"self.msrl.{operation}({arguments})"

    def global_ok(self, place: Place) -> bool:
        """Whether global calls and changes of global things may stand here."""
        return not place.per_actor

    # --- expressions

    def num(self, place: Place, depth: int = 2) -> str:
        """A global int (in a per-actor place, maybe a varying one)."""
        c = self.c
        options: list[tuple[int, Any]] = [(3, self.literal)]
        names = self.names("vnum" if place.per_actor else "num")
        if names:
            options.append((10, lambda: c.pick(names)))
        for kind, weight in (("nums", 2), ("stats", 2)):
            if self.names(kind):
                options.append((weight, lambda kind=kind: self.reduce(kind)))
        if self.names("result"):
            options.append((3, lambda: f'int({c.pick(self.names("result"))}["count"])'))
        if self.names("tensor"):
            options.append((1, lambda: f"int({c.pick(self.names('tensor'))}.sum()) % 19"))
        options.append((1, lambda: f"self.config.plan[{c.between(0, 2)}]"))
        if depth and not place.per_actor:
            options += self.impure(place)
        if depth:
            options += [
                (4, lambda: f"({self.num(place, depth - 1)} + {self.num(place, depth - 1)})"),
                (2, lambda: f"({self.num(place, depth - 1)} * {c.between(2, 5)} % {c.pick([7, 11, 13])})"),
                (3, lambda: f"blend({self.num(place, depth - 1)}, {self.num(place, depth - 1)})"),
                (1, lambda: f"max({self.num(place, depth - 1)}, {self.num(place, depth - 1)})"),
            ]
            options.append((1, lambda: self.ternary(place, depth - 1)))
        if not self.many or place.per_actor:
            options += self.from_varying()
        return c.weighted(options)()

    def small(self, place: Place, depth: int = 2) -> str:
        """A number to store: kept small, so that loops over sums stay within 64 bits."""
        value = self.num(place, depth)
        return value if value.isdigit() else f"{value} % 97"

    def impure(self, place: Place) -> list[tuple[int, Any]]:
        """Numbers that cost a side effect: draws, module state, component calls."""
        options: list[tuple[int, Any]] = [(2, self.draw), (1, self.bumped), (1, self.decoyed)]
        if self.affords(place) and self.has_buffer:
            options.append((2, lambda: self.feature("size", self.call(place, "replay_buffer_size", ""))))
        walrus = [name for name in self.names("num") if name.isidentifier() and name not in self.function.fixed]
        if walrus:
            options.append((2, lambda: self.walrus(place, self.c.pick(walrus))))
        neutral = [helper for helper in self.helpers if helper.kind == "schedule"]
        if neutral:
            options.append((4, lambda: self.scheduled(place, self.c.pick(neutral))))
        return options

    def from_varying(self) -> list[tuple[int, Any]]:
        options: list[tuple[int, Any]] = []
        if self.names("vector"):
            options.append((2, lambda: f"int({self.c.pick(self.names('vector'))}.sum()) % 23"))
        if self.names("td"):
            options.append((1, lambda: f'int({self.c.pick(self.names("td"))}["ticks"].sum())'))
        return options

    def feature(self, name: str, text: str) -> str:
        self.f(name)
        return text

    def literal(self) -> str:
        return str(self.c.between(0, 9))

    def draw(self) -> str:
        self.f("neutral draw")
        return self.c.pick(
            [
                "random.randrange(9)",
                "int(random.random() * 10)",
                "int(torch.rand(1).item() * 10)",
                "int(np.random.rand() * 10)",
            ]
        )

    def bumped(self) -> str:
        self.f("module global")
        return f"bump({self.literal()})"

    def decoyed(self) -> str:
        self.f("decoy")
        return f"DECOY.agent_act({self.literal()})"

    def walrus(self, place: Place, name: str) -> str:
        self.f("walrus")
        return f"({name} := {self.num(place, 0)} % 89)"

    def ternary(self, place: Place, depth: int) -> str:
        self.f("conditional expression")
        return f"({self.num(place, depth)} if {self.condition(place, 0)} else {self.num(place, depth)})"

    def scheduled(self, place: Place, helper: Helper) -> str:
        self.f("helper: schedule")
        self.used.add(helper.name)
        return f"self.{helper.name}({self.num(place, 0)})"

    def reduce(self, kind: str) -> str:
        name = self.c.pick(self.names(kind))
        if kind == "stats":
            return f'{name}["{self.c.pick("nm")}"]'
        return self.c.pick(
            [
                f"len({name})",
                f"sum({name}) % 41",
                f"digest({name})",
                f"fold({name}) % 997",
                f"sum(x for x in {name} if x % 2) % 31",
            ]
        )

    def condition(self, place: Place, depth: int = 1) -> str:
        """A condition that is global, wherever it must be."""
        c = self.c
        options: list[tuple[int, Any]] = [
            (5, lambda: f"{self.num(place, depth)} % {c.pick([2, 3])} == {c.between(0, 1)}"),
            (4, lambda: f"{self.num(place, depth)} {c.pick(['>', '<', '>=', '!='])} {self.num(place, 0)}"),
            (1, lambda: f"{self.num(place, 0)} < {self.num(place, 0)} <= {c.between(5, 60)}"),
        ]
        flags = self.names("flag")
        if flags:
            options.append((4, lambda: c.pick(["", "not "]) + c.pick(flags)))
        if depth:
            options.append(
                (2, lambda: f"({self.condition(place, 0)} {c.pick(['and', 'or'])} {self.condition(place, 0)})")
            )
        vectors = self.names("vector")
        if vectors and (not self.many or place.per_actor):
            options.append((4, lambda: f"bool(({c.pick(vectors)} > {c.between(0, 9)}).{c.pick(['any', 'all'])}())"))
        if vectors and not place.per_actor and depth and self.affords(place):
            options.append((5 if self.many else 1, lambda: self.agreed(place)))
        return c.weighted(options)()

    def agreed(self, place: Place) -> str:
        operation = self.c.pick(["all", "any"])
        self.f(f"msrl.{operation}")
        vector = self.vector(place, 0)
        return self.call(place, operation, f"{vector} {self.c.pick(['>', '<'])} {self.c.between(0, 15)}")

    def varying_test(self) -> str:
        """A condition that differs between actors."""
        c = self.c
        options: list[tuple[int, Any]] = [(2, lambda: f'bool({c.pick(self.names("td"))}["ticks"].sum() % 2 == 0)')]
        if self.names("vector"):
            options.append(
                (4, lambda: f"float({c.pick(self.names('vector'))}.sum()) % {c.pick([2, 3])} {c.pick(['==', '!='])} 0")
            )
            options.append(
                (3, lambda: f"bool(({c.pick(self.names('vector'))} > {c.between(1, 12)}).{c.pick(['any', 'all'])}())")
            )
        return c.weighted(options)()

    def vector(self, place: Place, depth: int = 1) -> str:
        """A tensor of E rows, float64."""
        c = self.c
        options: list[tuple[int, Any]] = []
        names, tds = self.names("vector"), self.names("td")
        if names:
            options.append((6, lambda: c.pick(names)))
        if tds:
            options.append((3, lambda: f'{c.pick(tds)}["observation"][:, {c.between(0, 1)}]'))
            options.append((2, lambda: f'{c.pick(tds)}["ticks"].squeeze(-1).double()'))
            options.append((2, lambda: f'row({c.pick(tds)})["next", "reward"].squeeze(-1)'))
            if self.keys:
                options.append((2, lambda: f'{c.pick(tds)}["{c.pick(self.keys)}"]'))
        if self.names("vectors"):
            options.append((2, lambda: f"{c.pick(self.names('vectors'))}[{c.pick([0, -1])}]"))
            options.append((2, lambda: f"torch.stack({c.pick(self.names('vectors'))}).sum(0)"))
        if depth and options:
            inner = depth - 1
            options += [
                (3, lambda: f"(({self.vector(place, inner)} + {self.num(place, 0)}) % {c.pick([17, 29])})"),
                (3, lambda: f"blend({self.vector(place, inner)}, {self.vector(place, inner)})"),
                (
                    1,
                    lambda: (
                        f"torch.where({self.vector(place, 0)} > {c.between(0, 9)}, 1.0, {self.vector(place, inner)})"
                    ),
                ),
                (1, lambda: f"{self.vector(place, inner)}.flip(0)"),
            ]
        return c.weighted(options)()

    def tensor(self, place: Place) -> str:
        c = self.c
        options: list[tuple[int, Any]] = [(2, lambda: f"torch.arange(3.0) * {self.num(place, 0)}")]
        if self.names("tensor"):
            options.append((4, lambda: f"({c.pick(self.names('tensor'))} * 2 + {self.num(place, 0)}) % 31"))
        return c.weighted(options)()

    # --- statements

    def block(self, place: Place, least: int = 1, most: int = 4) -> None:
        with self.indented():
            self.statements(place, self.c.between(least, most))

    def statements(self, place: Place, count: int) -> None:
        for _ in range(count):
            self.function.room -= 1
            if self.function.room >= 0:
                self.statement(place)

    def statement(self, place: Place) -> None:
        """One statement, or a small idiom of several lines."""
        free, deep = self.global_ok(place), place.depth < 3 and self.function.room > 0
        has_td = bool(self.names("td"))
        options: list[tuple[int, Any]] = []
        if free:
            options += [(7, self.set_number), (9, self.change), (1, self.say)]
            options += [(2, self.comprehend), (1, self.unpack), (1, self.close_over), (3, self.alias)]
        if has_td:
            options += [(4, self.set_vector), (3, self.change_varying)]
            if self.affords(place, 4):
                options += [(9, self.walk), (3, self.one_call)]
        if place.per_actor:
            options.append((2, self.count_varying))
        if free and "evaluate" in self.extras and self.affords(place, 12):
            options.append((3, self.evaluate))
        if free and self.affords(place, 3):
            options += [(12, self.learn), (8, self.log), (3, self.collect_values)]
            if self.has_buffer:
                options.append((6, self.sample_batch))
            if has_td and self.many:
                options.append((6, self.reduce_varying))
        if deep:
            options += [(7, self.branch), (6, self.for_loop), (5, self.while_loop)]
            if self.many and free and has_td:
                options += [(6, self.varying_branch), (5, self.varying_loop)]
            if free:
                options += [(5, self.no_grad), (2, self.custom_with), (4, self.try_finally), (4, self.maybe_defined)]
                if "except" in self.extras:
                    options.append((3, self.try_except))
        helpers = [helper for helper in self.helpers if self.can_call(place, helper)]
        helpers = [helper for helper in helpers if helper.name not in self.used] or helpers
        if helpers:
            options.append((14, lambda at: self.use_helper(at, self.c.pick(helpers))))
        if place.loop:
            options.append((5, self.leave_loop))
        if place.leave and free and place.depth:
            options.append((2, self.early_return))
        self.c.weighted(options or [(1, lambda at: self.emit("pass"))])(place)

    def set_number(self, place: Place) -> None:
        c = self.c
        shape = c.weighted([(6, "plain"), (4, "augmented"), (1, "chain"), (2, "tuple"), (1, "flag"), (1, "hint")])
        names = [name for name in self.names("num") if name not in self.function.fixed]
        if shape == "augmented" and names:
            self.f("augmented")
            value = self.small(place)
            self.emit(f"{c.pick(names)} {c.pick(['+=', '-='])} {value}")
        elif shape == "chain":
            value = self.small(place)
            first, second = self.new("num"), self.new("num")
            self.emit(f"{first} = {second} = {value}")
        elif shape == "tuple" and len(names) > 1:
            self.f("tuple unpacking")
            first, second = c.pick(names), c.pick(names)
            self.emit(f"{first}, {second} = {second}, {self.small(place)}")
        elif shape == "flag":
            self.assign(place, "flag", self.condition(place))
        elif shape == "hint":
            value = self.small(place)
            self.emit(f"{self.new('num')}: int = {value}  # a hint and a comment")
        else:
            self.assign(place, "num", self.small(place))

    def change(self, place: Place) -> None:
        """Change a global thing in place."""
        c = self.c
        kind = c.weighted([(4, "nums"), (4, "stats"), (3, "tensor"), (3, "batch")])
        if kind == "batch" and not self.names(kind):
            kind = "nums"
        if c.chance(15) or not self.names(kind):
            return self.make_container(place, kind if kind != "batch" else "tensor")
        name, value = c.pick(self.names(kind)), self.small(place)
        self.f(f"in place: {kind}")
        if name.startswith("self."):
            self.f("self attribute changed")
        if kind == "nums":
            lines = [
                f"{name}.append({value})",
                f"{name}.extend([{value}, 3])",
                f"note({name}, {value})",
                f"{name}[:] = {name}[-6:]",
            ]
            lines += [f"{name}.insert(0, {value})", f"if {name}:", f"{name}.sort(key=lambda x: x % 5)"]
            if name not in self.function.fixed:  # else it is the module's, and += would make it a local
                lines.append(f"{name} += [{value}]")
            line = c.pick(lines)
            self.emit(line)
            if line.startswith("if "):
                self.function.lines.append("    " * (self.function.indent + 1) + f"{name}[-1] = {value}")
            elif line.startswith("note"):
                self.f("unknown function changes its argument")
        elif kind == "stats":
            key = "key" if self.names("key") else f'"{c.pick("nm")}"'
            lines = [f"{name}[{key}] += {value}", f"{name}[{key}] = {value}", f"tweak({name}, {value})"]
            lines += [f"{name}.update(n={value})"]
            line = c.pick(lines)
            self.emit(line)
            if line.startswith("tweak"):
                self.f("unknown function changes its argument")
        elif kind == "tensor":
            self.emit(c.pick([f"{name}.add_({value})", f"{name}[0] = {value}", f"shift({name})", f"{name} += {value}"]))
        else:
            self.change_batch(place, name)
        return None

    def change_batch(self, place: Place, name: str) -> None:
        self.f("in place: batch")
        column, value = f'{name}["observation"]', self.small(place)
        self.emit(self.c.pick([f"{column}.add_({value})", f'{name}["x_b"] = {column}[:, 0] + {value}']))

    def make_container(self, place: Place, kind: str) -> None:
        """A new list, dict or tensor."""
        if kind == "nums":
            self.assign(place, kind, f"[{self.small(place)}, {self.num(place, 0)}]", again=30)
        elif kind == "stats":
            self.assign(place, kind, f'{{"n": {self.small(place)}, "m": {self.literal()}}}', again=20)
        elif kind == "tensor":
            self.assign(place, kind, self.tensor(place), again=40)
        elif kind == "flag":
            self.assign(place, kind, self.condition(place))
        elif kind == "vector":
            self.assign(place, kind, self.vector(place))
        elif kind == "vectors":
            self.assign(place, kind, f"[{self.vector(place)}]")
        elif kind == "num":
            self.assign(place, kind, self.literal(), again=0)

    def alias(self, place: Place) -> None:
        c = self.c
        kinds = [kind for kind in ("nums", "stats", "tensor", "batch", "td", "vector") if self.names(kind)]
        kind = c.pick(kinds)
        self.f("alias")
        source = c.pick(self.names(kind))
        if kind == "td" and source in self.state:
            name = self.new(kind)
            self.emit(f"{name} = {source}")
            self.state[name] = self.state[source]
        else:
            self.assign(place, kind, source, again=20)

    def say(self, place: Place) -> None:
        self.f("print")
        value = self.num(place)
        names = [name for name in self.names("num") if name.isidentifier()]
        lines = [f"print({value})", f"DECOY.log({value})"] + [f'print(f"{{{name}=}}", {value})' for name in names[:1]]
        self.emit(self.c.pick(lines))

    def comprehend(self, place: Place) -> None:
        c = self.c
        self.f("comprehension")
        if self.has_buffer and self.affords(place, 9) and c.chance(50):
            times = c.between(1, 3)
            inner = replace(place, times=place.times * times)
            self.f("component call in a comprehension")
            value = self.learn_call(inner, want=c.pick(["float", "td"]), nested=True)
            value = value if 'want="float"' in value else f'{value}["count"]'
            self.assign(place, "nums", f"[int({value}) for _ in range({times})]", again=30)
            return
        value = f"[blend(x, {self.num(place, 0)}) for x in range({c.between(1, 4)}) if x != {c.between(0, 4)}]"
        self.assign(place, "nums", value, again=30)

    def unpack(self, place: Place) -> None:
        self.f("star unpacking")
        values = [self.small(place), self.num(place, 0)]
        lists = self.names("nums")
        tail = f", *{self.c.pick(lists)}" if lists else ""
        first, rest = self.new("num"), self.new("nums")
        self.emit(f"{first}, *{rest} = [{', '.join(values)}{tail}]")

    def close_over(self, place: Place) -> None:
        """A neutral nested function; it reads its variable when called, not when made."""
        names = [name for name in self.names("num") if name.isidentifier()]
        if not names or place.loop:
            return self.set_number(place)
        self.f("closure")
        free = self.c.pick(names)
        self.counts["scale"] += 1
        name = f"scale{self.counts['scale']}"
        if self.c.chance(50):
            self.emit(f"{name} = lambda x: (x * 2 + {free}) % 43")
        else:
            self.emit(f"def {name}(x):")
            self.function.lines.append("    " * (self.function.indent + 1) + f"return (x * 2 + {free}) % 43")
        if free not in self.function.fixed:
            self.emit(f"{free} = ({free} + {self.literal()}) % 97")
        self.assign(place, "num", f"{name}({self.num(place, 0)})")
        return None

    def collect_values(self, place: Place) -> None:
        """Lists of varying values, grown by append."""
        c = self.c
        if not self.names("td"):
            return self.set_number(place)
        if self.names("vectors") and c.chance(80):
            self.f("append of varying")
            value = self.vector(place)
            self.emit(f"{c.pick(self.names('vectors'))}.append({value}{c.pick(['', '.clone()'])})")
        else:
            self.assign(place, "vectors", f"[{self.vector(place)}]", again=20)
        return None

    # Varying values

    def set_vector(self, place: Place) -> None:
        value = self.vector(place)
        self.assign(place, "vector", value + self.c.pick(["", ".clone()"]))

    def change_varying(self, place: Place) -> None:
        c = self.c
        names, tds = self.names("vector"), self.names("td")
        if self.keys and tds and c.chance(50):
            self.f("td[key] = …")
            td, key = c.pick(tds), c.pick(self.keys)
            line = c.pick(["{0} = {1}", "{0} += {2}", "{0}.add_({2})"])
            self.emit(line.format(f'{td}["{key}"]', self.vector(place) + ".clone()", self.num(place, 0)))
        elif names:
            self.f("in place: vector")
            name = c.pick(names)
            options = [
                f"{name}.add_({self.num(place, 0)})",
                f"{name} += {self.num(place, 0)}",
                f"{name}[0] = {c.between(0, 9)}.0",
            ]
            if not self.many or "unknown" in self.extras:
                options.append(f"shift({name})")
            self.emit(c.pick(options))
        else:
            self.set_vector(place)

    def count_varying(self, place: Place) -> None:
        """Per-actor numbers."""
        value = f"{self.num(place, 1)} % 53"
        self.assign(place, "vnum", value)

    def reduce_varying(self, place: Place) -> None:
        """Varying to global, explicitly."""
        c = self.c
        operation = c.pick(["sum", "mean", "gather", "all", "any", "gather"])
        self.f(f"msrl.{operation}")
        if operation in ("sum", "mean"):
            self.assign(place, "num", f"int({self.call(place, operation, self.vector(place))}) % 97")
        elif operation == "gather":
            stepped = [name for name in self.names("td") if self.state.get(name) == "stepped"]
            if stepped and c.chance(40):
                self.assign(place, "batch", self.call(place, "gather", c.pick(stepped)))
            else:
                self.assign(place, "tensor", self.call(place, "gather", self.vector(place)))
        else:
            self.assign(place, "flag", f"bool({self.agreed(place)})")

    # Component calls

    def act_arguments(self, place: Place, td: str) -> str:
        c = self.c
        shape = c.weighted(
            [(5, "none"), (5, "one"), (1, "keyword"), (1, "star"), (1, "double star"), (1, "fresh"), (1, "all star")]
        )
        if shape == "none":
            return td
        value = self.num(place, 1)
        if shape in ("star", "double star", "all star"):
            self.f("star arguments")
        if shape == "keyword":
            self.f("keyword arguments")
        return {
            "one": f"{td}, {value}",
            "keyword": f"{td}, bonus={value}",
            "star": f"{td}, *[{value}, {self.literal()}]",
            "double star": f'{td}, **{{"bonus": {value}}}',
            "fresh": f"{td}, fresh=True",
            "all star": f"*({td}, {value})",
        }[shape]

    def act(self, place: Place, td: str) -> None:
        """td = agent_act(td, …)"""
        if self.c.chance(12):
            self.f("tuple unpacking", "act returns a pair")
            call = self.call(place, "agent_act", f"{td}, pair=True")
            name = self.new("vector")
            self.emit(f"{td}, {name} = {call}")
        else:
            self.emit(f"{td} = {self.call(place, 'agent_act', self.act_arguments(place, td))}")
        self.state[td] = "acted"

    def step(self, place: Place, td: str) -> None:
        acted = self.state.get(td) in ("acted", "stepped")
        self.emit(f"{td} = {self.call(place, 'env_step', td)}")
        self.state.pop(td, None)
        if acted:
            self.state[td] = "stepped"

    def onward(self, td: str) -> None:
        known = self.state.pop(td, None) == "stepped"
        self.emit(f"{td} = {self.c.pick(['step_mdp', 'advance']) if known else 'advance'}({td})")

    def insert(self, place: Place, td: str) -> None:
        self.f("insert")
        if self.direct and self.state.get(td) == "stepped":
            self.emit(self.call(place, "replay_buffer_insert", td))
        elif not self.direct:
            self.emit(self.call(place, "replay_buffer_insert", f"row({td})"))

    def walk(self, place: Place) -> None:
        """Act and step, with other statements in between, maybe as a loop; what most algorithms do."""
        c = self.c
        td = c.pick(self.names("td"))
        times = c.weighted([(5, 1), (3, 2), (2, 3)])
        inserts = self.has_buffer and self.global_ok(place) and c.chance(70)
        while times > 1 and not self.affords(replace(place, times=place.times * times), 4):
            times -= 1
        if times == 1:
            return self.walk_once(place, td, inserts)
        self.f("step loop")
        index = self.new("vnum" if place.per_actor else "num", "i")
        self.emit(f"for {index} in range({times}):")
        inner = replace(place, times=place.times * times, depth=place.depth + 1, loop=True)
        with self.indented():
            self.walk_once(inner, td, inserts)
            if self.affords(inner, 3) and not place.per_actor and c.chance(25):
                self.f("learn in the step loop")
                self.learn(inner)
        return None

    def walk_once(self, place: Place, td: str, inserts: bool) -> None:
        c = self.c
        if c.chance(15) and not inserts:
            self.f("nested calls")
            self.emit(f"{td} = advance({self.call(place, 'env_step', self.call(place, 'agent_act', td))})")
            self.state.pop(td, None)
            return
        alias = ""
        if c.chance(20):
            self.f("alias")
            alias = self.new("td")
            self.emit(f"{alias} = {td}")  # sees what act and step write into it
        self.act(place, td)
        if c.chance(20):
            self.between(place)
        self.step(place, td)
        if c.chance(20):
            self.between(place)
        if inserts:
            self.insert(place, td)
            if c.chance(35):  # after the insert: the row must not change
                self.f("change after insert")
                self.emit(f'{td}["observation"].add_({c.between(1, 9)})')
        if c.chance(30) and self.state.get(td) == "stepped":
            value = f'{td}["next", "reward"].squeeze(-1)'
            names = [name for name in self.names("vector") if name not in self.function.fixed]
            if names and c.chance(60):
                name = c.pick(names)
                self.emit(f"{name} = {name} + {value}")
            else:
                self.assign(place, "vector", value)
        if c.chance(10) and self.global_ok(place) and self.state.get(td) == "stepped":
            self.f("list of TensorDicts")
            if self.names("tds"):
                self.emit(f"{c.pick(self.names('tds'))}.append({td}.clone())")
            else:
                self.assign(place, "tds", f"[{td}.clone()]")
        if alias and self.global_ok(place) and self.affords(place) and c.chance(60):
            self.f("log", "alias read")
            self.hints, self.hinted = ["log.1"], True
            value = f'row({alias})["next", "reward"].squeeze(-1)'
            self.emit(self.call(place, "log", f"{self.num(place, 0)}, {value}"))
        if c.chance(8) and self.global_ok(place) and self.affords(place):
            self.f("learn on td itself")
            self.hints, self.hinted = ["agent_learn.0"], True
            self.emit(self.call(place, "agent_learn", td))
            self.state.clear()  # it is marked as seen, and so are its aliases
        if c.chance(85):
            self.onward(td)

    def between(self, place: Place) -> None:
        """A statement without control flow, in the middle of a walk."""
        if self.global_ok(place):
            self.c.pick([self.set_number, self.change, self.set_vector])(place)
        else:
            self.set_vector(place)

    def one_call(self, place: Place) -> None:
        """A lone per-actor call, in any order: the components bear it."""
        c = self.c
        td = c.pick(self.names("td"))
        what = c.weighted([(3, "act"), (3, "step"), (2, "onward"), (1, "reset")])
        if what == "act":
            self.act(place, td)
        elif what == "step":
            self.step(place, td)
        elif what == "onward":
            self.onward(td)
        else:
            self.f("reset again")
            self.reset(place, td)

    def reset(self, place: Place, td: str) -> None:
        """td = env_reset(), with the columns this program adds to every td."""
        call = self.call(place, "env_reset", "")
        if not self.many and self.c.chance(30):
            self.emit(f"{td} = start({call})")
        else:
            self.emit(f"{td} = {call}")
            for line in self.columns(td):
                self.emit(line)
        self.state.pop(td, None)

    def columns(self, td: str) -> list[str]:
        return [f'{td}["{key}"] = {td}["observation"][:, {at}] * {at + 2}' for at, key in enumerate(self.keys)]

    def sample_batch(self, place: Place) -> str:
        """batch = replay_buffer_sample(…), maybe changed at once; returns the name."""
        self.f("sample")
        name = self.assign(
            place, "batch", self.call(place, "replay_buffer_sample", str(self.c.between(1, 4))), again=40
        )
        if self.c.chance(30):
            self.change_batch(place, name)
        if self.c.chance(10) and self.names("td") and self.affords(place, 4):
            self.f("clear")
            td = self.c.pick(self.names("td"))
            self.emit(self.call(place, "replay_buffer_clear", ""))
            self.act(place, td)
            self.step(place, td)
            self.insert(place, td)
        return name

    def learn_data(self, place: Place, nested: bool) -> tuple[str, bool]:
        """The first argument of agent_learn, and whether it varies."""
        c = self.c
        if self.forced:
            name, self.forced = self.forced, ""
            return name, False
        options: list[tuple[int, Any]] = [(1, lambda: (f"[{self.num(place, 0)}, {self.num(place, 0)}]", False))]
        if self.has_buffer:
            options.append((10, lambda: (self.sampled(place), False)))
        if nested:
            return c.weighted(options[-1:])()
        for kind, weight in (("batch", 14), ("nums", 2), ("stats", 2), ("tensor", 1)):
            if self.names(kind):
                options.append((weight, lambda kind=kind: (c.pick(self.names(kind)), False)))
        if self.names("td"):
            options.append((5, lambda: (self.td_to_learn(), True)))
            options.append((2, lambda: (f'{c.pick(self.names("td"))}["observation"]', True)))
        if self.names("vector"):
            options.append((2, lambda: (c.pick(self.names("vector")), True)))
            options.append((2, lambda: (f"[{self.vector(place, 0)}, {self.vector(place, 0)}]", True)))
            options.append((1, lambda: (f'{{"a": {self.vector(place, 0)}}}', True)))
        if self.names("vectors"):
            options.append((3, lambda: (c.pick(self.names("vectors")), True)))
        if self.names("tds"):
            options.append((3, lambda: (self.tds_to_learn(), True)))
        return c.weighted(options)()

    def sampled(self, place: Place) -> str:
        self.f("nested calls", "sample")
        return self.call(place, "replay_buffer_sample", str(self.c.between(1, 4)))

    def td_to_learn(self) -> str:
        """The environment's own TensorDict, or a copy. In a varying place of the past its keys may differ by actor."""
        td = self.c.pick(self.names("td"))
        if self.many and self.state.get(td) != "stepped":
            return f"row({td})"
        form = self.c.pick(["", ".clone()", '.select("observation", "ticks")'])
        if not form:
            self.f("learn on td itself")
            self.state.clear()  # it is marked as seen, and so are its aliases
        return td + form

    def tds_to_learn(self) -> str:
        name = self.c.pick(self.names("tds"))
        return self.c.pick([f"torch.stack({name})", f"[one.clone() for one in {name}]", f"torch.cat({name})"])

    def learn_call(self, place: Place, want: str = "", nested: bool = False) -> str:
        """agent_learn(…); at most one per line, since the line's comment tells which arguments vary."""
        c = self.c
        data, varies = self.learn_data(place, nested)
        hints = ["agent_learn.0"] if varies else []
        arguments = [data]
        shape = c.weighted([(10, "none"), (3, "more"), (2, "keyword"), (1, "varying"), (2, "star")])
        if shape == "more":
            arguments.append(self.num(place, 1))
        elif shape == "keyword":
            self.f("keyword arguments")
            arguments.append(f"bonus={self.num(place, 1)}")
        elif shape == "varying" and self.names("vector") and not nested:
            arguments.append(f"bonus={c.pick(self.names('vector'))}")
            hints.append("agent_learn.bonus")
        elif shape == "star":
            self.f("star arguments")
            arguments.append(c.pick(["*[{0}]", '**{{"bonus": {0}}}']).format(self.num(place, 0)))
        if data in self.names("batch") and c.chance(25):
            self.f("learner changes a tensor of its batch")
            arguments.append("scale=True")
        if want:
            arguments.append(f'want="{want}"')
        self.hints += hints
        self.hinted = True
        self.last_data = data
        self.f("learn", "learn on varying" if varies else "learn on global")
        if place.depth:
            self.f("learn in a nested block")
        return self.call(place, "agent_learn", ", ".join(arguments))

    def learn(self, place: Place) -> None:
        c = self.c
        shape = c.weighted(
            [
                (6, "result"),
                (3, "augmented"),
                (2, "bare"),
                (2, "logged"),
                (2, "number"),
                (1, "conditional"),
                (1, "short"),
                (1, "dict"),
            ]
        )
        numbers = [name for name in self.names("num") if name not in self.function.fixed]
        if self.has_buffer and self.affords(place, 4) and c.chance(25):
            self.forced = self.sample_batch(place)
        if shape == "augmented" and numbers:
            self.f("augmented learn")
            target = c.pick(numbers)
            if c.chance(50):
                self.emit(f'{target} += int({self.learn_call(place)}["count"])')
            else:
                self.emit(f"{target} += int({self.learn_call(place, want='float')})")
        elif shape == "bare":
            self.emit(self.learn_call(place))
        elif shape == "logged":
            step, value = self.num(place, 0), self.learn_call(place, want=c.pick(["float", "tensor"]))
            self.f("log", "nested calls")
            self.emit(self.call(place, "log", f"{step}, {value}"))
        elif shape == "number":
            self.assign(place, "num", f"int({self.learn_call(place, want='tensor')}) % 97")
        elif shape == "conditional":
            self.f("conditional expression", "learn in a conditional expression")
            test = self.condition(place, 0)
            self.assign(
                place, "num", f"int({self.learn_call(place, want='float')}) if {test} else {self.num(place, 0)}"
            )
        elif shape == "short":
            self.f("learn after and/or")
            test = self.condition(place, 0)
            self.assign(
                place, "flag", f"bool({test} {c.pick(['and', 'or'])} {self.learn_call(place, want='float')} > 60)"
            )
        elif shape == "dict":
            call = self.learn_call(place, want="dict")
            name = self.new("stats")
            self.emit(f"{name} = {call}")
            self.emit(f'{name}.update(n={name}.pop("count"), m=int({name}["loss"]))')
        else:
            self.assign(place, "result", self.learn_call(place), again=50)
        if self.last_data in self.names("batch") and self.affords(place) and c.chance(50):
            self.f("log", "batch read after learn")
            self.hinted = True
            self.emit(self.call(place, "log", f"{self.num(place, 0)}, seen=digest({self.last_data})"))

    def evaluate(self, place: Place) -> None:
        self.f("evaluate")
        self.spend(place, 11)  # it steps environments of its own
        call = self.call(place, "evaluate", self.c.pick(["2", "episodes=3"]))
        self.assign(place, "num", f"int({call} * 4) % 97")

    def log(self, place: Place, everything: bool = False) -> None:
        """Log live values: all of them, or some."""
        c = self.c
        self.f("log")
        found: list[tuple[str, str, bool]] = []
        for names in self.function.names:
            for name, kind in names.items():
                key = name.removeprefix("self.").lower()
                key = f"own_{key}" if name.startswith("self.") else key
                found += self.logged(key, name, kind)
        if not everything:
            found = [one for one in found if c.chance(30)][:5]
        unique = {key: (text, varies) for key, text, varies in found}
        arguments = [self.num(place, 0) if not everything else str(c.between(0, 9))]
        self.hinted = True
        for key, (text, varies) in unique.items():
            arguments.append(f"{key}={text}")
            if varies:
                self.hints.append(f"log.{key}")
                self.f("log of varying")
        if len(arguments) == 1:
            arguments.append(self.num(place, 1))
        self.emit(self.call(place, "log", ", ".join(arguments)))

    def logged(self, key: str, name: str, kind: str) -> list[tuple[str, str, bool]]:
        """How a variable is logged: (keyword, expression, varying)."""
        if kind == "num":
            return [(key, name, False)]
        if kind == "flag":
            return [(key, f"int({name})", False)]
        if kind in ("nums", "stats", "batch"):
            return [(key, f"digest({name})", False)]
        if kind == "tensor":
            return [(key, self.c.pick([name, f"{name}.sum()"]), False)]
        if kind == "result":
            return [(key, f'{name}["loss"]', False)]
        if kind == "vector":
            return [(key, name, True)]
        if kind == "vectors":
            return [(key, f"torch.stack({name}).sum(0)", True)]
        if kind == "td":
            forms = [f'{name}["observation"][:, 0]', f'row({name})["next", "reward"].squeeze(-1)']
            return [(key, self.c.pick(forms if self.many else [*forms, f"digest({name})"]), True)]
        if kind == "vnum":
            return [(key, name, True)]
        return []

    # Control

    def branch(self, place: Place) -> None:
        c = self.c
        inner = replace(place, depth=place.depth + 1)
        self.f("if")
        self.emit(f"if {self.condition(place)}:")
        self.block(inner)
        # Later conditions stand in the else part: their changes happen only there, so they must not make names.
        while c.chance(25):
            self.f("elif")
            self.emit(f"elif {self.condition(place)}:")
            self.block(inner)
        if c.chance(45):
            self.f("else")
            self.emit("else:")
            self.block(inner)

    def for_loop(self, place: Place) -> None:
        c = self.c
        kind = "vnum" if place.per_actor else "num"
        times = c.between(1, 3)
        shape = c.weighted(
            [(6, "range"), (2, "plan"), (2, "enumerate"), (1, "zip"), (1, "list"), (1, "keys"), (1, "reversed")]
        )
        values = [self.literal() for _ in range(times)]
        if shape in ("plan", "keys"):
            times = 3 if shape == "plan" else 2
        over = {
            "range": f"range({times})",
            "plan": "self.config.plan",
            "enumerate": f"enumerate(({', '.join(values)},))",
            "zip": f"zip(({', '.join(values)},), range({times}))",
            "list": f"[{', '.join(values)}]",
            "keys": 'sorted(("n", "m"))',
            "reversed": f"reversed(range({times}))",
        }[shape]
        if not self.function.cost + place.times * times <= self.function.budget:
            return self.set_number(place) if self.global_ok(place) else self.set_vector(place)
        self.f("for", f"for over {shape}")
        inner = replace(place, times=place.times * times, depth=place.depth + 1, loop=True)
        self.function.names.append({})
        if shape in ("enumerate", "zip"):
            self.f("tuple unpacking")
            targets = f"{self.new(kind, 'i')}, {self.new(kind)}"
        elif shape == "keys":
            targets = "key"
            self.function.names[-1]["key"] = "key"
        else:
            targets = self.new(kind, "i")
        self.emit(f"for {targets} in {over}:")
        self.block(inner, most=5)
        self.function.names.pop()
        self.loop_else(place)
        return None

    def while_loop(self, place: Place) -> None:
        """A loop whose end depends on data, and on a counter in the last resort."""
        c = self.c
        times = c.between(1, 3)
        if not self.function.cost + place.times * (times + 1) * 2 <= self.function.budget:
            return self.set_number(place) if self.global_ok(place) else self.set_vector(place)
        self.f("while")
        self.function.names.append({})
        counter = self.new("vnum" if place.per_actor else "num", "w", fixed=True)
        self.emit(f"{counter} = 0")
        test_place = replace(place, times=place.times * (times + 1), loop=False)
        inner = replace(place, times=place.times * times, depth=place.depth + 1, loop=True)
        shape = c.weighted([(4, "counted"), (2, "endless"), (2, "walrus")])
        if shape == "walrus":
            self.f("walrus")
            self.emit(f"while ({counter} := {counter} + 1) <= {times} and {self.condition(test_place)}:")
        elif shape == "endless":
            self.f("while True")
            self.emit("while True:")
        else:
            self.emit(f"while {counter} < {times} and {self.condition(test_place)}:")
        with self.indented():
            if shape != "walrus":
                self.emit(f"{counter} += 1")
            if shape == "endless":
                self.f("break")
                self.emit(f"if {counter} > {times} or {self.condition(replace(test_place, loop=False))}:")
                self.function.lines.append("    " * (self.function.indent + 1) + "break")
            self.statements(inner, c.between(1, 4))
        self.function.names.pop()
        self.loop_else(place)
        return None

    def loop_else(self, place: Place) -> None:
        if self.c.chance(15):
            self.f("loop else")
            self.emit("else:")
            self.block(replace(place, depth=place.depth + 1), most=2)

    def leave_loop(self, place: Place) -> None:
        word = self.c.pick(["break", "continue"])
        self.f(word)
        self.emit(f"if {self.condition(place)}:")
        with self.indented():
            if self.c.chance(40):
                self.statements(replace(place, depth=place.depth + 1, loop=False), 1)
            self.emit(word)

    def early_return(self, place: Place) -> None:
        self.f("early return")
        self.emit(f"if {self.condition(place)}:")
        with self.indented():
            if self.function.budget == CALLS or (self.c.chance(30) and self.affords(place)):
                self.log(place)  # in train always: a run that ends here must have something to compare
            self.emit(f"return {self.function.returns(place)}".rstrip())

    def varying_branch(self, place: Place) -> None:
        self.f("varying if")
        inner = replace(place, depth=place.depth + 1, per_actor=True, loop=False, leave=False)
        self.emit(f"if {self.varying_test()}:")
        self.block(inner, most=3)
        if self.c.chance(50):
            self.emit("else:")
            self.block(inner, most=3)

    def varying_loop(self, place: Place) -> None:
        """Each actor loops its own number of times; the count is varying, and known after the loop."""
        c = self.c
        times = c.between(2, 3)
        if not self.affords(place, 3 * times):
            return self.varying_branch(place)
        self.f("varying while")
        counter = self.new("vnum", "w", fixed=True)
        self.emit(f"{counter} = 0")
        self.emit(f"while {counter} < {times} and {self.varying_test()}:")
        inner = replace(place, times=place.times * times, depth=place.depth + 1, per_actor=True, loop=True, leave=False)
        with self.indented():
            self.emit(f"{counter} += 1")
            self.walk_once(inner, c.pick(self.names("td")), inserts=False)
            self.statements(inner, c.between(0, 2))
        self.assign(place, "vector", f"{self.vector(place, 0)} + {counter}")
        return None

    def no_grad(self, place: Place) -> None:
        self.f("with no_grad")
        self.emit(self.c.pick(["with torch.no_grad():", "with torch.no_grad(), scope('x'):"]))
        self.block(replace(place, depth=place.depth + 1), most=4)

    def custom_with(self, place: Place) -> None:
        self.f("with own context")
        if self.c.chance(50):
            self.emit(f"with scope({self.c.pick(['a', 'bcd'])!r}):")
            self.block(replace(place, depth=place.depth + 1), most=3)
        else:
            name = "entered"
            self.emit(f"with scope('ab') as {name}:")
            with self.indented():
                self.emit(f"{name}.append({self.literal()})")
                self.statements(replace(place, depth=place.depth + 1), self.c.between(1, 3))

    def try_finally(self, place: Place) -> None:
        self.f("try/finally")
        self.emit("try:")
        self.block(replace(place, depth=place.depth + 1), most=4)
        self.emit("finally:")
        last = replace(place, depth=3, loop=False, leave=False, calls=self.c.chance(40))
        with self.indented():
            if last.calls and self.affords(last, 2):
                self.f("component call in finally")
                self.log(last)
            self.c.pick([self.change, self.set_number])(last)

    def try_except(self, place: Place) -> None:
        self.f("try/except")
        self.emit("try:")
        with self.indented():
            self.statements(replace(place, depth=place.depth + 1), self.c.between(1, 2))
            self.emit(f"if {self.condition(place)}:")
            self.function.lines.append("    " * (self.function.indent + 1) + f"raise KeyError({self.literal()})")
            self.statements(replace(place, depth=place.depth + 1), self.c.between(0, 1))
        self.emit("except KeyError as error:")
        with self.indented():
            self.emit("HISTORY.append(error.args[0])")
            self.statements(replace(place, depth=3), 1)

    def maybe_defined(self, place: Place) -> None:
        """A name that exists on some paths only, and is read only there."""
        self.f("maybe defined")
        self.counts["late"] += 1
        name, flag = f"late{self.counts['late']}", f"have{self.counts['late']}"
        kind = self.c.pick(
            [kind for kind in ("num", "nums", "vector", "td", "batch") if kind == "num" or self.names(kind)]
        )
        self.emit(f"{flag} = False")
        self.emit(f"if {self.condition(place)}:")
        with self.indented():
            value = self.num(place) if kind == "num" else self.c.pick(self.names(kind))
            self.emit(f"{name} = {value}")
            self.emit(f"{flag} = True")
        inner = replace(place, depth=place.depth + 1)
        self.statements(inner, self.c.between(0, 2))
        self.emit(f"if {flag}:")
        with self.indented():
            self.function.names[-1][name] = kind
            if kind in ("num", "vector", "td", "nums", "batch") and self.affords(place, 2):
                self.log(inner)
            self.statements(inner, self.c.between(1, 2))

    # --- methods

    def methods(self, count: int, owner: str) -> list[str]:
        made = []
        for _ in range(count):
            kind = self.c.weighted(
                [(2, "schedule"), (2, "record"), (4, "collect"), (3, "update"), (4, "mixed"), (2, "descend")]
            )
            made.append(getattr(self, f"make_{kind}")(owner))
        return made

    def helper_name(self, kind: str) -> str:
        self.counts[kind] += 1
        return kind if self.counts[kind] == 1 else f"{kind}_{self.counts[kind]}"

    def text(self, signature: str, function: Function) -> str:
        docs = {0: [], 1: ['        """A helper."""'], 2: ["        # a comment first"]}[self.c.below(3)]
        return "\n".join([f"    def {signature}:", *docs, *function.lines])

    def spell(self) -> None:
        """Names of the method's own for component calls."""
        if self.c.chance(25):
            self.emit("msrl = self.msrl")
            self.function.spellings["msrl"] = "msrl"
        if self.c.chance(15):
            operation, name = self.c.pick(
                [("agent_act", "act"), ("agent_learn", "learn"), ("env_step", "step"), ("log", "record")]
            )
            self.emit(f"{name} = self.msrl.{operation}")
            self.function.spellings[operation] = name

    def make_schedule(self, owner: str) -> str:
        """A neutral helper: reads and changes the trainer."""
        name = self.helper_name("schedule")
        function = Function(returns=lambda place: f"{self.num(place, 0)} % 91", room=3)
        with self.method(function):
            function.names[-1]["k"] = "num"
            place = Place(calls=False)
            helpers, self.helpers, buffer, self.has_buffer = self.helpers, [], self.has_buffer, False
            self.statements(place, self.c.between(0, 3))
            self.emit(f"return {function.returns(place)}")
            self.helpers, self.has_buffer = helpers, buffer
        self.helpers.append(Helper(name, "schedule", 0, ("num",), False, owner))
        return self.text(f"{name}(self, k)", function)

    def make_record(self, owner: str) -> str:
        """A neutral helper that changes what it is given."""
        name = self.helper_name("record")
        function = Function(returns=lambda place: "len(items)", room=2)
        with self.method(function):
            function.names[-1].update(items="nums", stats="stats", k="num")
            helpers, self.helpers, buffer, self.has_buffer = self.helpers, [], self.has_buffer, False
            self.emit(self.c.pick(["items.append(k)", "items.insert(0, k % 7)", "items[:] = [k, *items[:5]]"]))
            self.statements(Place(calls=False), self.c.between(0, 2))
            self.emit(self.c.pick(['stats["m"] += 1', "stats.update(n=len(items))", "self.best = k % 50"]))
            self.emit("return len(items)")
            self.helpers, self.has_buffer = helpers, buffer
        self.helpers.append(Helper(name, "record", 0, ("num",), False, owner))
        return self.text(f"{name}(self, items, stats, k)", function)

    def make_collect(self, owner: str) -> str:
        """A per-actor helper: a loop of act and step."""
        c = self.c
        name = self.helper_name("collect")
        returns = c.pick([("td",), ("td", "vector")])
        inserts = c.chance(40)
        function = Function(returns=lambda place: "", room=4)
        buffer = self.has_buffer
        with self.method(function):
            function.names[-1].update(td="td", k="num")
            function.fixed.add("k")
            self.counts["td"] = max(1, self.counts["td"])
            self.spell()
            place = Place(times=1, per_actor=self.many and not inserts, leave=False)
            self.has_buffer = inserts
            inner = replace(place, times=2, depth=1, loop=True)
            if len(returns) == 2:
                self.emit('total = td["observation"][:, 0] * 0')
                function.names[-1]["total"] = "vector"
                function.fixed.add("total")
            self.emit("for j in range(k):")
            with self.indented():
                self.function.names[-1]["j"] = "vnum" if place.per_actor else "num"
                self.walk_once(inner, "td", inserts)
                if len(returns) == 2:
                    self.emit(f"total = total + {self.vector(inner, 0)}")
                if c.chance(30):
                    self.leave_loop(inner)
            self.emit("return td, total" if len(returns) == 2 else "return td")
        self.has_buffer = buffer
        self.helpers.append(Helper(name, "collect", function.cost, returns, self.many and not inserts, owner))
        return self.text(f"{name}(self, td, k=2)", function)

    def make_update(self, owner: str) -> str:
        """A helper of buffer and learner, with an early return."""
        c = self.c
        name = self.helper_name("update")
        function = Function(returns=lambda place: f"{self.num(place, 0)} % 91", room=4)
        with self.method(function):
            function.names[-1].update(k="num", last="num")
            self.spell()
            place = Place()
            buffer, self.has_buffer = self.has_buffer, True
            if c.chance(60):
                self.f("early return")
                self.emit(f"if {self.call(place, 'replay_buffer_size', '')} < {c.between(1, 6)}:")
                self.function.lines.append("            return 0")
            self.emit("last = 0")
            self.emit("for _ in range(k):")
            inner = Place(times=2, depth=1, loop=True)
            with self.indented():
                self.emit(f"last += int({self.learn_call(inner, want='float', nested=True)})")
                self.statements(inner, c.between(0, 2))
            self.emit("return last")
            self.has_buffer = buffer
        self.helpers.append(Helper(name, "update", function.cost, ("num",), False, owner))
        return self.text(f"{name}(self, k)", function)

    def make_mixed(self, owner: str) -> str:
        """A helper of all components."""
        c = self.c
        name = self.helper_name("mixed")
        function = Function(returns=lambda place: f"td, {self.num(place, 0)} % 91", room=c.between(4, 8))
        with self.method(function):
            function.names[-1].update(td="td", k="num")
            self.counts["td"] = max(1, self.counts["td"])
            self.spell()
            place = Place()
            buffer, self.has_buffer = self.has_buffer, True
            self.walk(place)
            self.statements(place, c.between(2, 5))
            self.emit(f"return {function.returns(place)}")
            self.has_buffer = buffer
        self.helpers.append(Helper(name, "mixed", function.cost, ("td", "num"), False, owner))
        return self.text(f"{name}(self, td, k=1, *more, **options)", function)

    def make_descend(self, owner: str) -> str:
        """A helper that calls itself, to a bounded depth."""
        c = self.c
        name = self.helper_name("descend")
        function = Function(returns=lambda place: "td", room=3)
        with self.method(function):
            function.names[-1].update(td="td", depth="num")
            function.fixed.add("depth")
            self.counts["td"] = max(1, self.counts["td"])
            place = Place(times=2, leave=False)
            buffer, self.has_buffer = self.has_buffer, True
            helpers, self.helpers = self.helpers, []
            self.emit("if depth <= 0:")
            self.function.lines.append("            return td")
            self.walk_once(place, "td", inserts=c.chance(40))
            self.statements(place, c.between(0, 2))
            self.emit(f"return self.{name}(td, depth - 1)")
            self.helpers, self.has_buffer = helpers, buffer
        self.helpers.append(Helper(name, "descend", function.cost, ("td",), False, owner))
        return self.text(f"{name}(self, td, depth)", function)

    def base_train(self) -> str:
        """A `train` of the base class, for `super().train()`."""
        function = Function(returns=lambda place: f"{self.num(place, 0)} % 91", room=6)
        with self.method(function):
            buffer, self.has_buffer = self.has_buffer, True
            place = Place()
            self.reset(place, "td")
            function.names[-1]["td"] = "td"
            self.counts["td"] = max(1, self.counts["td"])
            self.act(place, "td")
            self.step(place, "td")
            self.insert(place, "td")
            self.onward("td")
            self.statements(place, self.c.between(1, 4))
            self.emit(f"return {function.returns(place)}")
            self.has_buffer = buffer
        self.helpers.append(Helper("train", "train", function.cost, ("num",), False, "Base", owner="super()"))
        return self.text("train(self)", function)

    def override(self) -> list[str]:
        """Methods of the base class, extended."""
        made = []
        for helper in list(self.helpers):
            if helper.kind not in ("collect", "update", "mixed", "schedule") or not self.c.chance(50):
                continue
            if helper.home != "Base":
                continue
            self.f("super()")
            parameters = {"collect": "td, k=2", "update": "k", "mixed": "td, k=1, *more, **options", "schedule": "k"}[
                helper.kind
            ]
            passed = {"collect": "td, k", "update": "k", "mixed": "td, k, *more, **options", "schedule": "k"}[
                helper.kind
            ]
            result = ", ".join({"td": "td", "vector": "total", "num": "found"}[kind] for kind in helper.returns)
            function = Function(returns=lambda place: "", room=2)
            with self.method(function):
                self.emit(f"{result} = super().{helper.name}({passed})")
                if helper.kind in ("update", "mixed", "schedule"):
                    self.emit(f"self.best = (self.best + found) % {self.c.pick([50, 77])}")
                elif "vector" in helper.returns:
                    self.emit("total = blend(total, 1)")
                self.emit(f"return {result}")
            made.append("\n".join([f"    def {helper.name}(self, {parameters}):", *function.lines]))
        return made

    def can_call(self, place: Place, helper: Helper) -> bool:
        if place.per_actor and not helper.per_actor:
            return False
        if helper.kind == "train" and (place.depth or place.times > 1 or "train" in self.used):
            return False
        if {"td"} & set(helper.returns) and not self.names("td"):
            return False
        if helper.cost and not place.calls:
            return False
        return self.function.cost + helper.cost * place.times <= self.function.budget

    def use_helper(self, place: Place, helper: Helper) -> None:
        c = self.c
        self.f(f"helper: {helper.kind}")
        self.used.add(helper.name)
        self.function.cost += helper.cost * place.times
        target = f"{helper.owner}.{helper.name}"
        if helper.kind in ("schedule", "update"):
            argument = c.pick(["1", "2"]) if helper.kind == "update" else self.num(place, 0)
            self.assign(place, "num", f"{target}({argument}) % 97")
            return
        if helper.kind == "record":
            given = c.pick(self.names("nums")), c.pick(self.names("stats")), self.num(place, 0)
            self.assign(place, "num", f"{target}({', '.join(given)})")
            return
        if helper.kind == "train":
            self.f("super()")
            self.assign(place, "num", f"{target}()")
            return
        td = c.pick(self.names("td"))
        if helper.kind == "descend":
            self.emit(f"{td} = {target}({td}, {c.between(1, 2)})")
        else:
            count = c.pick(["1", "2"])
            forms = [f"{td}, {count}", f"{td}, k={count}", f"*({td}, {count})", f"td={td}, k={count}"]
            if helper.kind == "mixed":
                forms += [f"{td}, {count}, 7, other={self.literal()}"]
            arguments = c.pick(forms)
            if arguments.startswith("*"):
                self.f("star arguments")
            if helper.returns == ("td",):
                self.emit(f"{td} = {target}({arguments})")
            else:
                self.f("tuple unpacking")
                kind = helper.returns[1]
                own = [name for name in self.names(kind) if name not in self.function.fixed]
                own = [name for name in own if not (place.per_actor and kind == "num")]
                other = c.pick(own) if own and c.chance(50) else self.new(kind)
                self.emit(f"{td}, {other} = {target}({arguments})")
        self.state.clear()

    def train(self) -> str:
        c = self.c
        function = Function(returns=lambda place: self.answer(place), room=c.between(8, 26), budget=CALLS)
        with self.method(function):
            place = Place()
            self.spell()
            if c.chance(20):
                self.f("module global")
                self.emit("global COUNTER")
                function.names[-1]["COUNTER"] = "num"
            self.reset(place, "td")
            function.names[-1]["td"] = "td"
            self.counts["td"] = max(1, self.counts["td"])
            if self.carry:
                self.f("varying attribute" if self.many else "tensor attribute")
                self.emit('self.carry = td["observation"][:, 1].clone()')
            for kind in ("num", "num", "nums", "stats", "tensor", "vector", "vectors", "flag"):
                if c.chance(40):
                    self.make_container(place, kind)
            # The buffer holds rows from here on, so that samples need no guard.
            self.act(place, "td")
            self.step(place, "td")
            self.insert(place, "td")
            self.onward("td")
            self.has_buffer = True
            self.used -= {helper.name for helper in self.helpers if c.chance(50)}  # by other helpers, so far
            self.outer_loop(place)
            self.statements(place, c.between(2, 6))
            for helper in self.helpers:
                if helper.name not in self.used and self.can_call(place, helper) and c.chance(75):
                    self.use_helper(place, helper)
            self.log(place, everything=True)
            self.emit(f"return {self.answer(place)}")
        return self.text("train(self)", function)

    def outer_loop(self, place: Place) -> None:
        """The loop most trainers have around everything."""
        if not self.c.chance(70):
            return self.statements(place, self.c.between(2, 6))
        self.f("for")
        index = self.new("num", "i")
        self.emit(f"for {index} in range(self.config.iterations):")
        self.block(replace(place, times=3, depth=1, loop=True), least=3, most=8)
        return None

    def answer(self, place: Place) -> str:
        """What train returns."""
        parts = [self.num(place, 0)]
        if self.names("nums"):
            parts.append(f"digest({self.c.pick(self.names('nums'))})")
        return ", ".join(parts)


# Frequencies -------------------------------------------------------------------------------------------------------


def constructs(program: Program) -> set[str]:
    """The statement and expression types in a program's methods, as Python's own parser sees them."""
    found = set()
    for text in (program.source, program.base):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name in ("Program", "Base"):
                found |= {type(inner).__name__ for inner in ast.walk(node)}
    return found


def frequencies(count: int, actors: int) -> Counter[str]:
    """In how many of `count` programs each feature occurs."""
    seen: Counter[str] = Counter()
    for seed in range(count):
        program = program_of(seed, actors)
        seen.update(set(program.features))
        seen.update(f"ast.{name}" for name in constructs(program))
    return seen


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description="print a generated trainer, or count the constructs in many")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--count", type=int, default=0)
    options = parser.parse_args()
    if not options.count:
        print(program_of(options.seed, options.actors))
        return
    for name, times in frequencies(options.count, options.actors).most_common():
        print(f"{100 * times / options.count:5.1f} %  {name}")


if __name__ == "__main__":
    main()
