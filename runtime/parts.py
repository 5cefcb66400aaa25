"""The parts of a run, and how a place builds the instances that it hosts.

Parts    all that a run is made of: trainer, agent, buffer, config, the fragments' code. It can go to a worker.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from fdg.api import Actor, Agent, Trainer
from fdg.config import Config
from fdg.graph import Fragment, Graph
from fdg.msrl import MSRL
from fdg.runtime.environments import Environment, EnvSpec, make_env
from fdg.runtime.evaluation import Evaluator
from fdg.runtime.fused import Team
from fdg.runtime.instance import Instance, InstanceKey
from fdg.runtime.load import load_class, write_sources
from fdg.runtime.replay import ReplayBuffer
from fdg.runtime.streams import Streams, derive_seed
from fdg.runtime.values import copied
from fdg.runtime.weights import clone_tensors, copy_component, place_of, put_together, shared_places, take_apart


@dataclass
class Parts:
    """What a run is made of. `attributes` are the trainer's own, without what is part of the agent."""

    trainer_class: type[Trainer]
    config: Config
    agent: Agent
    buffer: ReplayBuffer | None
    spec: EnvSpec
    attributes: dict[str, Any] = field(default_factory=dict)
    fragments: dict[str, Fragment] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    sample_work: int = 0
    compile_update: bool = False
    edges: list[tuple[str, str, str]] = field(default_factory=list)
    """(source, target, value), for what is said of a run."""
    factory: Any = None
    """The user's own function that makes environments, where workers cannot read its file."""

    def with_graph(self, graph: Graph) -> Parts:
        self.fragments, self.files = graph.fragments, write_sources(graph)
        self.edges = [(edge.source, edge.target, edge.value) for edge in graph.edges]
        return self

    @cached_property
    def streams(self) -> Streams:
        return Streams(self.config.seed)

    @cached_property
    def places(self) -> list[Any]:
        """Where the weights are in this process's agent."""
        return shared_places(self.agent.actor, self.agent.learner) if self.agent.learner is not None else []

    @cached_property
    def classes(self) -> dict[str, Any]:
        """The generated classes by fragment."""
        return {
            name: load_class(self.trainer_class, fragment.source, fragment.line_map, self.files[name])
            for name, fragment in self.fragments.items()
        }

    @cached_property
    def environments(self) -> dict[int, Environment]:
        """The environments of this process, made when first asked for."""
        return {}

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.spec, lambda rows, seed: make_environment(self.config, rows, seed))

    def environment(self, index: int, actors: int = 1) -> Environment:
        """The environments of an actor, or of it and the following ones, fused."""
        if actors > 1 and index in self.environments:
            self.environments.pop(index).close()
        if index not in self.environments:
            self.environments[index] = actor_environment(self.config, self.streams, index, actors)
        return self.environments[index]

    def instance_keys(self) -> list[InstanceKey]:
        """All instances of the run."""
        found: list[InstanceKey] = []
        for name, fragment in self.fragments.items():
            if set(fragment.components) & {"env", "actor"}:
                found += [(name, "actor", index) for index in range(self.config.actors)]
            if set(fragment.components) & {"buffer", "learner"}:
                found.append((name, "one", 0))
        return found

    def instances(self, keys: Iterable[InstanceKey]) -> dict[InstanceKey, Instance]:
        """Build instances, each with copies of its components; fused actors have theirs together, with the first."""
        keys = list(keys)
        teams: dict[InstanceKey, Team] = {}
        for name, fragment in self.fragments.items():
            members = [key for key in keys if key[:2] == (name, "actor")]
            if fragment.fused and len(members) > 1:
                teams.update(dict.fromkeys(members, Team(fragment, members, self.config.envs)))
        return {
            key: self.actor_instance(key, teams.get(key)) if key[1] == "actor" else self.one_instance(key)
            for key in keys
        }

    @cached_property
    def notice(self) -> Callable[[str], None]:
        """How the user is told something; in a worker, by the terminal that it shares with the driver."""
        return lambda text: print(f"fdg: {text}", file=sys.stderr, flush=True)

    def captures(self) -> Any:
        """What compiles the learner's updates; None where nobody asked for it."""
        if not self.compile_update:
            return None
        from fdg.capture import Captures

        return Captures(self.notice)

    def body(self, fragment: str) -> Any:
        """The fragment's own copy of the trainer."""
        generated = self.classes[fragment]
        body = generated.__new__(generated)
        memo: dict[int, Any] = {}
        vars(body).update({name: copied(value, memo) for name, value in self.attributes.items()})
        return body

    def actor_instance(self, key: InstanceKey, team: Team | None) -> Instance:
        fragment, _, index = key
        if team is not None and key != team.members[0]:
            return Instance(
                key, self.body(fragment), MSRL(config=self.config, streams=self.streams, index=index), [], team
            )
        components = self.fragments[fragment].components
        actor: Actor | None = None
        weights: list[torch.Tensor] = []
        if "actor" in components:
            actor, weights = copy_component(self.agent.actor, self.places, "the actor")
        env = self.environment(index, len(team.members) if team else 1) if "env" in components else None
        msrl = MSRL(config=self.config, streams=self.streams, index=index, env=env, actor=actor)
        msrl.acts_on = weights
        return Instance(key, self.body(fragment), msrl, weights, team)

    def one_instance(self, key: InstanceKey) -> Instance:
        fragment = key[0]
        components = self.fragments[fragment].components
        agent: Agent | None = None
        weights: list[torch.Tensor] = []
        evaluation = new_watcher = None
        if "learner" in components:
            agent, weights = copy_component(self.agent, self.places, "the agent")
            new_watcher = evaluation_actors(agent.actor, [place_of(tensor) for tensor in weights], weights)
            watcher = new_watcher()
            evaluation = lambda: (self.evaluator, watcher)  # noqa: E731
        msrl = MSRL(
            config=self.config,
            streams=self.streams,
            learner=agent.learner if agent else None,
            buffer=self.buffer if "buffer" in components else None,
            evaluation=evaluation,
            watcher=new_watcher,
            weights=weights,
            sample_work=self.sample_work,
        )
        msrl.captures = self.captures()
        return Instance(key, self.body(fragment), msrl, weights)

    def local(self, log: Any) -> MSRL:
        """Everything in one place: the user's own objects."""
        weights = self.weights()
        new_watcher = evaluation_actors(self.agent.actor, self.places, weights)
        watcher = new_watcher()
        msrl = MSRL(
            config=self.config,
            streams=self.streams,
            env=self.environment(0),
            actor=self.agent.actor,
            learner=self.agent.learner,
            buffer=self.buffer,
            evaluation=lambda: (self.evaluator, watcher),
            watcher=new_watcher,
            log=log,
            weights=weights,
            sample_work=self.sample_work,
        )
        msrl.captures = self.captures()
        return msrl

    def unshared(self) -> str:
        """What to tell a user whose actor has weights of its own, and none of the learner's; else empty.

        Raises:
            UsageError: actor or learner cannot be copied.
        """
        parts = {"the actor": self.agent.actor, "the learner": self.agent.learner}
        trained = [any(t.requires_grad for t in take_apart(part, what)[1]) for what, part in parts.items()]
        if self.places or not all(trained):
            return ""
        return (
            "actor and learner share no tensors: nothing that is learned reaches the actor; give both the same module in "
            "agent()"
        )

    def weights(self) -> list[torch.Tensor]:
        """The weights of this process's agent."""
        return tensors_at(self.agent.actor, self.places) if self.places else []

    def close(self) -> None:
        for environment in self.environments.values():
            environment.close()
        self.evaluator.close()

    def __getstate__(self) -> dict[str, Any]:
        """What goes to a worker, which makes environments, streams and classes itself."""
        made = ("streams", "places", "classes", "environments", "evaluator", "notice")
        return {name: value for name, value in vars(self).items() if name not in made}


def make_environment(config: Config, rows: int, seed: int) -> Environment:
    """Environments by name, or, in a test, from the factory that stands in the config."""
    env: Any = config.env
    if callable(env):
        return env(rows, seed)
    return make_env(env, rows, seed, backend=None if config.backend == "auto" else config.backend)


def actor_environment(config: Config, streams: Streams, index: int, actors: int = 1) -> Environment:
    """The environments of one logical actor, or of several as one vector environment."""
    with streams.of("env", index):
        return make_environment(config, actors * config.envs, derive_seed(config.seed, "env", index))


def tensors_at(component: Any, places: list[Any]) -> list[torch.Tensor]:
    """A component's own tensors at the given places."""
    found = {place_of(tensor): tensor for tensor in reversed(take_apart(component, "the actor")[1])}
    return [found[place] for place in places]


def evaluation_actors(actor: Actor, places: list[Any], weights: list[torch.Tensor]) -> Callable[[], Actor]:
    """What makes actors for evaluation: each has the given weights themselves, and copies of all else as it is now."""
    data, tensors = take_apart(actor, "the actor")
    known = dict(zip(places, weights, strict=True))
    kept = [known.get(place_of(old)) for old in tensors]
    others = clone_tensors([old for old, weight in zip(tensors, kept, strict=True) if weight is None])

    def make() -> Actor:
        copies = iter(clone_tensors(others))
        return put_together(data, [next(copies) if weight is None else weight for weight in kept])

    return make


LARGE = ("torchrl", "torchrl.objectives", "torchrl.modules", "mujoco", "gymnasium.envs.mujoco")
"""Modules that take long to import."""


def prepare_to_send(parts: Parts) -> list[str]:
    """Find out what a worker can import: those modules are returned. Of others, what is in them travels by value."""
    known = [name for name in LARGE if name in sys.modules]
    objects = (parts.config, parts.agent.actor, parts.agent.learner)
    owners = [*parts.trainer_class.__mro__, *(owner for item in objects for owner in type(item).__mro__)]
    for name in dict.fromkeys(owner.__module__ for owner in owners):
        top = name.partition(".")[0]
        if name not in sys.modules or top in sys.stdlib_module_names or name == "__main__":
            continue
        if importlib.machinery.PathFinder.find_spec(top) is not None or top == "fdg":
            known.append(name)
        else:
            cloudpickle.register_pickle_by_value(sys.modules[name])
    return known
