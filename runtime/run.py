"""Launch a trainer: build its parts, run it under a policy on an engine, and report what happened."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase

from fdg.api import Actor, Agent, Trainer
from fdg.config import Config, make_config
from fdg.errors import UsageError, did_you_mean
from fdg.graph import Graph
from fdg.msrl import MSRL, PHASES
from fdg.registry import find_policy
from fdg.runtime.coordinator import Coordinator, DriverMSRL, InstanceKey, global_value
from fdg.runtime.environments import Environment, make_env
from fdg.runtime.evaluation import Evaluator
from fdg.runtime.inprocess import Instance
from fdg.runtime.load import load_class, write_sources
from fdg.runtime.replay import ReplayBuffer
from fdg.runtime.streams import Streams, derive_seed
from fdg.runtime.values import Handle, Varying, copied
from fdg.runtime.weights import _Pickler, copy_component, parameters_of, sha256, shared_places

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


class Progress:
    """Counts frames and episodes over all environments, and turns `log` calls into rows."""

    def __init__(self, config: Config, observers: Sequence[Any]) -> None:
        self.config, self.observers = config, observers
        self.environments: list[Environment] = []
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
    if engine != "inprocess":
        raise UsageError(f"unknown engine {engine!r}; {did_you_mean(engine, ['inprocess'])}")
    if (workers or 1) > 1 or sample_parallelism > 1:
        raise UsageError(
            f"workers is {workers}, sample_parallelism is {sample_parallelism}; the engine 'inprocess' has one process and asks "
            "for one sample at a time: leave both out"
        )
    if config is None or overrides:
        base = {} if config is None else {f: getattr(config, f) for f in config.__dataclass_fields__}
        config = make_config(trainer_class.config_class(), {**base, **overrides})
    chosen = find_policy(policy)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # part of the result: how many threads add up changes the last bits
    run = None
    try:
        run = Run(trainer_class, config, chosen, tuple(observers), sample_work)
        return run.go(passes, graph, eval_episodes, engine)
    finally:
        torch.set_num_threads(before)
        if run is not None:
            run.close()


class Run:
    """One run, from building the parts to the result."""

    def __init__(
        self, trainer_class: type[Trainer], config: Config, policy: Any, observers: Sequence[Any], work: int
    ) -> None:
        self.trainer_class, self.config, self.policy, self.sample_work = trainer_class, config, policy, work
        self.progress = Progress(config, observers)
        self.observers = observers
        self.streams = Streams(config.seed)
        self.environments: list[Environment] = []
        for index in range(config.actors):
            with self.streams.of("env", index):
                self.environments.append(self.make_environment(config.envs, derive_seed(config.seed, "env", index)))
        self.progress.environments = self.environments
        self.spec = self.environments[0].spec
        self.evaluator = Evaluator(self.spec, self.make_environment)
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

    def make_environment(self, rows: int, seed: int) -> Environment:
        """Environments by name, or, in a test, from the factory that stands in the config."""
        env: Any = self.config.env
        return env(rows, seed) if callable(env) else make_env(env, rows, seed)

    def close(self) -> None:
        for environment in self.environments:
            environment.close()
        self.evaluator.close()

    def go(self, passes: Any, graph: Graph | None, eval_episodes: int, engine: str) -> Result:
        untouched = self.policy.name == "local" and self.config.actors == 1 and graph is None
        self.places = shared_places(self.agent.actor, self.agent.learner) if self.agent.learner is not None else []
        if untouched:
            graph = self.try_project() if self.observers else None
            msrl, trainer = self.local(), self.trainer
            coordinator = None
        else:
            graph = graph or self.project(passes)
            self.check_shared_state(graph)
            coordinator = self.coordinate(graph)
            files = write_sources(graph)
            driver = load_class(self.trainer_class, graph.driver, graph.driver_map, files["driver"])
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
        learner = msrl if coordinator is None else coordinator.learner.msrl if coordinator.learner else msrl
        for name, value in vars(trainer).items():
            if isinstance(value, (Handle, Varying)):
                setattr(trainer, name, global_value(value, self.config.envs))
        phases = self.phases(msrl, coordinator)
        mean = self.progress.mean_return()
        if eval_episodes and learner._evaluation is not None:
            mean = learner.evaluate(eval_episodes)
        parameters = parameters_of(learner._learner) if learner._learner is not None else {}
        metrics = {
            "algorithm": self.trainer_class.__name__.lower(),
            "env": self.config.env,
            "backend": self.spec.backend,
            "policy": self.policy.name,
            "engine": engine,
            "actors": self.config.actors,
            "replay_shards": self.config.replay_shards,
            "seed": self.config.seed,
            "threads": torch.get_num_threads(),
            "frames": self.progress.frames(),
            "episodes": self.progress.episodes,
            "seconds": seconds,
            "frames_per_second": self.progress.frames() / seconds if seconds else 0.0,
            "mean_reward": mean,
            "phases": phases,
            "bytes": {f"{e.source}->{e.target}:{e.value}": e.bytes for e in graph.edges}
            if coordinator and graph
            else {},
            "calls": dict(coordinator.calls) if coordinator else {},
            "params_sha256": sha256(parameters),
            "iterations": self.progress.history,
        }
        for observer in self.observers:
            observer.on_end(metrics)
        return Result(
            trainer,
            global_value(returned, self.config.envs),
            metrics,
            self.progress.history,
            parameters,
            graph,
            metrics["calls"],
        )

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

    # one place ---------------------------------------------------------------------------------------------------------

    def local(self) -> MSRL:
        """Everything in one place: the user's own objects."""
        weights = copy_weights = []
        if self.agent.learner is not None:
            weights = tensors_at(self.agent.actor, self.places)
            copy_weights = weights
        watcher = evaluation_actor(self.agent.actor, self.places, copy_weights)
        return MSRL(
            config=self.config,
            streams=self.streams,
            env=self.environments[0],
            actor=self.agent.actor,
            learner=self.agent.learner,
            buffer=self.buffer,
            evaluation=lambda: (self.evaluator, watcher),
            log=self.progress.log,
            weights=weights,
            sample_work=self.sample_work,
        )

    # fragments -----------------------------------------------------------------------------------------------------------

    def coordinate(self, graph: Graph) -> Coordinator:
        """Make the instances of every fragment, each with copies of its components."""
        files = write_sources(graph)
        instances: dict[InstanceKey, Instance] = {}
        for fragment in graph.fragments.values():
            generated = load_class(self.trainer_class, fragment.source, fragment.line_map, files[fragment.name])
            components = set(fragment.components)
            if components & {"env", "actor"}:
                for index in range(self.config.actors):
                    instances[fragment.name, "actor", index] = self.actor_instance(
                        fragment.name, generated, components, index
                    )
            if components & {"buffer", "learner"}:
                instances[fragment.name, "one", 0] = self.one_instance(fragment.name, generated, components)
        return Coordinator(graph, instances, self.config.actors)

    def body(self, generated: Any) -> Any:
        """The fragment's own copy of the trainer: its attributes, without what belongs to components."""
        body = generated.__new__(generated)
        memo: dict[int, Any] = {}
        own = {name: value for name, value in vars(self.trainer).items() if name not in self.shared_attributes}
        vars(body).update({name: copied(value, memo) for name, value in own.items()})
        return body

    def actor_instance(self, fragment: str, generated: type, components: set[str], index: int) -> Instance:
        actor: Actor | None = None
        weights: list[torch.Tensor] = []
        if "actor" in components:
            actor, weights = copy_component(self.agent.actor, self.places, "the actor")
        msrl = MSRL(
            config=self.config,
            streams=self.streams,
            index=index,
            env=self.environments[index] if "env" in components else None,
            actor=actor,
        )
        return Instance(fragment, self.body(generated), msrl, weights)

    def one_instance(self, fragment: str, generated: type, components: set[str]) -> Instance:
        agent: Agent | None = None
        weights: list[torch.Tensor] = []
        evaluation = None
        if "learner" in components:
            agent, weights = copy_component(self.agent, self.places, "the agent")
            watcher = evaluation_actor(agent.actor, [_place_of(tensor) for tensor in weights], weights)
            evaluation = lambda: (self.evaluator, watcher)  # noqa: E731
        msrl = MSRL(
            config=self.config,
            streams=self.streams,
            learner=agent.learner if agent else None,
            buffer=self.buffer if "buffer" in components else None,
            evaluation=evaluation,
            weights=weights,
            sample_work=self.sample_work,
        )
        return Instance(fragment, self.body(generated), msrl, weights)

    def log_joined(self, step: int, value: Any, metrics: dict[str, Any]) -> None:
        """`log` at the driver of fragments: varying values are joined, handles fetched."""
        envs = self.config.envs
        self.progress.log(
            int(global_value(step, envs)),
            global_value(value, envs),
            {name: global_value(item, envs) for name, item in metrics.items()},
        )

    def phases(self, msrl: MSRL, coordinator: Coordinator | None) -> dict[str, float]:
        total = dict.fromkeys(PHASES, 0.0)
        places = [msrl] if coordinator is None else [instance.msrl for instance in coordinator.instances.values()]
        for place in places:
            for name, seconds in place.record.phases.items():
                total[name] += seconds
        if coordinator is not None:
            total["sync"] += coordinator.sync_seconds
        return total

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


def _place_of(tensor: torch.Tensor) -> Any:
    from fdg.runtime.weights import _place

    return _place(tensor)


def tensors_at(component: Any, places: list[Any]) -> list[torch.Tensor]:
    """A component's own tensors at the given places."""
    from fdg.runtime.weights import _place, take_apart

    found = {_place(tensor): tensor for tensor in reversed(take_apart(component, "the actor")[1])}
    return [found[place] for place in places]


def evaluation_actor(actor: Actor, places: list[Any], weights: list[torch.Tensor]) -> Actor:
    """An actor for evaluation: it has the given weights themselves, and copies of all else."""
    from fdg.runtime.weights import _place, clone_tensors, put_together, take_apart

    data, tensors = take_apart(actor, "the actor")
    known = dict(zip(places, weights, strict=True))
    copies = clone_tensors(tensors)
    return put_together(data, [known.get(_place(old), new) for old, new in zip(tensors, copies, strict=True)])
