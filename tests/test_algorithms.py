"""The bundled algorithms: the same under every policy, right in what they compute, and learning."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import mismatches, run_reference
from tensordict import TensorDict

from fdg import registry
from fdg.algorithms.dqn import DQN, DQNConfig, QLearner
from fdg.algorithms.reinforce import (
    REINFORCE,
    PolicyLearner,
    REINFORCEConfig,
    first_episodes,
    next_episodes,
    with_returns,
)
from fdg.config import field_docs, make_config
from fdg.errors import UsageError
from fdg.runtime.environments import make_env, step_mdp
from fdg.runtime.run import launch
from fdg.testing import assert_policies_equal

SMALL_DQN: dict[str, Any] = dict(
    iterations=5, envs=3, steps=4, updates=3, batch_size=8, hidden_dim=16, learning_starts=20, seed=7
)
SMALL_REINFORCE: dict[str, Any] = dict(iterations=3, envs=2, hidden_dim=16, seed=7)


@pytest.fixture
def cheetah(tmp_path: Path) -> str:
    """HalfCheetah with short episodes: Gaussian actions show what argmax hides."""
    file = tmp_path / f"cheetah_{tmp_path.name}.py"
    file.write_text(
        "import gymnasium\n\ndef make_env():\n    return gymnasium.make('HalfCheetah-v5', max_episode_steps=12)\n"
    )
    return f"{file}:make_env"


# ---- the same under every policy


@pytest.mark.parametrize("actors", [1, 2])
def test_dqn_is_the_same_under_every_policy(actors):
    result = assert_policies_equal(DQN, actors=actors, replay_shards=2, **SMALL_DQN)
    assert result.metrics["frames"] == actors * 3 * 4 * 5
    assert "loss" in result.history[-1]["values"]


@pytest.mark.parametrize("actors", [1, 2])
def test_reinforce_is_the_same_under_every_policy(actors, cheetah):
    assert_policies_equal(REINFORCE, actors=actors, env=cheetah, episodes_per_iter=4, **SMALL_REINFORCE)
    # CartPole falls: actors loop a different number of times
    coarse = ["single_learner_coarse", "sharded_replay"]
    assert_policies_equal(REINFORCE, coarse, actors=actors, episodes_per_iter=6, **SMALL_REINFORCE)


@pytest.mark.parametrize(
    ("trainer", "settings"),
    [
        (DQN, dict(SMALL_DQN, replay_shards=2)),
        (REINFORCE, dict(SMALL_REINFORCE, episodes_per_iter=6)),
    ],
)
@pytest.mark.parametrize("actors", [1, 3])
def test_policies_agree_with_the_reference(trainer, settings, actors):
    config = make_config(trainer.config_class(), dict(settings, actors=actors))
    result = launch(trainer, config, policy="single_learner_coarse")
    assert not mismatches(run_reference(trainer, config), result, trainer)


@pytest.mark.parametrize("steps", [2, 9])
def test_dqn_is_coarse_whatever_the_steps(steps):
    settings = dict(SMALL_DQN, steps=steps, updates=steps)
    calls = launch(DQN, policy="single_learner_coarse", actors=2, **settings).calls
    assert calls == {"actors.reset": 1, "actors.collect": 5, "learner.update": 5}


def test_reinforce_is_coarse():
    calls = launch(REINFORCE, policy="single_learner_coarse", actors=2, episodes_per_iter=4, **SMALL_REINFORCE).calls
    assert calls == {"actors.collect": 3, "learner.learn": 3}


# ---- DQN


def learner(**settings: Any) -> QLearner:
    trainer = DQN(make_config(DQNConfig, dict(SMALL_DQN, **settings)))
    env = make_env("CartPole-v1", 1, seed=1)
    return trainer.agent(env.spec).learner  # type: ignore[return-value]


def transitions(rows: int = 6) -> TensorDict:
    """Rows that go on, that are cut short, and that end."""
    torch.manual_seed(1)
    terminated = torch.arange(rows)[:, None] % 3 == 2
    truncated = torch.arange(rows)[:, None] % 3 == 1
    return TensorDict(
        {
            "observation": torch.randn(rows, 4),
            "action": torch.randint(2, (rows,)),
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


def test_dqn_bootstraps_unless_the_episode_terminated():
    batch, agent = transitions(), learner(gamma=0.9)
    errors = []
    for row in batch:
        value = agent.network(row["observation"])[row["action"]]
        following = 0.0 if row["next", "terminated"] else agent.network(row["next", "observation"]).max()
        errors.append((value - row["next", "reward"].squeeze() - 0.9 * following) ** 2)
    assert torch.isclose(agent.learn(batch), torch.stack(errors).mean())


@pytest.mark.parametrize("tau", [0.5, 0.05])
def test_the_target_network_follows_by_tau(tau):
    agent = learner(tau=tau)
    before = [parameter.detach().clone() for parameter in agent.network.parameters()]
    agent.learn(transitions())
    for old, new, target in zip(before, agent.network.parameters(), agent.target.parameters(), strict=True):
        assert not torch.equal(old, new)
        assert torch.allclose(target, old + tau * (new - old), atol=1e-6)


def test_epsilon_and_step_size_fall():
    trainer = DQN(DQNConfig(iterations=100, exploration_fraction=0.2, epsilon_start=0.9, epsilon_end=0.1))
    assert [round(trainer.epsilon(i), 6) for i in (0, 10, 20, 99)] == [0.9, 0.5, 0.1, 0.1]
    assert DQN(DQNConfig(exploration_fraction=0.0)).epsilon(1) == DQNConfig().epsilon_end
    agent = learner(lr=0.1)
    assert agent.lr() == 0.1
    agent.updates = SMALL_DQN["iterations"] * SMALL_DQN["updates"]
    assert agent.lr() == 0.0


def test_dqn_needs_discrete_actions():
    with pytest.raises(UsageError, match="discrete"):
        launch(DQN, env="Pendulum-v1", **SMALL_DQN)


# ---- REINFORCE


@pytest.mark.parametrize(
    ("actors", "envs", "episodes"),
    [(1, 1, 1), (1, 4, 4), (1, 4, 2), (1, 3, 7), (2, 2, 4), (2, 3, 10), (3, 2, 3)],
)
def test_an_iteration_has_exactly_its_episodes(actors, envs, episodes):
    result = launch(REINFORCE, actors=actors, envs=envs, episodes_per_iter=episodes, iterations=2, hidden_dim=8)
    assert [row["values"]["episodes"] for row in result.history] == [episodes, episodes]


def test_every_episode_that_is_begun_counts():
    counts, left = first_episodes(REINFORCEConfig(actors=2, envs=3, episodes_per_iter=10))
    assert (counts.tolist(), left) == ([True, True, True], 2)
    counts, left = next_episodes(counts, left, torch.tensor([False, True, False]))
    assert (counts.tolist(), left) == ([True, True, True], 1)
    counts, left = next_episodes(counts, left, torch.tensor([True, True, False]))
    assert (counts.tolist(), left) == ([True, False, True], 0)
    counts, left = next_episodes(counts, left, torch.tensor([False, True, True]))
    assert (counts.tolist(), left) == ([True, False, False], 0)
    counts, left = first_episodes(REINFORCEConfig(actors=1, envs=3, episodes_per_iter=2))
    assert (counts.tolist(), left) == ([True, True, False], 0)


class Naive(REINFORCE):
    """Finishes episodes, one row at a time; returns (step, environment) → (observation, return)."""

    def train(self):
        envs, left = self.config.envs, self.config.episodes_per_iter
        busy = [row < left for row in range(envs)]
        left -= sum(busy)
        running: list[list[Any]] = [[] for _ in range(envs)]
        rows = {}
        td, step = self.msrl.env_reset(), 0
        while any(busy):
            td = self.msrl.agent_act(td.set("_step", torch.tensor(busy)))
            td = self.msrl.env_step(td.exclude("_step"))  # all move, also those that wait in REINFORCE
            for row in range(envs):
                if not busy[row]:
                    continue
                running[row].append((step, td["observation"][row], td["next", "reward"][row].item()))
                if td["next", "done"][row]:
                    following = 0.0
                    for when, observation, reward in reversed(running[row]):
                        following = reward + self.config.gamma * following
                        rows[when, row] = (observation, following)
                    running[row] = []
                    busy[row] = left > 0
                    left -= busy[row]
            td, step = step_mdp(td), step + 1
        return [rows[key] for key in sorted(rows)]


@pytest.mark.parametrize("settings", [dict(envs=1, episodes_per_iter=3), dict(envs=4, episodes_per_iter=10)])
def test_what_is_learned_from_is_whole_episodes_with_their_returns(monkeypatch, settings):
    seen = []
    learn = PolicyLearner.learn
    monkeypatch.setattr(PolicyLearner, "learn", lambda self, rows: seen.append(rows) or learn(self, rows))
    launch(REINFORCE, iterations=1, seed=3, **settings)
    expected = launch(Naive, iterations=1, seed=3, **settings).returned
    (rows,) = seen
    assert torch.equal(rows["observation"], torch.stack([observation for observation, _ in expected]))
    assert torch.allclose(rows["return"], torch.tensor([value for _, value in expected]), rtol=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.3, 0.0])
def test_returns_against_a_loop(gamma):
    torch.manual_seed(2)
    length, envs = 40, 3
    done, reward = torch.rand(length, envs, 1) < 0.1, torch.randn(length, envs, 1)
    counts = torch.ones(length, envs, dtype=torch.bool)
    for env in range(envs):
        counts[1 + int(done[:, env, 0].nonzero().max()) :, env] = False  # what is not finished does not count
    steps = TensorDict(
        {
            "observation": torch.zeros(length, envs, 1),
            "action": torch.zeros(length, envs),
            "next": {"reward": reward, "done": done},
        },
        batch_size=[length, envs],
    )
    expected, following = torch.zeros(length, envs), torch.zeros(envs)
    for step in reversed(range(length)):
        following = reward[step, :, 0] + gamma * following * ~done[step, :, 0]
        expected[step] = following
    rows = with_returns([*steps.unbind(0)], [*counts.unbind(0)], gamma)
    assert list(rows.batch_size) == [int(counts.sum())]
    assert torch.allclose(rows["return"], expected[counts], atol=1e-5)


def test_the_policy_gradient_is_that_of_a_loop():
    trainer = REINFORCE(REINFORCEConfig(hidden_dim=8, lr=0.0))
    agent = trainer.agent(make_env("Pendulum-v1", 1, seed=1).spec)
    rows = TensorDict(
        {
            "observation": torch.randn(5, 3),
            "action": torch.randn(5, 1),
            "return": torch.randn(5),
            "next": {"reward": torch.ones(5, 1), "done": torch.ones(5, 1, dtype=torch.bool)},
        },
        batch_size=[5],
    )
    policy, returns = agent.learner.policy, rows["return"]
    expected = sum(
        -policy(row["observation"]).log_prob(row["action"]) * (row["return"] - returns.mean()) / returns.std() / 5
        for row in rows
    )
    assert torch.isclose(agent.learner.learn(rows)["loss"], expected, atol=1e-6)


def test_evaluation_takes_the_likeliest_action():
    for env in ("CartPole-v1", "Pendulum-v1"):
        environment = make_env(env, 4, seed=1)
        actor = REINFORCE(REINFORCEConfig()).agent(environment.spec).actor
        td = environment.reset()
        output = actor.policy.network(td["observation"])
        expected = output.argmax(-1) if env == "CartPole-v1" else output
        torch.testing.assert_close(actor.evaluate(td)["action"], expected.detach())


# ---- settings


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (REINFORCEConfig, dict(actors=3, episodes_per_iter=16), "3 actors cannot share evenly; write 18"),
        (REINFORCEConfig, dict(episodes_per_iter=0), "episodes_per_iter is 0; it must be at least 1"),
        (REINFORCEConfig, dict(gamma=1.5), "gamma is 1.5; it must be from 0 to 1"),
        (DQNConfig, dict(epsilon_end=-0.1), "epsilon_end is -0.1; it must be from 0 to 1"),
        (DQNConfig, dict(steps=0), "steps is 0; it must be at least 1"),
        (DQNConfig, dict(lr=-1.0), "lr is -1.0; it must be at least 0"),
        (DQNConfig, dict(buffer_size=100, learning_starts=1000), "learning would never start"),
    ],
)
def test_settings_out_of_range_are_refused(config, settings, message):
    with pytest.raises(UsageError, match=message):
        make_config(config, settings)


@pytest.mark.parametrize("config", [DQNConfig, REINFORCEConfig])
def test_every_setting_is_explained(config):
    assert set(field_docs(config)) == {field.name for field in dataclasses.fields(config)}


# ---- learning


def test_dqn_learns():
    assert launch(DQN, iterations=40, eval_episodes=20).metrics["mean_reward"] > 100


def test_reinforce_learns():
    history = launch(REINFORCE, iterations=20).history
    returns = [row["episodic_return"] for row in history]  # of the episodes it learned from
    assert sum(returns[-5:]) / 5 > 2 * sum(returns[:5]) / 5


def test_the_networks_are_torchrls() -> None:
    from torchrl.modules import MLP as TorchRL

    from fdg.networks import MLP
    from fdg.policy_step import plan_of

    sides = []
    for kind in (MLP, TorchRL):
        torch.manual_seed(1)
        sides.append(kind(4, 2, num_cells=[8, 16], activation_class=torch.nn.ReLU))
    assert {key: value.tolist() for key, value in sides[0].state_dict().items()} == {
        key: value.tolist() for key, value in sides[1].state_dict().items()
    }
    rows = torch.randn(5, 4)
    assert torch.equal(sides[0](rows), sides[1](rows))
    assert plan_of(sides[0]) and plan_of(sides[1])  # both take the quick way


PIXELS = """
import gymnasium, numpy as np
from gymnasium import spaces

class Pixels(gymnasium.Env):
    observation_space, action_space = spaces.Box(0, 255, (4, 4), np.uint8), {actions}

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {{}}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {{}}

def make_env():
    return Pixels()

def make_flat():
    return gymnasium.wrappers.DtypeObservation(gymnasium.wrappers.FlattenObservation(Pixels()), np.float32)
"""


@pytest.mark.parametrize("name", ["dqn", "reinforce", "a2c", "ppo", "td3", "sac"])
def test_images_are_refused_with_what_to_write(name, tmp_path):
    file = tmp_path / f"pixels_{name}.py"
    actions = "spaces.Box(-1, 1, (2,))" if name in ("td3", "sac") else "spaces.Discrete(2)"
    file.write_text(PIXELS.format(actions=actions))
    trainer = registry.find_algorithm(name).load()
    with pytest.raises(
        UsageError, match=r"DtypeObservation\(.*FlattenObservation\(env\), np.float32\) from `make_env`"
    ):
        launch(trainer, env=f"{file}:make_env", iterations=1)
    if name != "reinforce":  # its episodes would not end
        assert launch(trainer, env=f"{file}:make_flat", iterations=1, eval_episodes=0).metrics["frames"] > 0
