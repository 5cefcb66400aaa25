"""PPO: proximal policy optimisation with a clipped objective (Schulman et al., 2017). Its networks are A2C's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torchrl.objectives import ClipPPOLoss

from fdg import Agent, EnvSpec, Trainer, UsageError, stack, step_mdp
from fdg.algorithms.a2c import A2CConfig, A2CLearner, Policy, SamplingActor, mlp


@dataclass
class PPOConfig(A2CConfig):
    """Settings of PPO: those of A2C and some more."""

    envs: int = 8
    """Environments of each actor, stepped as one vector environment."""
    iterations: int = 500
    """Rollouts, each followed by `update_epochs` passes over it."""
    steps: int = 128
    """Steps of each environment in one rollout."""
    lr: float = 2.5e-4
    """Adam's step size at the start."""
    norm_adv: bool = True
    """Shift and scale advantages to mean 0 and spread 1 in each minibatch."""
    update_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Gradient steps in each pass; divides `steps`."""
    clip_coef: float = 0.2
    """How far the probability of an action may move, as a ratio, before the objective no longer rewards it."""
    clip_vloss: bool = False
    """Also keep values within `clip_coef` of the old ones."""
    loss: Literal["own", "torchrl"] = "own"
    """Who computes the loss: a few lines below, or TorchRL's ClipPPOLoss. The numbers are the same."""

    def validate(self) -> None:
        super().validate()
        self.at_least(1, "update_epochs", "num_minibatches")
        self.at_least(0, "clip_coef")
        if self.steps % self.num_minibatches:
            more = -(-self.steps // self.num_minibatches) * self.num_minibatches
            raise UsageError(
                f"num_minibatches is {self.num_minibatches}, and {self.steps} steps cannot be shared evenly: a minibatch is "
                f"some steps of all environments; write {more} steps, a multiple of num_minibatches"
            )


class PPOLearner(A2CLearner):
    """Passes over each rollout [T, N] in minibatches, with an objective that keeps the policy near the old one."""

    config: PPOConfig

    def __init__(self, policy: Policy, critic: nn.Module, config: PPOConfig) -> None:
        super().__init__(policy, critic, config)
        self.torchrl = torchrl_loss(policy, critic, config) if config.loss == "torchrl" else None

    def learn(self, rollout: TensorDict) -> dict[str, torch.Tensor]:
        self.optimizer.lr = self.lr()
        batch = self.prepare(rollout)
        length = len(rollout)
        for _ in range(self.config.update_epochs):
            # Steps are shuffled, and a minibatch has all environments of its steps: so have several learners' together.
            shuffled = batch[torch.randperm(length)].flatten()
            for minibatch in shuffled.split(len(shuffled) // self.config.num_minibatches):
                losses = self.update(self.loss, minibatch)
        losses.update(self.diagnose(batch.flatten()))
        self.finish(rollout)
        return losses

    @torch.no_grad()
    def prepare(self, rollout: TensorDict) -> TensorDict:
        """Also how likely the actions were: the actors' policy is still this one."""
        batch = super().prepare(rollout)
        batch["action_log_prob"], _ = self.policy(batch["observation"], batch["action"])
        return batch

    def loss(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        config, advantage = self.config, batch["advantage"]
        if config.norm_adv:
            advantage = (advantage - self.mean(advantage)) / (self.std(advantage) + 1e-8)
        if self.torchrl is not None:
            return self.torchrl_losses(batch.replace(advantage=advantage))
        log_prob, entropy = self.policy(batch["observation"], batch["action"])
        ratio = (log_prob - batch["action_log_prob"]).exp()
        clipped = ratio.clamp(1 - config.clip_coef, 1 + config.clip_coef)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        value = self.critic(batch["observation"]).squeeze(-1)
        error = (value - batch["value_target"]).square()
        if config.clip_vloss:
            near = batch["value"] + (value - batch["value"]).clamp(-config.clip_coef, config.clip_coef)
            error = torch.max(error, (near - batch["value_target"]).square())
        value_loss, entropy = error.mean(), entropy.mean()
        loss = policy_loss + config.vf_coef * value_loss
        if config.ent_coef:
            loss = loss - config.ent_coef * entropy
        return {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}

    def torchrl_losses(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """The same by TorchRL, which has numbers of a row in a dimension of their own."""
        assert self.torchrl is not None
        columns = {name: batch[name].unsqueeze(-1) for name in ("advantage", "value", "value_target")}
        out = self.torchrl(batch.replace(columns))
        parts = out["loss_objective"], out["loss_critic"], out["loss_entropy"]
        value_loss = parts[1] / self.config.vf_coef if self.config.vf_coef else parts[1]
        return {"loss": sum(parts), "policy_loss": parts[0], "value_loss": value_loss, "entropy": out["entropy"]}

    @torch.no_grad()
    def diagnose(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """How far the policy has moved by all minibatches of a rollout, and how good the values were before."""
        log_prob, _ = self.policy(batch["observation"], batch["action"])
        log_ratio = log_prob - batch["action_log_prob"]
        ratio, error = log_ratio.exp(), batch["value_target"] - batch["value"]
        unexplained = self.std(error) / (self.std(batch["value_target"]) + 1e-8)
        return {
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clipfrac": ((ratio - 1).abs() > self.config.clip_coef).float().mean(),
            "explained_variance": 1 - unexplained**2,
        }


def torchrl_loss(policy: Policy, critic: nn.Module, config: PPOConfig) -> ClipPPOLoss:
    """TorchRL's loss on the same networks."""
    log_std = policy.log_std
    keys = ["logits"] if log_std is None else ["loc", "scale"]
    network = policy.network if log_std is None else Spread(policy.network, log_std)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(network, in_keys=["observation"], out_keys=keys),
        ProbabilisticTensorDictModule(
            in_keys=keys, out_keys=["action"], distribution_class=Categorical if log_std is None else normal
        ),
    )
    value = TensorDictModule(critic, in_keys=["observation"], out_keys=["value"])
    clip = config.clip_coef if config.clip_vloss else None
    loss = ClipPPOLoss(
        actor, value, clip_epsilon=config.clip_coef, entropy_coeff=config.ent_coef, critic_coeff=config.vf_coef,
        loss_critic_type="l2", normalize_advantage=False, clip_value=clip,
    )  # fmt: skip
    loss.set_keys(value="value", sample_log_prob="action_log_prob")
    return loss


class Spread(nn.Module):
    """A network of means with spreads beside them."""

    def __init__(self, network: nn.Module, log_std: nn.Parameter) -> None:
        super().__init__()
        self.network, self.log_std = network, log_std

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.network(observation)
        return mean, self.log_std.exp().expand_as(mean)


def normal(loc: torch.Tensor, scale: torch.Tensor, **_: Any) -> Independent:
    return Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False)


class PPO(Trainer):
    """Proximal policy optimisation, for discrete and continuous actions."""

    config: PPOConfig

    def agent(self, spec: EnvSpec) -> Agent:
        policy, critic = Policy(spec, self.config), mlp(spec.features, 1, self.config, last_gain=1.0)
        return Agent(SamplingActor(policy), PPOLearner(policy, critic, self.config))

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
