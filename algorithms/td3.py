"""TD3: a deterministic policy with twin critics, delayed updates and smoothed targets (Fujimoto et al., 2018)."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
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
    ReplayBuffer,
    Trainer,
    UsageError,
    step_mdp,
)
from fdg.networks import MLP


@dataclass
class TD3Config(Config):
    """Settings of TD3. The defaults solve Pendulum-v1."""

    env: str = "Pendulum-v1"
    """Gymnasium id of the environment, or an alias such as halfcheetah; its actions are continuous."""
    envs: int = 8
    """Environments of each actor, stepped as one vector environment."""
    iterations: int = 250
    """Turns of the outer loop: collect, then update."""
    steps: int = 8
    """Steps of each environment per iteration."""
    utd_ratio: float = 1.0
    """Gradient steps of the critics per frame (update-to-data ratio)."""
    learning_starts: int = 1000
    """Frames with random actions before the first gradient step."""
    buffer_size: int = 1_000_000
    """Rows that the replay buffer keeps."""
    batch_size: int = 256
    """Rows of one gradient step."""
    lr: float = 1e-3
    """Adam's step size."""
    anneal_lr: bool = False
    """Let the step size fall linearly over the whole of training, so that the policy comes to rest."""
    gamma: float = 0.99
    """Discount of future rewards."""
    n_step: int = 1
    """Steps whose rewards are added up before the target critics' value."""
    tau: float = 0.005
    """How far the target networks follow the networks each time."""
    hidden_dim: int = 256
    """Units in each of the two hidden layers."""
    layer_norm: bool = False
    """Normalise the hidden layers of the critics, which bears more gradient steps per frame."""
    norm_obs: bool = False
    """Shift and scale observations by their running mean and spread in the batches learned from, and clip them to ±10."""
    policy_frequency: int = 2
    """Gradient steps of the critics for each of the policy."""
    target_frequency: int = 2
    """Gradient steps of the critics each time that the target networks follow."""
    tanh_penalty: float = 0.0
    """Weight of the squares of what goes into the policy's last tanh, where large values have almost no gradient left."""
    eval_tau: float = 1.0
    """How far the policy that evaluation takes follows the policy each time: 1 is the policy as it is, less an average of
    what it was, at the start of all that it has been."""
    exploration_noise: float = 0.1
    """Spread of the noise added to actions, as a part of half their range."""
    policy_noise: float = 0.2
    """Spread of the noise added to the target policy's actions, likewise."""
    noise_clip: float = 0.5
    """Bound of that noise, likewise."""

    def validate(self) -> None:
        super().validate()
        self.at_least(1, "steps", "buffer_size", "batch_size", "hidden_dim", "n_step")
        self.at_least(1, "policy_frequency", "target_frequency")
        self.at_least(0, "utd_ratio", "learning_starts", "lr", "exploration_noise", "policy_noise", "noise_clip")
        self.at_least(0, "tanh_penalty")
        self.between(0, 1, "gamma", "tau", "eval_tau")

    def updates(self) -> int:
        """Gradient steps of the critics per iteration."""
        return math.ceil(self.utd_ratio * self.steps * self.envs * self.actors)


class Critics(nn.Module):
    """Two networks for the value of an action, as one: their weights are stacked, each layer is one batched product."""

    def __init__(self, inputs: int, hidden_dim: int, layer_norm: bool = False) -> None:
        super().__init__()
        self.layer_norm = layer_norm
        sizes = [inputs, hidden_dim, hidden_dim, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for size, following in pairwise(sizes):
            bound = 1 / math.sqrt(size)  # as nn.Linear begins
            self.weights.append(nn.Parameter(torch.empty(2, size, following).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(2, 1, following).uniform_(-bound, bound)))

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """The values [2, B] of actions."""
        return values(observation, action, [*self.weights], [*self.biases], self.layer_norm)

    def frozen(self, observation: torch.Tensor, action: torch.Tensor, networks: int = 2) -> torch.Tensor:
        """The values by so many of the networks, for the policy to learn from: gradients reach the action only."""
        weights, biases = ([part.detach()[:networks] for part in parts] for parts in (self.weights, self.biases))
        return values(observation, action, weights, biases, self.layer_norm)


def values(
    observation: torch.Tensor,
    action: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    layer_norm: bool,
) -> torch.Tensor:
    """The values [networks, B] by networks whose weights are stacked."""
    x = torch.cat([observation, action], -1).expand(len(weights[0]), -1, -1)
    x = torch.baddbmm(biases[0], x, weights[0])
    for weight, bias in zip(weights[1:], biases[1:], strict=True):
        if layer_norm:
            x = nn.functional.layer_norm(x, x.shape[-1:])
        x = torch.baddbmm(bias, x.relu(), weight)
    return x.squeeze(-1)


class ActionBounds(nn.Module):
    """The box of an environment's actions: -1 … 1 is its range in each dimension."""

    center: torch.Tensor
    scale: torch.Tensor

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.dim = spec.action_dim
        low, high = (np.asarray(getattr(spec.action_space, name)).reshape(-1) for name in ("low", "high"))
        if not np.isfinite([low, high]).all():
            raise UsageError(f"{spec.id} has actions without bounds, {spec.action_space}; TD3 and SAC need a range")
        self.register_buffer("center", torch.as_tensor((high + low) / 2, dtype=torch.float32))
        self.register_buffer("scale", torch.as_tensor((high - low) / 2, dtype=torch.float32))

    def forward(self, unit: torch.Tensor) -> torch.Tensor:
        return self.center + self.scale * unit

    def random(self, rows: int) -> torch.Tensor:
        """Actions by chance, all alike likely."""
        return self(2 * torch.rand(rows, self.dim) - 1)

    def clip(self, action: torch.Tensor) -> torch.Tensor:
        return action.clamp(self.center - self.scale, self.center + self.scale)


class Policy(nn.Module):
    """Observations to actions."""

    def __init__(self, spec: EnvSpec, hidden_dim: int) -> None:
        super().__init__()
        self.bounds = ActionBounds(spec)
        self.network = MLP(spec.features, spec.action_dim, num_cells=[hidden_dim, hidden_dim], activation_class=nn.ReLU)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.bounded(self.network(observation))

    def bounded(self, output: torch.Tensor) -> torch.Tensor:
        """The actions that the network's output stands for."""
        return self.bounds(output.tanh())


class NoisyActor(Actor):
    """Takes the policy's actions with noise, or in the beginning random ones."""

    def __init__(self, policy: Policy, average: Policy, normalize: nn.Module, exploration_noise: float) -> None:
        self.policy, self.average, self.normalize = policy, average, normalize
        self.exploration_noise = exploration_noise

    def act(self, td: TensorDict, random: bool) -> TensorDict:
        bounds = self.policy.bounds
        if random:
            td["action"] = bounds.random(len(td))
        else:
            action = self.policy(self.normalize(td["observation"]))
            noise = self.exploration_noise * bounds.scale * torch.randn_like(action)
            td["action"] = bounds.clip(action + noise)
        return td

    def evaluate(self, td: TensorDict) -> TensorDict:
        td["action"] = self.average(self.normalize(td["observation"]))
        return td


class TD3Learner(Learner):
    """Moves the critics towards reward + gamma · the lower target value, and the policy towards higher values."""

    def __init__(
        self, policy: Policy, average: Policy, critics: Critics, normalize: nn.Module, config: TD3Config
    ) -> None:
        self.config, self.policy, self.average, self.critics = config, policy, average, critics
        self.normalize = normalize
        self.target_policy, self.target_critics = (deepcopy(net).requires_grad_(False) for net in (policy, critics))
        self.critic_optimizer = Adam(critics, lr=config.lr)
        self.policy_optimizer = Adam(policy, lr=config.lr)
        self.updates = 0

    def learn(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        self.critic_optimizer.lr = self.policy_optimizer.lr = self.lr()
        batch = normalized(batch, self.normalize)
        losses = {"critic_loss": self.update(self.critic_loss, batch, optimizer=self.critic_optimizer)}
        self.updates += 1
        if self.updates % self.config.policy_frequency == 0:
            losses["policy_loss"] = self.update(self.policy_loss, batch, optimizer=self.policy_optimizer)
            if self.average is not self.policy:
                times = self.updates // self.config.policy_frequency
                follow(self.average, self.policy, max(self.config.eval_tau, 1 / times))
        if self.updates % self.config.target_frequency == 0:
            follow(self.target_critics, self.critics, self.config.tau)
            follow(self.target_policy, self.policy, self.config.tau)
        return losses

    def lr(self) -> float:
        config = self.config
        turns = config.iterations - math.ceil(config.learning_starts / (config.steps * config.envs * config.actors))
        passed = self.updates / max(1, turns * config.updates()) if config.anneal_lr else 0.0
        return config.lr * max(0.0, 1 - passed)

    def critic_loss(self, batch: TensorDict) -> torch.Tensor:
        """The squared errors of both critics."""
        values = self.critics(batch["observation"], batch["action"])
        return (values - self.target_value(batch)).square().sum(0).mean()

    @torch.no_grad()
    def target_value(self, batch: TensorDict) -> torch.Tensor:
        """What the critics' values should be."""
        config, bounds, following = self.config, self.policy.bounds, batch["next"]
        noise = (torch.randn_like(batch["action"]) * config.policy_noise).clamp(-config.noise_clip, config.noise_clip)
        action = bounds.clip(self.target_policy(following["observation"]) + noise * bounds.scale)
        return bootstrapped(batch, self.target_critics(following["observation"], action).amin(0), config.gamma)

    def policy_loss(self, batch: TensorDict) -> torch.Tensor:
        """The first critic's values of the policy's actions, to be raised."""
        observation, policy, penalty = batch["observation"], self.policy, self.config.tanh_penalty
        output = policy.network(observation)
        loss = -self.critics.frozen(observation, policy.bounded(output), networks=1).mean()
        return loss + penalty * output.square().mean() if penalty else loss


def bootstrapped(batch: TensorDict, value: torch.Tensor, gamma: float) -> torch.Tensor:
    """Reward and the discounted value of what follows: nothing where the episode terminated."""
    following, steps = batch["next"], batch.get("steps_to_next_obs", None)
    discount = gamma if steps is None else gamma ** steps.squeeze(-1)
    return following["reward"].squeeze(-1) + discount * value * ~following["terminated"].squeeze(-1)


def normalized(batch: TensorDict, normalize: nn.Module) -> TensorDict:
    """A batch with its observations normalized, where they are to be. The statistics take them into account first."""
    if not isinstance(normalize, Normalizer):
        return batch
    observation, following = batch["observation"], batch["next"]
    normalize.update(observation)
    following = following.replace({"observation": normalize(following["observation"])})
    return batch.replace({"observation": normalize(observation), "next": following})


def normalizer(spec: EnvSpec, norm_obs: bool) -> nn.Module:
    """What observations go through before the networks see them."""
    return Normalizer(spec.features) if norm_obs else nn.Identity()


def follow(target: nn.Module, network: nn.Module, tau: float) -> None:
    """Move a target network a little towards its network."""
    with torch.no_grad():
        torch._foreach_lerp_([*target.parameters()], [*network.parameters()], tau)


class TD3(Trainer):
    """A deterministic policy learned from replay with twin critics, for continuous actions."""

    config: TD3Config

    def agent(self, spec: EnvSpec) -> Agent:
        config = self.config
        policy = Policy(spec, config.hidden_dim)
        average = deepcopy(policy).requires_grad_(False) if config.eval_tau < 1 else policy
        critics = Critics(spec.features + spec.action_dim, config.hidden_dim, config.layer_norm)
        normalize = normalizer(spec, config.norm_obs)
        return Agent(
            NoisyActor(policy, average, normalize, config.exploration_noise),
            TD3Learner(policy, average, critics, normalize, config),
        )

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
