"""One result for one experiment: every exact policy, engine, number of workers and of samples in flight.

`make test` runs a pairwise subset, `make test-matrix` all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from fdg.algorithms.a2c import A2C
from fdg.algorithms.dqn import DQN
from fdg.algorithms.ppo import PPO
from fdg.algorithms.reinforce import REINFORCE
from fdg.runtime.forkserver import forkserver
from fdg.runtime.run import launch

SMALL = dict(iterations=3, steps=3, updates=2, batch_size=16, learning_starts=8, hidden_dim=16, envs=2)
ROLLOUT = dict(iterations=2, steps=4, hidden_dim=16, envs=2, norm_obs=True, norm_reward=True)
PROGRAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dqn": (DQN, SMALL),
    "dqn-all-options": (DQN, {**SMALL, "prioritized": True, "double": True, "n_step": 3}),
    "reinforce": (REINFORCE, dict(iterations=2, episodes_per_iter=8, hidden_dim=16, envs=2, env="CartPole-v1")),
    "a2c": (A2C, ROLLOUT),
    "ppo": (PPO, {**ROLLOUT, "env": "Pendulum-v1", "update_epochs": 2, "num_minibatches": 2}),
}
POLICIES = ("single_learner_coarse", "sharded_replay", "single_learner_fine")
WORKERS, PARALLEL, SEEDS = (1, 2, 3), (1, 2, 4), (1, 2, 3)
FULL = list(product(PROGRAMS, POLICIES, WORKERS, PARALLEL, SEEDS))


def pairwise(cases: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Cases such that every pair of choices that occurs in all of them occurs in these."""
    missing = {pair for case in cases for pair in pairs(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & pairs(case)))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(case: tuple[Any, ...]) -> set[Any]:
    return {(i, case[i], j, case[j]) for i in range(len(case)) for j in range(i)}


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with forkserver():
        yield


@cache
def expected(program: str, seed: int) -> str:
    trainer, settings = PROGRAMS[program]
    return launch(trainer, policy="local", actors=4, replay_shards=4, seed=seed, **settings).params_sha256


def check(program: str, policy: str, workers: int, parallel: int, seed: int, engine: str = "process") -> None:
    trainer, settings = PROGRAMS[program]
    physical = dict(workers=workers, sample_parallelism=parallel) if engine == "process" else {}
    result = launch(trainer, policy=policy, engine=engine, actors=4, replay_shards=4, seed=seed, **physical, **settings)
    assert result.params_sha256 == expected(program, seed)


@pytest.mark.parametrize("program, policy, workers, parallel, seed", pairwise(FULL))
def test_pairs(program: str, policy: str, workers: int, parallel: int, seed: int) -> None:
    check(program, policy, workers, parallel, seed)


@pytest.mark.parametrize("program, policy", product(PROGRAMS, POLICIES))
def test_in_one_process(program: str, policy: str) -> None:
    check(program, policy, 1, 1, 1, engine="inprocess")


@pytest.mark.matrix
@pytest.mark.parametrize("program, policy, workers, parallel, seed", FULL)
def test_all(program: str, policy: str, workers: int, parallel: int, seed: int) -> None:
    check(program, policy, workers, parallel, seed)
    check(program, policy, 1, 1, seed, engine="inprocess")
