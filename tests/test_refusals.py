"""Every row of the list of refusals in docs/writing-algorithms.md, as a program: refused, at the line marked ▶."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from fdg.compiler import project
from fdg.errors import CompileError
from fdg.policies import Local, SingleLearnerCoarse

PAGE = Path(__file__).parent.parent / "docs" / "writing-algorithms.md"
ELSEWHERE = ("a part of the agent", "a class without source")  # seen only at launch, or only for class objects

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
    "`self.msrl`, or": [
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
            match self.config.seed:  # ▶
                case 1 if self.msrl.replay_buffer_size() > 3:
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
    "A > 1: a helper": [
        """
        def train(self):
            out = []
            self.fill(out)  # ▶
            self.msrl.agent_learn(out)

        def fill(self, out):
            out.append(self.msrl.env_reset())
            self.msrl.log(0, 1)
        """,
    ],
}
CASES = [(row, body) for row, bodies in REFUSED.items() for body in bodies]


IDS = [f"{row} {index}" for row, bodies in REFUSED.items() for index in range(len(bodies))]


@pytest.mark.parametrize("row, body", CASES, ids=IDS)
@pytest.mark.parametrize("policy", [Local, SingleLearnerCoarse], ids=lambda policy: policy.name)
def test_refused(row: str, body: str, policy: type, tmp_path: Path) -> None:
    lines = ["import torch", "from fdg import Trainer", "", "", "class Mine(Trainer):"]
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
    file.write_text(f"from fdg import Trainer\n\n\nclass Mine(Trainer):\n{text}")
    project(file=str(file), class_name="Mine", policy=SingleLearnerCoarse, actors=1)


def test_every_row_of_the_list_is_tested() -> None:
    table = PAGE.read_text().partition("| refused |")[2]
    rows = re.findall(r"^\| (?!write instead|---)(.*?) \| ", table, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        known = [words for words in (*REFUSED, *ELSEWHERE) if row.startswith(words)]
        assert known, f"no program for: {row}"
