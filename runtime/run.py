"""Launch a trainer: build its parts, run it under a policy on an engine, and report what happened."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase

from fdg.api import Actor, Agent, Trainer
from fdg.config import Config, make_config
from fdg.errors import UsageError
from fdg.graph import Graph
from fdg.registry import find_engine, find_policy
from fdg.runtime.coordinator import Coordinator, Count, DriverMSRL, global_value
from fdg.runtime.engine import Engine
from fdg.runtime.environments import Environment
from fdg.runtime.inprocess import InProcess
from fdg.runtime.load import load_class
from fdg.runtime.parts import Parts, actor_environment
from fdg.runtime.replay import ReplayBuffer
from fdg.runtime.streams import Streams
from fdg.runtime.values import Handle, Varying
from fdg.runtime.weights import _Pickler, parameters_of, sha256

RECENT = 100
"""Episodes whose mean return is shown during training."""


@dataclass
class Result:
    """What a run left behind."""

    trainer: Trainer
    returned: Any
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    parameters: dict[str, torch.Tensor]
    graph: Graph | None = None
    calls: dict[str, int] = field(default_factory=dict)
    """How often each region was called."""

    @property
    def params_sha256(self) -> str:
        return self.metrics["params_sha256"]


@dataclass(frozen=True)
class Options:
    """How a run is executed: nothing here changes its result."""

    engine: str = "inprocess"
    workers: int | None = None
    sample_parallelism: int = 1
    sample_work: int = 0
    eval_episodes: int = 0
    threads: int = 1
    passes: Iterable[str] | None = None
    deadline: float = 60.0
    """Seconds without a sign of life after which a worker counts as lost."""


class Progress:
    """Counts frames and episodes over all environments, and turns `log` calls into rows."""

    def __init__(self, config: Config, observers: Sequence[Any]) -> None:
        self.config, self.observers = config, observers
        self.environments: Sequence[Environment | Count] = []
        self.history: list[dict[str, Any]] = []
        self.returns: list[float] = []
        self.told: float | None = None
        """The mean return by the trainer's own account."""
        self.episodes = 0
        self.start = time.perf_counter()

    def frames(self) -> int:
        return sum(environment.frames for environment in self.environments)

    def drain(self) -> None:
        for environment in self.environments:
            finished = environment.drain_episodes()
            self.episodes += len(finished)
            self.returns += [value for value, _ in finished]
        del self.returns[:-RECENT]

    def mean_return(self) -> float | None:
        """What the trainer logged as `episodic_return` (it may count only some episodes), else the mean of the last."""
        if self.told is not None:
            return self.told
        return sum(self.returns) / len(self.returns) if self.returns else None

    def log(self, step: int, value: Any, metrics: dict[str, Any]) -> None:
        self.drain()
        values = plain_numbers(value, metrics)
        self.told = values.get("episodic_return", self.told)
        seconds = time.perf_counter() - self.start
        frames = self.frames()
        row = {
            "iteration": int(step),
            "frames": frames,
            "episodes": self.episodes,
            "seconds": seconds,
            "frames_per_second": frames / seconds if seconds else 0.0,
            "episodic_return": self.mean_return(),
            "values": values,
        }
        self.history.append(row)
        for observer in self.observers:
            observer.on_log(row)


def plain_numbers(value: Any, metrics: dict[str, Any]) -> dict[str, float]:
    """Logged values as plain numbers: tensors by their mean, TensorDicts and dicts entry by entry."""
    out: dict[str, float] = {}

    def put(name: str, item: Any) -> None:
        if isinstance(item, TensorDictBase):
            item = item.to_dict()
        if isinstance(item, dict):
            for key, inner in item.items():
                put(f"{name}/{key}" if name else str(key), inner)
        elif isinstance(item, torch.Tensor):
            if item.numel():
                number = item.detach()
                out[name or "loss"] = float(number if number.numel() == 1 else number.double().mean())
        elif isinstance(item, (bool, int, float)) or hasattr(item, "__float__"):
            out[name or "loss"] = float(item)
        elif isinstance(item, (list, tuple)) and item and all(isinstance(part, (bool, int, float)) for part in item):
            out[name or "loss"] = sum(map(float, item)) / len(item)

    if value is not None:
        put("", value)
    for name, item in metrics.items():
        put(name, item)
    return out


def launch(
    trainer_class: type[Trainer],
    config: Config | None = None,
    *,
    policy: Any = "local",
    engine: str = "inprocess",
    workers: int | None = None,
    sample_parallelism: int = 1,
    sample_work: int = 0,
    eval_episodes: int = 0,
    threads: int = 1,
    observers: Iterable[Any] = (),
    passes: Iterable[str] | None = None,
    graph: Graph | None = None,
    **overrides: Any,
) -> Result:
    """Train. The result depends on the trainer and its config alone, not on policy, engine or workers.

    >>> launch(DQN, iterations=5, seed=7, policy="single_learner_coarse").params_sha256          # doctest: +SKIP

    `threads` is the number of torch's threads. `graph` runs a graph made (or edited) before; without it the trainer is projected here. Keyword arguments that are
    not launch options override fields of the config.
    """
    engine = find_engine(engine)
    if engine == "inprocess" and ((workers or 1) > 1 or sample_parallelism > 1):
        raise UsageError(
            f"workers is {workers}, sample_parallelism is {sample_parallelism}; the engine 'inprocess' has one process and asks "
            "for one sample at a time: leave both out, or choose --engine process"
        )
    if config is None or overrides:
        base = {} if config is None else {f: getattr(config, f) for f in config.__dataclass_fields__}
        config = make_config(trainer_class.config_class(), {**base, **overrides})
    chosen = find_policy(policy)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # part of the result: how many threads add up changes the last bits
    run = None
    try:
        options = Options(engine, workers, sample_parallelism, sample_work, eval_episodes, threads, passes)
        run = Run(trainer_class, config, chosen, tuple(observers), options)
        return run.go(graph)
    finally:
        torch.set_num_threads(before)
        if run is not None:
            run.close()


class Run:
    """One run, from building the parts to the result."""

    def __init__(
        self, trainer_class: type[Trainer], config: Config, policy: Any, observers: Sequence[Any], options: Options
    ) -> None:
        self.trainer_class, self.config, self.policy, self.options = trainer_class, config, policy, options
        self.progress = Progress(config, observers)
        self.observers = observers
        self.engine: Engine | None = None
        self.streams = Streams(config.seed)
        environment = actor_environment(config, self.streams, 0)
        self.spec = environment.spec
        with self.streams.of("build"):
            self.trainer = trainer_class(config)
            self.agent = self.trainer.agent(self.spec)
            if not isinstance(self.agent, Agent):
                raise UsageError(
                    f"{trainer_class.__name__}.agent returned {self.agent!r}; return Agent(actor=…, learner=…)"
                )
            self.buffer = self.trainer.replay_buffer(self.spec)
        if self.buffer is not None:
            if not isinstance(self.buffer, ReplayBuffer):
                raise UsageError(
                    f"{trainer_class.__name__}.replay_buffer returned {self.buffer!r}; return fdg.ReplayBuffer(capacity)"
                )
            self.buffer.open(
                config.actors, config.replay_shards if policy.per(policy.fragment_of("buffer")) == "shard" else 1
            )
        self.parts = Parts(trainer_class, config, self.agent, self.buffer, self.spec, sample_work=options.sample_work)
        self.parts.streams, self.parts.environments[0] = self.streams, environment

    def close(self) -> None:
        if self.engine is not None:
            self.engine.stop()
        self.parts.close()

    def go(self, graph: Graph | None) -> Result:
        untouched = self.policy.name == "local" and self.config.actors == 1 and graph is None
        coordinator = None
        if untouched:
            graph = self.try_project() if self.observers else None
            msrl, trainer = self.parts.local(self.progress.log), self.trainer
            self.progress.environments = [self.parts.environment(0)]
        else:
            graph = graph or self.project(self.options.passes)
            self.check_shared_state(graph)
            own = {name: value for name, value in vars(self.trainer).items() if name not in self.shared_attributes}
            self.parts.attributes = own
            self.engine = self.start_engine(self.parts.with_graph(graph))
            coordinator = Coordinator(graph, self.engine, self.parts.instance_keys(), self.config.actors)
            coordinator.weight_bytes = sum(math.prod(size) * 4 for _, _, size, _ in self.parts.places)
            self.progress.environments = coordinator.counts
            driver = load_class(self.trainer_class, graph.driver, graph.driver_map, self.parts.files["driver"])
            trainer = driver.__new__(driver)
            vars(trainer).update(vars(self.trainer))
            msrl = DriverMSRL(coordinator, config=self.config, streams=self.streams, log=self.log_joined)
        trainer.msrl = msrl
        for observer in self.observers:
            observer.on_start(self.config, graph)
        self.progress.start = time.perf_counter()
        with self.streams.of("driver"):
            returned = trainer.train()
        seconds = time.perf_counter() - self.progress.start
        self.progress.drain()
        for name, value in vars(trainer).items():
            if isinstance(value, (Handle, Varying)):
                setattr(trainer, name, global_value(value, self.config.envs))
        returned = global_value(returned, self.config.envs)
        mean = self.progress.mean_return()
        if coordinator is None:
            parameters = parameters_of(msrl._learner) if msrl._learner is not None else {}
            evaluate: Any = msrl.evaluate if msrl._learner is not None else lambda episodes: None
        else:
            parameters, evaluate = coordinator.engine.parameters(), coordinator.engine.evaluate
        if self.options.eval_episodes and (measured := evaluate(self.options.eval_episodes)) is not None:
            mean = measured
        metrics = {
            "algorithm": self.trainer_class.__name__.lower(),
            "env": self.config.env,
            "backend": self.spec.backend,
            "policy": self.policy.name,
            "engine": self.options.engine,
            "actors": self.config.actors,
            "replay_shards": self.config.replay_shards,
            "seed": self.config.seed,
            "threads": torch.get_num_threads(),
            "frames": self.progress.frames(),
            "episodes": self.progress.episodes,
            "seconds": seconds,
            "frames_per_second": self.progress.frames() / seconds if seconds else 0.0,
            "mean_reward": mean,
            "phases": msrl.record.phases if coordinator is None else coordinator.phases,
            "bytes": {f"{e.source}->{e.target}:{e.value}": e.bytes for e in graph.edges}
            if coordinator and graph
            else {},
            "calls": dict(coordinator.calls) if coordinator else {},
            "params_sha256": sha256(parameters),
            "iterations": self.progress.history,
        }
        for observer in self.observers:
            observer.on_end(metrics)
        return Result(trainer, returned, metrics, self.progress.history, parameters, graph, metrics["calls"])

    def start_engine(self, parts: Parts) -> Engine:
        if self.options.engine == "process" and self.policy.name != "local":
            from fdg.runtime.process import Processes

            return Processes(parts, self.options)
        return InProcess(parts)

    def project(self, passes: Any = None) -> Graph:
        from fdg.compiler import PASSES, project

        return project(
            self.trainer_class,
            policy=self.policy,
            actors=self.config.actors,
            replay_shards=self.config.replay_shards,
            passes=PASSES if passes is None else passes,
        )

    def try_project(self) -> Graph | None:
        """The graph to show beside a local run, which does not need one."""
        try:
            return self.project()
        except UsageError:
            return None

    def log_joined(self, step: int, value: Any, metrics: dict[str, Any]) -> None:
        """`log` at the driver of fragments: varying values are joined, handles fetched."""
        envs = self.config.envs
        self.progress.log(
            int(global_value(step, envs)),
            global_value(value, envs),
            {name: global_value(item, envs) for name, item in metrics.items()},
        )

    # state that would be two copies --------------------------------------------------------------------------------------

    shared_attributes: frozenset[str] = frozenset()

    def check_shared_state(self, graph: Graph) -> None:
        """Refuse a `train` that reaches into the agent through the trainer: in fragments it would see a copy."""
        ignored = reachable_ids(self.config) | reachable_ids(self.spec)
        inside = reachable_ids(self.agent) - ignored
        shared = set()
        for name, value in vars(self.trainer).items():
            if name not in ("config", "msrl") and reachable_ids(value) & inside:
                shared.add(name)
        self.shared_attributes = frozenset(shared)
        if not shared:
            return
        from fdg.compiler.source import from_class

        for owner in from_class(self.trainer_class).bases:
            for method, node in owner.methods.items():
                if method in ("__init__", "agent", "replay_buffer"):
                    continue
                for name in shared:
                    place = find_attribute(node, name, owner.module)
                    if place is not None:
                        raise place.error(
                            f"`self.{name}` is part of the agent (made in `agent`), and `{method}` uses it: under "
                            f"{graph.policy!r} the agent lives in other fragments, and this would be a second copy",
                            "do it in Actor.act or Learner.learn, and pass what they need as an argument",
                        )


def find_attribute(function: Any, name: str, module: Any) -> Any:
    """The place of the first `self.<name>` in a method, or None."""
    import libcst as cst
    import libcst.matchers as m

    this = function.params.params[0].name.value if function.params.params else ""
    for node in m.findall(function, m.Attribute(value=m.Name(this), attr=m.Name(name))):
        assert isinstance(node, cst.Attribute)
        return module.origin(node)
    return None


def reachable_ids(value: Any) -> set[int]:
    """Ids of the mutable objects that can be reached from a value."""
    seen: set[int] = set()
    atoms = (int, float, str, bytes, bool, type(None), type, tuple, complex)

    class Visitor(_Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if (not isinstance(obj, atoms) and not callable(obj)) or isinstance(obj, (torch.nn.Module, Actor)):
                seen.add(id(obj))
            return super().persistent_id(obj)

    try:
        Visitor(io.BytesIO(), []).dump(value)
    except Exception:  # what cannot be pickled is reported where it is copied
        return seen
    return seen
