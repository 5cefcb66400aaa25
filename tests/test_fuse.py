"""Fused actors: what may run in one batch, and that nothing but the batch changes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from toy import ToyTrainer, flags, make_spec
from typer.testing import CliRunner

from fdg import Actor, Agent, Learner, step_mdp
from fdg.algorithms.dqn import DQN
from fdg.algorithms.reinforce import REINFORCE
from fdg.cli import app
from fdg.compiler import project
from fdg.errors import CheckpointError
from fdg.graph import Graph
from fdg.registry import find_policy
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import launch

COARSE, SHARDED, FINE = "single_learner_coarse", "sharded_replay", "single_learner_fine"
SMALL: dict[str, Any] = dict(
    actors=4, envs=2, iterations=4, steps=6, updates=2, batch_size=16, learning_starts=32, hidden_dim=8
)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with forkserver():
        yield


class RowEnvironment:
    """Every row tells its number and the number of the step."""

    def __init__(self, envs: int, seed: int) -> None:
        self.envs, self.spec, self.frames, self.time = envs, make_spec(envs), 0, 0

    def look(self) -> torch.Tensor:
        return torch.stack([torch.arange(self.envs), torch.full((self.envs,), self.time)], -1).double()

    def reset(self, seed: int | None = None) -> TensorDict:
        self.time = 0
        return TensorDict({"observation": self.look(), **flags(self.envs)}, [self.envs], names=["env"])

    def step(self, td: Any) -> Any:
        self.time += 1
        self.frames += self.envs
        reward = td["action"][:, None].double()
        then = {"observation": self.look(), "reset_observation": self.look(), "reward": reward, **flags(self.envs)}
        td["next"] = TensorDict(then, [self.envs], names=["env"])
        return td

    def drain_episodes(self) -> list[tuple[float, int]]:
        return []

    def close(self) -> None:
        pass


class SameRows(RowEnvironment):
    """Every row is the same, so that actors cannot be told apart."""

    def look(self) -> torch.Tensor:
        return torch.full((self.envs, 2), float(self.time)).double()


class Counter(Actor):
    """Acts on the observation alone, and counts its batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def act(self, td: Any, bonus: float = 0.0) -> Any:
        self.batches.append(len(td))
        td["action"] = (td["observation"].sum(-1) + bonus).long() % 4
        return td

    evaluate = act


class Spy(Learner):
    """Keeps what it is given."""

    def learn(self, *seen: Any) -> Any:
        return [item.clone() if hasattr(item, "clone") else item for item in seen]


class Spied(ToyTrainer):
    """A trainer that tells what its learner saw."""

    def agent(self, spec: Any) -> Agent:
        return Agent(Counter(), Spy())


class Steps(Spied):
    """Lists of steps, stacked; values computed row by row; a value that stays with the actors from turn to turn."""

    def train(self) -> Any:
        td = self.msrl.env_reset()
        seen, total = [], 0
        for i in range(self.config.iterations):
            steps = []
            for _ in range(3):
                td = self.msrl.agent_act(td, float(i))
                td = self.msrl.env_step(td)
                reward = td["next", "reward"].squeeze(-1)
                td["twice"] = 2 * reward + torch.where(reward > 1, reward, torch.zeros_like(reward))
                total = total + reward
                steps.append(td)
                td = step_mdp(td)
            seen.append(self.msrl.agent_learn(torch.stack(steps), total))
        return seen


class Inserts(Spied):
    """Rows into the buffer and out again."""

    def train(self) -> Any:
        td = self.msrl.env_reset()
        for _ in range(self.config.iterations):
            td = self.msrl.agent_act(td)
            td = self.msrl.env_step(td)
            self.msrl.replay_buffer_insert(td)
            td = step_mdp(td)
        return self.msrl.agent_learn(self.msrl.replay_buffer_sample(64))


def touch(td: Any) -> Any:
    """Nothing is known of it, so it runs at the driver."""
    os.getpid()
    td["touched"] = td["observation"].clone()
    return td


class Touched(Spied):
    """Objects that the driver changed are changed by the actors, and seen under all their names."""

    def train(self) -> Any:
        td = self.msrl.env_reset()
        first = td
        for _ in range(self.config.iterations):
            td = touch(td)
            before = td
            td = self.msrl.agent_act(td)
            td["after"] = td["touched"] + 1
            td = self.msrl.env_step(td)
            before["seen"] = 2 * before["after"]
            td = step_mdp(td)
        return self.msrl.agent_learn(first, before)


def graph_of(trainer: type, policy: str = COARSE, actors: int = 4, workers: int | None = 1) -> Graph:
    return project(trainer, policy=find_policy(policy), actors=actors, fused=True, workers=workers)


# the pass


@pytest.mark.parametrize("policy", ["local", COARSE, FINE, SHARDED, "multi_learner"])
def test_dqn_can_be_fused_under_every_policy(policy: str) -> None:
    graph = graph_of(DQN, policy)
    acting = [part for part in graph.fragments.values() if {"env", "actor"} & set(part.components)]
    assert acting and all(part.fused for part in acting)
    assert graph.passes[-1].startswith("fuse: 4 actors on one worker act in one batch")
    assert Graph.from_json(graph.to_json()) == graph


def test_what_actors_decide_for_themselves_is_not_fused() -> None:
    graph = graph_of(REINFORCE)
    assert not any(part.fused for part in graph.fragments.values())
    assert "reinforce.py:" in graph.passes[-1] and "`while moving`" in graph.passes[-1]


def test_one_actor_has_nothing_to_fuse() -> None:
    assert graph_of(DQN, actors=1).passes[-1] == "fuse: there is one actor"


class Mean(Spied):
    def train(self) -> None:
        td = self.msrl.env_step(self.msrl.agent_act(self.msrl.env_reset()))
        self.msrl.agent_learn(td["next", "reward"] - td["next", "reward"].mean())


class First(Spied):
    def train(self) -> None:
        td = self.msrl.env_step(self.msrl.agent_act(self.msrl.env_reset()))
        self.msrl.agent_learn(td["next", "reward"][0])


class Branch(Spied):
    def train(self) -> None:
        td = self.msrl.env_step(self.msrl.agent_act(self.msrl.env_reset()))
        reward = td["next", "reward"]
        if reward.sum() > 0:
            td = self.msrl.agent_act(td)
        self.msrl.agent_learn(td)


class Sized(Spied):
    def train(self) -> None:
        td = self.msrl.env_step(self.msrl.agent_act(self.msrl.env_reset()))
        td["weight"] = torch.arange(self.config.envs)
        self.msrl.agent_learn(td)


class Turns(Spied):
    def train(self) -> None:
        for _ in range(self.config.iterations):
            td = self.msrl.env_reset()
            while td["observation"].sum() < 9:
                td = step_mdp(self.msrl.env_step(self.msrl.agent_act(td)))
        self.msrl.agent_learn(td)


@pytest.mark.parametrize(
    "trainer, policy, code",
    [
        (Mean, COARSE, ".mean()`"),
        (First, COARSE, "[0]` takes some rows"),
        (Branch, COARSE, "`if reward.sum() > 0` may differ"),
        (Sized, COARSE, "no row per environment"),
        (Turns, FINE, "one actor's turn"),
    ],
)
def test_what_looks_beyond_a_row_is_not_fused(trainer: type, policy: str, code: str) -> None:
    graph = graph_of(trainer, policy)
    assert not any(part.fused for part in graph.fragments.values())
    assert code in graph.passes[-1], graph.passes[-1]


# running


@pytest.mark.parametrize("policy, engine", [("local", "inprocess"), (COARSE, "inprocess"), (COARSE, "process")])
@pytest.mark.parametrize("trainer", [Steps, Inserts])
def test_each_actor_has_its_own_rows(trainer: type, policy: str, engine: str) -> None:
    workers = {"workers": 1} if engine == "process" else {}
    run = launch(trainer, policy=policy, engine=engine, fuse=True, env=RowEnvironment, actors=3, **workers)
    assert run.metrics["fused"] and run.metrics["frames"] == (18 if trainer is Inserts else 54)
    if trainer is Inserts:
        (batch,) = run.returned
        rows = batch["observation"][:, 0].long()
        assert set(rows.tolist()) == set(range(6))  # 3 actors of 2 environments
        assert batch["index"][:, 0].tolist() == (rows // 2).tolist()  # an actor's rows are in its lane
    else:
        for i, (steps, total) in enumerate(run.returned):
            assert steps.batch_size == (3, 6) and total.shape == (6,)
            assert (steps["observation"][..., 0] == torch.arange(6.0)).all()
            assert (steps["observation"][:, 0, 1] == torch.arange(3 * i, 3 * i + 3.0)).all()


@pytest.mark.parametrize("policy", [COARSE, FINE, SHARDED])
def test_nothing_but_the_batch_changes(policy: str) -> None:
    """Where no row differs and nothing is drawn, fused and unfused runs are the same."""
    settings: dict[str, Any] = dict(env=SameRows, actors=3, policy=policy)
    for trainer in (Steps, Inserts, Touched):
        alone, fused = launch(trainer, **settings), launch(trainer, fuse=True, **settings)
        assert fused.metrics["fused"] and not alone.metrics["fused"]
        assert fused.metrics["frames"] == alone.metrics["frames"]
        for ours, theirs in zip(fused.returned, alone.returned, strict=True):
            for mine, other in zip(*((x if isinstance(x, list) else [x]) for x in (ours, theirs)), strict=True):
                assert mine.shape == other.shape and bool((mine == other).all())


def test_fused_dqn_is_the_same_on_every_engine() -> None:
    one = launch(DQN, policy=COARSE, fuse=True, **SMALL)
    other = launch(DQN, policy=SHARDED, engine="process", workers=1, fuse=True, **SMALL)
    assert one.params_sha256 == other.params_sha256
    assert one.metrics["frames"] == other.metrics["frames"] == 4 * 2 * 4 * 6
    two = launch(DQN, policy=COARSE, engine="process", workers=2, fuse=True, **SMALL)
    assert two.metrics["fused"] and two.metrics["frames"] == one.metrics["frames"]
    learners = launch(DQN, policy="multi_learner", engine="process", workers=2, fuse=True, **SMALL)
    assert learners.metrics["fused"] and learners.metrics["frames"] == one.metrics["frames"]


def test_what_cannot_be_fused_runs_as_before() -> None:
    told: list[str] = []
    settings: dict[str, Any] = dict(policy=COARSE, actors=2, envs=2, iterations=2, episodes_per_iter=4, hidden_dim=8)
    run = launch(REINFORCE, fuse=True, notice=told.append, **settings)
    assert not run.metrics["fused"]
    assert len(told) == 1 and told[0].startswith("not fused: no, `actors` runs once per actor: reinforce.py:")
    assert run.params_sha256 == launch(REINFORCE, **settings).params_sha256


def test_a_fused_run_goes_on_fused(tmp_path: Path) -> None:
    whole = launch(DQN, policy=COARSE, fuse=True, checkpoint_every=2, folder=tmp_path, **SMALL)
    saved = sorted((tmp_path / "checkpoints").glob("*.fdg"))[0]
    assert launch(DQN, policy=COARSE, resume=saved).params_sha256 == whole.params_sha256
    with pytest.raises(
        CheckpointError, match="has 2 environments here and 8 in the checkpoint: resume with the --envs, --fuse"
    ):
        launch(DQN, policy=COARSE, fuse=False, resume=saved)


def test_a_fused_run_goes_on_fused_from_a_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = launch(DQN, policy=COARSE, fuse=True, checkpoint_every=2, folder=tmp_path / "run", **SMALL)
    saved = sorted((tmp_path / "run" / "checkpoints").glob("*.fdg"))[0].rename(tmp_path / "alone.fdg")
    flags = ["--dist-policy", COARSE, "--resume", str(saved), "-q", "--eval-episodes", "0", "--metrics-json", "m.json"]
    done = CliRunner().invoke(app, ["train", "dqn", *flags])
    assert done.exit_code == 0, done.output
    metrics = json.loads(Path("m.json").read_text())
    assert metrics["fused"] and metrics["params_sha256"] == whole.params_sha256
