"""Lists of steps under a policy that acts and steps in different places: the list stays, whatever it shares with a step.

Bytes are counted, not seconds: what crosses grows with the number of steps, not with its square. And every way in which
a step that is in a list can change, by the actor, the environments or the program, must show in the list.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import mismatches, run_reference
from tensordict import TensorDictBase
from toy import ToyActor, ToyConfig, ToyLearner, ToyNet, ToyTrainer

from fdg.algorithms.a2c import A2C
from fdg.algorithms.ppo import PPO
from fdg.algorithms.reinforce import REINFORCE
from fdg.api import Agent, pure
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import Result, launch

FINE = "single_learner_fine"


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with forkserver():
        yield


@dataclass
class Steps(ToyConfig):
    """A toy experiment with a number of steps."""

    steps: int = 3
    """Steps of each environment in an iteration."""


class Scribbler(ToyActor):
    """Writes into the tensors that it is given, before it acts; told so, acts on a copy of what it wrote into."""

    def act(self, td: TensorDictBase, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        td["observation"].add_(1)
        if "done" in td.keys():  # noqa: SIM118
            td["done"].logical_not_()
        return super().act(td.clone() if copy else td, *args, **kwargs)


class Scribbled(ToyTrainer):
    """Trainers whose actor scribbles; a subclass writes `train`."""

    config: Steps

    def agent(self, spec: Any) -> Agent:
        net, shift = ToyNet(), torch.zeros(4, dtype=torch.float64)
        return Agent(actor=Scribbler(net, shift), learner=ToyLearner(net, shift))


@pure
def onward(td: TensorDictBase) -> TensorDictBase:
    """The root of the next step, which shares its tensors with the step before."""
    root = td.exclude("next", "action")
    then = td["next"]
    root["observation"], root["done"] = then["observation"], then["done"]
    return root


class Box:
    """An object of the user's own, which hides what is in it."""

    def __init__(self, td: TensorDictBase) -> None:
        self.observation = td["observation"]


# Programs ------------------------------------------------------------------------------------------------------------


class EarlierSteps(Scribbled):
    """The actor writes into tensors of the step before, which is in the list."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = []
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                steps.append(td)
                td = onward(td)
            loss = self.msrl.agent_learn(steps)
            self.msrl.log(i, loss)


class CopiesReturned(Scribbled):
    """The actor changes what it is given and returns another object; what it was given is in the list."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = []
            for _ in range(self.config.steps):
                steps.append(td)
                td = self.msrl.agent_act(td, copy=True)
                td = self.msrl.env_step(td)
                steps.append(td)
                td = onward(td)
            loss = self.msrl.agent_learn(steps)
            self.msrl.log(i, loss)


class ListOverIterations(Scribbled):
    """A list that is never emptied, and whose beginning the program changes between two steps."""

    def train(self):
        td = self.msrl.env_reset()
        steps = [td]
        for i in range(self.config.iterations):
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                steps[0]["observation"].add_(2)
                td = self.msrl.env_step(td)
                with contextlib.nullcontext():  # keeps this at the driver
                    steps[-1]["observation"] = steps[-1]["observation"] * 2
                    steps[0]["observation"].mul_(3).remainder_(1009)
                steps.append(td)
                td = onward(td)
            loss = self.msrl.agent_learn(steps)
            self.msrl.log(i, loss)


class Twice(Scribbled):
    """One step, twice in one list and once in another; one list under two names; a length that is read on the way."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = other = []
            again = []
            for _ in range(self.config.steps):
                steps.append(td)
                td = self.msrl.agent_act(td)
                other.append(td)
                td = self.msrl.env_step(td)
                steps.append(td)
                again.append(td)
                other.append(td)
                if len(again) % 2:
                    td = onward(td)
            loss = self.msrl.agent_learn(steps, other, again)
            self.msrl.log(i, loss)


class Nested(Scribbled):
    """Lists in lists and dicts, under names of their own."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps, pairs = [], []
            book = {"steps": steps, "pairs": pairs, "last": [td]}
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                steps.append(td)
                pairs.append([td, {"step": td, "observation": td["observation"]}])
                book["last"][0] = td
                td = onward(td)
            loss = self.msrl.agent_learn(book["steps"], book["pairs"], book["last"])
            self.msrl.log(i, loss)


class InnerTensorDicts(Scribbled):
    """What `td["next"]` was is in the list, while `td` gets another `next`, and entries of it change."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps, inner = [], []
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                inner.append(td["next"])
                td["next"]["observation"] = td["next"]["observation"] + 1
                steps.append(td)
            loss = self.msrl.agent_learn(steps, inner)
            self.msrl.log(i, loss)


class Views(Scribbled):
    """Parts of the tensors that the actor writes into."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            parts, turned = [], []
            for _ in range(self.config.steps):
                parts.append(td["observation"][:, :1])
                turned.append(td["observation"].flip(0))
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                parts.append(td["next", "observation"][:, 1:])
                td = onward(td)
            loss = self.msrl.agent_learn(parts, turned)
            self.msrl.log(i, loss)


class Attributes(Scribbled):
    """Lists that are attributes of the trainer, one filled by a method."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[Any] = []
        self.kept: list[Any] = []

    def keep(self, td: Any) -> None:
        self.kept.append(td)

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            self.steps = []
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                self.keep(td)
                td = self.msrl.env_step(td)
                self.steps.append(td)
                td = onward(td)
            loss = self.msrl.agent_learn(self.steps, self.kept)
            self.msrl.log(i, loss)


class Helpers(Scribbled):
    """A helper acts and steps, and does not know the list."""

    def advance(self, td: Any) -> Any:
        td = self.msrl.agent_act(td)
        return self.msrl.env_step(td)

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = []
            for _ in range(self.config.steps):
                steps.append(td)
                td = self.advance(td)
                steps.append(td)
                td = onward(td)
            loss = self.msrl.agent_learn(steps)
            self.msrl.log(i, loss)


class Boxes(Scribbled):
    """Tensors of the steps are in objects that cannot be looked into."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = []
            box = Box(td)
            for _ in range(self.config.steps):
                box.observation.add_(1)
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                steps.append(td)
                td = onward(td)
                box.observation = td["observation"]
            loss = self.msrl.agent_learn(steps)
            self.msrl.log(i, loss)


class BoxedSteps(Scribbled):
    """A TensorDict, and a view of a tensor in it, are in objects that cannot be looked into."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = []
            box, row = Box(td), Box(td)
            for _ in range(self.config.steps):
                box.step, row.observation = td, td["observation"][:1]
                box.step["observation"].add_(1)
                row.observation.mul_(2)
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                steps.append(td)
                td = onward(td)
            loss = self.msrl.agent_learn(steps)
            box.step["observation"].add_(1)
            row.observation.mul_(2)
            self.msrl.log(i, loss)


class Memory:
    """An object of the user's own whose methods have names that tensors and sets have too."""

    def __init__(self) -> None:
        self.steps: list[TensorDictBase] = []
        self.last: Any = None

    def add(self, td: TensorDictBase) -> None:
        self.steps.append(td)
        self.last = td["observation"]

    def take(self) -> list[TensorDictBase]:
        taken, self.steps = self.steps, []
        return taken


class Memories(Scribbled):
    """Steps are kept by an object of the user's own, over iterations."""

    def train(self):
        td = self.msrl.env_reset()
        memory = Memory()
        for i in range(self.config.iterations):
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                memory.add(td)
                td = onward(td)
                memory.last.add_(1)
            loss = self.msrl.agent_learn(memory.take())
            self.msrl.log(i, loss)


class Tally:
    """An object whose method has the name of one that only reads."""

    def __init__(self) -> None:
        self.n = 0

    def count(self) -> None:
        self.n += 1


class Tallies(Scribbled):
    """Steps are counted by an object of the user's own."""

    def train(self):
        td = self.msrl.env_reset()
        tally = Tally()
        for i in range(self.config.iterations):
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                tally.count()
                td = self.msrl.env_step(td)
                td = onward(td)
            self.msrl.log(i, n=tally.n)


class Scaled(Scribbled):
    """A nested function changes what it is given, and only reads what it refers to."""

    def train(self):
        scale = [2.0]

        def scaled(x):
            x.mul_(scale[0])

        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            td = self.msrl.agent_act(td)
            scaled(td["observation"])
            td = self.msrl.env_step(td)
            loss = self.msrl.agent_learn(td)
            td = onward(td)
            self.msrl.log(i, loss)


class Discarded(Scribbled):
    """Nobody reads a result that may share parts with what is changed after it."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            first = td
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                old = Box(first)
                td = self.msrl.env_step(td)
                loss = self.msrl.agent_learn(td)
                old.observation.add_(1)
                td["observation"].add_(3)
                td = onward(td)
            loss = self.msrl.agent_learn(first)
            self.msrl.log(i, loss)


class Unwound(Scribbled):
    """Steps are taken from the list again, and changed there."""

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = []
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                steps.append(td)
                td = onward(td)
            for _ in range(self.config.steps):
                last = steps.pop()
                last = self.msrl.agent_act(last)
                loss = self.msrl.agent_learn(last)
            self.msrl.log(i, loss)


PROGRAMS = [
    EarlierSteps, CopiesReturned, ListOverIterations, Twice, Nested, InnerTensorDicts, Views, Attributes, Helpers, Boxes,
    BoxedSteps, Memories, Tallies, Scaled, Discarded, Unwound,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("actors", [1, 2])
def test_what_is_in_a_list_changes_with_the_step(program: type[Scribbled], actors: int) -> None:
    config = Steps(actors=actors)
    outcome = run_reference(program, config)
    for policy in (FINE, "single_learner_coarse", "sharded_replay"):
        found = mismatches(outcome, launch(program, config, policy=policy), program)
        assert not found, f"{policy}: {found[0]}"
    found = mismatches(outcome, launch(program, config, policy=FINE, engine="process", workers=actors), program)
    assert not found, f"in processes: {found[0]}"


# Bytes ---------------------------------------------------------------------------------------------------------------


def per_frame(result: Result) -> float:
    """Bytes that crossed for each frame."""
    return sum(result.metrics["bytes"].values()) / result.metrics["frames"]


def assert_linear(few: Result, many: Result) -> None:
    assert many.metrics["frames"] > 3 * few.metrics["frames"], "four times as many, or so"
    assert per_frame(many) < 1.2 * per_frame(few), (few.metrics["bytes"], many.metrics["bytes"])


@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("program", [A2C, PPO, EarlierSteps, CopiesReturned, Views], ids=lambda p: p.__name__)
def test_bytes_grow_with_the_number_of_steps(program: Any, actors: int) -> None:
    config = {} if issubclass(program, Scribbled) else {"envs": 2}
    few, many = (launch(program, policy=FINE, actors=actors, iterations=1, steps=n, **config) for n in (8, 32))
    assert_linear(few, many)


@pytest.mark.parametrize("actors", [1, 2])
def test_bytes_grow_with_the_length_of_episodes(actors: int) -> None:
    few, many = (
        launch(REINFORCE, policy=FINE, actors=actors, envs=1, iterations=1, episodes_per_iter=n) for n in (2, 10)
    )
    assert_linear(few, many)


@pytest.mark.parametrize("actors", [1, 2])
def test_the_readmes_program(actors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    found = re.search(r"<!-- file: mine.py -->\n```python\n(.*?)```", readme, re.S)
    assert found is not None and "range(200)" in found[1]
    monkeypatch.syspath_prepend(tmp_path)
    results = []
    for steps in (10, 40):
        (tmp_path / f"mine{steps}.py").write_text(found[1].replace("range(200)", f"range({steps})"))
        program = importlib.import_module(f"mine{steps}").Mine
        expected = launch(program, actors=actors, envs=2, iterations=2)
        results.append(launch(program, policy=FINE, actors=actors, envs=2, iterations=2))
        assert results[-1].params_sha256 == expected.params_sha256
    assert_linear(*results)
