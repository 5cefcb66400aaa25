"""A2C: the synchronous advantage actor-critic (Mnih et al., 2016), with generalised advantages (Schulman et al., 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from tensordict import TensorDict
from torch import nn

from fdg import (
    Actor,
    Adam,
    Agent,
    Config,
    EnvSpec,
    Learner,
    Normalizer,
    RewardScaler,
    Trainer,
    fast,
    sample_categorical,
    sample_normal,
    stack,
    step_mdp,
)


@dataclass
class A2CConfig(Config):
    """Settings of A2C."""

    envs: int = 16
    """Environments of each actor, stepped as one vector environment."""
    iterations: int = 1000
    """Rollouts, each followed by one gradient step."""
    steps: int = 16
    """Steps of each environment in one rollout."""
    lr: float = 3e-3
    """Adam's step size at the start."""
    anneal_lr: bool = True
    """Let the step size fall linearly to 0."""
    gamma: float = 0.99
    """Discount of future rewards."""
    gae_lambda: float = 0.95
    """How far advantages look ahead: 1 to the rollout's end, 0 one step."""
    norm_adv: bool = False
    """Shift and scale advantages to mean 0 and spread 1 in each gradient step."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss, a mean squared error."""
    max_grad_norm: float = 0.5
    """Gradients longer than this are scaled down to it."""
    hidden_dim: int = 64
    """Units in each of the two hidden layers, of the policy and of the critic."""
    activation: Literal["tanh", "relu"] = "tanh"
    """What follows each hidden layer."""
    ortho_init: bool = True
    """Begin with orthogonal weights, small ones in the policy's last layer; otherwise with torch's own."""
    log_std_init: float = 0.0
    """Logarithm of the actions' spread at the start, where actions are continuous."""
    norm_obs: bool = False
    """Shift and scale observations by their running mean and spread."""
    norm_reward: bool = False
    """Divide rewards by the running spread of the discounted return."""

    def validate(self) -> None:
        super().validate()
        self.at_least(1, "steps", "hidden_dim")
        self.at_least(0, "lr", "ent_coef", "vf_coef", "max_grad_norm")
        self.between(0, 1, "gamma", "gae_lambda")


def mlp(inputs: int, outputs: int, config: A2CConfig, last_gain: float) -> nn.Sequential:
    """Two hidden layers."""
    activation = nn.Tanh if config.activation == "tanh" else nn.ReLU
    sizes = [inputs, config.hidden_dim, config.hidden_dim, outputs]
    linear = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(sizes)]
    if config.ortho_init:
        for layer, gain in zip(linear, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], activation(), linear[1], activation(), linear[2])


class Policy(nn.Module):
    """A distribution of actions: categorical, or normal with a spread of its own for each number of an action."""

    def __init__(self, spec: EnvSpec, config: A2CConfig) -> None:
        super().__init__()
        outputs = spec.n_actions if spec.discrete else spec.action_dim
        self.norm_obs = config.norm_obs
        self.normalize: nn.Module = Normalizer(spec.features) if config.norm_obs else nn.Identity()
        self.network = mlp(spec.features, outputs, config, last_gain=0.01)
        self.log_std = None if spec.discrete else nn.Parameter(torch.full((outputs,), config.log_std_init))

    def sample(self, observation: torch.Tensor) -> torch.Tensor:
        """Actions drawn for observations (not normalized yet)."""
        output = fast(self.network, self.normalize(observation) if self.norm_obs else observation)
        return sample_categorical(output) if self.log_std is None else sample_normal(output, self.log_std.exp())

    def mode(self, observation: torch.Tensor) -> torch.Tensor:
        """The likeliest actions for observations (not normalized yet)."""
        output = fast(self.network, self.normalize(observation) if self.norm_obs else observation)
        return output.argmax(-1) if self.log_std is None else output

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithm of the actions' probability, and the entropy, given normalized observations."""
        output = self.network(observation)
        if self.log_std is None:
            log_probs = output.log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy
        entropy = (self.log_std + (0.5 + 0.5 * math.log(2 * math.pi))).sum()
        away = (action - output) * (-self.log_std).exp()  # how many spreads from the mean
        return -0.5 * torch.linalg.vecdot(away, away) - (self.log_std + 0.5 * math.log(2 * math.pi)).sum(), entropy


class SamplingActor(Actor):
    """Samples from the policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def act(self, td: TensorDict) -> TensorDict:
        td["action"] = self.policy.sample(td["observation"])
        return td

    def evaluate(self, td: TensorDict) -> TensorDict:
        td["action"] = self.policy.mode(td["observation"])
        return td


def gae(
    reward: torch.Tensor, value: torch.Tensor, following: torch.Tensor, done: torch.Tensor, terminated: torch.Tensor,
    gamma: float, gae_lambda: float,
) -> torch.Tensor:  # fmt: skip
    """Generalised advantages of a rollout [T, N], given the values of observations and of the ones that follow.

    Where an episode was cut off, what follows is its last observation, and its value counts; only where it terminated
    nothing does. The rollout's end is the same case.
    """
    surprise = reward + gamma * ~terminated * following - value
    decay = gamma * gae_lambda * ~done
    advantages, later = [], torch.zeros_like(reward[0])
    for now, factor in zip(reversed(surprise.unbind()), reversed(decay.unbind()), strict=True):
        later = torch.addcmul(now, factor, later)
        advantages.append(later)
    return torch.stack(advantages[::-1])


class A2CLearner(Learner):
    """One gradient step on each rollout [T, N]: T steps of all N environments of all actors."""

    def __init__(self, policy: Policy, critic: nn.Module, config: A2CConfig) -> None:
        self.config, self.policy, self.critic, self.updates = config, policy, critic, 0
        self.rewards = RewardScaler(config.gamma) if config.norm_reward else None
        trained = [*policy.parameters(), *critic.parameters()]
        self.optimizer = Adam(trained, lr=config.lr, eps=1e-5, max_grad_norm=config.max_grad_norm)

    def learn(self, rollout: TensorDict) -> dict[str, torch.Tensor]:
        self.optimizer.lr = self.lr()
        batch = self.prepare(rollout)
        losses = self.update(self.loss, batch.flatten())
        self.finish(rollout)
        return losses

    def lr(self) -> float:
        passed = self.updates / self.config.iterations if self.config.anneal_lr else 0.0
        return self.config.lr * max(0.0, 1 - passed)

    @torch.no_grad()
    def prepare(self, rollout: TensorDict) -> TensorDict:
        """What the loss needs of a rollout, with advantages and the returns they stand for."""
        config, then = self.config, rollout["next"]
        reward, done, terminated = (then[key].squeeze(-1) for key in ("reward", "done", "terminated"))
        if self.rewards is not None:
            self.rewards.update(reward, done)
            reward = self.rewards(reward)
        observation = self.policy.normalize(rollout["observation"])
        value = self.critic(observation).squeeze(-1)
        following = self.critic(self.policy.normalize(then["observation"])).squeeze(-1)
        advantage = gae(reward, value, following, done, terminated, config.gamma, config.gae_lambda)
        columns = {"observation": observation, "action": rollout["action"], "advantage": advantage}
        return TensorDict({**columns, "value": value, "value_target": advantage + value}, rollout.batch_size)

    def loss(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """The policy gradient, the critic's squared error and the entropy bonus, for rows of a rollout."""
        config, advantage = self.config, batch["advantage"]
        if config.norm_adv:
            advantage = (advantage - self.mean(advantage)) / (self.std(advantage) + 1e-8)
        log_prob, entropy = self.policy(batch["observation"], batch["action"])
        value = self.critic(batch["observation"]).squeeze(-1)
        policy_loss = -(log_prob * advantage).mean()
        value_loss = (value - batch["value_target"]).square().mean()
        entropy = entropy.mean()
        loss = policy_loss + config.vf_coef * value_loss
        if config.ent_coef:
            loss = loss - config.ent_coef * entropy
        return {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}

    def finish(self, rollout: TensorDict) -> None:
        """Count the update. Only now statistics move: until here observations were seen as the actors saw them."""
        self.updates += 1
        if isinstance(self.policy.normalize, Normalizer):
            self.policy.normalize.update(rollout["observation"])


class A2C(Trainer):
    """Advantage actor-critic on short rollouts, for discrete and continuous actions."""

    config: A2CConfig

    def agent(self, spec: EnvSpec) -> Agent:
        policy, critic = Policy(spec, self.config), mlp(spec.features, 1, self.config, last_gain=1.0)
        return Agent(SamplingActor(policy), A2CLearner(policy, critic, self.config))

    def train(self) -> None:
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            steps = []
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                steps.append(td)
                td = step_mdp(td)
            losses = self.msrl.agent_learn(stack(steps))
            self.msrl.log(i, losses)
