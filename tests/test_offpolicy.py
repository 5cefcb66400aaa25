"""Learning from replay: n-step returns, double Q-learning, TD3 and SAC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import mismatches, run_reference
from tensordict import TensorDict
from torchrl.data.postprocs import MultiStep
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from fdg.algorithms.dqn import DQN, DQNConfig, QLearner
from fdg.api import Actor, Agent, Trainer
from fdg.config import Config, make_config
from fdg.errors import UsageError
from fdg.runtime.environments import make_env, step_mdp
from fdg.runtime.replay import ReplayBuffer
from fdg.runtime.run import launch
from fdg.testing import assert_policies_equal

THREE_STEPS = f"{Path(__file__).parent / 'three_steps.py'}:make_env"
SMALL_DQN: dict[str, Any] = dict(
    iterations=5, envs=3, steps=4, updates=3, batch_size=8, hidden_dim=16, learning_starts=20, seed=7
)


# ---- n-step returns


class Coin(Actor):
    """Actions by chance: episodes of `three_steps` end, or are cut off."""

    def act(self, td):
        td["action"] = torch.randint(2, td.batch_size)
        return td


class Collect(Trainer):
    """Fills a buffer and returns a large sample of it."""

    config: Config

    def agent(self, spec):
        return Agent(Coin())

    def replay_buffer(self, spec):
        return ReplayBuffer(64, n_step=3, gamma=0.5)

    def train(self):
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            for _ in range(5):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                self.msrl.replay_buffer_insert(td)
                td = step_mdp(td)
            if i == 1:
                td = self.msrl.env_reset()  # in the middle of an episode
            self.msrl.log(i, self.msrl.replay_buffer_sample(50))
        return self.msrl.replay_buffer_sample(500)


@pytest.mark.parametrize("actors", [1, 2])
def test_n_step_rows_never_leave_their_episode(actors):
    """In `three_steps` an observation is (episode, step, action), and the reward is the number of the step."""
    batch = launch(Collect, env=THREE_STEPS, actors=actors, envs=2, iterations=4).returned
    seen = set()
    for row in batch:
        episode, step, _ = row["observation"].tolist()
        reached, last, action = row["next", "observation"].tolist()
        steps = int(row["steps_to_next_obs"])
        assert reached == episode and last == step + steps
        rewards = [step + 1, step + 2, step + 3][:steps]
        assert row["next", "reward"].item() == sum(0.5**k * reward for k, reward in enumerate(rewards))
        assert bool(row["next", "done"]) == (last == 3)
        assert bool(row["next", "terminated"]) == (last == 3 and action == 1)
        assert bool(row["next", "truncated"]) == (last == 3 and action != 1)
        seen.add((step, steps, bool(row["next", "terminated"])))
    whole = {(step, 3 - step, ends) for step in (0.0, 1.0, 2.0) for ends in (True, False)}
    assert whole <= seen  # whole episodes, and the last rows and those before the reset with fewer steps
    assert any(step + steps < 3 for step, steps, _ in seen)


@pytest.mark.parametrize("actors", [1, 2])
def test_n_step_rows_are_the_same_under_every_policy(actors):
    settings = dict(env=THREE_STEPS, actors=actors, envs=2, iterations=3, replay_shards=2)
    assert_policies_equal(Collect, **settings)


@pytest.mark.parametrize("steps", [2, 4])
def test_n_step_returns_are_those_of_torchrl(steps):
    torch.manual_seed(1)
    length, envs, gamma = 30, 3, 0.9
    done = torch.rand(length, envs, 1) < 0.15
    observation = torch.randn(length + 1, envs, 2)
    td = TensorDict(
        {
            "observation": observation[:-1],
            "next": {
                "observation": torch.where(done, torch.randn(length, envs, 2), observation[1:]),
                "reward": torch.randn(length, envs, 1),
                "done": done,
                "terminated": done,
                "truncated": torch.zeros_like(done),
            },
        },
        batch_size=[length, envs],
    )
    buffer = ReplayBuffer(200, n_step=steps, gamma=gamma).open(1)
    for part in (td[:7], td[7:8], td[8:]):  # inserted in parts: rows still go on
        buffer.insert(0, part)
    rows = buffer._shards[0].gather(np.stack([np.zeros(length * envs), np.arange(length * envs)], 1))
    theirs = MultiStep(gamma=gamma, n_steps=steps)(td.clone().transpose(0, 1).contiguous()).transpose(0, 1).reshape(-1)
    assert torch.equal(rows["steps_to_next_obs"].flatten(), theirs["steps_to_next_obs"].flatten())
    assert torch.allclose(rows["next", "reward"], theirs["next", "reward"], atol=1e-6)
    for key in ("observation", ("next", "observation")):  # TorchRL leaves the flags as they were
        assert torch.equal(rows[key], theirs[key])


def test_n_step_in_a_ring_that_is_full():
    """The oldest rows are gone, the newest follow them in memory: these are not what comes next."""
    buffer = ReplayBuffer(10, n_step=3, gamma=1.0).open(1)
    for step in range(17):
        observation = torch.full((1, 1), float(step))
        flags = {key: torch.zeros(1, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        row = {
            "observation": observation,
            "next": {"observation": observation + 1, "reward": torch.ones(1, 1), **flags},
        }
        buffer.insert(0, TensorDict(row, batch_size=[1]))
    batch = buffer.sample(200)
    assert set(batch["observation"].flatten().tolist()) == {float(step) for step in range(7, 17)}
    expected = (17 - batch["observation"]).clamp(max=3)
    assert torch.equal(batch["steps_to_next_obs"], expected.long())
    assert torch.equal(batch["next", "reward"], expected)
    assert torch.equal(batch["next", "observation"], batch["observation"] + expected)


def test_n_step_refuses_what_it_cannot_follow():
    with pytest.raises(UsageError, match=r"write gamma=0\.99"):
        ReplayBuffer(10, n_step=3)
    td = make_env("CartPole-v1", 4, seed=1).reset()
    with pytest.raises(UsageError, match=r"n_step = 2 needs .'next', 'observation'. in every row"):
        ReplayBuffer(10, n_step=2, gamma=0.9).open(1).insert(0, td)
    env, buffer = make_env("CartPole-v1", 4, seed=1), ReplayBuffer(10, n_step=2, gamma=0.9).open(1)
    td = env.reset()
    td["action"] = torch.zeros(4, dtype=torch.long)
    td = env.step(td)
    buffer.insert(0, td)
    with pytest.raises(UsageError, match="4 a step as in the first one; got 2"):
        buffer.insert(0, td[:2])


# ---- DQN


@pytest.mark.parametrize("options", [dict(double=True), dict(n_step=3), dict(double=True, n_step=3, prioritized=True)])
@pytest.mark.parametrize("actors", [1, 2])
def test_dqn_options_are_the_same_under_every_policy(options, actors):
    settings = dict(SMALL_DQN, actors=actors, replay_shards=2, **options)
    assert_policies_equal(
        DQN, ["single_learner_coarse", "sharded_replay", "single_learner_fine", "multi_learner"], **settings
    )


def test_double_dqn_agrees_with_the_reference():
    config = make_config(DQNConfig, dict(SMALL_DQN, actors=2, double=True))
    assert not mismatches(run_reference(DQN, config), launch(DQN, config, policy="single_learner_coarse"), DQN)


def test_dqn_options_are_the_same_on_processes():
    settings = dict(SMALL_DQN, actors=2, replay_shards=2, double=True, n_step=3, prioritized=True)
    assert_policies_equal(DQN, ["sharded_replay"], ["process"], **settings)


def learner(**settings: Any) -> QLearner:
    trainer = DQN(make_config(DQNConfig, dict(SMALL_DQN, **settings)))
    found = trainer.agent(make_env("CartPole-v1", 1, seed=1).spec).learner
    assert isinstance(found, QLearner)
    with torch.no_grad():  # a target network that values other actions
        for parameter in found.target.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return found


def transitions(rows: int = 32) -> TensorDict:
    """Rows that go on, that are cut short, and that end."""
    terminated, truncated = (torch.arange(rows)[:, None] % 3 == which for which in (2, 1))
    return TensorDict(
        {
            "observation": torch.randn(rows, 4),
            "action": torch.randint(2, (rows,)),
            "priority_weight": torch.rand(rows),
            "steps_to_next_obs": torch.randint(1, 4, (rows, 1)),
            "next": {
                "observation": torch.randn(rows, 4),
                "reward": torch.randn(rows, 1),
                "done": terminated | truncated,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        batch_size=[rows],
    )


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
def test_dqn_loss_is_that_of_torchrl(double, n_step):
    torch.manual_seed(3)
    agent, batch = learner(double=double, n_step=n_step, gamma=0.9), transitions()
    del batch["priority_weight"]
    if n_step == 1:
        del batch["steps_to_next_obs"]
    values = QValueActor(agent.network, in_keys=["observation"], action_space="categorical")
    theirs = DQNLoss(values, loss_function="l2", delay_value=True, double_dqn=double, action_space="categorical")
    theirs.make_value_estimator(gamma=0.9)
    for target, mine in zip(
        theirs.target_value_network_params.values(True, True), agent.target.parameters(), strict=True
    ):
        target.data.copy_(mine)
    expected = theirs(batch.clone())["loss"]
    expected_gradient = torch.autograd.grad(expected, list(theirs.value_network_params.values(True, True)))
    loss = agent.loss(batch)
    gradient = torch.autograd.grad(loss, list(agent.network.parameters()))
    assert torch.isclose(loss, expected)
    for mine, other in zip(gradient, expected_gradient, strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_prioritized_loss_is_weighted_and_leaves_the_errors():
    torch.manual_seed(3)
    agent, batch = learner(prioritized=True), transitions()
    loss = agent.loss(batch)
    weight, error = batch["priority_weight"][:, None], batch["td_error"]
    assert error.shape == (32, 1) and bool((error >= 0).all())
    assert torch.isclose(loss, (weight * error.square()).mean())
