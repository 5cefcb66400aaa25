"""Toy components for compiler tests: integers in disguise, so that a whole training run costs milliseconds.

    ToyEnvironment   counts along a ring of 23 places; episodes end at data-dependent steps
    ToyActor         acts on the weights, on its own state and on torch, numpy and `random` draws
    ToyLearner       an order-dependent update of the weights from every value it is given; marks its batch as seen
    ToyTrainer       a trainer of these; subclass it and write `train`

Everything that could go wrong in a projection shows in the numbers: a stale weight, a row in another order, a draw from
another stream, a forgotten change of an argument, a lost grad mode. The components are total: any order of calls runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from fdg.api import Actor, Agent, Learner, Trainer, pure
from fdg.config import Config

PLACES, OLDEST, PRIME = 23, 6, 2**31 - 1
# What a learner looks at. Bookkeeping that a buffer adds to a sample (an index, a weight) is not the algorithm's data.
LEAVES = ("observation", "ticks", "action", "reward", "done", "terminated", "truncated", "seen", "x_a", "x_b")


def fold(value: Any, start: int = 17) -> int:
    """A number that depends on every value inside `value`, on their order and on nothing else.

    >>> fold([1, 2]) != fold([2, 1])
    True
    """
    total = start
    if isinstance(value, TensorDictBase):
        for key in sorted(value.keys()):
            inner = value.get(key)
            if key == "next" or key in LEAVES:
                total = fold(inner, total + len(key))
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        total = fold(value.reshape(-1).tolist(), total)
    elif isinstance(value, dict):
        for key in sorted(value):
            total = fold(value[key], total + len(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            total = fold(item, total)
    elif isinstance(value, (bool, int, float, np.number, np.bool_)):
        total = (total * 1000003 + int(float(value) * 1024)) % PRIME
    elif isinstance(value, str):
        total = fold([ord(letter) for letter in value], total)
    elif value is not None:
        raise TypeError(f"fold of {type(value).__name__}: toy components take numbers, tensors and containers of those")
    return (total * 31 + 1) % PRIME


@pure
def digest(value: Any) -> int:
    """`fold`, below 1000, declared pure."""
    return fold(value) % 1000


@pure
def advance(td: TensorDictBase) -> TensorDictBase:
    """The root of the next step, as `fdg.step_mdp`; without a step behind it, `td` itself."""
    if "next" not in td.keys():  # noqa: SIM118
        return td
    then = td["next"]
    root = td.exclude("next", "action")
    for key in ("observation", "ticks"):
        root[key] = then[key if key == "ticks" else "reset_observation"].clone()
    for key in ("done", "terminated", "truncated"):
        root[key] = torch.zeros_like(then[key])
    return root


@pure
def row(td: TensorDictBase) -> TensorDictBase:
    """A transition with always the same keys, whatever was done to `td`: what may be inserted at any time."""
    then = td.get("next", td)
    flat = {"observation": td["observation"], "action": td.get("action", torch.zeros_like(td["ticks"][:, 0]))}
    after = {
        "observation": then["observation"],
        "reward": then.get("reward", torch.zeros_like(td["observation"][:, :1])),
    }
    flat["next"] = TensorDict({**after, "done": then["done"]}, td.batch_size, names=td.names)
    return TensorDict(flat, td.batch_size, names=td.names).clone()


class ToyEnvironment:
    """E counters on a ring of 23 places. An episode ends at every sixth place, or is cut after 6 steps."""

    def __init__(self, envs: int = 1) -> None:
        self.envs = envs
        self.spec = make_spec(envs)
        self.place, self.age = torch.zeros(envs, dtype=torch.int64), torch.zeros(envs, dtype=torch.int64)
        self.returns = torch.zeros(envs, dtype=torch.float64)
        self.episodes: list[tuple[float, int]] = []
        self.frames = 0

    def reset(self, seed: int | None = None, **_: Any) -> TensorDict:
        self._begin(torch.ones(self.envs, dtype=torch.bool))
        return TensorDict({**self._look(), **flags(self.envs)}, [self.envs], names=["env"])

    def step(self, td: TensorDictBase) -> TensorDictBase:
        action = td.get("action", None)
        action = torch.zeros(self.envs, dtype=torch.int64) if action is None else action.reshape(self.envs).long()
        drawn = random.randrange(4) + torch.randint(0, 2, (self.envs,)) + 7 * torch.is_grad_enabled()
        self.place = (self.place * 5 + action * 3 + drawn) % PLACES
        self.age = self.age + 1
        self.frames += self.envs
        reward = (self.place % 7 - 3).double()
        self.returns += reward
        terminated = self.place % 6 == 0
        truncated = (self.age >= OLDEST) & ~terminated
        then = {**self._look(), **flags(self.envs, terminated, truncated), "reward": reward[:, None]}
        over = terminated | truncated
        self.episodes += [(float(self.returns[e]), int(self.age[e])) for e in range(self.envs) if over[e]]
        self._begin(over)
        then["reset_observation"] = self._look()["observation"]
        td["next"] = TensorDict(then, [self.envs], names=["env"])
        return td

    def drain_episodes(self) -> list[tuple[float, int]]:
        episodes, self.episodes = self.episodes, []
        return episodes

    def close(self) -> None:
        pass

    def _begin(self, rows: torch.Tensor) -> None:
        start = torch.randint(0, PLACES, (self.envs,)) + int(np.random.randint(3))
        self.place = torch.where(rows, start % PLACES, self.place)
        self.age = torch.where(rows, 0, self.age)
        self.returns = torch.where(rows, 0.0, self.returns)

    def _look(self) -> dict[str, torch.Tensor]:
        return {"observation": torch.stack([self.place, self.age], -1).double(), "ticks": self.age[:, None].clone()}


def flags(
    envs: int, terminated: torch.Tensor | None = None, truncated: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The three columns that say whether an episode is over."""
    none = torch.zeros(envs, dtype=torch.bool)
    terminated, truncated = none if terminated is None else terminated, none if truncated is None else truncated
    columns = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
    return {key: column[:, None].clone() for key, column in columns.items()}


def make(envs: int = 1, seed: int = 0, **_: Any) -> ToyEnvironment:
    """The factory to name as an environment. It needs no seed: the environment draws from its own stream."""
    return ToyEnvironment(envs)


def make_spec(envs: int) -> Any:
    """What the toy environment tells of itself."""
    from fdg.runtime.environments import EnvSpec

    return EnvSpec(
        id="toy",
        observation_space=gymnasium.spaces.Box(-1.0, 100.0, (2,), np.float64),
        action_space=gymnasium.spaces.Discrete(4),
        backend="toy",
        num_envs=envs,
    )


class ToyNet(torch.nn.Module):
    """The weights: four numbers, and a counter that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        start = torch.randint(1, 50, (4,)).double()
        self.values = torch.nn.Parameter(start, requires_grad=False)
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))


class ToyActor(Actor):
    """Acts on the weights, on what it is told, on its own count of calls, and on draws from all three generators."""

    def __init__(self, net: ToyNet, shift: torch.Tensor) -> None:
        self.net, self.shift, self.calls = net, shift, 0

    def act(self, td: TensorDictBase, *args: Any, fresh: bool = False, pair: bool = False, **kwargs: Any) -> Any:
        """Put an `action` into `td`; `fresh`: into a copy of it; `pair`: return its score as well."""
        self.calls += 1
        if fresh:
            td = td.clone()
        if "seen" in td.keys():  # noqa: SIM118
            del td["seen"]
        told = fold((args, kwargs)) % 13 + self.calls
        draws = torch.randint(0, 3, td.batch_size) + random.randrange(3) + int(np.random.randint(3))
        score = self._score(td) + draws + told
        td["action"] = score % 4
        return (td, (score % 31).double()) if pair else td

    def evaluate(self, td: TensorDictBase) -> TensorDictBase:
        td["action"] = self._score(td) % 4
        return td

    def _score(self, td: TensorDictBase) -> torch.Tensor:
        weights = self.net.values + self.shift
        return (td["observation"] * weights[:2]).sum(-1).long() % 1009 + self.net.version


class ToyLearner(Learner):
    """Updates the weights from every value it is given, in order; leaves a mark on its batch."""

    def __init__(self, net: ToyNet, shift: torch.Tensor) -> None:
        self.net, self.shift, self.updates = net, shift, 0

    def learn(self, batch: Any, *args: Any, want: str = "td", scale: bool = False, **kwargs: Any) -> Any:
        """One update. `want` chooses what comes back: td, tensor, float or dict; `scale` changes rewards in place."""
        self.updates += 1
        total = fold((batch, args, kwargs), self.updates) + 5 * torch.is_grad_enabled()
        total += int(torch.randint(0, 7, ())) + random.randrange(7) + int(np.random.randint(7))
        parts = torch.tensor([total % 101, total // 101 % 89, total // 8989 % 97, total % 53])
        self.net.values.copy_((self.net.values * 3 + parts) % 211)
        self.net.version += 1
        self.shift += total % 3
        self._mark(batch, scale)
        loss = torch.tensor(total % 997 / 8, dtype=torch.float64)
        if want == "tensor":
            return loss
        if want == "float":
            return float(loss)
        if want == "dict":
            return {"loss": float(loss), "count": self.updates}
        return TensorDict({"loss": loss, "count": torch.tensor(self.updates)}, [])

    def _mark(self, batch: Any, scale: bool) -> None:
        if isinstance(batch, (list, tuple)):
            for item in batch:
                self._mark(item, scale)
        elif isinstance(batch, TensorDictBase):
            seen = batch.get("seen", None)
            batch["seen"] = torch.ones(batch.batch_size, dtype=torch.int64) if seen is None else seen + 1
            if scale:
                batch["observation"].mul_(2).remainder_(29)
        elif isinstance(batch, dict):
            batch["seen"] = batch.get("seen", 0) + 1


@dataclass
class ToyConfig(Config):
    """A toy experiment: two environments, a small buffer, a plan of small numbers."""

    env: Any = make
    """A factory of environments, or what names one."""
    envs: int = 2
    """Environments of each actor."""
    iterations: int = 3
    """Turns of the outer loop."""
    capacity: int = 24
    """Rows in the buffer, over all lanes."""
    plan: tuple[int, ...] = (2, 1, 3)
    """Small numbers to loop over."""


class ToyTrainer(Trainer):
    """A trainer of toy components; a subclass writes `train`.

    Any other trainer runs at the cost of integers when it borrows the two methods, with `env=make` in its config:

        class ToyDQN(DQN):
            agent, replay_buffer = ToyTrainer.agent, ToyTrainer.replay_buffer
    """

    config: ToyConfig

    def agent(self, spec: Any) -> Agent:
        net, shift = ToyNet(), torch.zeros(4, dtype=torch.float64)
        return Agent(actor=ToyActor(net, shift), learner=ToyLearner(net, shift))

    def replay_buffer(self, spec: Any) -> Any:
        from fdg.runtime.replay import ReplayBuffer

        return ReplayBuffer(getattr(self.config, "capacity", 24))
