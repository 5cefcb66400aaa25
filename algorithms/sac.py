"""SAC: soft actor-critic with an entropy temperature that adjusts itself (Haarnoja et al., 2018). Its critics are TD3's."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.functional import softplus

from fdg import Actor, Adam, Agent, Config, EnvSpec, Learner, ReplayBuffer, Trainer, step_mdp
from fdg.algorithms.td3 import ActionBounds, Critics, bootstrapped, follow, normalized, normalizer
from fdg.networks import MLP

LOG_STD = (-20.0, 2.0)
"""Bounds of the logarithm of the policy's spread."""


@dataclass
class SACConfig(Config):
    """Settings of SAC. The defaults are meant for Pendulum-v1."""

    env: str = "Pendulum-v1"
    """Gymnasium id of the environment, or an alias such as halfcheetah; its actions are continuous."""
    envs: int = 8
    """Environments of each actor, stepped as one vector environment."""
    iterations: int = 250
    """Turns of the outer loop: collect, then update."""
    steps: int = 8
    """Steps of each environment per iteration."""
    utd_ratio: float = 1.0
    """Gradient steps per frame (update-to-data ratio)."""
    learning_starts: int = 1000
    """Frames with random actions before the first gradient step."""
    buffer_size: int = 1_000_000
    """Rows that the replay buffer keeps."""
    batch_size: int = 256
    """Rows of one gradient step."""
    lr: float = 1e-3
    """Adam's step size."""
    gamma: float = 0.99
    """Discount of future rewards."""
    n_step: int = 1
    """Steps whose rewards are added up before the target critics' value."""
    tau: float = 0.005
    """How far the target critics follow the critics after each gradient step."""
    hidden_dim: int = 256
    """Units in each of the two hidden layers."""
    layer_norm: bool = False
    """Normalise the hidden layers of the critics, which bears more gradient steps per frame."""
    norm_obs: bool = False
    """Shift and scale observations by their running mean and spread in the batches learned from, and clip them to ±10."""
    policy_frequency: int = 1
    """Gradient steps of the critics for each of the policy and the temperature."""
    alpha: float = 1.0
    """Temperature: what a nat of entropy is worth in reward; at the start, if it adjusts itself."""
    autotune: bool = True
    """Let the temperature adjust itself, so that the policy's entropy comes to `target_entropy`."""
    target_entropy: float | None = None
    """Entropy that the policy is to have; by default minus the number of action dimensions."""

    def validate(self) -> None:
        super().validate()
        self.at_least(1, "steps", "buffer_size", "batch_size", "hidden_dim", "policy_frequency", "n_step")
        self.at_least(0, "utd_ratio", "learning_starts", "lr")
        self.at_least(1e-8, "alpha")
        self.between(0, 1, "gamma", "tau")

    def updates(self) -> int:
        """Gradient steps per iteration."""
        return math.ceil(self.utd_ratio * self.steps * self.envs * self.actors)


class Policy(nn.Module):
    """Observations to a distribution of actions: normal, squashed by tanh into their bounds."""

    def __init__(self, spec: EnvSpec, hidden_dim: int) -> None:
        super().__init__()
        self.bounds = ActionBounds(spec)
        self.network = MLP(
            spec.features, 2 * spec.action_dim, num_cells=[hidden_dim, hidden_dim], activation_class=nn.ReLU
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """The middle of the distribution, without chance."""
        return self.bounds(self.network(observation).chunk(2, -1)[0].tanh())

    def sample(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions and the logarithm of how likely they were."""
        mean, log_std = self.network(observation).chunk(2, -1)
        log_std = log_std.clamp(*LOG_STD)
        noise = torch.randn_like(mean)
        unbounded = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)²), the logarithm of tanh's slope, in a form that is right for large x too
        log_slope = 2 * (math.log(2) - unbounded - softplus(-2 * unbounded)) + self.bounds.scale.log()
        return self.bounds(unbounded.tanh()), (log_normal - log_slope).sum(-1)


class SamplingActor(Actor):
    """Samples from the policy, or in the beginning takes random actions."""

    def __init__(self, policy: Policy, normalize: nn.Module) -> None:
        self.policy, self.normalize = policy, normalize

    def act(self, td: TensorDict, random: bool) -> TensorDict:
        if random:
            td["action"] = self.policy.bounds.random(len(td))
        else:
            td["action"] = self.policy.sample(self.normalize(td["observation"]))[0]
        return td

    def evaluate(self, td: TensorDict) -> TensorDict:
        td["action"] = self.policy(self.normalize(td["observation"]))
        return td


class SACLearner(Learner):
    """Learns values of reward and entropy together, and a policy in proportion to them."""

    def __init__(self, policy: Policy, critics: Critics, normalize: nn.Module, config: SACConfig) -> None:
        self.config, self.policy, self.critics, self.normalize = config, policy, critics, normalize
        self.target_critics = deepcopy(critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.alpha)), requires_grad=config.autotune)
        self.target_entropy = -policy.bounds.dim if config.target_entropy is None else config.target_entropy
        self.critic_optimizer = Adam(critics, lr=config.lr)
        self.policy_optimizer = Adam([*policy.parameters(), self.log_alpha], lr=config.lr)
        self.updates = 0

    def learn(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        self.critic_optimizer.lr = self.policy_optimizer.lr = self.config.lr  # a run may go on with another
        batch = normalized(batch, self.normalize)
        losses = {"critic_loss": self.update(self.critic_loss, batch, optimizer=self.critic_optimizer)}
        self.updates += 1
        if self.updates % self.config.policy_frequency == 0:
            found = self.update(self.policy_loss, batch, optimizer=self.policy_optimizer)
            losses["policy_loss"], losses["entropy"] = found["loss_policy"], found["entropy"]
        follow(self.target_critics, self.critics, self.config.tau)
        return {**losses, "alpha": self.log_alpha.detach().exp()}

    def critic_loss(self, batch: TensorDict) -> torch.Tensor:
        """The squared errors of both critics."""
        values = self.critics(batch["observation"], batch["action"])
        return (values - self.target_value(batch)).square().sum(0).mean()

    @torch.no_grad()
    def target_value(self, batch: TensorDict) -> torch.Tensor:
        """What the critics' values should be: with the entropy of what follows."""
        following = batch["next"]
        action, log_prob = self.policy.sample(following["observation"])
        value = self.target_critics(following["observation"], action).amin(0) - self.log_alpha.exp() * log_prob
        return bootstrapped(batch, value, self.config.gamma)

    def policy_loss(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """Values and entropy, to be raised; and a temperature that rises while the entropy is below its target."""
        observation = batch["observation"]
        action, log_prob = self.policy.sample(observation)
        value = self.critics.frozen(observation, action).amin(0)
        losses = {"loss_policy": (self.log_alpha.detach().exp() * log_prob - value).mean(), "entropy": -log_prob.mean()}
        if self.config.autotune:
            losses["loss_alpha"] = -self.log_alpha * (log_prob.detach() + self.target_entropy).mean()
        return losses


class SAC(Trainer):
    """A stochastic policy learned from replay with twin critics and an entropy bonus, for continuous actions."""

    config: SACConfig

    def agent(self, spec: EnvSpec) -> Agent:
        policy = Policy(spec, self.config.hidden_dim)
        critics = Critics(spec.features + spec.action_dim, self.config.hidden_dim, self.config.layer_norm)
        normalize = normalizer(spec, self.config.norm_obs)
        return Agent(SamplingActor(policy, normalize), SACLearner(policy, critics, normalize, self.config))

    def replay_buffer(self, spec: EnvSpec) -> ReplayBuffer:
        return ReplayBuffer(self.config.buffer_size, n_step=self.config.n_step, gamma=self.config.gamma)

    def train(self) -> None:
        updates = self.config.updates()
        losses = None
        td = self.msrl.env_reset()
        for i in range(self.config.iterations):
            begins = i * self.config.steps * self.config.envs * self.config.actors < self.config.learning_starts
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td, begins)
                td = self.msrl.env_step(td)
                self.msrl.replay_buffer_insert(td)
                td = step_mdp(td)
            if not begins:
                for _ in range(updates):
                    losses = self.msrl.agent_learn(self.msrl.replay_buffer_sample(self.config.batch_size))
            self.msrl.log(i, losses)
