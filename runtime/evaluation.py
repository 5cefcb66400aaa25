"""Evaluation: episodes of a policy on environments of its own, which training never sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fdg.api import Actor, Trainer, build_parts
from fdg.config import Config
from fdg.errors import CheckpointError, RunError, UsageError
from fdg.runtime.environments import Environment, EnvSpec, make_env, step_mdp
from fdg.runtime.streams import Streams, derive_seed

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


def evaluate_apart(evaluator: Evaluator, actor: Actor, episodes: int, seed: int) -> list[float]:
    """Returns of `episodes` episodes that depend on the actor and the seed alone: random numbers are new ones too."""
    with Streams(seed).of("evaluate"):
        return evaluator.run(actor, episodes, derive_seed(seed, "evaluate") % 2**31)


def evaluate_run(trainer: type[Trainer], config: Config, run: str | Path, episodes: int, seed: int) -> list[float]:
    """Returns of what a run learned: of its final policy, or of its newest checkpoint if it has not ended.

    Raises:
        CheckpointError: there is neither, or it does not fit the trainer of today.
    """
    from fdg.runtime import checkpoint
    from fdg.runtime.parts import actor_environment
    from fdg.runtime.runfolder import POLICY
    from fdg.runtime.snapshot import restore

    final = Path(run) / POLICY
    state = checkpoint.load(final if final.is_file() else checkpoint.latest(run))
    if state.get("trainer") != trainer.__name__:
        raise CheckpointError(f"{run} is a run of {state.get('trainer')}, not of {trainer.__name__}")
    streams = Streams(config.seed)
    environment = actor_environment(config, streams, 0)
    try:
        with streams.of("build"):
            agent, _ = build_parts(trainer(config), environment.spec)
    finally:
        environment.close()
    if "actor" in state:
        restore(agent.actor, state["actor"], "the actor")
    else:
        restore(agent.actor, state["components"]["actor"][0])
        restore(agent.learner, state["components"]["learner"])
    evaluator = Evaluator(environment.spec)
    try:
        return evaluate_apart(evaluator, agent.actor, episodes, seed)
    finally:
        evaluator.close()


def evaluate(actor: Actor, env: EnvSpec | str, episodes: int, seed: int) -> list[float]:
    """Returns of exactly `episodes` episodes of an actor; see `Evaluator.run`."""
    evaluator = Evaluator(env)
    try:
        return evaluator.run(actor, episodes, seed)
    finally:
        evaluator.close()
