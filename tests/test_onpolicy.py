"""A2C and PPO: the same under every policy, right in what they compute, and learning."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import mismatches, run_reference
from tensordict import TensorDict
from torchrl.objectives import A2CLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate

from fdg.algorithms.a2c import A2C, A2CConfig, A2CLearner, gae
from fdg.algorithms.ppo import PPO, PPOConfig, PPOLearner, torchrl_loss
from fdg.config import field_docs, make_config
from fdg.errors import UsageError
from fdg.normalize import Normalizer
from fdg.runtime.environments import make_env
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import launch
from fdg.testing import assert_policies_equal

SMALL: dict[str, Any] = dict(iterations=3, envs=2, steps=6, hidden_dim=8, seed=7)
SMALL_PPO: dict[str, Any] = dict(SMALL, update_epochs=2, num_minibatches=3)
NORMALIZED = dict(norm_obs=True, norm_reward=True)
BOTH = pytest.mark.parametrize(("trainer", "settings"), [(A2C, SMALL), (PPO, SMALL_PPO)])
POLICIES = ("single_learner_coarse", "sharded_replay", "single_learner_fine", "multi_learner")


@pytest.fixture
def cheetah(tmp_path: Path) -> str:
    """HalfCheetah with short episodes, which are cut off within a rollout and across two."""
    file = tmp_path / f"cheetah_{tmp_path.name}.py"
    file.write_text(
        "import gymnasium\n\ndef make_env():\n    return gymnasium.make('HalfCheetah-v5', max_episode_steps=4)\n"
    )
    return f"{file}:make_env"


# ---- the same under every policy


@BOTH
@pytest.mark.parametrize("actors", [1, 2])
def test_the_same_under_every_policy(trainer, settings, actors, cheetah):
    assert_policies_equal(trainer, POLICIES, actors=actors, env=cheetah, **NORMALIZED, **settings)
    result = assert_policies_equal(trainer, POLICIES, actors=actors, **settings)
    assert result.metrics["frames"] == actors * 2 * 6 * 3


@BOTH
@pytest.mark.parametrize("actors", [1, 3])
def test_policies_agree_with_the_reference(trainer, settings, actors):
    config = make_config(trainer.config_class(), dict(settings, actors=actors, **NORMALIZED))
    result = launch(trainer, config, policy="single_learner_coarse")
    assert not mismatches(run_reference(trainer, config), result, trainer)


@BOTH
def test_coarse_whatever_the_steps(trainer, settings):
    calls = launch(trainer, policy="single_learner_coarse", actors=2, **settings).calls
    assert calls == {"actors.reset": 1, "actors.collect": 3, "learner.learn": 3}


@BOTH
@pytest.mark.parametrize("workers", [2, 3])
def test_several_learners_do_what_one_does(trainer, settings, workers, cheetah):
    """Rows are environments: 4 of 2 actors, shared by 2 or unevenly by 3; statistics and minibatches are over all."""
    options = dict(settings, actors=2, env=cheetah, **NORMALIZED)
    one = launch(trainer, policy="single_learner_coarse", **options)
    with forkserver():
        several = launch(trainer, policy="multi_learner", engine="process", workers=workers, **options)
    for name, value in one.parameters.items():
        assert torch.allclose(value, several.parameters[name], atol=1e-5), name
    for left, right in zip(one.history, several.history, strict=True):
        assert left["values"] == pytest.approx(right["values"], rel=1e-3, abs=1e-4)


@BOTH
def test_a_resumed_run_goes_on_with_the_statistics(trainer, settings, tmp_path):
    options = dict(settings, iterations=4, actors=2, **NORMALIZED)
    whole = launch(trainer, **options)
    launch(trainer, policy="single_learner_coarse", folder=tmp_path, checkpoint_every=2, **options)
    first = next(iter(sorted((tmp_path / "checkpoints").iterdir())))
    again = launch(trainer, resume=first, policy="single_learner_fine")
    assert again.params_sha256 == whole.params_sha256
    assert again.history[-1]["values"] == whole.history[-1]["values"]


@BOTH
def test_a_resumed_run_takes_another_step_size(trainer, settings, tmp_path):
    options = dict(settings, iterations=4, anneal_lr=False)
    whole = launch(trainer, folder=tmp_path, checkpoint_every=2, **options)
    first = next(iter(sorted((tmp_path / "checkpoints").iterdir())))
    assert launch(trainer, resume=first).params_sha256 == whole.params_sha256
    assert launch(trainer, resume=first, lr=0.1).params_sha256 != whole.params_sha256


class Told(PPO):
    """Says in what order minibatches are made: the steps in them."""

    def agent(self, spec):
        agent = super().agent(spec)
        loss = agent.learner.loss
        agent.learner.seen = []
        agent.learner.loss = lambda rows: agent.learner.seen.append(rows["observation"]) or loss(rows)
        return agent


def test_each_pass_has_every_row_once_and_all_environments_of_a_step():
    trainer = Told(make_config(PPOConfig, SMALL_PPO))
    learner = trainer.agent(make_env("CartPole-v1", 2, seed=1).spec).learner
    rollout = made_up(6, 2, discrete=True)
    rollout["observation"] = torch.arange(12.0).view(6, 2, 1).expand(6, 2, 4).clone()
    learner.learn(rollout)
    numbers = [rows[:, 0].tolist() for rows in learner.seen]
    assert [len(batch) for batch in numbers] == [4] * 6
    for batch in numbers:
        assert all(number + 1 in batch for number in batch if number % 2 == 0)
    for half in (numbers[:3], numbers[3:]):
        assert sorted(number for batch in half for number in batch) == list(range(12))
    assert numbers[:3] != numbers[3:]


# ---- what is computed


def made_up(length: int, envs: int, discrete: bool) -> TensorDict:
    """A rollout in which episodes go on, are cut off and terminate."""
    draw = torch.Generator().manual_seed(3)
    kind = torch.randint(0, 6, (length, envs, 1), generator=draw)
    then = {
        "observation": torch.randn(length, envs, 4 if discrete else 3, generator=draw),
        "reward": torch.randn(length, envs, 1, generator=draw),
        "done": kind < 2,
        "terminated": kind == 0,
        "truncated": kind == 1,
    }
    action = (
        torch.randint(0, 2, (length, envs), generator=draw)
        if discrete
        else torch.randn(length, envs, 1, generator=draw)
    )
    return TensorDict(
        {
            "observation": torch.randn(length, envs, 4 if discrete else 3, generator=draw),
            "action": action,
            "next": then,
        },
        batch_size=[length, envs],
        names=[None, "env"],
    )


def learner(trainer: Any, discrete: bool = True, **settings: Any) -> Any:
    torch.manual_seed(5)
    config = make_config(trainer.config_class(), settings)
    return trainer(config).agent(make_env("CartPole-v1" if discrete else "Pendulum-v1", 1, seed=1).spec).learner


def gradients(learner: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, learner.optimizer.param_groups[0]["params"], retain_graph=True))


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 1.0), (1.0, 0.0)])
def test_advantages_are_torchrls(gamma, gae_lambda):
    then = made_up(40, 3, discrete=True)["next"]
    value, following = torch.randn(2, 40, 3, 1)
    expected, target = generalized_advantage_estimate(
        gamma, gae_lambda, value, following, then["reward"], then["done"], then["terminated"], time_dim=0
    )
    flat = (x.squeeze(-1) for x in (then["reward"], value, following, then["done"], then["terminated"]))
    assert torch.allclose(gae(*flat, gamma, gae_lambda), expected.squeeze(-1), atol=1e-5)
    assert torch.allclose(expected + value, target, atol=1e-5)


class Steps(torch.nn.Module):
    """Values an observation of `three_steps` at 10 · the step's number."""

    def forward(self, observation):
        return 10 * observation[..., 1:2]


class Prepared(A2C):
    """Returns what the learner makes of its rollouts, whose episodes have 3 steps each."""

    def agent(self, spec):
        agent = super().agent(spec)
        agent.learner.critic = Steps()
        agent.learner.learn = agent.learner.prepare
        return agent

    def train(self):
        from fdg import step_mdp

        td, steps = self.msrl.env_reset(), []
        for _ in range(4):
            td = self.msrl.env_step(self.msrl.agent_act(td))
            steps.append(td)
            td = step_mdp(td)
        rollout = torch.stack(steps)
        return self.msrl.agent_learn(rollout), self.msrl.gather(rollout)


@pytest.mark.parametrize("actors", [1, 2])
def test_what_was_cut_off_counts_on_from_its_last_observation(actors):
    here = Path(__file__).parent / "three_steps.py"
    batch, rollout = launch(
        Prepared, env=f"{here}:make_env", actors=actors, envs=8, gamma=0.5, gae_lambda=1.0, hidden_dim=8
    ).returned
    terminated = rollout["next", "terminated"].squeeze(-1)
    assert rollout["next", "done"].squeeze(-1)[2].all()
    assert terminated[2].any() and not terminated[2].all()
    target = batch["value_target"]
    # rewards are 1, 2, 3 and then 1 again; a last observation is worth 30, the one after the rollout 10
    last = 3 + 0.5 * torch.where(terminated[2], 0.0, 30.0)
    assert torch.allclose(target[2], last)
    assert torch.allclose(target[1], 2 + 0.5 * last)
    assert torch.allclose(target[0], 1 + 0.5 * (2 + 0.5 * last))
    assert torch.allclose(target[3], torch.tensor(1 + 0.5 * 10.0))


@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_ppos_loss_is_torchrls(discrete, clip_vloss):
    settings = dict(clip_vloss=clip_vloss, ent_coef=0.02, vf_coef=0.7, clip_coef=0.1, hidden_dim=8)
    own, other = learner(PPO, discrete, **settings), learner(PPO, discrete, loss="torchrl", **settings)
    rollout = made_up(10, 4, discrete)
    batch = own.prepare(rollout)
    batch["action_log_prob"] = own.policy(batch["observation"], batch["action"])[0].detach() + 0.3 * torch.randn(10, 4)
    batch["value"] += 0.3 * torch.randn(10, 4)
    rows = batch.flatten()
    mine, theirs = own.loss(rows), other.loss(rows)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.allclose(mine[name], theirs[name], atol=1e-6), name
    for left, right in zip(gradients(own, mine["loss"]), gradients(other, theirs["loss"]), strict=True):
        assert torch.allclose(left, right, atol=1e-6)
        assert left.abs().sum() > 0


@pytest.mark.parametrize("discrete", [True, False])
def test_a2cs_loss_is_torchrls(discrete):
    own = learner(A2C, discrete, ent_coef=0.02, vf_coef=0.7, hidden_dim=8)
    rows = own.prepare(made_up(10, 4, discrete)).flatten()
    networks = torchrl_loss(own.policy, own.critic, PPOConfig())  # the same networks, as TorchRL wants them
    loss = A2CLoss(
        networks.actor_network, networks.critic_network, entropy_coeff=0.02, critic_coeff=0.7, loss_critic_type="l2",
        functional=False,
    )  # fmt: skip
    loss.set_keys(value="value")
    with (
        networks.actor_network_params.to_module(networks.actor_network),
        networks.critic_network_params.to_module(networks.critic_network),
    ):
        wide = {name: rows[name].unsqueeze(-1) for name in ("advantage", "value", "value_target")}
        out = loss(rows.replace(wide))
        theirs = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
        expected = gradients(own, theirs)
    mine = own.loss(rows)
    assert torch.allclose(mine["loss"], theirs, atol=1e-6)
    assert torch.allclose(mine["policy_loss"], out["loss_objective"], atol=1e-6)
    for left, right in zip(gradients(own, mine["loss"]), expected, strict=True):
        assert torch.allclose(left, right, atol=1e-6)


def test_torchrls_loss_trains_to_the_same_weights():
    own = launch(PPO, **SMALL_PPO)
    other = launch(PPO, policy="single_learner_coarse", loss="torchrl", **SMALL_PPO)
    for name, value in own.parameters.items():
        assert torch.allclose(value, other.parameters[name], atol=1e-5), name


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("actors", [1, 2])
def test_actor_and_learner_agree_on_the_policy(env, actors):
    """Nothing is learned, so the ratio of new to old probabilities is 1: also while observations are normalized."""
    settings = dict(SMALL_PPO, env=env, actors=actors, lr=0.0, **NORMALIZED)
    history = launch(PPO, policy="single_learner_coarse", **settings).history
    for row in history:
        assert abs(row["values"]["approx_kl"]) < 1e-9
        assert row["values"]["clipfrac"] == 0


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_actions_are_drawn_as_likely_as_is_said(env):
    environment = make_env(env, 1, seed=1)
    agent = PPO(PPOConfig(env=env, hidden_dim=8, ortho_init=False, log_std_init=-0.7)).agent(environment.spec)
    policy, observation = agent.actor.policy, environment.reset()["observation"]
    torch.manual_seed(1)
    with torch.no_grad():
        action = policy.sample(observation.expand(20_000, -1))
        log_prob, entropy = policy(observation.expand(20_000, -1), action)
    assert -log_prob.mean() == pytest.approx(entropy.mean().item(), abs=0.02)
    if env == "CartPole-v1":
        chosen = log_prob[action == 1]
        assert (action == 1).float().mean() == pytest.approx(chosen[0].exp().item(), abs=0.02)
    else:
        assert action.std() == pytest.approx(0.4966, abs=0.01)
        assert action.mean() == pytest.approx(policy.mode(observation).item(), abs=0.02)


def test_step_size_falls_only_if_asked():
    for anneal, expected in ((True, [1.0, 2 / 3, 1 / 3]), (False, [1.0, 1.0, 1.0])):
        agent = learner(A2C, lr=1.0, anneal_lr=anneal, iterations=3, hidden_dim=8)
        seen = []
        for _ in range(3):
            agent.learn(made_up(6, 2, discrete=True))
            seen.append(agent.optimizer.lr)
        assert seen == pytest.approx(expected)


def test_what_the_actors_saw_counts_after_it_was_learned_from():
    agent = learner(PPO, norm_obs=True, hidden_dim=8, steps=6, num_minibatches=3)
    assert isinstance(agent.policy.normalize, Normalizer)
    first = made_up(6, 2, discrete=True)
    assert torch.equal(agent.prepare(first)["observation"], first["observation"])
    agent.learn(first)
    rows = first["observation"].reshape(-1, 4)
    again = agent.prepare(first)["observation"].reshape(-1, 4)
    assert torch.allclose(again, (rows - rows.mean(0)) / rows.std(0, correction=0), atol=1e-5)


# ---- settings


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (PPOConfig, dict(steps=10, num_minibatches=4), "write 12 steps, a multiple"),
        (PPOConfig, dict(update_epochs=0), "update_epochs is 0; it must be at least 1"),
        (PPOConfig, dict(loss="mine"), "loss is 'mine'"),
        (A2CConfig, dict(gae_lambda=1.5), "gae_lambda is 1.5; it must be from 0 to 1"),
        (A2CConfig, dict(activation="sigmoid"), "activation is 'sigmoid'"),
        (A2CConfig, dict(lr=-1.0), "lr is -1.0; it must be at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(config, settings, message):
    with pytest.raises(UsageError, match=message):
        make_config(config, settings)


@pytest.mark.parametrize("config", [A2CConfig, PPOConfig])
def test_every_setting_is_explained(config):
    assert set(field_docs(config)) == {field.name for field in dataclasses.fields(config)}


# ---- learning


@pytest.mark.parametrize(("trainer", "settings"), [(A2C, dict(iterations=150, envs=8)), (PPO, dict(iterations=60))])
def test_learns(trainer, settings):
    history = launch(trainer, **settings).history
    assert history[-1]["episodic_return"] > 2 * history[0]["episodic_return"]


def test_learners_are_what_their_trainers_use():
    assert type(learner(A2C)) is A2CLearner
    assert type(learner(PPO)) is PPOLearner
