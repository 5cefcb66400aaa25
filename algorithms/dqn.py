"""DQN: Q-learning with a neural network, replay and a target network (Mnih et al., 2015)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from fdg import Actor, Agent, Config, EnvSpec, Learner, ReplayBuffer, Trainer, step_mdp


@dataclass
class DQNConfig(Config):
    """Settings of DQN."""

    envs: int = 16
    """Environments of each actor, stepped as one vector environment."""
    iterations: int = 500
    """Turns of the outer loop: collect, then update."""
    steps: int = 8
    """Steps of each environment per iteration."""
    updates: int = 32
    """Gradient steps per iteration."""
    learning_starts: int = 1000
    """Rows in the replay buffer before the first gradient step."""
    buffer_size: int = 50_000
    """Rows that the replay buffer keeps."""
    batch_size: int = 128
    """Rows of one gradient step."""
    lr: float = 1e-3
    """Adam's step size."""
    gamma: float = 0.99
    """Discount of future rewards."""
    tau: float = 0.01
    """How far the target network moves towards the network after each gradient step; 1 copies it."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    hidden_dim: int = 128
    """Units in each of the two hidden layers."""
    epsilon_start: float = 1.0
    """Chance of a random action at the start."""
    epsilon_end: float = 0.05
    """Chance of a random action once explored."""
    exploration_fraction: float = 0.3
    """Part of the iterations over which epsilon falls from start to end."""

    def validate(self) -> None:
        super().validate()
        self.at_least(1, "steps", "buffer_size", "batch_size", "hidden_dim")
        self.at_least(0, "updates", "learning_starts", "lr", "max_grad_norm", "exploration_fraction")
        # TODO


class QActor(Actor):
    """Epsilon-greedy on the action values."""

    def __init__(self, network: nn.Module, n_actions: int) -> None:
        self.network, self.n_actions = network, n_actions

    def act(self, td: TensorDict, epsilon: float) -> TensorDict:
        greedy = self.network(td["observation"]).argmax(-1)
        explore = torch.rand(greedy.shape) < epsilon
        td["action"] = torch.where(explore, torch.randint(self.n_actions, greedy.shape), greedy)
        return td

    def evaluate(self, td: TensorDict) -> TensorDict:
        return self.act(td, epsilon=0.0)


class QLearner(Learner):
    """Gradient steps on the temporal-difference error."""

    def __init__(self, network: nn.Module, config: DQNConfig) -> None:
        values = QValueActor(network, in_keys=["observation"], action_space="categorical")
        self.loss = DQNLoss(values, loss_function="smooth_l1", action_space="categorical", delay_value=True)
        self.loss.make_value_estimator(gamma=config.gamma)
        self.target = SoftUpdate(self.loss, tau=config.tau)
        self.optimizer = torch.optim.Adam(network.parameters(), lr=config.lr)
        self.parameters = list(network.parameters())
        self.max_grad_norm = config.max_grad_norm

    def learn(self, batch: TensorDict) -> torch.Tensor:
        loss = self.loss(batch)["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
        self.target.step()
        return loss


class DQN(Trainer):
    """Q-learning from replay with a target network, for discrete actions."""

    config: DQNConfig

    def agent(self, spec: EnvSpec) -> Agent:
        width = self.config.hidden_dim
        network = MLP(spec.obs_dim, spec.n_actions, num_cells=[width, width], activation_class=nn.ReLU)
        return Agent(QActor(network, spec.n_actions), QLearner(network, self.config))

    def replay_buffer(self, spec: EnvSpec) -> ReplayBuffer:
        return ReplayBuffer(self.config.buffer_size)

    def epsilon(self, i: int) -> float:
        """Falls linearly from start to end over the first part of training."""
        config = self.config
        done = min(1.0, i / max(1.0, config.exploration_fraction * config.iterations))
        return config.epsilon_start + done * (config.epsilon_end - config.epsilon_start)

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
                    loss = self.msrl.agent_learn(self.msrl.replay_buffer_sample(self.config.batch_size))
            self.msrl.log(i, loss=loss, epsilon=epsilon)
