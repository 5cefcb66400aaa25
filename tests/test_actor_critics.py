"""TD3 and SAC: the same under every policy, right in what they compute, and learning."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import mismatches, run_reference
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.modules import MLP, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, TD3Loss

from fdg.algorithms.sac import LOG_STD, SAC, SACConfig, SACLearner
from fdg.algorithms.td3 import TD3, Critics, NoisyActor, TD3Config, TD3Learner
from fdg.config import field_docs, make_config
from fdg.errors import UsageError
from fdg.runtime.environments import make_env
from fdg.runtime.run import launch
from fdg.testing import assert_policies_equal

SMALL: dict[str, Any] = dict(
    iterations=4, envs=2, steps=3, learning_starts=12, batch_size=8, hidden_dim=8, utd_ratio=0.5, seed=7
)
THREE_STEPS = f"{Path(__file__).parent / 'three_steps.py'}:make_continuous"
BOTH = pytest.mark.parametrize("trainer", [TD3, SAC])


# ---- the same under every policy


@BOTH
@pytest.mark.parametrize("actors", [1, 2])
def test_the_same_under_every_policy(trainer, actors):
    """Episodes are cut off, or end, at every third step."""
    policies = ["single_learner_coarse", "sharded_replay", "single_learner_fine", "multi_learner"]
    settings = dict(SMALL, env=THREE_STEPS, actors=actors, replay_shards=2)
    result = assert_policies_equal(trainer, policies, **settings)
    assert result.metrics["frames"] == actors * 2 * 3 * 4
    assert {"critic_loss", "policy_loss"} <= result.history[-1]["values"].keys()
    config = make_config(trainer.config_class(), settings)
    assert not mismatches(run_reference(trainer, config), result, trainer)


@BOTH
def test_the_same_on_processes(trainer):
    policies = ["single_learner_coarse", "sharded_replay"]
    assert_policies_equal(trainer, policies, ["process"], actors=2, env=THREE_STEPS, **SMALL)


@BOTH
def test_a_resumed_run_takes_another_step_size(trainer, tmp_path):
    whole = launch(trainer, env=THREE_STEPS, folder=tmp_path, checkpoint_every=3, **SMALL)
    first = next(iter(sorted((tmp_path / "checkpoints").iterdir())))
    assert launch(trainer, resume=first).params_sha256 == whole.params_sha256
    assert launch(trainer, resume=first, lr=0.1).params_sha256 != whole.params_sha256


def test_the_step_size_of_td3_falls_to_0():
    config = make_config(TD3.config_class(), dict(SMALL, anneal_lr=True))  # 2 turns of 3 updates after 2 without
    learner = TD3(config).agent(make_env(THREE_STEPS, 2, 1).spec).learner
    rates = []
    for learner.updates in (0, 3, 6):
        rates.append(learner.lr())
    assert config.updates() == 3 and rates == pytest.approx([1e-3, 0.5e-3, 0.0])


@BOTH
def test_several_learners(trainer):
    """Each draws noise for its own rows, so the numbers differ from those of one learner; parameters stay alike."""
    settings = dict(SMALL, env=THREE_STEPS, actors=2)
    result = launch(trainer, policy="multi_learner", engine="process", workers=2, **settings)
    assert all(torch.isfinite(parameter).all() for parameter in result.parameters.values())


@BOTH
def test_coarse_whatever_the_steps(trainer):
    calls = launch(trainer, policy="single_learner_coarse", env=THREE_STEPS, actors=2, **SMALL).calls
    assert calls == {"actors.reset": 1, "actors.collect": 4, "learner.update": 4}


# ---- losses


def learner(trainer: type, env: str, **settings: Any) -> Any:
    """A learner whose target networks differ from its networks."""
    torch.manual_seed(5)
    config = make_config(trainer.config_class(), {**SMALL, "hidden_dim": 16, "gamma": 0.9, "env": env, **settings})
    found = trainer(config).agent(make_env(env, 1, seed=1).spec).learner
    for name in ("target_critics", "target_policy"):
        for parameter in getattr(found, name, nn.Module()).parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return found


def transitions(env: str, rows: int = 32) -> TensorDict:
    """Rows that go on, that are cut short, and that end."""
    torch.manual_seed(6)
    spec = make_env(env, 1, seed=1).spec
    terminated, truncated = (torch.arange(rows)[:, None] % 3 == which for which in (2, 1))
    return TensorDict(
        {
            "observation": torch.randn(rows, spec.obs_dim),
            "action": torch.rand(rows, spec.action_dim) * 2 - 1,
            "next": {
                "observation": torch.randn(rows, spec.obs_dim),
                "reward": torch.randn(rows, 1),
                "done": terminated | truncated,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        batch_size=[rows],
    )


def alone(critics: Critics) -> list[ValueOperator]:
    """The two critics as networks of their own, for TorchRL."""
    made = []
    for which in range(2):
        inputs, hidden = critics.weights[0].shape[1:]
        network = MLP(inputs, 1, num_cells=[hidden, hidden], activation_class=nn.ReLU)
        layers = [layer for layer in network if isinstance(layer, nn.Linear)]
        for layer, weight, bias in zip(layers, critics.weights, critics.biases, strict=True):
            layer.weight.data.copy_(weight[which].T)
            layer.bias.data.copy_(bias[which, 0])
        made.append(ValueOperator(network, in_keys=["observation", "action"]))
    return made


def same_critics(params: Any, critics: Critics, gradient: bool) -> None:
    """TorchRL's stacked parameters of the critics, or their gradients, are ours; without `gradient` they become ours."""
    theirs = [params["module", str(index), kind] for kind in ("weight", "bias") for index in (0, 2, 4)]
    for other, mine in zip(theirs, [*critics.weights, *critics.biases], strict=True):
        if gradient:
            shaped = mine.grad.transpose(1, 2) if other.dim() == 3 else mine.grad.squeeze(1)
            assert mine.grad.abs().sum() > 0
            assert torch.allclose(other.grad.reshape(shaped.shape), shaped, atol=1e-6)
        else:
            shaped = mine.transpose(1, 2) if mine.shape[1] > 1 else mine.squeeze(1)
            other.data.copy_(shaped.reshape(other.shape))


class Spread(nn.Module):
    """The network of SAC's policy with its outputs as TorchRL wants them: mean and spread."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.network(observation).chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD).exp()


def test_sac_losses_are_those_of_torchrl():
    env = "Pendulum-v1"  # actions from -2 to 2
    ours, batch = learner(SAC, env, alpha=0.3, target_entropy=-1.5), transitions(env)
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(Spread(ours.policy.network), in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhNormal,
            distribution_kwargs=dict(low=-2.0, high=2.0),
            return_log_prob=True,
        ),
    )
    theirs = SACLoss(policy, alone(ours.critics), loss_function="l2", alpha_init=0.3, target_entropy=-1.5)
    theirs.make_value_estimator(gamma=0.9)
    same_critics(theirs.target_qvalue_network_params, ours.target_critics, gradient=False)
    torch.manual_seed(1)
    expected, _ = theirs.qvalue_v2_loss(batch.clone())
    torch.manual_seed(1)
    loss = ours.critic_loss(batch)
    assert torch.isclose(loss, expected, rtol=1e-4)
    expected.backward()
    loss.backward()
    same_critics(theirs.qvalue_network_params, ours.critics, gradient=True)
    torch.manual_seed(2)
    expected, found = theirs.actor_loss(batch.clone())
    alpha = theirs.alpha_loss(found["log_prob"]).mean()
    torch.manual_seed(2)
    losses = ours.policy_loss(batch)
    assert torch.isclose(losses["loss_policy"], expected, rtol=1e-4)
    assert torch.isclose(losses["loss_alpha"], alpha, rtol=1e-4)
    assert torch.isclose(losses["entropy"], -found["log_prob"].mean(), rtol=1e-4)
    parameters = [*ours.policy.network.parameters()]
    mine = torch.autograd.grad(losses["loss_policy"], parameters, retain_graph=True)
    for one, other in zip(mine, torch.autograd.grad(expected, policy_parameters(theirs)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    (mine_alpha,) = torch.autograd.grad(losses["loss_alpha"], [ours.log_alpha])
    (their_alpha,) = torch.autograd.grad(alpha, [theirs.log_alpha])
    assert torch.isclose(mine_alpha, their_alpha.sum(), rtol=1e-4)


def test_td3_losses_are_those_of_torchrl():
    env = "HalfCheetah-v5"
    ours, batch = learner(TD3, env), transitions(env)
    network = nn.Sequential(ours.policy.network, nn.Tanh())
    actor = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    bounds = (-torch.ones(6), torch.ones(6))
    theirs = TD3Loss(actor, alone(ours.critics), bounds=bounds, loss_function="l2")
    theirs.make_value_estimator(gamma=0.9)
    same_critics(theirs.target_qvalue_network_params, ours.target_critics, gradient=False)
    targets = theirs.target_actor_network_params.values(True, True)
    for target, mine in zip(targets, ours.target_policy.network.parameters(), strict=True):
        target.data.copy_(mine)
    torch.manual_seed(1)
    expected, _ = theirs.value_loss(batch.clone())
    torch.manual_seed(1)
    loss = ours.critic_loss(batch)
    assert torch.isclose(loss, expected, rtol=1e-5)
    expected.backward()
    loss.backward()
    same_critics(theirs.qvalue_network_params, ours.critics, gradient=True)
    expected, _ = theirs.actor_loss(batch.clone())
    loss = ours.policy_loss(batch)
    assert torch.isclose(loss, expected, rtol=1e-5)
    mine = torch.autograd.grad(loss, [*ours.policy.network.parameters()])
    for one, other in zip(mine, torch.autograd.grad(expected, policy_parameters(theirs)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def policy_parameters(loss: Any) -> list[torch.Tensor]:
    return [value for value in loss.actor_network_params.values(True, True) if value.requires_grad]


@BOTH
def test_the_policy_loss_leaves_the_critics_alone(trainer):
    ours, batch = learner(trainer, "Pendulum-v1"), transitions("Pendulum-v1")
    found = ours.policy_loss(batch)
    (found["loss_policy"] if trainer is SAC else found).backward()
    assert all(not parameter.grad.any() for parameter in ours.critics.parameters())
    assert all(parameter.grad.any() for parameter in ours.policy.parameters())


@pytest.mark.parametrize("layer_norm", [False, True])
def test_critics_are_two_networks_of_their_own(layer_norm):
    torch.manual_seed(1)
    critics = Critics(5, 16, layer_norm)
    observation, action = torch.randn(32, 3), torch.randn(32, 2, requires_grad=True)
    expected = []
    for which in range(2):
        layers = [nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 1)]
        for layer, weight, bias in zip(layers, critics.weights, critics.biases, strict=True):
            layer.weight.data.copy_(weight[which].T)
            layer.bias.data.copy_(bias[which, 0])
        norms = [nn.LayerNorm(16) if layer_norm else nn.Identity() for _ in range(2)]
        first, second, last = layers
        network = nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU(), last)
        expected.append(network(torch.cat([observation, action], -1)).squeeze(-1))
    assert torch.allclose(critics(observation, action), torch.stack(expected), atol=1e-6)
    assert torch.allclose(critics.frozen(observation, action, networks=1), expected[0][None], atol=1e-6)
    (mine,) = torch.autograd.grad(critics.frozen(observation, action).sum(), action)
    (theirs,) = torch.autograd.grad(sum(expected).sum(), action)
    assert torch.allclose(mine, theirs, atol=1e-6)


@BOTH
def test_rows_of_several_steps_are_discounted_by_their_number(trainer):
    env = "Pendulum-v1"
    ours, batch = learner(trainer, env, gamma=0.9), transitions(env)
    following = batch["next"]
    assert batch["next", "terminated"].any() and not batch["next", "terminated"].all()
    torch.manual_seed(1)
    value = (ours.target_value(batch) - following["reward"].squeeze(-1)) / 0.9
    steps = batch["steps_to_next_obs"] = torch.arange(len(batch))[:, None] % 4 + 1
    torch.manual_seed(1)
    expected = following["reward"] + 0.9**steps * value[:, None]
    assert torch.allclose(ours.target_value(batch), expected.squeeze(-1), atol=1e-5)
    assert torch.equal(value == 0, following["terminated"].squeeze(-1))


@BOTH
def test_options_are_the_same_under_every_policy(trainer):
    policies, options = ["single_learner_coarse", "sharded_replay"], dict(layer_norm=True, n_step=3)
    assert_policies_equal(trainer, policies, env=THREE_STEPS, **options, **SMALL)


def test_the_average_policy_is_the_same_under_every_policy():
    policies = ["single_learner_coarse", "single_learner_fine", "sharded_replay", "multi_learner"]
    settings = dict(SMALL, eval_tau=0.25, tanh_penalty=0.1, actors=3, env=THREE_STEPS)
    result = assert_policies_equal(TD3, policies, **settings)
    config = make_config(TD3.config_class(), settings)
    assert not mismatches(run_reference(TD3, config), result, TD3)


@BOTH
@pytest.mark.parametrize("actors", [1, 3])
def test_normalized_observations_are_the_same_under_every_policy(trainer, actors):
    policies = ["single_learner_coarse", "single_learner_fine", "sharded_replay", "multi_learner"]
    settings = dict(SMALL, norm_obs=True, actors=actors, env=THREE_STEPS)
    result = assert_policies_equal(trainer, policies, **settings)
    config = make_config(trainer.config_class(), settings)
    assert not mismatches(run_reference(trainer, config), result, trainer)
    plain = launch(trainer, **dict(settings, norm_obs=False))
    assert plain.params_sha256 != result.params_sha256


# ---- updates


@BOTH
def test_the_learner_sees_normalized_observations(trainer):
    """By running statistics of all batches so far, this one among them: as if the environment had normalized."""
    env = "Pendulum-v1"
    ours, plain = (learner(trainer, env, policy_frequency=1, **option) for option in ({"norm_obs": True}, {}))
    seen = torch.zeros(0, 3)
    for times in (3.0, 0.5):
        batch = transitions(env)
        batch["observation"] = times * batch["observation"] + 5
        before, by_hand = batch.clone(), batch.clone()
        seen = torch.cat([seen, batch["observation"]])
        for rows in (by_hand, by_hand["next"]):
            rows["observation"] = (rows["observation"] - seen.mean(0)) / seen.std(0, correction=0)
        for one, rows in ((ours, batch), (plain, by_hand)):
            torch.manual_seed(1)
            one.learn(rows)
        assert torch.equal(batch["observation"], before["observation"])  # the rows themselves stay
        assert torch.equal(batch["next", "observation"], before["next", "observation"])
    for part in ("critics", "policy"):
        assert not same(snapshot(getattr(plain, part)), getattr(learner(trainer, env), part))
        for mine, expected in zip(getattr(ours, part).parameters(), getattr(plain, part).parameters(), strict=True):
            assert torch.allclose(mine, expected, atol=1e-5)


@BOTH
def test_the_actor_sees_normalized_observations(trainer):
    config = make_config(trainer.config_class(), dict(SMALL, env="Pendulum-v1", norm_obs=True))
    actor = trainer(config).agent(make_env("Pendulum-v1", 1, seed=1).spec).actor
    observation = 3 * torch.randn(32, 3) + 5
    actor.normalize.update(observation)
    normalized = (observation - observation.mean(0)) / observation.std(0, correction=0)
    with torch.no_grad():
        for act in (actor.evaluate, lambda td: actor.act(td, False)):
            taken = []
            for normalize, x in (
                (actor.normalize, observation),
                (nn.Identity(), normalized),
                (nn.Identity(), observation),
            ):
                actor.normalize, kept = normalize, actor.normalize
                torch.manual_seed(1)
                taken.append(act(TensorDict({"observation": x.clone()}, [32]))["action"].clone())
                actor.normalize = kept
            assert torch.allclose(taken[0], taken[1], atol=1e-5) and not torch.allclose(taken[0], taken[2], atol=1e-2)


def test_evaluation_takes_the_average_of_the_policies():
    """Which follows the policy whenever it is updated, at first all that it has been; without it, evaluation takes the
    policy as it is."""
    ours, batch = learner(TD3, "Pendulum-v1", eval_tau=0.4, policy_frequency=2), transitions("Pendulum-v1")
    for share in (1.0, 0.5, 0.4, 0.4):
        average, policy = snapshot(ours.average), snapshot(ours.policy)
        ours.learn(batch)
        assert same(average, ours.average)
        ours.learn(batch)
        assert not same(policy, ours.policy)
        for old, new, now in zip(average, ours.policy.parameters(), ours.average.parameters(), strict=True):
            assert torch.allclose(now, old + share * (new - old), atol=1e-6)
    td = make_env("Pendulum-v1", 3, seed=1).reset()
    with torch.no_grad():
        seen = NoisyActor(ours.policy, ours.average, nn.Identity(), 0.1).evaluate(td)["action"]
        assert torch.equal(seen, ours.average(td["observation"]))
        assert not torch.equal(seen, ours.policy(td["observation"]))
    assert (plain := learner(TD3, "Pendulum-v1")).average is plain.policy


def test_actions_at_the_end_of_their_range_may_cost():
    """Where tanh is flat the critic moves the policy no more; the penalty does."""
    batch = transitions("Pendulum-v1")
    free, held = (learner(TD3, "Pendulum-v1", tanh_penalty=weight) for weight in (0.0, 0.1))
    for one in (free, held):
        one.policy.network[-1].bias.data.fill_(12.0)
    unbounded = free.policy.network(batch["observation"])
    assert torch.equal(unbounded.tanh(), torch.ones_like(unbounded))
    losses = [one.policy_loss(batch) for one in (free, held)]
    assert torch.isclose(losses[1], losses[0] + 0.1 * unbounded.square().mean())
    grads = [
        torch.autograd.grad(loss, one.policy.network[-1].bias)[0]
        for loss, one in zip(losses, (free, held), strict=True)
    ]
    assert grads[0].abs() < 1e-6 and grads[1] > 1  # down, away from the end


def test_td3_updates_the_policy_and_the_targets_every_second_time():
    ours, batch = learner(TD3, "Pendulum-v1", policy_frequency=2, tau=0.25), transitions("Pendulum-v1")
    policy, target = snapshot(ours.policy), snapshot(ours.target_critics)
    assert ours.learn(batch).keys() == {"critic_loss"}
    assert same(policy, ours.policy) and same(target, ours.target_critics)
    assert ours.learn(batch).keys() == {"critic_loss", "policy_loss"}
    assert not same(policy, ours.policy)
    for old, new, now in zip(target, ours.critics.parameters(), ours.target_critics.parameters(), strict=True):
        assert torch.allclose(now, old + 0.25 * (new - old), atol=1e-6)


@pytest.mark.parametrize("frequency", [1, 2])
def test_sac_updates_the_policy_at_its_frequency(frequency):
    ours = learner(SAC, "Pendulum-v1", policy_frequency=frequency, tau=0.25)
    batch, policy, target = transitions("Pendulum-v1"), snapshot(ours.policy), snapshot(ours.target_critics)
    ours.learn(batch)
    assert same(policy, ours.policy) == (frequency == 2)
    for old, new, now in zip(target, ours.critics.parameters(), ours.target_critics.parameters(), strict=True):
        assert torch.allclose(now, old + 0.25 * (new - old), atol=1e-6)


@pytest.mark.parametrize(("target_entropy", "rises"), [(-50.0, False), (50.0, True)])
def test_the_temperature_follows_the_entropy(target_entropy, rises):
    ours = learner(SAC, "Pendulum-v1", target_entropy=target_entropy)
    before = ours.log_alpha.item()
    ours.learn(transitions("Pendulum-v1"))
    assert (ours.log_alpha.item() > before) == rises


def test_a_fixed_temperature_stays():
    ours = learner(SAC, "Pendulum-v1", autotune=False, alpha=0.2)
    assert ours.learn(transitions("Pendulum-v1"))["alpha"].item() == pytest.approx(0.2)


def snapshot(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(before: list[torch.Tensor], module: nn.Module) -> bool:
    return all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize(("trainer", "kind"), [(TD3, TD3Learner), (SAC, SACLearner)])
def test_updates_per_frame(trainer, kind, monkeypatch):
    calls = []
    learn = kind.learn
    monkeypatch.setattr(kind, "learn", lambda self, batch: calls.append(len(batch)) or learn(self, batch))
    launch(trainer, **dict(SMALL, utd_ratio=1.5))
    assert calls == [8] * (2 * 9)  # 24 frames, 12 of them random; 6 an iteration


# ---- actions


@BOTH
def test_actions(trainer):
    env = make_env("Pendulum-v1", 50, seed=1)
    actor = trainer(trainer.config_class()()).agent(env.spec).actor
    td = env.reset()
    with torch.no_grad():
        random, sampled, again = (actor.act(td, begins)["action"].clone() for begins in (True, False, False))
        assert random.abs().max() > 1.5 and random.abs().max() <= 2  # over the whole range
        assert sampled.abs().max() <= 2 and not torch.equal(sampled, again)
        assert torch.equal(actor.evaluate(td)["action"].clone(), actor.evaluate(td)["action"])


@BOTH
def test_the_beginning_is_random(trainer):
    """Whatever the networks are, so are the first actions; then not."""
    first = [launch(trainer, **dict(SMALL, iterations=n, hidden_dim=h)).history for n in (2, 4) for h in (8, 9)]
    values = [[row["values"] for row in history] for history in first]
    assert not any(values[0]) and values[0] == values[1]  # nothing is learned
    assert values[2][-1] != values[3][-1]


@BOTH
def test_discrete_and_unbounded_actions_are_refused(trainer, tmp_path):
    with pytest.raises(UsageError, match="continuous ones are needed"):
        launch(trainer, **dict(SMALL, env="CartPole-v1"))
    file = tmp_path / f"unbounded_{trainer.__name__}.py"
    file.write_text(
        "import gymnasium, numpy\n\ndef make_env():\n    env = gymnasium.make('Pendulum-v1').unwrapped\n"
        "    env.action_space = gymnasium.spaces.Box(-numpy.inf, numpy.inf, (1,))\n    return env\n"
    )
    with pytest.raises(UsageError, match="without bounds"):
        launch(trainer, **dict(SMALL, env=f"{file}:make_env"))


# ---- settings and learning


@pytest.mark.parametrize("config", [TD3Config, SACConfig])
def test_settings(config):
    assert set(field_docs(config)) == {field.name for field in dataclasses.fields(config)}
    assert config(actors=2, envs=3, steps=4, utd_ratio=0.5).updates() == 12
    with pytest.raises(UsageError, match="policy_frequency is 0; it must be at least 1"):
        config(policy_frequency=0)


@BOTH
def test_it_learns(trainer, tmp_path):
    file = tmp_path / f"aim_{trainer.__name__}.py"
    file.write_text(
        "import gymnasium, numpy\n\n\nclass Aim(gymnasium.Env):\n"
        "    '''One step: the nearer the action to a quarter of the observation, the better.'''\n"
        "    observation_space = gymnasium.spaces.Box(-2, 2, (1,))\n"
        "    action_space = gymnasium.spaces.Box(-1, 1, (1,))\n\n"
        "    def reset(self, *, seed=None, options=None):\n        super().reset(seed=seed)\n"
        "        self.at = self.np_random.uniform(-2, 2, 1).astype('float32')\n        return self.at, {}\n\n"
        "    def step(self, action):\n        miss = float(action[0] - self.at[0] / 4)\n"
        "        return self.at, -abs(miss), True, False, {}\n\n\ndef make_env():\n    return Aim()\n"
    )
    settings = dict(SMALL, env=f"{file}:make_env", envs=8, steps=8, iterations=12, learning_starts=128, batch_size=64)
    result = launch(trainer, eval_episodes=50, **dict(settings, hidden_dim=32, utd_ratio=1.0, lr=3e-3))
    assert result.metrics["mean_reward"] > -0.15  # without a policy: -0.56
