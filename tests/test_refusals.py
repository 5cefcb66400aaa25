"""Every row of the list of refusals in docs/writing-algorithms.md, as a program: refused, at the line marked ▶."""

from __future__ import annotations

import inspect
import linecache
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from toy import ToyLearner, ToyTrainer

from fdg.api import Agent, Trainer
from fdg.compiler import project
from fdg.errors import CompileError, UsageError
from fdg.policies import Local, SingleLearnerCoarse
from fdg.registry import import_file
from fdg.runtime.run import launch
from fdg.testing import assert_policies_equal

IDENTIFIER = re.compile(r"\W+")
PAGE = Path(__file__).parent.parent / "docs" / "writing-algorithms.md"
ELSEWHERE = ("several learners", "a part of the agent", "a class without source")
"""Rows with a test of their own below: seen only at launch, or only for class objects."""

HEADER = """\
import contextlib
import torch
from fdg import Trainer

SEEN = []


@contextlib.contextmanager
def noted(name):
    SEEN.append(name)
    yield


class Mine(Trainer):
"""

# row of the list (its first words) -> bodies of a trainer
REFUSED: dict[str, list[str]] = {
    "a component call in a lambda": [
        """
        def train(self):
            act = lambda td: self.msrl.agent_act(td)  # ▶
            act(self.msrl.env_reset())
        """,
        """
        def train(self):
            def step(td):
                return self.msrl.env_step(td)  # ▶

            step(self.msrl.env_reset())
        """,
        """
        def train(self):
            class Stepper:
                def step(inner, td):
                    return self.msrl.env_step(td)  # ▶
        """,
    ],
    "a component call in a generator": [
        """
        def train(self):
            sum(self.msrl.agent_learn(i) for i in range(3))  # ▶
        """,
        """
        def train(self):
            for td in self.rollouts():
                self.msrl.agent_learn(td)

        def rollouts(self):  # ▶
            yield self.msrl.env_reset()
        """,
    ],
    "`async` methods": [
        """
        async def train(self):  # ▶
            self.msrl.env_reset()
        """,
        """
        def train(self):
            td = self.msrl.env_reset()
            async for other in td:  # ▶
                pass
        """,
        """
        def train(self):
            td = self.msrl.env_reset()
            async with td:  # ▶
                pass
        """,
    ],
    "`getattr(self.msrl": [
        """
        def train(self):
            getattr(self.msrl, "env_reset")()  # ▶
        """,
    ],
    "`self.msrl`, `self.msrl.agent_act` without": [
        """
        def train(self):
            collect(self.msrl)  # ▶
        """,
        """
        def train(self):
            td = self.msrl.env_reset()
            repeat(self.msrl.agent_act, td)  # ▶
        """,
        """
        def train(self):
            self.calls = self.msrl  # ▶
        """,
        """
        def train(self):
            td = self.msrl.env_reset()
            repeat(self.step, td)  # ▶

        def step(self, td):
            return self.msrl.env_step(td)
        """,
    ],
    "a local name": [
        """
        def train(self):
            msrl = self.msrl
            msrl.env_reset()
            msrl = 3  # ▶
        """,
    ],
    "an assignment to": [
        """
        def train(self):
            self.msrl = None  # ▶
        """,
    ],
    "an operation that": [
        """
        def train(self):
            td = self.msrl.env_rest()  # ▶
        """,
    ],
    "a decorator": [
        """
        @torch.no_grad()
        def train(self):  # ▶
            self.msrl.env_reset()
        """,
    ],
    "a component call in the head": [
        """
        def train(self):
            with open(self.msrl.replay_buffer_size()):  # ▶
                pass
        """,
        """
        def train(self):
            sizes = {}
            for sizes[self.msrl.replay_buffer_size()] in range(3):  # ▶
                pass
        """,
        """
        def train(self):
            batches = {}
            batches[self.msrl.replay_buffer_size()] = self.msrl.replay_buffer_sample(3)  # ▶
        """,
    ],
    "a component call in the guard": [
        """
        def train(self):
            match self.config.seed:
                case 1 if self.msrl.replay_buffer_size() > 3:  # ▶
                    pass
        """,
    ],
    "`except*`": [
        """
        def train(self):
            try:  # ▶
                self.msrl.env_reset()
            except* ValueError:
                pass
        """,
    ],
    "`nonlocal`": [
        """
        def train(self):
            nonlocal outer  # ▶
            outer = self.msrl.env_reset()
        """,
    ],
    "A > 1: a varying value": [
        """
        def train(self):
            td = self.msrl.env_reset()
            n = int(td["observation"].sum())
            self.msrl.replay_buffer_sample(n)  # ▶
        """,
    ],
    "A > 1: a global call": [
        """
        def train(self):
            td = self.msrl.env_reset()
            if td["done"].any():
                self.msrl.evaluate()  # ▶
        """,
        """
        def train(self):
            td = self.msrl.env_reset()
            while not td["done"].all():
                td = self.msrl.env_step(td)
                self.msrl.log(0, 1)  # ▶
        """,
    ],
    "A > 1: a `return`": [
        """
        def train(self):
            td = self.msrl.env_reset()
            if td["done"].any():  # ▶
                return 3
            self.msrl.env_step(td)
        """,
    ],
    "A > 1: random numbers": [
        """
        def train(self):
            td = self.msrl.env_reset()
            noisy = td["observation"] + torch.rand(1)  # ▶
            self.msrl.log(0, noisy)
        """,
    ],
    "A > 1: module state": [
        """
        def train(self):
            td = self.msrl.env_reset()
            SEEN.append(td["observation"].sum())  # ▶
        """,
        """
        def note(self, n):
            with noted("x"):
                return n + 1

        def train(self):
            td = self.msrl.env_reset()
            n = int(td["observation"].sum())
            n = self.note(n)  # ▶
            self.msrl.log(0, n=n)
        """,
    ],
    "A > 1: a value that a varying object holds": [
        """
        def train(self):
            td = self.msrl.env_reset()
            shared = torch.ones(2)
            held = [td, shared]
            self.msrl.agent_learn(shared)  # ▶
            self.msrl.log(0, held[1])
        """,
    ],
    "A > 1: a nested function": [
        """
        def train(self):
            steps = []

            def push(td):  # ▶
                steps.append(td)

            push(self.msrl.env_reset())
            self.msrl.agent_learn(steps)
        """,
        """
        def train(self):
            steps = []
            push = lambda td: steps.append(td)  # ▶
            push(self.msrl.env_reset())
            self.msrl.agent_learn(steps)
        """,
    ],
}
CASES = [(row, body) for row, bodies in REFUSED.items() for body in bodies]


IDS = [f"{row} {index}" for row, bodies in REFUSED.items() for index in range(len(bodies))]


@pytest.mark.parametrize("row, body", CASES, ids=IDS)
@pytest.mark.parametrize("policy", [Local, SingleLearnerCoarse], ids=lambda policy: policy.name)
def test_refused(row: str, body: str, policy: type, tmp_path: Path) -> None:
    lines = HEADER.splitlines()
    lines += textwrap.indent(textwrap.dedent(body), "    ").splitlines()
    marked = next(number for number, line in enumerate(lines, 1) if "▶" in line)
    file = tmp_path / "mine.py"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(CompileError) as error:
        project(file=str(file), class_name="Mine", policy=policy, actors=2)
    seen = error.value
    assert seen.line == marked, seen
    assert seen.reason and seen.hint, "it says why, and what to write instead"
    shown = str(seen).splitlines()
    assert shown[0].startswith(f"{file}:{marked}:{seen.column + 1}: ")
    assert shown[1].strip() == file.read_text().splitlines()[marked - 1].strip()
    caret = shown[2].index("^")
    assert shown[1][caret : caret + 1].strip(), "the caret stands below something"
    assert not re.search(r"`_\w+\d`", str(seen)), "no name that the user did not write"


@pytest.mark.parametrize("row, body", [case for case in CASES if case[0].startswith("A > 1")])
def test_one_actor_is_not_refused(row: str, body: str, tmp_path: Path) -> None:
    text = textwrap.indent(textwrap.dedent(body), "    ")
    file = tmp_path / "mine.py"
    file.write_text(HEADER + text)
    project(file=str(file), class_name="Mine", policy=SingleLearnerCoarse, actors=1)


def test_every_row_of_the_list_is_tested() -> None:
    table = PAGE.read_text().partition("| refused |")[2]
    rows = re.findall(r"^\| (?!write instead|---)(.*?) \| ", table, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        known = [words for words in (*REFUSED, *ELSEWHERE) if row.startswith(words)]
        assert known, f"no program for: {row}"


# Whole programs ------------------------------------------------------------------------------------------------------
# « stands where the caret has to point. Each program is a trainer that runs: with one actor in one place it does.


@dataclass
class Refused:
    """A program, and what its refusal has to say."""

    body: str
    reason: str
    hint: str
    actors: int = 1
    alone: bool = True
    """Whether the user's own loop runs."""

    def write(self, file: Path) -> tuple[type[Trainer], int, int]:
        """Write it as a trainer `Mine`; returns the class, and line and column of the mark."""
        text = "from toy import ToyTrainer, advance, row\nimport functools\nimport torch\n\n\n"
        text += "def collect(msrl):\n    return msrl.env_reset()\n\n\n"
        text += "def twice(function, *args):\n    function(*args)\n    return function(*args)\n\n\n"
        text += "def traced(method):\n    return functools.wraps(method)(lambda self: method(self))\n\n\n"
        text += "class Mine(ToyTrainer):\n" + textwrap.indent(textwrap.dedent(self.body).strip("\n"), "    ") + "\n"
        before = text[: text.index("«")]
        file.write_text(text.replace("«", ""))
        return import_file(str(file)).Mine, before.count("\n") + 1, len(before.rpartition("\n")[2])


WHOLE = {
    "lambda": Refused(
        """
        def train(self):
            act = «lambda td: self.msrl.agent_act(td)
            self.msrl.env_step(act(self.msrl.env_reset()))
            self.msrl.log(0, 1)
        """,
        "inside a lambda",
        "a method of the trainer",
    ),
    "lambda as an argument": Refused(
        """
        def train(self):
            losses = list(map(«lambda x: self.msrl.agent_learn(x, want="float"), [1, 2, 3]))
            self.msrl.log(0, sum(losses))
        """,
        "inside a lambda",
        "a method of the trainer",
    ),
    "generator expression": Refused(
        """
        def train(self):
            total = sum(«self.msrl.agent_learn(i, want="float") for i in range(3))
            self.msrl.log(0, total)
        """,
        "inside a generator",
        "a list",
    ),
    "generator expression in a name": Refused(
        """
        def train(self):
            tds = («self.msrl.env_reset() for _ in range(2))
            self.msrl.log(0, self.msrl.agent_learn(list(tds)))
        """,
        "inside a generator",
        "a list",
    ),
    "nested function": Refused(
        """
        def train(self):
            def step(td):
                return advance(«self.msrl.env_step(td))

            self.msrl.log(0, self.msrl.agent_learn(step(step(self.msrl.env_reset()))))
        """,
        "inside the nested function `step`",
        "make `step` a method of the trainer",
    ),
    "nested function through an alias": Refused(
        """
        def train(self):
            msrl = self.msrl

            def step(td):
                return advance(«msrl.env_step(td))

            msrl.log(0, msrl.agent_learn(step(msrl.env_reset())))
        """,
        "inside the nested function `step`",
        "make `step` a method of the trainer",
    ),
    "nested function that calls a helper": Refused(
        """
        def train(self):
            def step(td):
                return «self.one(td)

            self.msrl.log(0, self.msrl.agent_learn(step(self.msrl.env_reset())))

        def one(self, td):
            return self.msrl.env_step(td)
        """,
        "inside the nested function `step`",
        "make `step` a method of the trainer",
    ),
    "nested class": Refused(
        """
        def train(self):
            class Stepper:
                def step(_, td):
                    return «self.msrl.env_step(td)

            self.msrl.log(0, self.msrl.agent_learn(Stepper().step(self.msrl.env_reset())))
        """,
        "inside the nested class `Stepper`",
        "a method of the trainer",
    ),
    "async method": Refused(
        """
        def train(self):
            try:
                self.step(self.msrl.env_reset()).send(None)
            except StopIteration as stop:
                self.msrl.log(0, self.msrl.agent_learn(stop.value))

        «async def step(self, td):
            return self.msrl.env_step(td)
        """,
        "`step` is an `async` method",
        "an ordinary method",
    ),
    "generator method": Refused(
        """
        def train(self):
            for td in self.rollouts():
                self.msrl.log(0, self.msrl.agent_learn(td))

        «def rollouts(self):
            for _ in range(2):
                yield self.msrl.env_reset()
        """,
        "`rollouts` is a generator",
        "return a list",
    ),
    "yield from": Refused(
        """
        def train(self):
            for td in self.rollouts():
                self.msrl.log(0, self.msrl.agent_learn(td))

        «def rollouts(self):
            yield from [self.msrl.env_reset(), self.msrl.env_reset()]
        """,
        "`rollouts` is a generator",
        "return a list",
    ),
    "getattr": Refused(
        """
        def train(self):
            for name in ["env_reset"]:
                td = «getattr(self.msrl, name)()
            self.msrl.log(0, self.msrl.agent_learn(td))
        """,
        "getattr",
        "self.msrl.<operation>",
    ),
    "getattr of an alias": Refused(
        """
        def train(self):
            msrl = self.msrl
            reset = «getattr(msrl, "env_reset")
            msrl.log(0, msrl.agent_learn(reset()))
        """,
        "getattr",
        "self.msrl.<operation>",
    ),
    "self.msrl passed on": Refused(
        """
        def train(self):
            td = collect(«self.msrl)
            self.msrl.log(0, self.msrl.agent_learn(td))
        """,
        "`self.msrl` is passed on",
        "directly in a method of the trainer",
    ),
    "an alias of it passed on": Refused(
        """
        def train(self):
            msrl = self.msrl
            td = collect(«msrl)
            msrl.log(0, msrl.agent_learn(td))
        """,
        "`msrl` stands for self.msrl and is passed on",
        "in a method of the trainer",
    ),
    "self.msrl stored in an attribute": Refused(
        """
        def train(self):
            self.calls = «self.msrl
            self.calls.log(0, self.calls.agent_learn(self.calls.env_reset()))
        """,
        "`self.msrl` is passed on",
        "directly in a method of the trainer",
    ),
    "self.msrl stored in a list": Refused(
        """
        def train(self):
            both = [«self.msrl, 3]
            both[0].log(0, both[1])
        """,
        "`self.msrl` is passed on",
        "directly in a method of the trainer",
    ),
    "self.msrl handed to a helper": Refused(
        """
        def train(self):
            self.go(«self.msrl)

        def go(self, msrl):
            msrl.log(0, msrl.agent_learn(msrl.env_reset()))
        """,
        "`self.msrl` is passed on",
        "directly in a method of the trainer",
    ),
    "a bound method passed on": Refused(
        """
        def train(self):
            td = self.msrl.env_reset()
            td = twice(«self.msrl.agent_act, td)
            self.msrl.log(0, self.msrl.agent_learn(td))
        """,
        "`self.msrl.agent_act` is passed on here without being called",
        "self.msrl.agent_act(…)",
    ),
    "a helper passed on": Refused(
        """
        def train(self):
            td = twice(«self.step, self.msrl.env_reset())
            self.msrl.log(0, self.msrl.agent_learn(td))

        def step(self, td):
            return self.msrl.env_step(td)
        """,
        "`self.step`",
        "self.step(…)",
    ),
    "a decorator on train": Refused(
        """
        @traced
        «def train(self):
            self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))
        """,
        "decorated with @traced",
        "without the decorator",
    ),
    "a decorator on a helper": Refused(
        """
        def train(self):
            self.msrl.log(0, self.msrl.agent_learn(self.begin()))

        @torch.no_grad()
        «def begin(self):
            return self.msrl.env_reset()
        """,
        "decorated with @torch.no_grad()",
        "with torch.no_grad():",
    ),
    "a call in an assignment's target": Refused(
        """
        def train(self):
            losses = {}
            losses[«self.msrl.replay_buffer_size()] = self.msrl.agent_learn(self.msrl.env_reset(), want="float")
            self.msrl.log(0, losses[0])
        """,
        "in the target of an assignment",
        "a variable on the line before",
    ),
    "a call in the target of +=": Refused(
        """
        def train(self):
            losses = [0.0]
            losses[«self.msrl.replay_buffer_size()] += self.msrl.agent_learn(self.msrl.env_reset(), want="float")
            self.msrl.log(0, losses[0])
        """,
        "in the target of an assignment",
        "a variable on the line before",
    ),
    "a call in a loop's target": Refused(
        """
        def train(self):
            places = {}
            for places[«self.msrl.replay_buffer_size()] in range(3):
                self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))
        """,
        "in a loop's target",
        "assign inside the loop",
    ),
    "a call in the head of with": Refused(
        """
        def train(self):
            with torch.set_grad_enabled(«self.msrl.replay_buffer_size() > 0):
                self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))
        """,
        "with",
        "line before",
    ),
    "a call in a case guard": Refused(
        """
        def train(self):
            match self.config.seed:
                case 1 if «self.msrl.replay_buffer_size() == 0:
                    self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))
        """,
        "case guard",
        "an if inside the case",
    ),
    "except*": Refused(
        """
        def train(self):
            «try:
                self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))
            except* ValueError:
                pass
        """,
        "`except*`",
        "except",
    ),
    "an unknown operation": Refused(
        """
        def train(self):
            td = «self.msrl.env_rest()
        """,
        "no operation 'env_rest'",
        "did you mean 'env_reset'?",
        alone=False,
    ),
    "an unknown operation inside a call": Refused(
        """
        def train(self):
            td = self.msrl.env_reset()
            self.msrl.log(0, self.msrl.agent_learn(«self.msrl.replay_buffer_smaple(3)))
        """,
        "no operation 'replay_buffer_smaple'",
        "did you mean 'replay_buffer_sample'?",
        alone=False,
    ),
    "msrl and something else": Refused(
        """
        def train(self):
            msrl = self.msrl
            td = msrl.env_reset()
            msrl.log(0, msrl.agent_learn(td))
            «msrl = 3
        """,
        "`msrl` is sometimes `self.msrl` and sometimes something else",
        "use self.msrl directly",
    ),
    "msrl or something else": Refused(
        """
        def train(self):
            msrl = «self.msrl if self.config.seed else None
            msrl.log(0, msrl.agent_learn(msrl.env_reset()))
        """,
        "self.msrl",
        "self.msrl",
    ),
    "self.msrl assigned": Refused(
        """
        def train(self):
            self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))
            «self.msrl = None
        """,
        "`self.msrl` is set by the run",
        "another name",
    ),
    "state on the trainer's class": Refused(
        """
        def train(self):
            self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))
            «type(self).count = 1
        """,
        "`type(self).count` is set on the trainer's class",
        "self.count, set in __init__",
    ),
    "state on the trainer's class, by __class__": Refused(
        """
        def train(self):
            self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))
            «self.__class__.count = 1
        """,
        "`self.__class__.count` is set on the trainer's class",
        "self.count, set in __init__",
    ),
    "varying sample size": Refused(
        """
        def train(self):
            td = self.msrl.env_reset()
            self.msrl.replay_buffer_insert(row(td))
            n = int(td["observation"][0, 0]) % 3 + 1
            self.msrl.log(0, self.msrl.agent_learn(self.msrl.replay_buffer_sample(«n)))
        """,
        "`n` is varying (one value per actor), but `replay_buffer_sample` needs a global one",
        "self.msrl.gather(n)",
        actors=2,
    ),
    "varying step of log": Refused(
        """
        def train(self):
            td = self.msrl.env_reset()
            place = int(td["observation"][0, 0])
            self.msrl.log(«place, self.msrl.agent_learn(td))
        """,
        "`place` is varying",
        "self.msrl.gather(place)",
        actors=2,
    ),
    "schedule of tensors that an actor may change": Refused(
        """
        def train(self):
            td = self.msrl.env_reset()
            for i, e in enumerate(torch.linspace(0, 1, 3)):
                td = self.msrl.agent_act(td, e)
                self.msrl.log(i, self.msrl.agent_learn(td))
            schedule = torch.linspace(0, 1, 3)
            for i, e in enumerate(schedule):
                td = self.msrl.agent_act(td, e)
                self.msrl.log(«i, self.msrl.agent_learn(td))
        """,
        "`i` is varying",
        "float(e) or e.clone() in line",
        actors=2,
    ),
    "varying count of a loop around a global call": Refused(
        """
        def train(self):
            td = self.msrl.env_reset()
            for k in range(int(td["observation"][0, 0]) + 1):
                «self.msrl.agent_learn(k)
            self.msrl.log(0, k)
        """,
        "`agent_learn` is a global call, but line",
        "up to a global number",
        actors=2,
    ),
    "loop over a varying list around a global call": Refused(
        """
        def train(self):
            rows = [self.msrl.env_reset() for _ in range(3)]
            for td in rows:
                «self.msrl.agent_learn(td)
            self.msrl.log(0, 1)
        """,
        "`agent_learn` is a global call, but line",
        "`for n in range(…):` up to a global number, with x[n] in it",
        actors=2,
    ),
    "global call under a varying condition": Refused(
        """
        def train(self):
            td = self.msrl.env_step(self.msrl.env_reset())
            if td["next", "reward"].sum() > 0:
                loss = «self.msrl.agent_learn(td)
            self.msrl.log(0, 1)
        """,
        "`agent_learn` is a global call, but line",
        "self.msrl.all(…)",
        actors=2,
    ),
    "global call under a varying conditional expression": Refused(
        """
        def train(self):
            td = self.msrl.env_step(self.msrl.env_reset())
            loss = «self.msrl.agent_learn(td) if td["next", "reward"].sum() > 0 else None
            self.msrl.log(0, 1)
        """,
        "`agent_learn` is a global call, but line",
        "self.msrl.all(…)",
        actors=2,
    ),
    "global call in a helper under a varying condition": Refused(
        """
        def train(self):
            td = self.msrl.env_step(self.msrl.env_reset())
            if td["next", "reward"].sum() > 0:
                «self.update(td)
            self.msrl.log(0, 1)

        def update(self, td):
            self.msrl.agent_learn(td)
        """,
        "global call",
        "self.msrl.all(…)",
        actors=2,
    ),
    "global call after a varying break": Refused(
        """
        def train(self):
            td = self.msrl.env_reset()
            for k in range(4):
                td = self.msrl.env_step(td)
                if td["next", "done"].any():
                    break
                «self.msrl.replay_buffer_insert(row(td))
                td = advance(td)
            self.msrl.log(0, k)
        """,
        "`replay_buffer_insert` is a global call, but line",
        "self.msrl.all(…)",
        actors=2,
    ),
    "while not done with a global call": Refused(
        """
        def train(self):
            td, done = self.msrl.env_reset(), False
            while not done:
                td = self.msrl.env_step(td)
                «self.msrl.agent_learn(td)
                done = bool(td["next", "done"].any())
                td = advance(td)
            self.msrl.log(0, 1)
        """,
        "`agent_learn` is a global call, but line",
        "self.msrl.all(…)",
        actors=2,
    ),
    "early return under a varying condition": Refused(
        """
        def train(self):
            td = self.msrl.env_step(self.msrl.env_reset())
            «if td["next", "done"].any():
                return 3
            self.msrl.log(0, self.msrl.agent_learn(td))
        """,
        "varying",
        "self.msrl.a",
        actors=2,
    ),
    "break under a varying condition around a global call": Refused(
        """
        def train(self):
            td = self.msrl.env_reset()
            for i in range(3):
                td = self.msrl.env_step(td)
                «self.msrl.agent_learn(td)
                if td["next", "done"].any():
                    break
                td = advance(td)
            self.msrl.log(0, 1)
        """,
        "`agent_learn` is a global call, but line",
        "self.msrl.all(…)",
        actors=2,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_refusal_points_at_the_place_and_says_what_to_write(name: str, tmp_path: Path) -> None:
    case, file = WHOLE[name], tmp_path / f"refused_{IDENTIFIER.sub('_', name)}.py"
    trainer, line, column = case.write(file)
    with pytest.raises(CompileError) as caught:
        launch(trainer, policy="single_learner_coarse", actors=case.actors)
    error, text = caught.value, file.read_text().splitlines()[line - 1]
    assert (error.file, error.line) == (str(file), line), error
    assert case.reason in error.reason
    assert case.hint in error.hint
    shown = str(error).splitlines()
    assert shown[0] == f"{file}:{line}:{error.column + 1}: {error.reason}"
    assert shown[1] == f"    {text}"
    assert shown[2] == " " * (4 + error.column) + "^"
    assert shown[3:-1] == error.notes
    assert shown[-1] == f"write instead: {error.hint}" or "did you mean" in error.hint
    assert error.column == column, f"the caret does not stand below {text[column:]!r}:\n{error}"


def test_a_varying_value_is_traced_to_where_it_comes_from(tmp_path: Path) -> None:
    case = Refused(
        """
        def train(self):
            td = self.msrl.env_reset()
            rows = []
            for _ in range(2):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                rows.append(td["next", "reward"])
            n = self.count(rows)
            self.msrl.evaluate(«n)

        def count(self, rows):
            self.msrl.log(0, 1)
            return len(rows)
        """,
        "`n` is varying",
        "self.msrl.all(len(x) == n)",
        actors=2,
    )
    trainer, *_ = case.write(tmp_path / "traced.py")
    with pytest.raises(CompileError) as caught:
        launch(trainer, policy="local", actors=2)
    notes, text = caught.value.notes, (tmp_path / "traced.py").read_text().splitlines()
    for note, line in zip(
        notes, ("n = self.count", "return len", "n = self.count", "rows.append", "td = "), strict=True
    ):
        number = int(note.partition("line ")[2].partition(":")[0])
        assert line in text[number - 1] and line in note, notes
    assert case.hint in caught.value.hint


@pytest.mark.parametrize("name", [name for name in WHOLE if WHOLE[name].alone])
def test_what_is_refused_runs_in_one_place(name: str, tmp_path: Path) -> None:
    trainer, _, _ = WHOLE[name].write(tmp_path / f"alone_{IDENTIFIER.sub('_', name)}.py")
    assert launch(trainer, policy="local").history


@pytest.mark.parametrize("name", [name for name in WHOLE if WHOLE[name].actors > 1])
@pytest.mark.parametrize("policy", ["single_learner_coarse", "single_learner_fine"])
def test_what_is_refused_for_two_actors_is_right_for_one(name: str, policy: str, tmp_path: Path) -> None:
    trainer, _, _ = WHOLE[name].write(tmp_path / f"one_{IDENTIFIER.sub('_', name)}.py")
    assert_policies_equal(trainer, policies=[policy])


def test_every_policy_refuses_alike(tmp_path: Path) -> None:
    """`local` with two actors as well: what a program means does not depend on the policy."""
    said = set()
    trainer, _, _ = WHOLE["while not done with a global call"].write(tmp_path / "alike.py")
    for policy in ("local", "single_learner_coarse", "sharded_replay", "single_learner_fine"):
        with pytest.raises(CompileError) as caught:
            launch(trainer, policy=policy, actors=2)
        said.add(str(caught.value))
    assert len(said) == 1


# Not a matter of one line --------------------------------------------------------------------------------------------


def test_no_source_to_read() -> None:
    space: dict[str, object] = {}
    exec(
        "from toy import ToyTrainer\nclass Made(ToyTrainer):\n"
        "    def train(self): self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))\n",
        space,
    )
    made = space["Made"]
    assert launch(made, policy="local").history
    with pytest.raises(CompileError, match="no source to read for class Made") as caught:
        launch(made, policy="single_learner_coarse")
    assert "exec" in caught.value.hint and "file" in caught.value.hint


def test_nonlocal_in_a_method() -> None:
    total = 0

    class Inner(ToyTrainer):
        def train(self):
            nonlocal total
            total += self.msrl.agent_learn(self.msrl.env_reset(), want="float")
            self.msrl.log(0, total)

    assert launch(Inner, policy="local").history and total > 0
    with pytest.raises(CompileError, match="`nonlocal` cannot be projected") as caught:
        launch(Inner, policy="single_learner_coarse")
    line = inspect.getsourcelines(Inner.train)[1] + 1
    assert (caught.value.file, caught.value.line, caught.value.column) == (__file__, line, 12)
    assert caught.value.hint == "an attribute of self"


def test_a_trainer_without_train(tmp_path: Path) -> None:
    file = tmp_path / "without_train.py"
    file.write_text("from toy import ToyTrainer\n\n\nclass Empty(ToyTrainer):\n    def other(self):\n        pass\n")
    trainer = import_file(str(file)).Empty
    for attempt in (
        lambda: launch(trainer, policy="single_learner_coarse"),
        lambda: project(file=str(file), class_name="Empty", policy=SingleLearnerCoarse),
    ):
        with pytest.raises(CompileError, match="Empty has no `train` method") as caught:
            attempt()
        assert (caught.value.file, caught.value.line, caught.value.column) == (str(file), 4, 0)
        assert "class Empty(ToyTrainer):\n    ^" in str(caught.value)
        assert "def train(self)" in caught.value.hint


def test_a_file_that_does_not_parse(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("from fdg import Trainer\n\nclass Mine(Trainer):\n    def train(self) pass\n")
    with pytest.raises(CompileError, match="does not parse") as caught:
        project(file=str(file), class_name="Mine", policy=SingleLearnerCoarse)
    assert (caught.value.file, caught.value.line) == (str(file), 4)
    shown = str(caught.value).splitlines()
    assert shown[0].startswith(f"{file}:4:")
    assert shown[1] == "        def train(self) pass"
    assert shown[2] == " " * shown[1].index("pass") + "^"


def test_a_class_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "other_name.py"
    file.write_text("from fdg import Trainer\n\nclass Mine(Trainer):\n    def train(self):\n        pass\n")
    with pytest.raises(UsageError, match=r"no class 'Mime'.*did you mean 'Mine'"):
        project(file=str(file), class_name="Mime", policy=SingleLearnerCoarse)
    with pytest.raises(UsageError, match=r"nowhere\.py"):
        project(file=str(tmp_path / "nowhere.py"), class_name="Mine", policy=SingleLearnerCoarse)


class Normalising(ToyLearner):
    """Subtracts the mean of its rows."""

    def learn(self, rows):
        x = rows["observation"]
        return super().learn(x - x.mean(0))


class BatchStatistics(ToyTrainer):
    def agent(self, spec):
        agent = super().agent(spec)
        return Agent(agent.actor, Normalising(agent.learner.net, agent.learner.shift))

    def train(self):
        self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset())["loss"])


def test_statistics_of_the_rows_at_hand() -> None:
    """Several learners have some rows each; one learner has all of them."""
    assert launch(BatchStatistics, policy="single_learner_coarse").history
    with pytest.raises(CompileError) as caught:
        launch(BatchStatistics, policy="multi_learner")
    seen, line = caught.value, inspect.getsourcelines(Normalising.learn)[1] + 2
    assert (seen.file, seen.line, seen.hint) == (__file__, line, "self.mean(x)")
    assert seen.source[seen.column :].startswith("x.mean(0)") and "statistic of the rows at hand" in seen.reason


class KeepsItsNet(ToyTrainer):
    """Keeps a part of the agent, and does not look at it while training."""

    def agent(self, spec):
        agent = super().agent(spec)
        self.net = agent.actor.net
        return agent

    def train(self):
        self.msrl.log(0, self.msrl.agent_learn(self.msrl.env_reset()))


class UsesItsNet(KeepsItsNet):
    """Looks at it."""

    def train(self):
        super().train()
        self.msrl.log(0, norm=self.size())

    def size(self):
        return float(self.net.values.sum())


def test_a_part_of_the_agent_used_while_training() -> None:
    """It would be a second copy, so it is refused, wherever the agent is elsewhere; kept but not used, it is fine."""
    assert launch(UsesItsNet, policy="local").history
    with pytest.raises(UsageError) as caught:
        launch(UsesItsNet, policy="single_learner_coarse")
    said, line = str(caught.value), inspect.getsourcelines(UsesItsNet.size)[1] + 1
    assert f"{__file__}:{line}:" in said and "`self.net` is part of the agent" in said and "Learner.learn" in said
    assert f"    {linecache.getline(__file__, line).rstrip()}\n" + " " * (4 + 21) + "^" in said
    assert_policies_equal(KeepsItsNet)
