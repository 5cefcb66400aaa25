"""TorchRL's side: python torchrl_side.py WORKLOAD SECONDS"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from measure import answer, rate

KINDS = {"CartPole-v1": (4, 2), "HalfCheetah-v5": (17, 6)}


def collect(env_id: str, seconds: float) -> None:
    """The best of its collectors: one process with serial environments, or two processes, synchronous or not."""
    import torch
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torch import nn
    from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
    from torchrl.envs import DoubleToFloat, GymEnv, SerialEnv, TransformedEnv
    from torchrl.modules import ProbabilisticActor, TanhNormal

    inputs, outputs = KINDS[env_id]
    discrete = env_id == "CartPole-v1"
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    keys = ["logits"] if discrete else ["loc", "scale"]
    layers += [nn.Linear(64, outputs)] if discrete else [nn.Linear(64, 2 * outputs), NormalParamExtractor()]
    policy = ProbabilisticActor(
        TensorDictModule(nn.Sequential(*layers), in_keys=["observation"], out_keys=keys),
        in_keys=keys,
        distribution_class=torch.distributions.Categorical if discrete else TanhNormal,
        distribution_kwargs={} if discrete else {"low": -1.0, "high": 1.0},
    )

    def one() -> Any:
        if discrete:
            return GymEnv(env_id, categorical_action_encoding=True)
        return TransformedEnv(GymEnv(env_id), DoubleToFloat())

    def many() -> Any:
        return SerialEnv(8, one)

    found = {}
    for name, make in (
        ("serial", lambda: Collector(many, policy, frames_per_batch=800, total_frames=-1)),
        ("sync", lambda: MultiSyncCollector([many] * 2, policy, frames_per_batch=1600, total_frames=-1)),
        ("async", lambda: MultiAsyncCollector([many] * 2, policy, frames_per_batch=800, total_frames=-1)),
    ):
        collector = make()
        batches = iter(collector)
        found[name] = rate(lambda batches=batches: next(batches).numel(), seconds)  # type: ignore[misc]
        collector.shutdown()
    print(found)
    answer(rate=max(found.values()))


def collect_cartpole(seconds: float) -> None:
    collect("CartPole-v1", seconds)


def collect_cheetah(seconds: float) -> None:
    collect("HalfCheetah-v5", seconds)


def dqn_published(seconds: float) -> None:
    """The shape in which DQN with TorchRL is published: one environment, a TensorDict for each step; 4 collections of 100
    frames, then one update of 64 rows with TorchRL's buffer and loss."""
    import gymnasium
    import torch
    from tensordict import TensorDict
    from torch import nn
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    env = gymnasium.make("CartPole-v1")
    network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    values = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss_module = DQNLoss(values, action_space="categorical", delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, tau=0.05)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=64)
    observation = torch.from_numpy(env.reset(seed=1)[0])

    def collect(frames: int) -> TensorDict:
        nonlocal observation
        found = []
        for _ in range(frames):
            with torch.no_grad():
                action = values(TensorDict({"observation": observation}, []))["action"]
            if torch.rand(()) < 0.1:
                action = torch.randint(2, ())
            following, reward, terminated, truncated, _ = env.step(action.item())
            after = torch.from_numpy(following)
            flags = {"done": torch.tensor([terminated or truncated]), "terminated": torch.tensor([terminated])}
            row = {"observation": observation, "action": action}
            found.append(
                TensorDict(
                    {**row, "next": {"observation": after, "reward": torch.tensor([float(reward)]), **flags}}, []
                )
            )
            observation = torch.from_numpy(env.reset()[0]) if terminated or truncated else after
        return torch.stack(found)  # type: ignore[arg-type, return-value]

    def step() -> int:
        for _ in range(4):
            buffer.extend(collect(100))
        loss = loss_module(buffer.sample())["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        target.step()
        return 400

    answer(rate=rate(step, seconds))


def rows(n: int) -> Any:
    """Transitions of CartPole, as an environment's step leaves them."""
    import torch
    from tensordict import TensorDict

    def part(**more: Any) -> dict[str, Any]:
        flags = {key: torch.zeros(n, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        return {"observation": torch.randn(n, 4), **flags, **more}

    following = TensorDict(part(reward=torch.ones(n, 1)), batch_size=[n])
    return TensorDict(part(action=torch.zeros(n, dtype=torch.int64), next=following), batch_size=[n])


def replay_uniform(seconds: float) -> None:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)
    buffer.extend(rows(100_000))
    new = rows(16)

    def step() -> int:
        buffer.extend(new)
        buffer.sample()
        return 1

    answer(rate=rate(step, seconds))


def replay_prioritized(seconds: float) -> None:
    import torch
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    sampler = PrioritizedSampler(100_000, alpha=0.6, beta=0.4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), sampler=sampler, batch_size=256)
    buffer.extend(rows(100_000))
    priority = torch.rand(256)

    def step() -> int:
        _, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], priority)
        return 1

    answer(rate=rate(step, seconds))


def start_up(seconds: float) -> None:
    """Seconds that `import torchrl` takes, from a new process on, and the memory it needs."""
    import subprocess

    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torchrl"], check=True)
    taken = time.perf_counter() - start
    answer(seconds=taken, megabytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)


WORKLOADS = (collect_cartpole, collect_cheetah, dqn_published, replay_uniform, replay_prioritized, start_up)

if __name__ == "__main__":
    if sys.argv[1] != "start_up":
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(1)
    {function.__name__: function for function in WORKLOADS}[sys.argv[1]](float(sys.argv[2]))
