"""Running statistics for observations and rewards, kept by the learner: the same numbers under every policy.

    policy.normalize = Normalizer(spec.obs_dim)            in `agent`: actor and learner both reach it, so it travels as weights
    self.policy.normalize(td["observation"])               in `act` and `learn`
    self.policy.normalize.update(rollout["observation"])   in `learn`, once the batch was learned from

    self.rewards = RewardScaler(gamma)                     in the learner's `__init__`
    self.rewards.update(reward, done)                      in `learn`: [T, N], T steps of N environments
    reward = self.rewards(reward)

Actors see only what the learner has published: all of them normalize alike, whatever their number and place. Where a
batch is shared out over several learners, the statistics are over all of its rows.
"""

from __future__ import annotations

import torch
from torch import nn

from fdg import statistics
from fdg.errors import UsageError


class Normalizer(nn.Module):
    """Shifts and scales values by the mean and spread of all those that `update` was given.

    Before the first update values pass as they are, but for the clipping.

    >>> normalizer = Normalizer(2)
    >>> normalizer.update(torch.tensor([[0.0, 5.0], [2.0, 9.0]]))
    >>> normalizer(torch.tensor([1.0, 9.0]))
    tensor([0., 1.])
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, *shape: int, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.shape, self.clip, self.epsilon = shape, clip, epsilon
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones(shape))  # what `forward` needs, in its own type
        self.register_buffer("shift", torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.shift, x, self.scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: torch.Tensor) -> None:
        """Take values `[…, *shape]` into account. Only the learner may: actors read weights.

        Raises:
            UsageError: the values have another shape.
        """
        rows = x.dim() - len(self.shape)
        if rows < 0 or tuple(x.shape[rows:]) != self.shape:
            raise UsageError(
                f"Normalizer.update was given values of shape {list(x.shape)}; the last dimensions must be {list(self.shape)}"
            )
        count, mean, var = statistics.moments(x.reshape(-1, *self.shape))
        total = self.count + count
        away = mean - self.mean
        self.var.copy_((self.var * self.count + var * count + away.square() * (self.count * count / total)) / total)
        self.mean.add_(away * (count / total))
        self.count.copy_(total)
        self.scale.copy_((self.var + self.epsilon).rsqrt())
        self.shift.copy_(-self.mean * self.scale)


class RewardScaler(nn.Module):
    """Divides rewards by the spread of the discounted return so far, which follows each environment across batches.

    Rewards are not shifted: that would make it good, or bad, to stay alive.
    """

    running: torch.Tensor

    def __init__(self, gamma: float, clip: float = 10.0) -> None:
        super().__init__()
        self.gamma, self.clip = gamma, clip
        self.returns = Normalizer()
        self.register_buffer("running", torch.zeros(0))  # the return so far, one for each environment

    def forward(self, reward: torch.Tensor) -> torch.Tensor:
        return (reward * self.returns.scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, reward: torch.Tensor, done: torch.Tensor) -> None:
        """Take a rollout into account: rewards and ends of episodes, `[T, N]`, that follow those of the last call.

        Raises:
            UsageError: other shapes, or another number of environments than before.
        """
        if reward.dim() != 2 or reward.shape != done.shape:
            raise UsageError(
                f"RewardScaler.update was given rewards {list(reward.shape)} and done {list(done.shape)}; both must be [T, N], "
                "T steps of N environments"
            )
        before = statistics.own_rows(self.running) if len(self.running) else torch.zeros_like(reward[0])
        if before.shape != reward[0].shape:
            raise UsageError(
                f"RewardScaler.update was given rewards of {reward.shape[1]} environments, and of {len(before)} the last "
                "time; the return so far follows each environment from rollout to rollout"
            )
        decay = self.gamma * ~done
        returns = []
        for now, factor in zip(reward.unbind(), decay.unbind(), strict=True):
            returns.append(before + now)
            before = returns[-1] * factor
        self.running = statistics.all_rows(before)
        self.returns.update(torch.stack(returns))
