"""DQN: Q-learning from replay with a target network (Mnih et al., 2015); double, n-step and prioritized as options."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

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
    ReplayBuffer,
    Trainer,
    UsageError,
    epsilon_greedy,
    fast,
    step_mdp,
)
from fdg.networks import MLP


@dataclass
class DQNConfig(Config):
    """Settings of DQN. The defaults solve CartPole-v1."""

    envs: int = 64
    """Environments of each actor, stepped as one vector environment."""
    iterations: int = 400
    """Turns of the outer loop: collect, then update."""
    steps: int = 8
    """Steps of each environment per iteration."""
    updates: int = 20
    """Gradient steps per iteration."""
    learning_starts: int = 500
    """Rows in the replay buffer before the first gradient step."""
    buffer_size: int = 200_000
    """Rows that the replay buffer keeps."""
    batch_size: int = 512
    """Rows of one gradient step."""
    lr: float = 3e-3
    """Adam's step size at the start; it falls linearly to 0."""
    gamma: float = 0.99
    """Discount of future rewards."""
    tau: float = 0.05
    """How far the target network follows the network after each gradient step; 1 copies it."""
    max_grad_norm: float = 10.0
    """Gradients longer than this are scaled down to it."""
    hidden_dim: int = 128
    """Units in each of the two hidden layers."""
    epsilon_start: float = 1.0
    """Chance of a random action at the start."""
    epsilon_end: float = 0.05
    """Chance of a random action in the end."""
    exploration_fraction: float = 0.1
    """Part of the iterations over which epsilon falls from start to end."""
    double: bool = False
    """Let the network choose the action that the target network values (van Hasselt et al., 2016)."""
    n_step: int = 1
    """Steps whose rewards are added up before the target network's value (Sutton, 1988)."""
    prioritized: bool = False
    """Draw rows in proportion to their temporal-difference error (Schaul et al., 2016)."""
    alpha: float = 0.6
    """How much the error counts in prioritized draws; 0 draws uniformly."""
    beta: float = 0.4
    """How far importance weights make up for prioritized draws; 1 does fully."""

    def validate(self) -> None:
        super().validate()
        self.at_least(1, "steps", "updates", "buffer_size", "batch_size", "hidden_dim", "n_step")
        self.at_least(0, "learning_starts", "lr", "max_grad_norm", "alpha", "beta")
        self.between(0, 1, "gamma", "tau", "epsilon_start", "epsilon_end", "exploration_fraction")
        if self.learning_starts > self.buffer_size:
            raise UsageError(
                f"learning_starts is {self.learning_starts}, but the replay buffer keeps only {self.buffer_size} rows: "
                "learning would never start; write a larger buffer_size"
            )


class QActor(Actor):
    """Takes the action of the highest value, or now and then a random one."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def act(self, td: TensorDict, epsilon: float) -> TensorDict:
        td["action"] = epsilon_greedy(fast(self.network, td["observation"]), epsilon)
        return td

    def evaluate(self, td: TensorDict) -> TensorDict:
        td["action"] = fast(self.network, td["observation"]).argmax(-1)
        return td


class QLearner(Learner):
    """Moves the values of actions taken towards reward + gamma · the target network's highest value thereafter."""

    def __init__(self, network: nn.Module, config: DQNConfig) -> None:
        self.config, self.network, self.updates = config, network, 0
        self.target = deepcopy(network).requires_grad_(False)
        self.target_weights: list[torch.Tensor] = [*self.target.parameters()]
        self.weights: list[torch.Tensor] = [*network.parameters()]
        self.optimizer = Adam(network, lr=config.lr, max_grad_norm=config.max_grad_norm)

    def learn(self, batch: TensorDict) -> torch.Tensor:
        self.optimizer.lr = self.lr()
        loss = self.update(self.loss, batch)
        with torch.no_grad():
            torch._foreach_lerp_(self.target_weights, self.weights, self.config.tau)
        self.updates += 1
        return loss

    def loss(self, batch: TensorDict) -> torch.Tensor:
        """The squared error: a clipped one hardly notices that an episode ended, so that values grow without bound."""
        value = self.network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
        error = value - self.target_value(batch)
        weight = batch.get("priority_weight", None)
        if weight is None:
            return error.square().mean()
        batch["td_error"] = error.detach().abs()
        return (weight.unsqueeze(-1) * error.square()).mean()

    @torch.no_grad()
    def target_value(self, batch: TensorDict) -> torch.Tensor:
        """Reward and the discounted value of what follows: nothing where the episode terminated."""
        following = batch["next", "observation"]
        values = fast(self.target, following)
        if self.config.double:
            value = values.gather(-1, fast(self.network, following).argmax(-1, keepdim=True))
        else:
            value = values.amax(-1, keepdim=True)
        discount = self.config.gamma ** batch.get("steps_to_next_obs", 1)
        return batch["next", "reward"] + discount * value * ~batch["next", "terminated"]

    def lr(self) -> float:
        """Falls linearly to 0 over the whole of training."""
        return self.config.lr * max(0.0, 1 - self.updates / (self.config.iterations * self.config.updates))


class DQN(Trainer):
    """Q-learning from replay with a target network, for discrete actions."""

    config: DQNConfig

    def agent(self, spec: EnvSpec) -> Agent:
        hidden = [self.config.hidden_dim, self.config.hidden_dim]
        network = MLP(spec.features, spec.n_actions, num_cells=hidden, activation_class=nn.ReLU)
        return Agent(QActor(network), QLearner(network, self.config))

    def replay_buffer(self, spec: EnvSpec) -> ReplayBuffer:
        config = self.config
        return ReplayBuffer(
            config.buffer_size,
            n_step=config.n_step,
            gamma=config.gamma,
            prioritized=config.prioritized,
            alpha=config.alpha,
            beta=config.beta,
        )

    def epsilon(self, i: int) -> float:
        """Falls linearly from start to end, then stays."""
        passed = min(1.0, i / max(1.0, self.config.exploration_fraction * self.config.iterations))
        return (1 - passed) * self.config.epsilon_start + passed * self.config.epsilon_end

    def train(self) -> None:
        td = self.msrl.env_reset()
        loss = None
        for i in range(self.config.iterations):
            epsilon = self.epsilon(i)
            for _ in range(self.config.steps):
                td = self.msrl.agent_act(td, epsilon)
                td = self.msrl.env_step(td)
                self.msrl.replay_buffer_insert(td)
                td = step_mdp(td)
            if self.msrl.replay_buffer_size() >= self.config.learning_starts:
                for _ in range(self.config.updates):
                    batch = self.msrl.replay_buffer_sample(self.config.batch_size)
                    loss = self.msrl.agent_learn(batch)
                    if self.config.prioritized:
                        self.msrl.replay_buffer_update_priority(batch)
            self.msrl.log(i, loss=loss, epsilon=epsilon)
