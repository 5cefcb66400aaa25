"""Hot paths stay fast: each against a loop that does the same work by hand, in turns, in one process.

CPU time of this thread, and the best of many short turns: what else the machine does hardly shows. Limits lie well above
what is measured (in brackets) and below what a careless change costs. Whole programs beside others: benchmarks/peers.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time_ns
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import fdg
from fdg import ReplayBuffer, step_mdp
from fdg.capture import Captures, sites
from fdg.runtime.backends import CartPoleRows, make_rows
from fdg.runtime.environments import make_env
from fdg.update import captured, in_python, update


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_ratio_below(
    limit: float, ours: Callable[[], Any], reference: Callable[[], Any], turns: int = 60, calls: int = 20
) -> None:
    """How many times as long as the reference, by the best turn of each. On a busy machine a good turn may take a while to
    come: there are up to five times as many before the limit counts as missed."""
    best = {ours: float("inf"), reference: float("inf")}
    for turn in range(1, 5 * turns + 1):
        for function in best:
            start = thread_time_ns()
            for _ in range(calls):
                function()
            best[function] = min(best[function], thread_time_ns() - start)
        if turn % turns == 0 and best[ours] / best[reference] < limit:
            return
    assert best[ours] / best[reference] < limit


def rows(n: int) -> TensorDict:
    flags = {key: torch.zeros(n, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
    following = {"observation": torch.randn(n, 4), "reward": torch.ones(n, 1), **flags}
    root = {"observation": torch.randn(n, 4), "action": torch.zeros(n, dtype=torch.int64), **flags}
    return TensorDict({**root, "next": TensorDict(following, batch_size=[n])}, batch_size=[n])


def test_a_step_costs_little_more_than_gymnasiums_own() -> None:
    """Physics, checks, counters, TensorDicts and step_mdp of 16 CartPoles, against Gymnasium's `step` alone."""
    env, theirs = make_env("CartPole-v1", 16, seed=1), CartPoleRows("CartPole-v1", 16).vector
    actions = torch.tensor([0, 1] * 8)
    td = env.reset()
    theirs.reset(seed=1)

    def ours() -> None:
        nonlocal td
        td["action"] = actions
        td = step_mdp(env.step(td))

    assert_ratio_below(2.0, ours, lambda: theirs.step(actions.numpy()))  # 1.5; once 2.3


def test_an_insert_costs_little_more_than_writing_the_columns() -> None:
    """16 rows into a buffer, against ten slice assignments and the tensors' arrays."""
    buffer, td = ReplayBuffer(100_000), rows(16)
    buffer.insert(0, td)
    columns = [td[key] for key in td.keys(True, True)]
    table = [np.empty((100_000, *column.shape[1:]), column.numpy().dtype) for column in columns]

    def by_hand() -> None:
        for array, column in zip(table, columns, strict=True):
            array[16:32] = column.numpy()

    assert_ratio_below(3.5, lambda: buffer.insert(0, td), by_hand)  # 2.1


def test_a_sample_costs_little_more_than_taking_the_rows() -> None:
    """256 of 100 000 rows, against ten gathers by hand."""
    buffer = ReplayBuffer(100_000)
    buffer.insert(0, rows(100_000))
    columns = [column.array for column in buffer._shards[0].table.columns]

    def by_hand() -> list[torch.Tensor]:
        where = torch.randint(100_000, (256,)).numpy()
        return [torch.from_numpy(column.take(where, axis=0)) for column in columns]

    assert_ratio_below(3.2, lambda: buffer.sample(256), by_hand)  # 2.1


def test_a_prioritized_sample_and_update_cost_a_few_uniform_samples() -> None:
    uniform, prioritized = ReplayBuffer(100_000), ReplayBuffer(100_000, prioritized=True)
    for buffer in (uniform, prioritized):
        buffer.insert(0, rows(100_000))
    priority = torch.rand(256)

    def ours() -> None:
        prioritized.update_priority(prioritized.sample(256), priority)

    assert_ratio_below(11.0, ours, lambda: uniform.sample(256))  # 5.3


def test_mujoco_rows_are_faster_than_gymnasiums_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 HalfCheetahs on one CPU, against `env.step` of each."""
    monkeypatch.setattr("fdg.runtime.mujoco_rows.cores", lambda: 1)
    ours, theirs = (make_rows("HalfCheetah-v5", 8, backend) for backend in ("mujoco", "sync"))
    actions = np.zeros((8, 6), np.float32)
    for side in (ours, theirs):
        side.reset(list(range(8)))
    assert_ratio_below(0.97, lambda: ours.step(actions), lambda: theirs.step(actions), calls=4)  # 0.8
    ours.close()
    theirs.close()


def small_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


@pytest.mark.parametrize("n, limit", [(1, 0.75), (64, 0.9)])
def test_a_policy_step_is_faster_than_the_modules_own(n: int, limit: float) -> None:
    network, x = small_network(), torch.randn(n, 4)
    with torch.no_grad():
        assert_ratio_below(limit, lambda: fdg.fast(network, x), lambda: network(x))  # 0.57, 0.68


class Update:
    """An update of a small network: by us, and by hand on flat tensors."""

    def __init__(self) -> None:
        self.network, self.x = small_network(), torch.randn(64, 4)
        self.optimizer = fdg.Adam(self.network, lr=1e-4, max_grad_norm=0.5)
        self.batch = TensorDict({"observation": self.x, "next": TensorDict({"observation": self.x}, [64])}, [64])

    def loss(self, batch: TensorDict) -> torch.Tensor:
        return self.network(self.x).square().mean()

    def ours(self) -> None:
        in_python(self.optimizer, self.loss, (self.batch,))

    def by_hand(self) -> None:
        flat, grad, first, second, steps = self.optimizer.flat, self.optimizer.grad, *self.moments()
        grad.zero_()
        self.loss(self.batch).backward()
        length = float(torch.linalg.vector_norm(grad))
        if length > 0.5:
            grad.mul_(0.5 / (length + 1e-6))
        steps.add_(1)
        torch._fused_adam_(  # type: ignore[attr-defined]
            [flat], [grad], [first], [second], [], [steps], lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def moments(self) -> tuple[torch.Tensor, ...]:
        return self.optimizer.exp_avg, self.optimizer.exp_avg_sq, self.optimizer.steps


def test_an_update_costs_little_more_than_one_by_hand() -> None:
    both = Update()
    assert_ratio_below(1.2, both.ours, both.by_hand)  # 1.06


def test_a_compiled_update_spends_little_outside_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the code itself, against an update by Python."""
    both, captures = Update(), Captures(print)
    monkeypatch.setattr(sites, "compiled", lambda module, inputs, say: lambda values: list(module(*values)))
    with captured(captures):
        update(both.optimizer, both.loss, (both.batch,))
        (site,) = captures.sites.values()
        (step,) = site.captured
        outputs = [torch.zeros(())]
        step.code = lambda inputs: outputs
        monkeypatch.setattr(sites, "CHECKED", ())
        monkeypatch.setattr(sites, "SELDOM", 10**9)
        assert_ratio_below(0.08, lambda: update(both.optimizer, both.loss, (both.batch,)), both.ours)  # 0.03
