"""One update, by torch's optimizer, by `fdg.Adam`, and compiled (`--compile-update`): DQN and PPO, own and TorchRL losses.

    python benchmarks/update_step.py               # compiles first, once: a minute or two

Variants take turns; a figure is the best turn, in CPU time of the one thread that works. `by hand` is what one would write with parameters and
gradients in one flat tensor and the fused kernel: what `fdg.Adam` has to keep up with. The exit code is 1 if DQN with
`fdg.Adam` takes more than 1.2 times as long as that, or compiled more than a third of torch's.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

import fdg
from fdg.algorithms.a2c import Policy, mlp
from fdg.algorithms.dqn import DQNConfig, QLearner
from fdg.algorithms.ppo import PPOConfig, PPOLearner
from fdg.capture import Captures
from fdg.update import captured, in_python, update

TURNS, CALLS, BATCH = 15, 40, 64
LIMIT_EAGER, LIMIT_COMPILED = 1.2, 1 / 3


def transitions() -> TensorDict:
    then = {
        "observation": torch.randn(BATCH, 4),
        "reward": torch.randn(BATCH, 1),
        "done": torch.zeros(BATCH, 1, dtype=torch.bool),
        "terminated": torch.zeros(BATCH, 1, dtype=torch.bool),
    }
    return TensorDict(
        {"observation": torch.randn(BATCH, 4), "action": torch.randint(2, (BATCH,)), "next": then}, [BATCH]
    )


def rollout_rows() -> TensorDict:
    columns = {name: torch.randn(BATCH) for name in ("advantage", "value", "value_target")}
    columns["action_log_prob"] = torch.randn(BATCH) - 8
    return TensorDict({"observation": torch.randn(BATCH, 17), "action": torch.randn(BATCH, 6), **columns}, [BATCH])


def own_dqn() -> tuple[Any, Any, TensorDict]:
    learner = QLearner(
        nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)), DQNConfig()
    )
    return learner.loss, learner.network, transitions()


def torchrl_dqn() -> tuple[Any, Any, TensorDict]:
    _, network, batch = own_dqn()
    values = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(values, loss_function="l2", delay_value=True, action_space="categorical")
    loss.make_value_estimator(gamma=0.99)
    batch["td_error"] = torch.zeros(BATCH, 1)
    return loss, network, batch


def ppo(kind: str) -> tuple[Any, Any, TensorDict]:
    config = PPOConfig(loss=kind, hidden_dim=64)  # type: ignore[arg-type]
    spec: Any = type("Spec", (), {"discrete": False, "action_dim": 6, "obs_dim": 17})
    policy, critic = Policy(spec, config), mlp(17, 1, config, 1.0)
    return PPOLearner(policy, critic, config).loss, nn.ModuleList([policy, critic]), rollout_rows()


WORKLOADS: dict[str, Callable[[], tuple[Any, Any, TensorDict]]] = {
    "DQN 4-64-64-2": own_dqn,
    "DQN 4-64-64-2, TorchRL's loss": torchrl_dqn,
    "PPO HalfCheetah": lambda: ppo("fdg"),
    "PPO HalfCheetah, TorchRL's loss": lambda: ppo("torchrl"),
}


def by_torch(loss: Any, network: nn.Module, batch: TensorDict) -> Callable[[], Any]:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, eps=1e-5)

    def turn() -> None:
        optimizer.zero_grad()
        found = loss(batch)
        (found if isinstance(found, torch.Tensor) else found["loss"]).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()

    return turn


def by_hand(loss: Any, network: nn.Module, batch: TensorDict) -> Callable[[], Any]:
    """Flat parameters and gradients, written out for one optimizer and nothing else."""
    parameters = list(network.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    grad, exp_avg, exp_avg_sq = (torch.zeros_like(flat) for _ in range(3))
    steps, offset = torch.zeros(()), 0
    for parameter in parameters:
        end = offset + parameter.numel()
        parameter.data = flat[offset:end].view(parameter.shape)
        parameter.grad = grad[offset:end].view(parameter.shape)
        offset = end

    def turn() -> None:
        grad.zero_()
        found = loss(batch)
        (found if isinstance(found, torch.Tensor) else found["loss"]).backward()
        length = float(torch.linalg.vector_norm(grad))
        if length > 0.5:
            grad.mul_(0.5 / (length + 1e-6))
        steps.add_(1)
        torch._fused_adam_(  # type: ignore[attr-defined]
            [flat], [grad], [exp_avg], [exp_avg_sq], [], [steps], lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.0,
            eps=1e-5, amsgrad=False, maximize=False,
        )  # fmt: skip

    return turn


def by_fdg(loss: Any, network: nn.Module, batch: TensorDict) -> Callable[[], Any]:
    optimizer = fdg.Adam(network, lr=1e-4, eps=1e-5, max_grad_norm=0.5)
    return lambda: in_python(optimizer, loss, (batch,))


def compiled(loss: Any, network: nn.Module, batch: TensorDict) -> Callable[[], Any]:
    optimizer = fdg.Adam(network, lr=1e-4, eps=1e-5, max_grad_norm=0.5)
    captures = Captures(lambda text: print(f"  {text}", flush=True))

    def turn() -> None:
        with captured(captures):
            for _ in range(CALLS):
                update(optimizer, loss, (batch,))

    turn()
    if captures.updates < CALLS:
        raise SystemExit("not compiled")
    return turn


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    missed = False
    print(f"{'µs per update, batch 64':34} {'torch.optim':>12} {'by hand':>14} {'fdg.Adam':>14} {'compiled':>14}")
    for name, make in WORKLOADS.items():
        variants = {}
        for variant in (by_torch, by_hand, by_fdg, compiled):
            torch.manual_seed(0)
            variants[variant.__name__] = variant(*make())
        seen: dict[str, list[float]] = {variant: [] for variant in variants}
        for _ in range(TURNS):
            for variant, turn in variants.items():
                start = thread_time()
                for _ in range(1 if variant == "compiled" else CALLS):
                    turn()
                seen[variant].append((thread_time() - start) / CALLS * 1e6)
        at = {variant: min(times) for variant, times in seen.items()}
        cells = [f"{at[v]:7.0f} ({at['by_torch'] / at[v]:.1f}x)" for v in ("by_hand", "by_fdg", "compiled")]
        print(f"{name:34} {at['by_torch']:12.0f} " + " ".join(f"{cell:>14}" for cell in cells), flush=True)
        if name == "DQN 4-64-64-2":
            missed = at["by_fdg"] > LIMIT_EAGER * at["by_hand"] or at["compiled"] > LIMIT_COMPILED * at["by_torch"]
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
