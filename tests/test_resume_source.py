"""`train` with boundaries: stopped at any of them and resumed, a trainer does what it does uninterrupted.

The trainers below run on components of plain integers. Every point is pickled together with the components and the trainer's
attributes, and resumed in a new trainer. Random trainers and drivers are stopped at every boundary of one run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import linecache
import pickle
import traceback
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reference import mismatches, run_reference
from strategies import program_of
from toy import ToyTrainer

from fdg import Trainer
from fdg.algorithms.dqn import DQN
from fdg.compiler import project
from fdg.compiler.resume import PREFIX, resumable
from fdg.compiler.source import from_class
from fdg.errors import CompileError
from fdg.policies import POLICIES
from fdg.runtime.boundary import Boundaries, Point, Stop
from fdg.runtime.load import load_class
from fdg.runtime.run import launch

# Components of integers ------------------------------------------------------------------------------------------------


class World:
    """All components: a number that every call changes, and what was logged."""

    def __init__(self) -> None:
        self.state, self.logs = 1, []

    def next(self, *given: Any) -> int:
        self.state = (self.state * 31 + sum(map(ord, repr(given)))) % 1009
        return self.state


class Components(Boundaries):
    """`self.msrl` of the trainers below."""

    def __init__(self, world: World, on_boundary: Any = None, point: Point | None = None) -> None:
        super().__init__(on_boundary, point)
        self.world = world

    def env_reset(self) -> list[int]:
        return [self.world.next("reset")]

    def env_step(self, td: list[int]) -> list[int]:
        td.append(self.world.next("step", td[-3:]))  # in place: who else holds it must see it
        return td

    def agent_act(self, td: list[int], *given: Any) -> list[int]:
        return [*td[-2:], self.world.next("act", td[-2:], given)]

    def agent_learn(self, *given: Any) -> int:
        return self.world.next("learn", given)

    def replay_buffer_size(self) -> int:
        return self.world.state % 7

    def log(self, *given: Any, **values: Any) -> None:
        self.world.logs.append(repr((given, values)))


CONFIG = SimpleNamespace(iterations=4, steps=2, plan=(3, 1, 2), names=["a", "b"])


@contextlib.contextmanager
def scope(name: str) -> Any:
    yield f"<{name}>"


def helper(x: int) -> int:
    return x * 2 + 1


# Trainers --------------------------------------------------------------------------------------------------------------


class For(Trainer):
    def train(self):
        """A docstring stays the docstring."""
        td = self.msrl.env_reset()
        loss = None
        # a comment before the loop
        for i in range(self.config.iterations):
            # a comment in the loop
            td = self.msrl.env_step(self.msrl.agent_act(td, i))
            batch = self.msrl.agent_learn(td)
            loss = batch if batch % 2 else loss
            self.msrl.log(i, loss)
        return td, loss


class Nothing(Trainer):
    def train(self):
        for i in range(self.config.iterations):
            td = self.msrl.env_reset()
            for _ in range(self.config.steps):
                td = self.msrl.env_step(td)
            self.msrl.log(i, td)


class LastIndex(Trainer):
    def train(self):
        for i in range(self.config.iterations):
            self.msrl.log(i)
        return i


class While(Trainer):
    def train(self):
        total, td = 0, self.msrl.env_reset()
        while total < 7 * self.config.iterations:
            td = self.msrl.env_step(td)
            total += 3 + td[-1] % 5
            self.msrl.log(total)
        else:
            self.msrl.log("over", total)
        return total


class Walrus(Trainer):
    def train(self):
        seen = []
        while (x := self.msrl.agent_learn(len(seen))) and len(seen) < 5:
            seen.append(x)
            self.msrl.log(x)
        return seen, x


class WalrusBehindAnd(Trainer):
    def train(self):
        n = 0
        while n < 4 and (x := self.msrl.agent_learn(n)):
            n += 1
            self.msrl.log(x, n)
        return n, x


class Forever(Trainer):
    def train(self):
        n = 0
        while True:
            n += 1
            if self.msrl.agent_learn(n) % 11 == 0 or n > 9:
                break
            self.msrl.log(n)
        return n


class ForElse(Trainer):
    def train(self):
        best = 0
        for i in range(self.config.iterations):
            best = max(best, self.msrl.agent_learn(i))
            if best > 5000:
                break
        else:
            # a comment in the else
            self.msrl.log("all", best)
            best += 1
        return best


class Jumps(Trainer):
    def train(self):
        kept = []
        for i in range(12):
            x = self.msrl.agent_learn(i, kept)
            if x % 3 == 0:
                continue
            kept.append(x)
            if len(kept) > 4:
                break
            self.msrl.log(i, kept)
        return kept


class EarlyReturn(Trainer):
    def train(self):
        if self.config.iterations == 0:
            return "nothing"
        x = 0
        for i in range(20):
            x = self.msrl.agent_learn(x)
            self.msrl.log(i, x)
            if i == 5:
                return i, x
        return "end"


class TwoLoops(Trainer):
    def train(self):
        td = self.msrl.env_reset()
        warm = 0
        for _ in range(3):
            td = self.msrl.env_step(td)
            warm += td[-1]
        self.msrl.log("warm", warm)
        offset = self.msrl.agent_learn(warm)
        n = 0
        while n < 3:
            n += 1
            td = self.msrl.env_step(td)
            self.msrl.log(n, td, offset)
        total = n + offset
        for i, x in enumerate(self.config.plan):
            total += self.msrl.agent_learn(i, x)
        return total, td


class TwoLoopsAtOnce(Trainer):
    def train(self):
        for i in range(3):
            self.msrl.log("one", i)
        for i in range(3):
            self.msrl.log("two", i)


class ManyLocals(Trainer):
    def train(self):
        a, (b, *c) = self.msrl.env_reset(), [1, 2, 3]
        alpha_rate: float = 0.5
        beta_rate = gamma_rate = self.msrl.agent_learn(1)
        delta_decay, epsilon_decay, zeta_decay = 1, 2, self.msrl.agent_learn(2)
        text = """several
lines, not to be indented
    at all"""
        unused = self.msrl.agent_learn(3)  # noqa: F841
        long_name_of_a_table = {"x": 1}
        another_name = long_name_of_a_table
        a.append(b)
        for i in range(self.config.iterations):
            long_name_of_a_table[i] = beta_rate
            beta_rate += delta_decay + epsilon_decay + zeta_decay + gamma_rate * alpha_rate
            c.append(another_name[i])
            self.msrl.log(i, text, a, c, another_name)
        return another_name is long_name_of_a_table, c


class Targets(Trainer):
    def train(self):
        table, pair = {}, [0, 0]
        for k, (name, table[k]) in enumerate(zip(self.config.plan, count(5))):
            pair[0], pair[1] = self.msrl.agent_learn(name), k
            self.msrl.log(k, name, table, pair)
        return table, name


class Attributes(Trainer):
    def train(self):
        self.best, self.seen = 0, []
        mine = self.seen
        for self.turn in range(self.config.iterations):  # noqa: B020
            self.best = max(self.best, self.msrl.agent_learn(self.turn))
            mine.append(self.best)
            self.msrl.log(self.turn, self.seen, mine)
        return mine is self.seen


class Lists(Trainer):
    def train(self):
        items = [1, 2]
        for x in items:
            if len(items) < 6:
                items.append(x + self.msrl.agent_learn(x) % 5)
            self.msrl.log(x)
        for k, x in enumerate(items):
            self.msrl.log(k, x)
            items[k] = 0
        names = {"b": 1, "a": 2}
        for name, value in names.items():
            self.msrl.log(name, value)
            names[name] = 7
        return items, names


class Rebound(Trainer):
    def train(self):
        n, items = 3, [4, 5, 6]
        for i in range(n):
            n = n + self.msrl.agent_learn(i) % 3
        for x in items:
            items = [self.msrl.agent_learn(x)]
        for x in range(len(items) * 4):
            items.append(self.msrl.agent_learn(x))
        for x in list(self.numbers(n)):
            n += self.msrl.agent_learn(x)
        for x in 7, 8, n:
            n += self.msrl.agent_learn(x)
        return n, items

    def numbers(self, n):
        self.msrl.log("numbers", n)  # once
        yield from range(min(n, 5))


class FromConfig(Trainer):
    def train(self):
        config = self.config
        iterations = config.iterations * 2
        half = iterations // 2
        rows = [0] * half
        for i in range(iterations):
            rows[i % half] += self.msrl.agent_learn(i)
            self.msrl.log(i, rows)


class Alias(Trainer):
    def train(self):
        td = self.msrl.env_reset()
        msrl = self.msrl
        learn, this = msrl.agent_learn, self
        act, total = msrl.agent_act, 0
        for i in range(self.config.iterations):
            td = act(td, i)
            total += this.msrl.agent_learn(td)
            msrl.log(i, total)
        return total, learn is not None


class Functions(Trainer):
    def train(self):
        import math
        from itertools import islice as cut

        start = self.msrl.agent_learn(0)
        rate = 1

        def scaled(x, by=self.config.steps):
            return math.floor(x * by + start + rate)

        twice = lambda x: scaled(scaled(x))  # noqa: E731
        double, total = helper, 0
        for i in range(self.config.iterations):
            rate += 1
            total += twice(self.msrl.agent_learn(i)) + double(i) + sum(cut([rate, 1, 2], 2))
            self.msrl.log(i, total, [rate for rate in range(2)], (lambda: rate)())
        return total


class Schedules(Trainer):
    def train(self):
        td = self.msrl.env_reset()
        if self.config.steps > 1:
            # the usual one
            schedule = self.linear
        else:

            def schedule(i):
                return 0

        step, best = self.msrl.env_step, 0
        linear = self.linear
        for i in range(self.config.iterations):
            td = step(td)
            best += schedule(i) + linear(i) + td[-1]
            self.msrl.log(i, best)

    def linear(self, i):
        return 1 + i * 2


class MaybeUnbound(Trainer):
    def train(self):
        if self.config.iterations > 100:
            never = 1
        for i in range(self.config.iterations):
            if i == 2:
                late = self.msrl.agent_learn(i)
            if i == 3:
                self.msrl.log(late)
                del late
            try:
                self.msrl.log(i, late)
            except UnboundLocalError:
                self.msrl.log(i, "no late")
        try:
            return never
        except UnboundLocalError:
            return "never"


class Deleted(Trainer):
    def train(self):
        x = self.msrl.agent_learn(1)
        for i in range(3):
            self.msrl.log(i, "x" in locals(), locals().get("x", 0))
            if i == 1:
                del x


class With(Trainer):
    def train(self):
        base = self.msrl.agent_learn(1)
        word = "a"
        with scope(word) as name, contextlib.suppress(ValueError):
            inner = self.msrl.agent_learn(2)
            for i in range(self.config.iterations):
                inner += self.msrl.agent_learn(base, i)
                self.msrl.log(name, inner)
            self.msrl.log("behind", inner)
            while inner > 500:
                inner = inner // 2 + self.msrl.agent_learn(1) % 3
                self.msrl.log(inner)
            raise ValueError
        return base, inner


class If(Trainer):
    def train(self):
        x = self.msrl.agent_learn(1)
        if x > 2000:
            self.msrl.log("large")
        elif (y := self.msrl.agent_learn(x)) > 0:
            z = y + 1
            for i in range(3):
                self.msrl.log(i, z)
                z += 1
        elif x == 3:
            while x:
                x -= self.msrl.agent_learn(x)
        else:
            self.msrl.log("small")
        if x < 0:
            for i in range(2):
                self.msrl.log("not here", i)
        else:
            start = self.msrl.agent_learn(x)
            for i in range(2):
                self.msrl.log("here", i, start)
        return x


class TryFinally(Trainer):
    def train(self):
        total = self.msrl.agent_learn(0)
        try:
            step = self.msrl.agent_learn(1)
            for i in range(self.config.iterations):
                try:
                    total += step
                    if i == 1:
                        raise KeyError(i)
                    self.msrl.log(i, total)
                except KeyError as error:
                    self.msrl.log("error", repr(error))
            raise ValueError(total)
        except ValueError as error:
            self.msrl.log("caught", repr(error))
        finally:
            total += 1
        return total


class Helper(Trainer):
    def train(self):
        td = self.msrl.env_reset()
        bonus = self.msrl.agent_learn(5)
        self.prepare()
        result = self.loop(td, self.config.iterations, bonus=7)
        self.msrl.log("back", result, bonus)
        for i in range(2):
            self.msrl.log(i, td, bonus)
        return result

    def prepare(self):
        for i in range(3):
            self.start = self.msrl.agent_learn(i)

    def loop(self, td, n, *, bonus=0):
        total = self.start
        for i in range(n):
            td = self.msrl.env_step(td)
            total += td[-1] + bonus
            self.msrl.log(i, total)
            if total > 10**6:
                return None
        return total


class Base(Trainer):
    def train(self):
        """The base's."""
        total = self._Base__secret = 0
        for i in range(self.config.iterations):
            total += self.step(i)
            self.__secret += 1
        return total

    def step(self, i):
        x = self.msrl.agent_learn(i)
        self.msrl.log(i, x)
        return x


class Derived(Base):
    def train(self):
        before = self.msrl.agent_learn(99)
        total = super().train()
        self.msrl.log("end", before, total, super().step(1))
        return total + before

    def step(self, i):
        return super().step(i) + 1


# fmt: off
class OneLiners(Trainer):
    def train(self):
        x = 0; msrl = self.msrl; y = msrl.agent_learn(1)  # noqa: E702
        for i in range(3): x += msrl.agent_learn(i); self.msrl.log(i, x, y)  # noqa: E701, E702
        while x % 5: x = msrl.agent_learn(x)  # noqa: E701
        else: msrl.log("else", x)  # noqa: E701
        with scope("a"): self.rest(x)  # noqa: E701

    def rest(self, x):
        for i in (range(
            2
        )):
            self.msrl.log("ünïcödé", i); x += 1  # noqa: E702
        while ("é" and
               x < 10**6):
            x *= self.msrl.agent_learn(x) + 2; self.msrl.log(x)  # noqa: E702
# fmt: on


LIMITS, GROWS = (2, 3), [1]


class ModuleState(Trainer):
    def train(self):
        for i in range(LIMITS[1]):
            self.msrl.log(i)
        GROWS[:] = [1]
        for i in range(len(GROWS) + 1):
            GROWS.append(self.msrl.agent_learn(i))


class PlainLoops(Trainer):
    def train(self):
        """Loops without component calls need no boundary, and may run over anything."""
        sizes = {}
        for name in {"a"}:
            sizes[name] = 1
        total = 0
        for line in iter(["1", "2"]):
            total += int(line)
        for i in range(self.config.iterations):
            total += sum(sizes.values())
            self.msrl.log(i, total)


class Inspects(Trainer):
    def train(self):
        one, two = self.msrl.agent_learn(1), self.msrl.agent_learn(2)
        for i in range(2):
            self.msrl.log(i, sorted(set(locals()) & {"one", "two"}), eval("two"))


TRAINERS = [
    For, Nothing, LastIndex, While, Walrus, WalrusBehindAnd, Forever, ForElse, Jumps, EarlyReturn, TwoLoops,
    TwoLoopsAtOnce, ManyLocals, Targets, Attributes, Lists, Rebound, FromConfig, Alias, Functions, Schedules, MaybeUnbound, Deleted,
    With, If, TryFinally, Helper, Derived, OneLiners, ModuleState, PlainLoops, Inspects,
]  # fmt: skip


def generated(trainer: type) -> Any:
    made = resumable(from_class(trainer))
    return load_class(trainer, made.source, made.line_map, Path("resumable.py"))


def run(trainer: type, msrl: Any, attributes: dict[str, Any], config: Any = CONFIG) -> Any:
    """What `train` returns, the logs, the attributes at the end."""
    one = trainer.__new__(trainer)
    one.config, one.msrl = config, msrl
    vars(one).update(attributes)
    returned = one.train()
    return returned, msrl.world.logs, own(one)


def own(trainer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(trainer).items() if name not in ("msrl", "config")}


def snapshots(trainer: type, config: Any = CONFIG) -> tuple[Any, list[tuple[Point, bytes]]]:
    """An uninterrupted run of a generated class, and everything at each of its points, as bytes."""
    found: list[tuple[Point, bytes]] = []
    one = trainer.__new__(trainer)

    def keep(point: Point) -> None:
        found.append((point, pickle.dumps((point, one.msrl.world, own(one)))))

    one.config, one.msrl = config, Components(World(), keep)
    returned = one.train()
    return (returned, one.msrl.world.logs, own(one)), found


@pytest.mark.parametrize("trainer", TRAINERS)
def test_resumed_at_every_boundary(trainer):
    expected = run(trainer, Components(World()), {})
    new = generated(trainer)
    result, points = snapshots(new)
    assert result == expected
    assert len(points) >= 3
    places = [(point.label, point.turns, point.ended) for point, _ in points]
    for index, (_, data) in enumerate(points):
        point, world, attributes = pickle.loads(data)
        later: list[Any] = []
        msrl = Components(world, lambda p, later=later: later.append((p.label, p.turns, p.ended)), point)
        assert run(new, msrl, attributes) == expected, f"resumed at {point}"
        assert later == places[index + 1 :]


@pytest.mark.parametrize("trainer", [For, While, FromConfig, Helper, Nothing, LastIndex])
def test_a_finished_run_goes_on_with_more_iterations(trainer):
    longer = SimpleNamespace(**{**vars(CONFIG), "iterations": 7})
    if trainer is FromConfig:  # its list has one place per iteration
        longer.iterations = 4
    expected = run(trainer, Components(World()), {}, longer)
    new = generated(trainer)
    _, points = snapshots(new)
    label = 2 if trainer is Helper else 1
    _, data = next((point, data) for point, data in points if point.ended and point.label == label)
    point, world, attributes = pickle.loads(data)
    assert run(new, Components(world, None, point), attributes, longer) == expected


def test_a_run_can_be_stopped():
    new = generated(TryFinally)
    world, seen = World(), []

    def stop(point):
        seen.append(point)
        if point.turns == 2:
            raise Stop

    with pytest.raises(Stop):
        run(new, Components(world, stop), {})
    assert [point.turns for point in seen] == [0, 1, 2]
    assert "caught" not in str(world.logs)


def test_what_is_saved():
    saves = {
        trainer: resumable(from_class(trainer)).boundaries[0].saves for trainer in (For, Nothing, ManyLocals, Alias)
    }
    assert saves[For] == ["td", "loss"]
    assert saves[Nothing] == []
    assert "unused" not in saves[ManyLocals] and {"a", "c", "another_name"} <= set(saves[ManyLocals])
    assert saves[Alias] == ["td", "total"]


def test_the_code_is_readable():
    """One example in full: comments and layout stay, lines lead to the user's."""
    made = resumable(from_class(For))
    expected = '''\
# `train` of For (test_resume_source.py), with boundaries: places where a checkpoint may be taken.
# Generated; this is the code that runs.


class For_resumable(For):
    def train(self):
        """A docstring stays the docstring."""
        if self.msrl.begins(1):
            td = self.msrl.env_reset()
            loss = None
        else:
            td, loss = self.msrl.restored("td", "loss")
        # a comment before the loop
        for i in self.msrl.turns(1, range(self.config.iterations)):
            self.msrl.boundary(1, td=td, loss=loss)
            # a comment in the loop
            td = self.msrl.env_step(self.msrl.agent_act(td, i))
            batch = self.msrl.agent_learn(td)
            loss = batch if batch % 2 else loss
            self.msrl.log(i, loss)
        else:
            self.msrl.ended(1, td=td, loss=loss)
        return td, loss
'''
    assert made.source == expected
    lines = made.source.splitlines()
    for number, file, line in made.line_map:
        text, there = lines[number - 1].strip(), linecache.getline(file, line).strip()
        assert text == there or "self.msrl." in text or text == "else:"


def test_every_line_of_the_user_is_kept():
    for trainer in TRAINERS:
        made = resumable(from_class(trainer))
        found = {(file, line) for _, file, line in made.line_map}
        node = ast.parse(made.source)
        assert ast.get_docstring(node.body[0].body[0]) == trainer.train.__doc__
        first, code = trainer.train.__code__.co_firstlineno, trainer.train.__code__
        last = max(line for _, _, line in code.co_lines() if line is not None)
        assert {(code.co_filename, line) for line in range(first, last + 1)} <= found, trainer


def test_a_traceback_ends_in_the_users_line():
    class Fails(Trainer):
        def train(self):
            x = self.msrl.agent_learn(1)
            for i in range(3):
                if i == 2:
                    raise KeyError("here")
                self.msrl.log(i, x)

    with pytest.raises(KeyError) as caught:
        run(generated(Fails), Components(World()), {})
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert frame.filename == __file__
    assert frame.line == 'raise KeyError("here")'


# Refusals --------------------------------------------------------------------------------------------------------------


class NoLoop(Trainer):
    def train(self):
        self.msrl.log(self.msrl.env_reset())


class Iterator(Trainer):
    def train(self):
        batches = iter([1, 2, 3])
        for batch in batches:
            self.msrl.log(batch)


class Generator(Trainer):
    def train(self):
        for batch in self.batches():
            self.msrl.log(batch)

    def batches(self):
        yield from range(3)


class Unknown(Trainer):
    def train(self):
        for line in open("file"):  # noqa: SIM115
            self.msrl.log(line)


class Lazy(Trainer):
    def train(self):
        items = [1, 2, 3]
        for x in zip(items, items):  # noqa: B905
            items = [self.msrl.agent_learn(x)]


class OfSet(Trainer):
    def train(self):
        names = {"a", "b"}
        for name in names:
            self.msrl.log(name)


class ChosenFunction(Trainer):
    def train(self):
        schedule = self.linear
        if self.msrl.agent_learn(1) > 3:
            schedule = lambda i: 1  # noqa: E731
        for i in range(3):
            self.msrl.log(i, schedule(i))

    def linear(self, i):
        return i


class InMatch(Trainer):
    def train(self):
        match self.config.steps:
            case 2:
                for i in range(3):
                    self.msrl.log(i)


class InFinally(Trainer):
    def train(self):
        try:
            self.msrl.log(1)
        finally:
            for i in range(3):
                self.msrl.log(i)


class CalledTwice(Trainer):
    def train(self):
        self.phase()
        self.phase()

    def phase(self):
        for i in range(3):
            self.msrl.log(i)


class Arguments(Trainer):
    def train(self):
        self.phase(self.msrl.env_reset())

    def phase(self, td):
        for i in range(3):
            self.msrl.log(i, td)


class ChangesHead(Trainer):
    def train(self):
        word = "a"
        with scope(word):
            word = "b"
            for i in range(3):
                self.msrl.log(i, word)


def wrapped(function: Any) -> Any:
    return function


class Decorated(Trainer):
    @wrapped
    def train(self):
        for i in range(3):
            self.msrl.log(i)


REFUSALS = [
    (NoLoop, "`train` has no loop with component calls", "def train", "for i in range(self.config.iterations)"),
    (Iterator, "runs over `batches`, an iterator", "for batch in batches:", "for batch in list(batches):"),
    (Generator, "runs over `self.batches()`, an iterator", "for batch in self", "for batch in list(self.batches()):"),
    (Unknown, "not known to be a list", "for line in open", "for line in list(open('file')):"),
    (Lazy, "runs over `zip(items, items)`, an iterator", "for x in zip", "for x in list(zip(items, items)):"),
    (OfSet, "runs over `names`, a set", "for name in names:", "for name in sorted(names):"),
    (ChosenFunction, "`schedule`, a function or method", "for i in range(3):", "a method of the trainer"),
    (InMatch, "the loop stands in a `match`", "for i in range(3):", "at the top of `train`"),
    (InFinally, "a `finally`", "for i in range(3):", "at the top of `train`"),
    (CalledTwice, "in `phase`, which is called from more than one place", "self.phase()", "in `train` itself"),
    (Arguments, "has arguments that would be computed again", "self.phase(", "variables as arguments"),
    (ChangesHead, "`word` changes inside this `with`", "with scope(word):", "another name"),
    (Decorated, "`train` is decorated", "def train", "without the decorator"),
]


@pytest.mark.parametrize(("trainer", "reason", "line", "hint"), REFUSALS, ids=[case[0].__name__ for case in REFUSALS])
def test_not_resumable(trainer, reason, line, hint):
    with pytest.raises(CompileError) as caught:
        resumable(from_class(trainer))
    error = caught.value
    assert error.reason.startswith(PREFIX) and reason in error.reason
    assert error.file == __file__ and error.source.strip().startswith(line)
    assert hint in error.hint


def test_a_loop_without_a_boundary_beside_one_with():
    class Both(Trainer):
        def train(self):
            for batch in open("file"):  # noqa: SIM115
                self.msrl.log(batch)
            for i in range(3):
                self.msrl.log(i)

    made = resumable(from_class(Both))
    assert len(made.boundaries) == 1
    assert "not known to be a list" in made.notes[0].reason


# Drivers and random trainers -------------------------------------------------------------------------------------------


class Proxy:
    """A run's `self.msrl`, with boundaries beside it."""

    def __init__(self, msrl: Any, boundaries: Boundaries) -> None:
        self._msrl, self._boundaries = msrl, boundaries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._boundaries if hasattr(Boundaries, name) else self._msrl, name)


class Interrupted(Stop):
    def __init__(self, point: Point) -> None:
        self.point = point


def interrupt(trainer: type, labels: set[int]) -> list[Point]:
    """Let each run of a trainer (whose class has boundaries) be stopped at every boundary and resumed; the list of stops.

    The components live on, and of the frame of `train` only the point is left.
    """
    stops: list[Point] = []

    def stop(point: Point) -> None:
        if point.label in labels:
            stops.append(point)
            raise Interrupted(point)

    def set_msrl(self: Any, msrl: Any) -> None:
        if "train" not in vars(type(self)):  # of a fragment
            vars(self)["msrl"] = msrl
            return
        vars(self)["msrl"] = Proxy(msrl, Boundaries(stop))

        def train() -> Any:
            del vars(self)["train"]
            while True:
                try:
                    return self.train()
                except Interrupted as found:
                    vars(self)["msrl"] = Proxy(msrl, Boundaries(stop, found.point))

        vars(self)["train"] = train

    trainer.msrl = property(lambda self: vars(self)["msrl"], set_msrl)  # type: ignore[attr-defined]
    return stops


def entered_once(made: Any) -> set[int]:
    """The boundaries that are not inside a `with` or `try`, which would be left and entered again."""
    (cls,) = (node for node in ast.parse(made.source).body if isinstance(node, ast.ClassDef))
    once: set[int] = set()

    def visit(body: list[ast.stmt]) -> None:
        for statement in body:
            head = ast.unparse(statement).split("\n")[0]
            if isinstance(statement, ast.With) and ".msrl.calling(" in head:
                name = head.split("calling('")[1].split("'")[0]
                visit(next(method.body for method in cls.body if method.name == name))  # type: ignore[attr-defined]
            elif ".msrl.boundary(" in head:
                once.add(int(head.split("boundary(")[1].split(",")[0].rstrip(")")))
            elif isinstance(statement, (ast.For, ast.While, ast.If)):
                visit([*statement.body, *statement.orelse])

    visit(next(method.body for method in cls.body if method.name == "train"))  # type: ignore[attr-defined]
    return once


def quietly(trainer: type, config: Any, **options: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return launch(trainer, config, **options)


SLOW = [pytest.param(range(start, start + 25), marks=pytest.mark.slow) for start in range(25, 200, 25)]


@pytest.mark.parametrize("seeds", [range(15), *SLOW])
def test_random_trainers(seeds):
    """The user's own `train`, under `local`."""
    stopped = 0
    for seed in seeds:
        program = program_of(seed, 1)
        outcome = run_reference(program.load(), program.config())
        fresh = program.load()
        try:
            made = resumable(from_class(fresh))
        except CompileError as error:
            assert error.reason.startswith(PREFIX) and error.line
            continue
        trainer = load_class(fresh, made.source, made.line_map, Path("resumable.py"))
        stops = interrupt(trainer, entered_once(made))
        result = quietly(trainer, program.config())
        found = mismatches(outcome, result, fresh)
        assert not found, f"{found[0]}\n{made.source}\n{program}"
        stopped += len(stops)
    assert stopped > len(seeds)


@pytest.mark.parametrize(
    ("policy", "actors", "seeds"),
    [
        ("single_learner_coarse", 1, range(6)),
        ("sharded_replay", 1, range(6, 12)),
        ("single_learner_coarse", 2, range(3)),
        pytest.param("single_learner_coarse", 1, range(12, 32), marks=pytest.mark.slow),
        pytest.param("sharded_replay", 1, range(32, 52), marks=pytest.mark.slow),
        pytest.param("single_learner_coarse", 2, range(3, 13), marks=pytest.mark.slow),
    ],
)
def test_drivers_of_random_trainers(policy, actors, seeds):
    stopped = 0
    for seed in seeds:
        program = program_of(seed, actors)
        fresh = program.load()
        shards = program.config().replay_shards
        try:
            graph = project(fresh, policy=POLICIES[policy], actors=actors, replay_shards=shards)
            made = resumable(from_class(fresh), graph.driver, graph.driver_map)
        except CompileError as error:
            assert error.line and (error.reason.startswith(PREFIX) or actors > 1)
            continue
        outcome = run_reference(program.load(), program.config())
        stops = interrupt(fresh, entered_once(made))
        graph.driver, graph.driver_map = made.source, made.line_map
        result = quietly(fresh, program.config(), policy=policy, graph=graph)
        found = mismatches(outcome, result, fresh)
        assert not found, f"{found[0]}\n{made.source}\n{program}"
        stopped += len(stops)
    assert stopped > 2 * len(seeds)


def test_the_driver_of_dqn():
    class Toy(DQN):
        agent, replay_buffer = ToyTrainer.agent, ToyTrainer.replay_buffer

    graph = project(Toy, policy=POLICIES["single_learner_coarse"], actors=2)
    made = resumable(from_class(Toy), graph.driver, graph.driver_map)
    assert [(boundary.label, boundary.saves) for boundary in made.boundaries] == [(1, ["td", "loss"])]
    assert "for i in self.msrl.turns(1, range(self.config.iterations)):" in made.source
    assert {Path(file).name for _, file, _ in made.line_map} == {"dqn.py"}


def test_an_edited_driver_has_lines_of_its_own():
    driver = "class X_driver(X):\n    def train(self):\n        for x in open(''):\n            self.msrl.log(x)\n"
    with pytest.raises(CompileError) as caught:
        resumable(from_class(For), driver, [], "driver.py")
    assert (caught.value.file, caught.value.line) == ("driver.py", 3)
    whole = "class X_driver(X):\n    def train(self):\n        self.msrl.local.train()\n"
    with pytest.raises(CompileError, match="no loop is left at the driver"):
        resumable(from_class(For), whole, [], "driver.py")


def test_boundaries_by_themselves():
    points: list[Point] = []
    boundaries = Boundaries(points.append)
    for _ in boundaries.turns(1, itertools.count()):
        boundaries.boundary(1, self=1, label=2)  # names of any kind
        if boundaries.turn == 3:
            break
    with boundaries.calling("helper", x=1):
        boundaries.boundary(2, x=2)
    assert [(p.label, p.turns, p.values) for p in points[-2:]] == [
        (1, 2, {"self": 1, "label": 2}),
        (2, 0, {"x": 1, "helper.x": 2}),
    ]
