"""The oracle: what a trainer means, run naively and without the compiler.

    outcome = run_reference(MyTrainer, config)         # config.actors = A >= 1
    outcome.params, outcome.logs, outcome.returned, outcome.attributes

**How.** Every logical actor is a *replica*: a thread with its own trainer, agent, buffer, environment, random streams
and copy of module globals, that runs the user's unmodified `train`. One replica runs at a time, in actor order.
Per-actor calls (`env_*`, `agent_act`) run at once. At a global call (`agent_learn`, `replay_buffer_*`, `log`,
`evaluate`, `gather`, `all`, `any`, `mean`, `sum`) a replica waits until all of them stand at the same call of the same
line; then varying arguments are exchanged and joined in actor order, and each replica carries the call out on its own
learner and buffer. So nothing is shared and nothing can leak, weights need not travel, and at the end all replicas must
agree to the bit on weights, logs and buffer: if a varying value got where a global one is needed, the run fails.

**Which arguments are varying.**
- `gather`, `all`, `any`, `mean`, `sum` and `replay_buffer_insert`: always.
- `replay_buffer_sample`, `replay_buffer_update_priority`, `evaluate`, the step of `log`: never. Replicas must agree on
  them to the bit.
- `agent_learn` and `log`: a comment at the end of the line decides, `# varying: agent_learn.0 log.reward` (operation,
  then position or keyword; an empty list says that all are global). Without one, a TensorDict with a dimension named
  "env" is varying; anything else is varying if replicas differ in it. Equal plain tensors with E rows could be either:
  that is an error which asks for the comment, never a guess; a number that is equal everywhere counts as global. What
  global calls return has no dimension named "env".

**How they join.** A TensorDict along "env" (rows or single entries without that name just follow each other), a plain
tensor along dimension 0 (its size must be E); a number or a tensor without dimensions becomes one entry per actor.
Tuples and dicts join part by part, and so do lists of such steps (equally long ones); other lists follow each other.
Stacked TensorDicts of different lengths (replicas looped a different number of times) become flat rows, with columns
`actor` and `episode`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import linecache
import queue
import re
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from fdg.api import Agent, Trainer
from fdg.errors import RunError
from fdg.runtime.environments import begin_rows, make_env, step_mdp
from fdg.runtime.streams import Streams, derive_seed


@dataclass
class Outcome:
    """What a run did, as far as a user can see it."""

    params: dict[str, torch.Tensor]
    """The learner's tensors by path."""
    logs: list[dict[str, Any]]
    """One record per `log`: step, value, metrics; snapshots."""
    returned: Any
    """What `train` returned to actor 0. If it varies, a run returns it joined, as it joins varying attributes."""
    attributes: dict[str, Any]
    """The trainer's attributes at the end (actor 0's)."""
    globals: dict[str, Any]
    """The data in the trainer's modules and classes at the end (actor 0's), as `Namespace(trainer_class).flat()`."""
    stdout: str
    """What was printed (by actor 0)."""
    progress: list[tuple[int, int]] = field(default_factory=list)
    """(frames, finished episodes) of all actors at each `log`."""
    learner: Any = None
    """The learner itself (actor 0's)."""
    actors: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """(returned, attributes) of each actor, for values that vary."""


def run_reference(
    trainer_class: type[Trainer],
    config: Any,
    *,
    deadline: float = 60.0,
    limit: int = 20_000,
    make_environment: Callable[[Any, int], Any] | None = None,
) -> Outcome:
    """Run `trainer_class` with `config.actors` actors and no compiler.

    Raises:
        RunError: actors do not meet at the same global call, a value is varying where it must be global, a replica is
            silent for `deadline` seconds, or makes more than `limit` component calls.
    """
    world = World(deadline, limit, config, make_environment or default_environment)
    namespace = Namespace(trainer_class)
    before = [None if config.actors == 1 else copied(namespace.read()) for _ in range(config.actors)]
    for actor, data in enumerate(before):
        # Built anew for each, from the same stream: copying an agent can break what its parts share.
        streams, window = Streams(config.seed), Window(namespace, data)
        with window:
            with streams.of("env", actor):
                environment = world.make_environment(config, derive_seed(config.seed, "env", actor))
            with streams.of("build", 0):
                trainer = trainer_class(config if config.actors == 1 else copy.deepcopy(config))
                agent = trainer.agent(environment.spec)
                storage = trainer.replay_buffer(environment.spec)
        if getattr(storage, "prioritized", False):
            raise NotImplementedError("the reference draws uniformly, this buffer by priority")
        lanes = Lanes(config.actors, None if storage is None else storage.capacity)
        world.replicas.append(Replica(world, actor, trainer, agent, environment, lanes, streams, window))
    world.run()
    return world.outcome()


def default_environment(config: Any, seed: int) -> Any:
    """`config.envs` environments: from a factory in `config.env`, or by name."""
    if callable(config.env):
        return config.env(config.envs, seed)
    return make_env(config.env, config.envs, seed)


def mismatches(outcome: Outcome, result: Any, trainer_class: type[Trainer]) -> list[str]:
    """Where a `fdg.launch` result differs from the reference, in words; empty if it is the same to the bit.

    Compares logs (as the numbers that a run keeps of them), counts, parameters, the returned value, the trainer's
    attributes and the data in its modules.
    """
    seen = [(row["iteration"], row["values"]) for row in result.history]
    found = differences([(int(record["step"]), plain(record)) for record in outcome.logs], seen, "logs")
    found += differences(outcome.progress, [(row["frames"], row["episodes"]) for row in result.history], "progress")
    known = {name: outcome.params[name] for name in result.parameters if name in outcome.params}
    found += differences(known, {name: value.detach() for name, value in result.parameters.items()}, "params")
    found += from_each([returned for returned, _ in outcome.actors], result.returned, "returned")
    found += differences(outcome.globals, Namespace(trainer_class).flat(), "globals")
    mine = {name: value for name, value in vars(result.trainer).items() if name not in ("msrl", "config")}
    if set(mine) != set(outcome.attributes):
        return [*found, f"attributes: {sorted(outcome.attributes)} and {sorted(mine)}"]
    for name, value in mine.items():
        found += from_each([attributes[name] for _, attributes in outcome.actors], value, f"self.{name}")
    return found


def from_each(each: list[Any], value: Any, where: str) -> list[str]:
    """Where a value that outlives a run differs from the actors' own: a varying one is joined when the run ends."""
    found = differences(each[0], value, where)
    if not found or len(each) == 1:
        return found
    if isinstance(value, tuple) and all(isinstance(mine, tuple) and len(mine) == len(value) for mine in each):
        parts = enumerate(zip(*each, strict=True))
        return [text for at, mine in parts for text in from_each(list(mine), value[at], f"{where}[{at}]")]
    rows = next((len(leaf) for leaf in leaves(each) if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)
    return differences(join(each, rows, where), value, where)


def plain(record: dict[str, Any]) -> dict[str, float]:
    """A log record as a run keeps it: numbers; of a tensor or a list its mean; of a dict each entry."""
    numbers: dict[str, float] = {}

    def put(name: str, item: Any) -> None:
        if isinstance(item, TensorDictBase):
            item = item.to_dict()
        if isinstance(item, dict):
            for key, inner in item.items():
                put(f"{name}/{key}" if name else str(key), inner)
        elif isinstance(item, torch.Tensor):
            numbers[name or "loss"] = float(item if item.numel() == 1 else item.double().mean())
        elif isinstance(item, (bool, int, float)):
            numbers[name or "loss"] = float(item)
        elif isinstance(item, (list, tuple)) and item and all(isinstance(part, (bool, int, float)) for part in item):
            numbers[name or "loss"] = sum(map(float, item)) / len(item)

    for key, item in record.items():
        if key != "step":
            put("" if key == "value" else key, item)
    return numbers


# Replicas ----------------------------------------------------------------------------------------------------------


class _Cancelled(BaseException):
    """Ends a replica's thread when another one has failed."""


@dataclass
class Arrival:
    """Where a replica stopped: at a global call, at the end of `train`, or at an exception."""

    operation: str
    site: tuple[str, int] = ("", 0)
    value: Any = None

    def __str__(self) -> str:
        if self.operation == "return":
            return "has returned from train"
        return f"is at {self.operation}, {self.site[0]}:{self.site[1]}"


class World:
    """All replicas and whose turn it is."""

    def __init__(self, deadline: float, limit: int, config: Any, make_environment: Callable[[Any, int], Any]) -> None:
        self.deadline, self.limit, self.config, self.make_environment = deadline, limit, config, make_environment
        self.replicas: list[Replica] = []
        self.progress: list[tuple[int, int]] = []

    def run(self) -> None:
        """Give each replica its turn, to its next global call, until all have returned."""
        try:
            while True:
                arrivals = []
                for replica in self.replicas:
                    arrival = replica.turn()
                    if arrival.operation == "raise":
                        raise arrival.value
                    arrivals.append(arrival)
                first = arrivals[0]
                if any((other.operation, other.site) != (first.operation, first.site) for other in arrivals):
                    where = "; ".join(f"actor {index} {arrival}" for index, arrival in enumerate(arrivals))
                    raise RunError(f"global call under a varying condition: {where}")
                if first.operation == "return":
                    return
                if first.operation == "log":
                    worlds = [replica.environment for replica in self.replicas]
                    frames = sum(getattr(world, "frames", 0) for world in worlds)
                    self.progress.append((frames, sum(len(getattr(world, "episodes", ())) for world in worlds)))
                # Snapshots, since the first to go on may change what the others still have to read.
                alone = len(arrivals) == 1
                values = [arrival.value if alone else snapshot(arrival.value) for arrival in arrivals]
                for replica in self.replicas:
                    replica.inbox = values
        finally:
            for replica in self.replicas:
                replica.cancel()

    def outcome(self) -> Outcome:
        """Actor 0's view, after all replicas were found equal in what is global."""
        first = self.replicas[0]
        for other in self.replicas[1:]:
            for what in ("params", "logs", "rows"):
                found = differences(getattr(first, what)(), getattr(other, what)(), what)
                if found:
                    raise RunError(
                        f"actors 0 and {other.index} disagree, so a varying value was used where a global one is "
                        f"needed: {found[0]}"
                    )
        return Outcome(
            params=first.params(),
            logs=first.logs(),
            returned=first.returned,
            attributes=first.attributes(),
            globals=first.window.final,
            stdout=first.window.printed.getvalue(),
            progress=self.progress,
            learner=first.agent.learner,
            actors=[(replica.returned, replica.attributes()) for replica in self.replicas],
        )


class Replica:
    """One logical actor with a world of its own; also the `msrl` its trainer sees."""

    def __init__(
        self,
        world: World,
        index: int,
        trainer: Trainer,
        agent: Agent,
        environment: Any,
        lanes: Lanes,
        streams: Streams,
        window: Window,
    ) -> None:
        self.world, self.index, self.trainer, self.agent = world, index, trainer, agent
        self.environment, self.lanes, self.streams, self.window = environment, lanes, streams, window
        self.inbox: list[Any] = []
        self.returned: Any = None
        self.records: list[dict[str, Any]] = []
        self.calls = 0
        self._cancelled = False
        self._go: threading.Semaphore = threading.Semaphore(0)
        self._out: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=f"actor {index}", daemon=True)
        trainer.msrl = self  # type: ignore[assignment]

    def params(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.agent.learner)

    def logs(self) -> list[dict[str, Any]]:
        return self.records

    def rows(self) -> list[Any]:
        return [dict(one.items()) for lane in self.lanes.lanes for one in lane]

    def attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.trainer).items() if name not in ("msrl", "config")}

    # The thread

    def turn(self) -> Arrival:
        """Let this replica run to its next global call; called from outside."""
        if not self._thread.ident:
            self._thread.start()
        self._go.release()
        try:
            return self._out.get(timeout=self.world.deadline)
        except queue.Empty:
            raise RunError(f"actor {self.index} is silent for {self.world.deadline} s, in its own code") from None

    def cancel(self) -> None:
        """End the thread, if it still lives: its `finally` blocks run, its component calls do not."""
        self._cancelled = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join(timeout=min(5.0, self.world.deadline))

    def _live(self) -> None:
        self._go.acquire()
        try:
            with self._in_place():
                self.returned = self.trainer.train()
            arrival = Arrival("return")
        except BaseException as error:
            arrival = Arrival("raise", value=error)
        self._out.put(arrival)

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Everything global is this replica's: random streams, module data, standard output."""
        with self.window, self.streams.of("driver", 0):
            yield

    def _meet(self, operation: str, value: Any) -> list[Any]:
        """Wait until all replicas stand at this call; returns what each of them brought."""
        self._count()
        arrival = Arrival(operation, call_site(), value)
        driver = self.streams.of("driver", 0)
        driver.__exit__()
        self.window.__exit__()
        self._out.put(arrival)
        in_time = self._go.acquire(timeout=self.world.deadline * len(self.world.replicas))
        self.window.__enter__()
        driver.__enter__()
        if self._cancelled:
            raise _Cancelled
        if not in_time:
            raise RunError(f"actor {self.index} waits at {operation} since {self.world.deadline} s: nobody comes")
        return self.inbox

    def _count(self) -> None:
        self.calls += 1
        if self._cancelled:
            raise _Cancelled
        if self.calls > self.world.limit:
            raise RunError(f"actor {self.index} made more than {self.world.limit} component calls: an endless loop?")

    # Per-actor calls

    def env_reset(self) -> Any:
        self._count()
        with self.streams.of("env", self.index):
            return self.environment.reset()

    def env_step(self, td: Any) -> Any:
        self._count()
        with self.streams.of("env", self.index):
            return self.environment.step(begin_rows(td))

    def agent_act(self, td: Any, *args: Any, **kwargs: Any) -> Any:
        self._count()
        with self.streams.of("actor", self.index), torch.no_grad():
            return self.agent.actor.act(begin_rows(td), *args, **kwargs)

    # Global calls

    def agent_learn(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._joined("agent_learn", args, kwargs)
        with self.streams.of("learner", 0):
            result = self.agent.learner.learn(*args, **kwargs)
        return self._unnamed(result.detach() if isinstance(result, torch.Tensor) and result.requires_grad else result)

    def replay_buffer_insert(self, td: Any) -> None:
        parts = self._meet("replay_buffer_insert", td)
        for lane, part in enumerate(parts):
            self.lanes.insert(lane, part)

    def replay_buffer_sample(self, n: int) -> Any:
        self._agree("replay_buffer_sample", n)
        with self.streams.of("buffer", 0):
            return self.lanes.sample(n)

    def replay_buffer_update_priority(self, batch: Any, priority: Any = None) -> None:
        self._agree("replay_buffer_update_priority", (batch, priority))
        raise RunError("replay_buffer_update_priority: the reference knows no priorities, only uniform draws")

    def replay_buffer_size(self) -> int:
        self._agree("replay_buffer_size", None)
        return len(self.lanes)

    def replay_buffer_clear(self) -> None:
        self._agree("replay_buffer_clear", None)
        self.lanes.clear()

    def log(self, step: Any, value: Any = None, **metrics: Any) -> None:
        (step, value), metrics = self._joined("log", (step, value), metrics)
        record = {"step": step, "value": value, **metrics}
        if value is None:
            del record["value"]
        self.records.append(snapshot(record))

    def evaluate(self, episodes: int = 10) -> float:
        self._agree("evaluate", episodes)
        with self.streams.of("evaluate", 0):
            returns = evaluate(self.world, self.agent.actor, episodes)
        return sum(returns) / len(returns)

    def gather(self, x: Any) -> Any:
        return self._collective("gather", x)

    def all(self, x: Any) -> bool:
        return bool(as_tensor(self._collective("all", x)).all())

    def any(self, x: Any) -> bool:
        return bool(as_tensor(self._collective("any", x)).any())

    def mean(self, x: Any) -> torch.Tensor:
        values = as_tensor(self._collective("mean", x))
        return values.mean() if values.is_floating_point() else values.float().mean()

    def sum(self, x: Any) -> torch.Tensor:
        return as_tensor(self._collective("sum", x)).sum()

    def _collective(self, operation: str, x: Any) -> Any:
        parts = self._meet(operation, x)
        if len(parts) == 1:
            entry = isinstance(x, (bool, int, float)) or (isinstance(x, torch.Tensor) and x.ndim == 0)
            return as_tensor(x).reshape(1) if entry else x
        return self._unnamed(join(parts, self.world.config.envs, f"{operation}(x)"))

    def _agree(self, operation: str, value: Any) -> None:
        """Meet at a call whose arguments must be global."""
        parts = self._meet(operation, value)
        found = differences(parts[0], parts[self.index], "argument")
        if found:
            raise RunError(f"{operation}: a varying value where a global one is needed: {found[0]}")

    def _joined(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Meet at a call whose varying arguments become global."""
        site = call_site()
        parts = self._meet(operation, (args, kwargs))
        if len(parts) == 1:
            return args, kwargs
        envs, told = self.world.config.envs, varying_by_comment(operation, site)
        if len({(len(other[0]), tuple(other[1])) for other in parts}) > 1:
            raise RunError(f"{operation} at {site[0]}:{site[1]}: actors pass different arguments")

        def one(key: int | str, mine: Any, values: list[Any]) -> Any:
            where = f"argument {key!r} of {operation} at {site[0]}:{site[1]}"
            if operation == "log" and key == 0:
                varies = False
            elif told is not None:
                varies = str(key) in told
            else:
                varies = seems_varying(values, envs, where)
            if varies:
                return join(values, envs, where)
            found = differences(values[0], values[self.index], where)
            if found:
                raise RunError(f"a varying value where a global one is needed: {found[0]}")
            return mine

        joined = tuple(one(at, args[at], [other[0][at] for other in parts]) for at in range(len(args)))
        return joined, {key: one(key, kwargs[key], [other[1][key] for other in parts]) for key in kwargs}

    def _unnamed(self, value: Any) -> Any:
        """What a global call returns has no environment axis any more."""
        if len(self.world.replicas) > 1 and isinstance(value, TensorDictBase):
            value.names = None
        return value


def call_site() -> tuple[str, int]:
    """File and line of the user's call."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def varying_by_comment(operation: str, site: tuple[str, int]) -> set[str] | None:
    """What `# varying: agent_learn.0 log.x` says about one operation of its line; None without such a comment."""
    found = re.search(r"#\s*varying:(.*)$", linecache.getline(*site))
    if found is None:
        return None
    names = found.group(1).replace(",", " ").split()
    return {name.split(".", 1)[1] for name in names if name.split(".", 1)[0] == operation}


# Values ------------------------------------------------------------------------------------------------------------


def env_axis(td: TensorDictBase) -> int | None:
    """The dimension named "env"."""
    return td.names.index("env") if td.names and "env" in td.names else None


def seems_varying(values: list[Any], envs: int, where: str) -> bool:
    """Without a comment: a named dimension, or a difference; a plain tensor that could be either is an error."""
    if any(isinstance(leaf, TensorDictBase) and env_axis(leaf) is not None for leaf in leaves(values)):
        return True
    if any(differences(values[0], other) for other in values[1:]):
        return True
    if any(isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == envs for leaf in leaves(values)):
        raise RunError(
            f"{where} is equal in all actors and has {envs} rows, so it could be varying or global: "
            "write a comment on that line, # varying: operation.argument, or # varying: for none"
        )
    return False


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested containers that is no container."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def join(values: list[Any], envs: int, where: str) -> Any:
    """One value of all actors' values, in actor order."""
    first = values[0]
    if all(isinstance(value, TensorDictBase) for value in values):
        return join_tensordicts(values, where)
    if all(isinstance(value, (bool, int, float)) for value in values):
        return torch.tensor(values)
    if all(isinstance(value, torch.Tensor) for value in values):
        if all(value.ndim == 0 for value in values):
            return torch.stack(values)
        for actor, value in enumerate(values):
            if value.ndim == 0 or value.shape[0] != envs:
                shape = list(value.shape)
                raise RunError(f"{where}: actor {actor} has shape {shape}; dimension 0 must be its {envs} environments")
        return torch.cat(values, 0)
    if all(isinstance(value, list) for value in values):
        items = [item for value in values for item in value]
        if not items or not all(is_step(item, envs) for item in items):
            return items
        if len({len(value) for value in values}) > 1:
            raise RunError(f"{where}: lists of {[len(value) for value in values]} steps of all environments")
        return [join([value[at] for value in values], envs, f"{where}[{at}]") for at in range(len(first))]
    if all(isinstance(value, tuple) and len(value) == len(first) for value in values):
        return tuple(join([value[at] for value in values], envs, f"{where}[{at}]") for at in range(len(first)))
    if all(isinstance(value, dict) and list(value) == list(first) for value in values):
        return {key: join([value[key] for value in values], envs, f"{where}[{key!r}]") for key in first}
    if any(differences(first, other) for other in values[1:]):
        raise RunError(f"{where}: varying, and nothing that joins: {values}")
    return copy.deepcopy(first)


def is_step(item: Any, envs: int) -> bool:
    """Whether a list's item has a row for each environment."""
    if isinstance(item, TensorDictBase):
        return env_axis(item) is not None
    return isinstance(item, torch.Tensor) and item.ndim > 0 and item.shape[0] == envs


def join_tensordicts(values: list[Any], where: str) -> Any:
    """Along "env"; without that name, rows and entries of all actors."""
    first = values[0]
    axis = env_axis(first)
    if axis is None:
        if first.batch_dims > 1:
            raise RunError(f"{where}: none of the dimensions {list(first.batch_size)} is named 'env'")
        return torch.cat(values, 0) if first.batch_dims else torch.stack(values, 0)
    if len({tuple(value.batch_size[:axis] + value.batch_size[axis + 1 :]) for value in values}) == 1:
        joined = torch.cat(values, axis)
        joined.names = first.names
        return joined
    # Ragged: by actor, then step, then environment; episodes are counted per actor and environment.
    rows = []
    for actor, value in enumerate(values):
        before = torch.zeros(value.batch_size[axis], dtype=torch.int64)
        for step in value.unbind(1 - axis):
            part = snapshot(step)
            part.names = None
            part["actor"], part["episode"] = torch.full_like(before, actor), before.clone()
            if ("next", "done") in step.keys(include_nested=True):
                before = before + step["next", "done"].reshape(-1).long()
            rows.append(part)
    return torch.cat(rows, 0)


def as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def snapshot(value: Any) -> Any:
    """A deep copy that shares nothing with the original and has no autograd history."""
    if isinstance(value, TensorDictBase):
        return value.detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(snapshot(item) for item in value)
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    return copy.deepcopy(value)


def differences(left: Any, right: Any, where: str = "value") -> list[str]:
    """Where two values are not the same to the bit, in words; empty if they are.

    >>> differences({"a": [1, 2.0]}, {"a": [1, 2]}, "x")
    ["x['a'][1]: 2.0 (float) and 2 (int)"]
    """
    if isinstance(left, TensorDictBase) and isinstance(right, TensorDictBase):
        if left.batch_size != right.batch_size:
            return [f"{where}: batch size {list(left.batch_size)} and {list(right.batch_size)}"]
        return differences(dict(left.items()), dict(right.items()), where)
    if isinstance(left, (torch.Tensor, np.ndarray)) and type(left) is type(right):
        a, b = (torch.as_tensor(x).detach().cpu() for x in (left, right))
        if a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b):
            return []
        return [f"{where}: {left!r} and {right!r}"]
    if type(left) is not type(right):
        names = {type(side).__qualname__ for side in (left, right)}
        if len(names) == 1 and hasattr(left, "__dict__"):  # a class of the same program, loaded twice
            return differences(vars(left), vars(right), where)
        return [f"{where}: {left!r} ({type(left).__name__}) and {right!r} ({type(right).__name__})"]
    if isinstance(left, dict):
        if sorted(map(str, left)) != sorted(map(str, right)):
            return [f"{where}: keys {sorted(map(str, left))} and {sorted(map(str, right))}"]
        return [text for key in left for text in differences(left[key], right[key], f"{where}[{key!r}]")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{where}: lengths {len(left)} and {len(right)}: {left!r} and {right!r}"]
        return [text for at in range(len(left)) for text in differences(left[at], right[at], f"{where}[{at}]")]
    if isinstance(left, float):
        same = struct.pack("d", left) == struct.pack("d", right)
        return [] if same else [f"{where}: {left!r} and {right!r}"]
    if type(left).__eq__ is object.__eq__ and hasattr(left, "__dict__"):
        return differences(vars(left), vars(right), where)
    return [] if left == right else [f"{where}: {left!r} and {right!r}"]


def bits(tensor: torch.Tensor) -> bytes:
    if tensor.dtype is torch.bfloat16:  # numpy has no such thing
        tensor = tensor.clone(memory_format=torch.contiguous_format).view(torch.int16)
    return tensor.numpy().tobytes()


def tensors_of(root: Any, path: str = "", seen: set[int] | None = None) -> dict[str, torch.Tensor]:
    """Every tensor reachable from an object, by path; the first path wins."""
    seen = set() if seen is None else seen
    if id(root) in seen or isinstance(root, (str, bytes, int, float, type, types.FunctionType, types.ModuleType)):
        return {}
    seen.add(id(root))
    if isinstance(root, torch.Tensor):
        return {path: root.detach().clone()}
    if isinstance(root, torch.optim.Optimizer):
        return {}
    if isinstance(root, torch.nn.Module):
        inner: Any = root.state_dict(keep_vars=True)
    elif isinstance(root, (dict, TensorDictBase)):
        inner = dict(root.items())
    elif isinstance(root, (list, tuple)):
        inner = dict(enumerate(root))
    else:
        inner = getattr(root, "__dict__", {})
    found: dict[str, torch.Tensor] = {}
    for name in sorted(inner, key=str):
        found.update(tensors_of(inner[name], f"{path}.{name}" if path else str(name), seen))
    return found


def evaluate(world: World, actor: Any, episodes: int) -> list[float]:
    """Returns of so many episodes: up to 16 environments side by side, a fixed quota each; by row, then in time."""
    seed = derive_seed(world.config.seed, "evaluate", 0) % 2**31
    rows = min(episodes, 16)
    quotas = [episodes // rows + (row < episodes % rows) for row in range(rows)]
    environment = world.make_environment(replace(world.config, envs=rows), seed)
    found: list[list[float]] = [[] for _ in range(rows)]
    totals = [0.0] * rows
    with torch.no_grad():
        td = environment.reset(seed)
        while any(len(found[row]) < quotas[row] for row in range(rows)):
            td = environment.step(actor.evaluate(td))
            for row in range(rows):
                totals[row] += float(td["next", "reward"][row])
                if td["next", "done"][row]:
                    found[row].append(totals[row])
                    totals[row] = 0.0
            td = step_mdp(td)
    environment.close()
    return [value for row in range(rows) for value in found[row][: quotas[row]]]


# Replay ------------------------------------------------------------------------------------------------------------


class Lanes:
    """The replay buffer: a list of rows per actor, oldest first. Capacity is split evenly, eviction is per lane."""

    def __init__(self, actors: int, capacity: int | None) -> None:
        self.room = None if capacity is None else max(1, capacity // actors)
        self.lanes: list[list[TensorDictBase]] = [[] for _ in range(actors)]

    def __len__(self) -> int:
        return sum(map(len, self.lanes))

    def insert(self, lane: int, td: TensorDictBase) -> None:
        if self.room is None:
            raise RunError("replay_buffer_insert without a replay buffer")
        kept = snapshot(td)
        kept.names = None
        kept.pop(("next", "reset_observation"), None)
        kept.pop("reset_observation", None)
        self.lanes[lane] += [row.clone() for row in kept.reshape(-1).unbind(0)]
        del self.lanes[lane][: -self.room]

    def sample(self, n: int) -> TensorDictBase:
        rows = [row for lane in self.lanes for row in lane]
        if not rows:
            raise RunError("replay_buffer_sample from an empty buffer")
        return torch.stack([rows[at] for at in torch.randint(0, len(rows), (n,)).tolist()]).contiguous()

    def clear(self) -> None:
        for lane in self.lanes:
            lane.clear()


# What is global in Python ------------------------------------------------------------------------------------------


class Namespace:
    """The data in a trainer's modules and classes, bases included: what `global` and `cls.x` can change."""

    def __init__(self, trainer_class: type) -> None:
        self.owners: dict[str, Any] = {}
        for cls in trainer_class.__mro__:
            module = sys.modules.get(cls.__module__)
            if module is None or cls.__module__.split(".")[0] in ("fdg", "builtins", "typing", "abc", "torch"):
                continue
            if module not in self.owners.values():
                self.owners[f"module of {cls.__name__}"] = module
            self.owners[cls.__name__] = cls

    def read(self) -> dict[str, dict[str, Any]]:
        """The data, by owner and name; the objects themselves."""
        return {owner: data_of(vars(self.owners[owner])) for owner in self.owners}

    def flat(self) -> dict[str, Any]:
        """The same, by `owner.name`."""
        return {f"{owner}.{name}": value for owner, names in self.read().items() for name, value in names.items()}

    def write(self, data: dict[str, dict[str, Any]]) -> None:
        for owner, values in data.items():
            for name in set(data_of(vars(self.owners[owner]))) - set(values):
                delattr(self.owners[owner], name)
            for name, value in values.items():
                setattr(self.owners[owner], name, value)


def data_of(names: Any) -> dict[str, Any]:
    """The entries of a namespace that are data: not code, modules, types or Python's own."""
    code = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)
    return {
        name: value
        for name, value in names.items()
        if not name.startswith(("__", "_abc_"))
        and not isinstance(value, code)
        and type(value).__module__ not in ("typing", "types", "__future__")
    }


def copied(data: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A deep copy of module data, what is shared inside stays shared; what cannot be copied (a lock, a file) is not."""
    memo: dict[int, Any] = {}

    def one(value: Any) -> Any:
        try:
            return copy.deepcopy(value, memo)
        except TypeError:
            return value

    return {owner: {name: one(value) for name, value in values.items()} for owner, values in data.items()}


class Window:
    """Shows one replica its own module data and output while it runs. Without `data` it shows the real ones."""

    def __init__(self, namespace: Namespace, data: dict[str, dict[str, Any]] | None) -> None:
        self.namespace, self.mine = namespace, data
        self.printed = io.StringIO()
        self.final: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._stdout, sys.stdout = sys.stdout, self.printed
        if self.mine is not None:
            self._outer = self.namespace.read()
            self.namespace.write(self.mine)

    def __exit__(self, *exception: object) -> None:
        sys.stdout = self._stdout
        self.final = self.namespace.flat()
        if self.mine is not None:
            self.mine = self.namespace.read()
            self.namespace.write(self._outer)
