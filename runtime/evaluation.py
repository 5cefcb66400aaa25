"""Evaluation: episodes of a policy on environments of its own, which training never sees."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fdg.api import Actor
from fdg.errors import RunError, UsageError
from fdg.runtime.environments import Environment, EnvSpec, make_env, step_mdp

ROWS = 16
"""Environments side by side. Part of the result, since each row runs its own episodes."""

MAX_STEPS = 100_000
"""Steps one row may take for one episode before evaluation gives up."""


class Evaluator:
    """Evaluates actors on one environment; its vector environment is kept from one call to the next.

    >>> Evaluator("cartpole").run(actor, episodes=10, seed=1)                                         # doctest: +SKIP
    [500.0, 489.0, …]
    """

    def __init__(self, env: EnvSpec | str, make: Callable[[int, int], Environment] | None = None) -> None:
        self._name = env if isinstance(env, str) else env.id
        self._backend = None if isinstance(env, str) else env.backend
        self._make = make
        self._env: Environment | None = None

    def run(self, actor: Actor, episodes: int, seed: int) -> list[float]:
        """Returns of exactly `episodes` episodes: those of the first row, then of the second, …

        Rows have fixed quotas. Taking whichever episodes end first would favour short ones. The same actor and seed
        give the same returns, whatever was evaluated before.

        Raises:
            UsageError: fewer than one episode is asked for.
            RunError: an episode does not end.
        """
        if episodes < 1:
            raise UsageError(f"evaluate: episodes is {episodes}, at least 1 is needed")
        rows = min(episodes, ROWS)
        env = self._environment(rows, seed)
        quotas = [episodes // rows + (row < episodes % rows) for row in range(rows)]
        returns: list[list[float]] = [[] for _ in range(rows)]
        missing, since_end = episodes, 0
        with torch.no_grad():
            td = env.reset(seed)
            env.drain_episodes()
            while missing:
                stepped = env.step(actor.evaluate(td))
                since_end += 1
                if env.episodes:
                    ended = stepped["next", "done"].flatten().nonzero().flatten().tolist()
                    for row, (value, _) in zip(ended, env.drain_episodes(), strict=True):
                        if len(returns[row]) < quotas[row]:
                            returns[row].append(value)
                            missing, since_end = missing - 1, 0
                if since_end > MAX_STEPS:
                    raise RunError(
                        f"evaluate: no episode of {self._name} ended in {MAX_STEPS} steps, {missing} of {episodes} are "
                        "missing: give the environment a limit (gymnasium.wrappers.TimeLimit)"
                    )
                td = step_mdp(stepped)
        return [value for row in returns for value in row]

    def close(self) -> None:
        """Release the environments."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _environment(self, rows: int, seed: int) -> Environment:
        if self._env is None or self._env.spec.num_envs != rows:
            self.close()
            make = self._make or (lambda rows, seed: make_env(self._name, rows, seed, backend=self._backend))
            self._env = make(rows, seed)
        return self._env


def evaluate(actor: Actor, env: EnvSpec | str, episodes: int, seed: int) -> list[float]:
    """Returns of exactly `episodes` episodes of an actor; see `Evaluator.run`."""
    evaluator = Evaluator(env)
    try:
        return evaluator.run(actor, episodes, seed)
    finally:
        evaluator.close()
