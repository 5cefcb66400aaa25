"""MSRL: what a trainer calls. The same object serves the user's own loop and each fragment; it holds the components
that live there, gives each call its component's random stream, and counts and times what happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fdg.api import Actor, Learner
from fdg.errors import RunError, UsageError, did_you_mean
from fdg.runtime.environments import Environment, begin_rows
from fdg.runtime.evaluation import Evaluator, evaluate_apart
from fdg.runtime.replay import ReplayBuffer
from fdg.runtime.rows import Rows
from fdg.runtime.streams import Streams, derive_seed
from fdg.runtime.values import UNBOUND, Varying, copied, join
from fdg.update import captured

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
version_of: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
PHASES = ("collect", "sync", "sample", "learn")
LOOKS = 3
"""Calls of `act` after which the actor's weights are compared number by number: a write to `.data` leaves no other trace."""


class Record:
    """What a run (or one fragment of it) has seen: episodes, frames, seconds by phase."""

    def __init__(self) -> None:
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.calls = 0


class MSRL:
    """The component calls of one place. Components that are not there are None."""

    def __init__(
        self,
        *,
        config: Any,
        streams: Streams,
        index: int = 0,
        env: Environment | None = None,
        actor: Actor | None = None,
        learner: Learner | None = None,
        buffer: ReplayBuffer | None = None,
        evaluation: Callable[[], tuple[Evaluator, Actor]] | None = None,
        watcher: Callable[[], Actor] | None = None,
        log: Callable[..., None] | None = None,
        weights: list[torch.Tensor] | None = None,
        sample_work: int = 0,
    ) -> None:
        self.config, self.streams, self.index = config, streams, index
        self._env, self._actor, self._learner, self._buffer = env, actor, learner, buffer
        self._evaluation, self._watcher, self._log = evaluation, watcher, log
        self._weights = weights or []
        self._marks = self._versions()
        self.acts_on: list[torch.Tensor] = self._weights if actor is not None else []
        """The weights that the actor has."""
        self._looks = LOOKS
        self._several = config.actors > 1
        self._sample_work = sample_work
        self.version = 0
        """How many times the learner has learned."""
        self.replica: Any = None
        """Takes the place of `learn` where the learner is one of several."""
        self.captures: Any = None
        """Compiles the learner's updates, if asked for."""
        self.record = Record()
        self._phases = self.record.phases
        self._env_stream: Any = streams.of("env", index)
        if getattr(env, "private_random", False):
            self._env_stream = nullcontext()
        self._actor_stream = streams.of("actor", index)
        self._buffer_stream = streams.of("buffer")
        self._learner_stream = streams.of("learner")

    if not TYPE_CHECKING:  # type checkers know the calls

        def __getattr__(self, name: str) -> Any:
            calls = [call for call in dir(MSRL) if not call.startswith("_")]
            raise AttributeError(f"self.msrl has no {name!r}: {did_you_mean(name, calls)}")

    def attach(self, boundaries: Any) -> None:
        """Let `train` say where the boundaries of its outermost loops are (the compiler writes these calls)."""
        for name in ("begins", "resumes", "restored", "turns", "again", "boundary", "ended", "calling"):
            setattr(self, name, getattr(boundaries, name))

    # environments and actors

    def env_reset(self) -> Any:
        """Begin new episodes in all environments; the first step's TensorDict."""
        start = perf_counter()
        with self._env_stream:
            td = self._env.reset()  # type: ignore[union-attr]
        self._phases["collect"] += perf_counter() - start
        return td

    def env_step(self, td: Any) -> Any:
        """Take `td["action"]` in every environment; `td` with `next` filled."""
        start = perf_counter()
        with self._env_stream:
            td = self._env.step(begin_rows(td))  # type: ignore[union-attr]
        self._phases["collect"] += perf_counter() - start
        return td

    def agent_act(self, td: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the actor choose actions, without autograd."""
        start = perf_counter()
        gradients = torch.is_grad_enabled()
        before = [weight.detach().clone() for weight in self.acts_on] if self._looks else []
        with self._actor_stream:
            set_grad_enabled(False)  # torch.no_grad() takes 3 µs more
            try:
                td = self._actor.act(begin_rows(td), *args, **kwargs)  # type: ignore[union-attr]
            finally:
                set_grad_enabled(gradients)
        if before:
            self._looks -= 1
            if any(map(_differ, before, self.acts_on)):
                raise weights_written()
        self._phases["collect"] += perf_counter() - start
        return td

    # replay

    def rows(self) -> Rows:
        """Rows to insert later, in one transfer."""
        return Rows()

    def replay_buffer_insert(self, td: Any) -> None:
        """Insert a snapshot of every row of `td`."""
        buffer = self._need_buffer("replay_buffer_insert")
        if isinstance(td, Varying):
            for lane, rows in enumerate(td):
                buffer.insert(lane, rows)
        else:
            buffer.insert(self.index, td)

    def replay_buffer_insert_rows(self, rows: Any) -> None:
        buffer = self._need_buffer("replay_buffer_insert")
        for lane, part in enumerate(rows if isinstance(rows, Varying) else [rows]):
            if len(part):
                buffer.insert(lane, part)

    def replay_buffer_sample(self, batch_size: int) -> Any:
        """Draw rows; a TensorDict whose "index" says which they are."""
        buffer = self._need_buffer("replay_buffer_sample")
        start = perf_counter()
        with self._buffer_stream:
            batch = buffer.sample(batch_size)
        if self._sample_work:
            batch["checksum"] = sample_work(batch, self._sample_work)
        self._phases["sample"] += perf_counter() - start
        return batch

    def replay_buffer_update_priority(self, batch: Any, priority: Any = None) -> None:
        """Give the rows of a batch new priorities (by default its "td_error")."""
        self._need_buffer("replay_buffer_update_priority").update_priority(batch, priority)

    def replay_buffer_size(self) -> int:
        """How many rows can be drawn."""
        return len(self._need_buffer("replay_buffer_size"))

    def replay_buffer_clear(self) -> None:
        """Forget all rows."""
        self._need_buffer("replay_buffer_clear").clear()

    def _need_buffer(self, call: str) -> ReplayBuffer:
        if self._buffer is None:
            raise UsageError(
                f"self.msrl.{call}: this trainer has no replay buffer; write "
                "`def replay_buffer(self, spec): return ReplayBuffer(capacity)`"
            )
        return self._buffer

    # learner

    def agent_learn(self, *args: Any, **kwargs: Any) -> Any:
        """Let the learner learn; what it returns, cut from autograd."""
        if self._learner is None:
            raise UsageError("self.msrl.agent_learn: the agent has no learner; return Agent(actor=…, learner=…)")
        start = perf_counter()
        if self._marks != self._versions():
            raise weights_written()
        args = tuple([self._joined(value) for value in args])
        kwargs = {name: self._joined(value) for name, value in kwargs.items()} if kwargs else kwargs
        try:
            with self._learner_stream:
                if self.replica is not None:
                    result = self.replica.learn(args, kwargs)
                elif self.captures is not None:
                    with captured(self.captures):
                        result = self._learner.learn(*args, **kwargs)
                else:
                    result = self._learner.learn(*args, **kwargs)
        finally:  # also where it failed: it may have written weights before
            self.version += 1
            self._marks = self._versions()
        if self._several:
            result = copied(result, {})  # a value of its own, whatever the arguments were joined from
        elif isinstance(result, torch.Tensor) and result.requires_grad:
            result = result.detach()
        self._phases["learn"] += perf_counter() - start
        return result

    def compiled(self) -> int:
        """How many updates compiled code made."""
        return 0 if self.captures is None else self.captures.updates

    def _versions(self) -> list[int]:
        """How often each of the weights was written."""
        return list(map(version_of, self._weights))

    def _joined(self, value: Any) -> Any:
        return join(list(value), self.config.envs, "agent_learn") if isinstance(value, Varying) else value

    def evaluate(self, episodes: int = 10) -> float:
        """Mean return of the current policy over some episodes, on environments of its own."""
        returns = self.evaluate_returns(episodes)
        return sum(returns) / len(returns)

    def evaluate_returns(self, episodes: int) -> list[float]:
        assert self._evaluation is not None
        evaluator, actor = self._evaluation()
        with self.streams.of("evaluate"):
            return evaluator.run(actor, episodes, derive_seed(self.config.seed, "evaluate") % 2**31)

    def returns_apart(self, episodes: int, seed: int) -> list[float]:
        """Returns of some episodes, for the run and not for `train`: random numbers and the actor's own state (all but
        the weights) are new each time, so that nothing is left for the next evaluation of either to see."""
        assert self._evaluation is not None
        evaluator, _ = self._evaluation()
        return evaluate_apart(evaluator, self._new_watcher(), episodes, seed)

    def policy_state(self) -> dict[str, Any]:
        """The actor as it would be evaluated, as plain data."""
        from fdg.runtime.snapshot import state_of

        return state_of(self._new_watcher(), "the actor")

    def _new_watcher(self) -> Actor:
        assert self._watcher is not None
        return self._watcher()

    # driver

    def log(self, step: int, value: Any = UNBOUND, **metrics: Any) -> None:
        """Record values of one iteration: `log(i, loss)`, `log(i, loss=…, entropy=…)` or `log(i, {…})`."""
        assert self._log is not None
        self._log(step, value, metrics)

    def gather(self, x: Any) -> Any:
        """All actors' values as one global value, joined along the environments."""
        return self._global(x)

    def all(self, x: Any) -> bool:
        """Whether it holds in all environments of all actors."""
        return bool(self._entries(x).all())

    def any(self, x: Any) -> bool:
        """Whether it holds in any environment of any actor."""
        return bool(self._entries(x).any())

    def mean(self, x: Any) -> torch.Tensor:
        """Mean over all environments of all actors."""
        values = self._entries(x)
        return values.mean() if values.is_floating_point() else values.float().mean()

    def sum(self, x: Any) -> torch.Tensor:
        """Sum over all environments of all actors."""
        return self._entries(x).sum()

    def _entries(self, x: Any) -> torch.Tensor:
        """All entries of all actors' values: what is reduced over all of them needs no dimension for the environments."""
        if isinstance(x, Varying) and all(isinstance(value, torch.Tensor) for value in x):
            return torch.cat([value.reshape(-1) for value in x])
        return torch.as_tensor(self._global(x))

    def _global(self, x: Any) -> Any:
        if isinstance(x, Varying):
            return join(list(x), self.config.envs)
        if isinstance(x, (bool, int, float)) or (isinstance(x, torch.Tensor) and x.dim() == 0):
            return torch.as_tensor(x).reshape(1)
        return x


def _differ(before: torch.Tensor, now: torch.Tensor) -> bool:
    return not torch.equal(before, now) and not torch.equal(before.nan_to_num(), now.nan_to_num())


def weights_written() -> RunError:
    return RunError(
        "weights were written outside `learn` (by the actor?): actors run on copies, so such a write would be lost; "
        "write them in Learner.learn"
    )


def sample_work(batch: Any, rounds: int) -> torch.Tensor:
    """`--sample-work`: rounds of scalar Python arithmetic on each sampled row's values; a checksum per row."""
    rows = batch["observation"].reshape(batch.batch_size[0], -1).tolist()
    sums = []
    for row in rows:
        total = 0.0
        for turn in range(rounds):
            total = total * 0.5 + row[turn % len(row)]
        sums.append(total)
    return torch.tensor(sums)
