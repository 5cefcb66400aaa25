"""Checkpoints and what they are for: a run goes on to the same result, wherever it goes on and whatever was lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_execution import QLike
from toy import ToyLearner

from fdg.algorithms.dqn import DQN
from fdg.algorithms.reinforce import REINFORCE
from fdg.api import Agent
from fdg.errors import CheckpointError, RunError
from fdg.runtime import process, recovery
from fdg.runtime.boundary import Stop
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import Result, launch

COARSE, SHARDED, FINE = "single_learner_coarse", "sharded_replay", "single_learner_fine"
TOY: dict[str, Any] = dict(actors=2, replay_shards=2, iterations=8, seed=4)
PLACES = [("local", "inprocess"), (COARSE, "inprocess"), (SHARDED, "process")]


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with forkserver():
        yield


@pytest.fixture(scope="module")
def expected() -> Result:
    return launch(QLike, policy="local", **TOY)


def same(expected: Result, seen: Result) -> None:
    assert seen.params_sha256 == expected.params_sha256
    assert [row["values"] for row in seen.history] == [row["values"] for row in expected.history]
    assert (seen.metrics["frames"], seen.metrics["episodes"]) == (
        expected.metrics["frames"],
        expected.metrics["episodes"],
    )


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("*.fdg"))


@pytest.mark.parametrize("policy, engine", PLACES)
def test_a_run_goes_on_wherever_it_is_resumed(policy: str, engine: str, expected: Result, tmp_path: Path) -> None:
    same(expected, launch(QLike, policy=policy, engine=engine, checkpoint_every=3, folder=tmp_path, **TOY))
    for other, place in PLACES:
        same(expected, launch(QLike, policy=other, engine=place, resume=checkpoints(tmp_path)[0]))


def test_one_actor_under_local_has_boundaries_too(tmp_path: Path) -> None:
    settings = {**TOY, "actors": 1}
    expected = launch(QLike, policy="local", **settings)
    same(expected, launch(QLike, policy="local", checkpoint_every=3, folder=tmp_path, **settings))
    for file in checkpoints(tmp_path):
        same(expected, launch(QLike, policy="local", resume=file))
        same(expected, launch(QLike, policy=COARSE, resume=file))


def test_a_finished_run_goes_on_with_more_iterations(tmp_path: Path) -> None:
    launch(QLike, policy=COARSE, checkpoint_every=100, folder=tmp_path, **{**TOY, "iterations": 3})
    expected = launch(QLike, policy="local", **TOY)
    same(expected, launch(QLike, policy=COARSE, resume=tmp_path, iterations=TOY["iterations"]))


def test_dqn_with_a_torchrl_loss(tmp_path: Path) -> None:
    small = dict(iterations=6, actors=2, replay_shards=2, seed=7, learning_starts=16, updates=2, steps=4)
    expected = launch(DQN, policy="local", **small)
    launch(DQN, policy=SHARDED, engine="process", checkpoint_every=2, folder=tmp_path, **small)
    same(expected, launch(DQN, policy=COARSE, engine="process", workers=1, resume=checkpoints(tmp_path)[0]))


class Other(QLike):
    """Other code."""

    def train(self):
        for i in range(self.config.iterations):
            self.msrl.env_reset()
            self.msrl.log(i)


def test_foreign_and_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    launch(QLike, policy=COARSE, checkpoint_every=3, folder=tmp_path, **TOY)
    with pytest.raises(CheckpointError, match="checkpoint of QLike, not of Other"):
        launch(Other, policy=COARSE, resume=tmp_path)
    changed = type("QLike", (Other,), {"__module__": Other.__module__})
    with pytest.raises(CheckpointError, match="other code"):
        launch(changed, policy=COARSE, resume=tmp_path)
    file = checkpoints(tmp_path)[-1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError):
        launch(QLike, policy=COARSE, resume=file)


class Gentle(ToyLearner):
    """As the toy's, by other code."""


class GentleTrainer(QLike):
    def agent(self, spec: Any) -> Agent:
        agent = super().agent(spec)
        return Agent(agent.actor, Gentle(agent.actor.net, agent.actor.shift))


def test_another_learner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(GentleTrainer, policy=COARSE, checkpoint_every=3, folder=tmp_path, **TOY)
    launch(GentleTrainer, policy=COARSE, resume=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "agent_hash", lambda agent: "of another")
        with pytest.raises(CheckpointError, match="other code of ToyActor or Gentle"):
            launch(GentleTrainer, policy=COARSE, resume=tmp_path)


def test_the_code_of_actor_and_learner_has_a_name() -> None:
    one, other = (object.__new__(kind) for kind in (ToyLearner, Gentle))
    assert recovery.agent_hash(Agent(None, one)) == recovery.agent_hash(Agent(None, one))  # type: ignore[arg-type]
    assert recovery.agent_hash(Agent(None, one)) != recovery.agent_hash(Agent(None, other))  # type: ignore[arg-type]


def test_checkpoints_are_called_by_the_turns_done(tmp_path: Path) -> None:
    launch(QLike, policy=COARSE, checkpoint_every=3, folder=tmp_path, **TOY)
    assert [file.stem for file in checkpoints(tmp_path)] == ["00000006", "00000008"]


# Losing workers -------------------------------------------------------------------------------------------------------


class Killer:
    """Sends a signal to one of the workers at some moment of an iteration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worker: str, at: int, delay: float, number: int) -> None:
        self.worker, self.at, self.delay, self.number = worker, at, delay, number
        self.engines: list[process.Processes] = []
        start = process.Processes.__init__

        def starting(engine: process.Processes, *arguments: Any) -> None:
            self.engines.append(engine)
            start(engine, *arguments)

        monkeypatch.setattr(process.Processes, "__init__", starting)

    def on_start(self, *_: Any) -> None: ...

    def on_log(self, row: dict[str, Any]) -> None:
        if row["iteration"] == self.at:
            pid = next(remote.pid for remote in self.engines[-1].remotes if remote.name == self.worker)
            if self.delay:
                threading.Timer(self.delay, os.kill, (pid, self.number)).start()
            else:
                os.kill(pid, self.number)

    def on_end(self, *_: Any) -> None: ...


@pytest.mark.parametrize("turn", range(20))
def test_a_killed_worker_is_replaced(turn: int, expected: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty kills of actors, shards and the learner: no row is lost or doubled, the result is the same."""
    chance = random.Random(turn)
    worker = ("actors[0]", "replay[1]", "actors[1]", "replay[0]", "learner")[turn % 5]
    killer = Killer(monkeypatch, worker, chance.randrange(1, 7), chance.random() * 0.01 * (turn % 3), signal.SIGKILL)
    said: list[str] = []
    result = launch(
        QLike,
        policy=SHARDED,
        engine="process",
        checkpoint_every=chance.choice([0, 2]),
        observers=[killer],
        notice=said.append,
        **TOY,
    )
    same(expected, result)
    if len(killer.engines) > 1:
        assert worker in said[0] and "SIGKILL" in said[0]
    else:
        assert killer.delay, "a worker that is killed at once is replaced"


def test_observers_see_each_row_once(expected: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(monkeypatch, "learner", 5, 0, signal.SIGKILL)
    rows: list[int] = []

    class Watch:
        def on_start(self, *_: Any) -> None:
            rows.append(-1)

        def on_log(self, row: dict[str, Any]) -> None:
            rows.append(row["iteration"])

        def on_end(self, *_: Any) -> None: ...

    launch(QLike, policy=COARSE, engine="process", observers=[killer, Watch()], notice=lambda _: None, **TOY)
    assert rows == [-1, *range(TOY["iterations"])] and len(killer.engines) == 2


def test_a_stopped_worker_is_named_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(monkeypatch, "actors[1]", 3, 0, signal.SIGSTOP)
    with pytest.raises(RunError, match=r"actors\[1\].*no sign of life.*actors → replay `rows1`"):
        launch(QLike, policy=SHARDED, engine="process", deadline=2.0, observers=[killer], **TOY)


def test_a_worker_that_always_dies_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Always(Killer):
        def on_log(self, row: dict[str, Any]) -> None: ...

    killer = Always(monkeypatch, "learner", 0, 0, signal.SIGKILL)
    perform = process.Processes.call

    def dying(engine: process.Processes, tasks: Any) -> Any:
        os.kill(engine.remotes[-1].pid, signal.SIGKILL)
        return perform(engine, tasks)

    monkeypatch.setattr(process.Processes, "call", dying)
    with pytest.raises(RunError, match="SIGKILL"):
        launch(QLike, policy=COARSE, engine="process", notice=lambda _: None, **TOY)
    assert 1 < len(killer.engines) < 20


def test_ctrl_c_stops_with_a_checkpoint(expected: Result, tmp_path: Path) -> None:
    class Interrupt:
        def on_start(self, *_: Any) -> None: ...

        def on_log(self, row: dict[str, Any]) -> None:
            if row["iteration"] == 3:
                os.kill(os.getpid(), signal.SIGINT)

        def on_end(self, *_: Any) -> None: ...

    said: list[str] = []
    with pytest.raises(Stop):
        launch(QLike, policy=COARSE, folder=tmp_path, observers=[Interrupt()], notice=said.append, **TOY)
    assert "Ctrl-C again" in said[0]
    same(expected, launch(QLike, policy=SHARDED, resume=tmp_path))


DRIVER = """
import sys
from fdg.algorithms.dqn import DQN
from fdg.algorithms.reinforce import REINFORCE
from fdg.algorithms.reinforce import REINFORCE
from fdg.runtime.run import launch

class Watch:
    def on_start(self, *_): pass
    def on_log(self, row): print(row["iteration"], flush=True)
    def on_end(self, *_): pass

launch({trainer}, policy={policy!r}, engine="process", checkpoint_every=1, folder={folder!r}, observers=[Watch()], **{settings!r})
"""
PRIORITIZED = dict(iterations=12, actors=2, replay_shards=2, envs=4, steps=4, updates=2, learning_starts=16)
CHEETAH = dict(env="HalfCheetah-v5", iterations=4, actors=2, envs=1, episodes_per_iter=2, hidden_dim=16)


@pytest.mark.parametrize(
    "trainer, settings, policy, other",
    [
        (DQN, {**PRIORITIZED, "batch_size": 16, "prioritized": True, "env": "CartPole-v1"}, SHARDED, COARSE),
        (REINFORCE, CHEETAH, COARSE, "local"),
    ],
)
def test_a_killed_driver_is_resumed(trainer: Any, settings: Any, policy: str, other: str, tmp_path: Path) -> None:
    expected = launch(trainer, policy=other, **settings)
    text = DRIVER.format(trainer=trainer.__name__, policy=policy, folder=str(tmp_path), settings=settings)
    driver = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    while driver.stdout.readline().strip() != str(settings["iterations"] // 2):
        assert driver.poll() is None
    driver.kill()
    driver.wait()
    assert checkpoints(tmp_path)
    same(expected, launch(trainer, policy=policy, engine="process", resume=tmp_path))
    same(expected, launch(trainer, policy=other, resume=tmp_path))
