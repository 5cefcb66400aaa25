"""REINFORCE: the Monte-Carlo policy gradient (Williams, 1992), with returns normalised over the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from fdg import (
    Actor,
    Adam,
    Agent,
    Config,
    EnvSpec,
    Learner,
    Trainer,
    UsageError,
    fast,
    sample_categorical,
    sample_normal,
    step_mdp,
)
from fdg.networks import MLP


@dataclass
class REINFORCEConfig(Config):
    """Settings of REINFORCE."""

    envs: int = 16
    """Environments of each actor, stepped as one vector environment."""
    iterations: int = 100
    """Turns of the outer loop: finish episodes, then take one gradient step."""
    episodes_per_iter: int = 16
    """Episodes of one gradient step, over all actors; a multiple of `actors`."""
    lr: float = 3e-3
    """Adam's step size at the start; it falls linearly to 0."""
    gamma: float = 0.99
    """Discount of future rewards."""
    hidden_dim: int = 128
    """Units in each hidden layer."""
    hidden_layers: int = 2
    """Hidden layers of the network."""

    def validate(self) -> None:
        super().validate()
        self.at_least(1, "episodes_per_iter", "hidden_dim", "hidden_layers")
        self.at_least(0, "lr")
        self.between(0, 1, "gamma")
        if self.episodes_per_iter % self.actors:
            more = -(-self.episodes_per_iter // self.actors) * self.actors
            raise UsageError(
                f"episodes_per_iter is {self.episodes_per_iter}, which {self.actors} actors cannot share evenly; "
                f"write {more}, a multiple of actors"
            )


class Policy(nn.Module):
    """Observations to a distribution of actions: categorical, or normal with a spread of its own for each action."""

    def __init__(self, spec: EnvSpec, hidden_dim: int, hidden_layers: int = 2) -> None:
        super().__init__()
        outputs = spec.n_actions if spec.discrete else spec.action_dim
        self.network = MLP(spec.features, outputs, num_cells=[hidden_dim] * hidden_layers, activation_class=nn.Tanh)
        self.log_std = None if spec.discrete else nn.Parameter(torch.zeros(outputs))

    def forward(self, observation: torch.Tensor) -> Distribution:
        output = self.network(observation)
        if self.log_std is None:
            return Categorical(logits=output, validate_args=False)
        return Independent(Normal(output, self.log_std.exp(), validate_args=False), 1, validate_args=False)


class PolicyActor(Actor):
    """Samples from the policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def act(self, td: TensorDict) -> TensorDict:
        moves = td.get("_step", None)  # which environments are to take a step
        output, log_std = fast(self.policy.network, td["observation"], moves), self.policy.log_std
        td["action"] = sample_categorical(output) if log_std is None else sample_normal(output, log_std.exp())
        return td

    def evaluate(self, td: TensorDict) -> TensorDict:
        output = fast(self.policy.network, td["observation"])
        td["action"] = output.argmax(-1) if self.policy.log_std is None else output
        return td


class PolicyLearner(Learner):
    """Makes actions likelier the more return followed them."""

    def __init__(self, policy: Policy, config: REINFORCEConfig) -> None:
        self.config, self.policy, self.updates = config, policy, 0
        self.optimizer = Adam(policy, lr=config.lr)

    def learn(self, rows: TensorDict) -> dict[str, torch.Tensor]:
        returns = rows["return"]
        advantage = (returns - self.mean(returns)) / (self.std(returns) + 1e-8)
        self.optimizer.lr = self.config.lr * max(0.0, 1 - self.updates / self.config.iterations)
        given = rows["observation"], rows["action"], advantage
        loss = self.update(self.loss, *given, compile=False)  # each batch has another number of rows
        self.updates += 1
        episodes = self.sum(rows["next", "done"])
        mean_return = self.sum(rows["next", "reward"]) / episodes  # of the episodes that count, see `next_episodes`
        return {"loss": loss, "episodes": episodes, "episodic_return": mean_return}

    def loss(self, observation: torch.Tensor, action: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return -(self.policy(observation).log_prob(action) * advantage).mean()


class REINFORCE(Trainer):
    """Monte-Carlo policy gradient over whole episodes, for discrete and continuous actions."""

    config: REINFORCEConfig

    def agent(self, spec: EnvSpec) -> Agent:
        policy = Policy(spec, self.config.hidden_dim, self.config.hidden_layers)
        return Agent(PolicyActor(policy), PolicyLearner(policy, self.config))

    def train(self) -> None:
        for i in range(self.config.iterations):
            td = self.msrl.env_reset()
            counts, left = first_episodes(self.config)
            steps, counted, moving = [], [], True
            while moving:
                td["_step"] = counts
                td = self.msrl.agent_act(td)
                td = self.msrl.env_step(td)
                steps.append(td)
                counted.append(counts)
                done = td["next", "done"]
                if done.any():
                    counts, left = next_episodes(counts, left, done.squeeze(-1))
                    moving = bool(counts.any())
                td = step_mdp(td)
            rows = with_returns(steps, counted, self.config.gamma)
            metrics = self.msrl.agent_learn(rows)
            self.msrl.log(i, metrics)


def first_episodes(config: REINFORCEConfig) -> tuple[torch.Tensor, int]:
    """Which environments of an actor begin with an episode that counts, and how many of its episodes are then left."""
    episodes = config.episodes_per_iter // config.actors
    return torch.arange(config.envs) < episodes, max(0, episodes - config.envs)


def next_episodes(counts: torch.Tensor, left: int, done: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Environments whose episode has ended take one of those left, in their order.

    Every episode that was begun is finished and counts: taking the first to end would favour short ones. An environment
    that finds none left waits for the others.
    """
    ended = counts & done
    goes_on = ended & (ended.cumsum(0) <= left)
    return (counts & ~ended) | goes_on, left - int(goes_on.sum())


def with_returns(steps: list[TensorDict], counted: list[torch.Tensor], gamma: float) -> TensorDict:
    """The rows of all steps that count, each with the discounted return from there to the end of its episode."""
    keys = "observation", "action", ("next", "reward"), ("next", "done")
    observation, action, reward, done = (torch.stack([step[key] for step in steps]) for key in keys)
    returns, later = [], torch.zeros_like(reward[0])
    for now, factor in zip(reversed(reward.unbind()), reversed((gamma * ~done).unbind()), strict=True):
        later = torch.addcmul(now, factor, later)
        returns.append(later)
    rows = torch.stack(counted).flatten().nonzero().squeeze(-1)
    every = observation, action, reward, done, torch.stack(returns[::-1]).squeeze(-1)
    observation, action, reward, done, gains = (column.flatten(0, 1)[rows] for column in every)
    following = TensorDict({"reward": reward, "done": done}, rows.shape)
    columns = {"observation": observation, "action": action, "next": following, "return": gains}
    return TensorDict(columns, rows.shape)
