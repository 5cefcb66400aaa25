"""What runs in a place: instances of fragments, the objects that stay with them, and the tasks they perform.

    Task      run one region of one instance: what enters, and what is to become of what leaves
    Reply     what left: values for the driver, keys of objects that stay, and what happened meanwhile
    Instance  one copy of a fragment: for one logical actor, or the only one
    Host      the instances of one place (this process, or a worker)

A task and its reply are each one message: an object that occurs twice in it is one object on the other side. So a reply
can say what became of the driver's own objects: `lent` names them, in the task as they were, in the reply as they are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from fdg.msrl import MSRL, weights_written
from fdg.runtime import trace
from fdg.runtime.fused import Team, own, perform_together
from fdg.runtime.state import State, component_state, load_component_state, merged
from fdg.runtime.values import ATOMS, UNBOUND, Varying, nbytes

InstanceKey = tuple[str, str, int]
"""(fragment, "actor" or "one", index)."""


class Here(NamedTuple):
    """An input that is in the instance's own store already."""

    key: int

    def __deepcopy__(self, memo: Any) -> Here:
        return self


class From(NamedTuple):
    """An input that another instance has: the objects of one source are brought together, in one message."""

    source: InstanceKey
    keys: tuple[int, ...]
    position: int

    def __deepcopy__(self, memo: Any) -> From:
        return self


class Kept(NamedTuple):
    """An output that stays, and a copy for the driver to read if it will (else UNBOUND)."""

    key: int
    copy: Any


class Out(NamedTuple):
    """What is to become of an output: `drivers` ones go to the driver whatever they are, `sent` ones to others soon.

    `how` is that of the port, or "apart": the object is elsewhere, and the region has nothing to return.
    """

    name: str
    how: str
    plain: str
    drivers: bool
    sent: bool


class Task(NamedTuple):
    """Run a region of an instance."""

    instance: InstanceKey
    region: str
    inputs: dict[str, Any]
    outputs: tuple[Out, ...] = ()
    restores: tuple[tuple[str, bool], ...] = ()
    """Inputs that the region may change: whether the driver wants them back; otherwise they stay here."""
    lent: list[Any] = []
    lend: bool = False
    weights: int | None = None
    """The version of the weights that the region must see, if it sees any."""
    release: tuple[int, ...] = ()
    """Objects that nobody holds any more."""
    modes: tuple[Any, ...] | None = None
    """The driver's grad and autocast modes, if they are not the usual ones."""


@dataclass
class Reply:
    """What a region call left."""

    outputs: list[Any] = field(default_factory=list)
    restored: dict[str, Any] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    lent: list[Any] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the inputs that came from other instances."""
    report: dict[str, Any] = field(default_factory=dict)
    """Seconds by phase, frames, episodes and the version of the learner's weights."""


class Store:
    """The objects that stay in one instance. An object has one key, however many names it has."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self._keys: dict[int, int] = {}
        self._counter = itertools.count(1)

    def keep(self, value: Any) -> int:
        key = self._keys.get(id(value))
        if key is None:
            key = next(self._counter)
            self.objects[key], self._keys[id(value)] = value, key
        return key

    def release(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._keys.pop(id(self.objects.pop(key)), None)

    def put(self, key: int, value: Any) -> None:
        """Another form of an object under the same key."""
        self._keys.pop(id(self.objects[key]), None)
        self.objects[key], self._keys[id(value)] = value, key


class Weights(Protocol):
    """Where the learner's weights are published."""

    def write(self, weights: list[torch.Tensor], version: int) -> None: ...

    def read(self, weights: list[torch.Tensor], version: int) -> None: ...


class LocalWeights:
    """The learner's own tensors, for actors in the same process."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def write(self, weights: list[torch.Tensor], version: int) -> None:
        self.tensors = weights

    def read(self, weights: list[torch.Tensor], version: int) -> None:
        with torch.no_grad():
            for mine, new in zip(weights, self.tensors, strict=True):
                mine.copy_(new)


class Instance:
    """One copy of a fragment. Its objects live in its store."""

    def __init__(
        self, key: InstanceKey, body: Any, msrl: MSRL, weights: list[torch.Tensor], team: Team | None = None
    ) -> None:
        self.key, self.body, self.msrl, self.weights, self.team = key, body, msrl, weights, team
        self.store = Store()
        self.version = 0
        """Version of the weights that the actor here has."""
        self.marks = [tensor._version for tensor in weights]
        body.msrl = msrl

    def call(self, region: str, inputs: dict[str, Any]) -> Any:
        """Run one region. Weights are the learner's: an actor that writes its copies would do so in vain."""
        method = getattr(self.body, region)
        with trace.span(trace.row_of(self.key), f"{method.__doc__} {region}", "region"):
            result = method(**inputs)
        if self.msrl._actor is not None and self.marks != [tensor._version for tensor in self.weights]:
            raise weights_written()
        return result

    def report(self) -> dict[str, Any]:
        """What happened here since the last report."""
        record, env = self.msrl.record, self.msrl._env
        seen: dict[str, Any] = {"phases": dict(record.phases), "version": self.msrl.version}
        record.phases.update(dict.fromkeys(record.phases, 0.0))
        if self.msrl.replica is not None:
            seen.update(reduced=self.msrl.replica.take_bytes(), draws=self.msrl.replica.draws)
        if self.msrl.captures is not None:
            seen["compiled"] = self.msrl.compiled()
        if env is not None:
            seen.update(frames=env.frames, episodes=env.drain_episodes())
        return seen

    def load_weights(self, board: Weights, version: int) -> None:
        board.read(self.weights, version)
        self.version = version
        self.marks = [tensor._version for tensor in self.weights]


def learned(error: BaseException) -> tuple[int | None, Any]:
    """The version of the learner's weights when a region of its failed, and where they are: `train` may go on."""
    return getattr(error, "_fdg_learned", (None, None))


def modes() -> tuple[Any, ...] | None:
    """The modes of torch in which the driver calls a region; None when they are the usual ones."""
    autocast = torch.is_autocast_enabled("cpu")
    found = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_autocast_dtype("cpu"))
    return None if found[:3] == (True, False, False) else found


@contextlib.contextmanager
def entered(found: tuple[Any, ...] | None) -> Iterator[None]:
    """Enter the driver's modes where a region runs."""
    if found is None:
        yield
        return
    grad, inference, autocast, dtype = found
    with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, autocast):
        yield


class Host:
    """The instances of one place, and how they perform tasks."""

    def __init__(self, instances: dict[InstanceKey, Instance], board: Weights, publishes: bool = True) -> None:
        self.instances, self.board, self.publishes = instances, board, publishes
        for instance in instances.values():
            if instance.msrl._learner is not None and publishes:
                board.write(instance.weights, instance.msrl.version)
        if trace.on():
            self.watch()

    def watch(self) -> None:
        """Give component calls spans in the trace."""
        for key, instance in self.instances.items():
            trace.watch(instance.msrl, trace.row_of(key), trace.PHASE_OF)

    def perform(self, task: Task, bring: Callable[[InstanceKey, tuple[int, ...]], tuple[Any, ...]]) -> Reply:
        """Run a task whose message has arrived. `bring` gets objects of other instances, as copies."""
        instance = self.instances[task.instance]
        instance.store.release(task.release)
        reply = Reply()
        self.bring_weights(instance, task)
        brought: dict[Any, tuple[Any, ...]] = {}
        with trace.span(trace.row_of(task.instance), "transfer", "transfer"):
            inputs = {
                name: self.resolve(instance, name, value, bring, brought, reply) for name, value in task.inputs.items()
            }
        version = instance.msrl.version
        try:
            with entered(task.modes):
                result = instance.call(task.region, inputs)
        except Exception as error:
            self.publish(instance, version)
            if instance.msrl._learner is not None:
                with contextlib.suppress(AttributeError):
                    error._fdg_learned = instance.msrl.version, getattr(self.board, "where", None)  # type: ignore[attr-defined]
            raise
        self.publish(instance, version)
        results = (result,) if len(task.outputs) == 1 else result or ()
        lent = {id(value) for value in task.lent} if task.lend else set()
        for name, wanted in task.restores:
            if wanted:
                reply.restored[name] = inputs[name]
            else:
                reply.moved[name] = instance.store.keep(inputs[name])
        reply.outputs = [
            self.leave(instance, out, value, lent) for out, value in zip(task.outputs, results, strict=True)
        ]
        if lent and (reply.restored or any(not isinstance(value, (Kept, *ATOMS)) for value in reply.outputs)):
            reply.lent = task.lent
        reply.report = instance.report()
        return reply

    def publish(self, instance: Instance, before: int) -> None:
        """Publish the learner's weights, if it has learned since."""
        if instance.msrl.version != before and self.publishes:
            self.board.write(instance.weights, instance.msrl.version)

    def perform_all(self, tasks: list[Task], bring: Callable[..., tuple[Any, ...]]) -> list[Reply]:
        """Run tasks: fused actors together, others one after the other."""
        if self.instances[tasks[0].instance].team is not None:
            return perform_together(self, tasks, bring)
        return [self.perform(task, bring) for task in tasks]

    def bring_weights(self, instance: Instance, task: Task) -> None:
        """Bring an actor's weights up to date, if its region is to see newer ones."""
        if task.weights is not None and task.weights != instance.version and instance.weights:
            start = perf_counter()
            with trace.span(trace.row_of(instance.key), f"sync weights {task.weights}", "sync"):
                instance.load_weights(self.board, task.weights)
            instance.msrl.record.phases["sync"] += perf_counter() - start

    def resolve(
        self, instance: Instance, name: str, value: Any, bring: Any, brought: Any, reply: Reply, whole: bool = False
    ) -> Any:
        """An input as the region gets it; `whole` where actors run together and their parts may be put together."""
        if isinstance(value, Here):
            found = instance.store.objects[value.key]
            return found if whole else own(found)
        if isinstance(value, From):
            if (value.source, value.keys) not in brought:
                brought[value.source, value.keys] = bring(value.source, value.keys)
            value = brought[value.source, value.keys][value.position]
            reply.bytes[name] = reply.bytes.get(name, 0) + nbytes(value)
            return value
        if isinstance(value, Varying):
            return Varying(self.resolve(instance, name, item, bring, brought, reply) for item in value)
        return value

    def leave(self, instance: Instance, out: Out, value: Any, lent: set[int]) -> Any:
        """An output as the driver gets it."""
        if out.how == "apart":
            return UNBOUND
        if value is UNBOUND or out.drivers or id(value) in lent:
            return value
        if out.plain == "yes" or (out.plain == "maybe" and isinstance(value, ATOMS)):
            return value
        return Kept(instance.store.keep(value), value if out.how == "value" else UNBOUND)

    def state(self) -> State:
        """The state of all components here."""
        return merged(component_state(instance.msrl) for instance in self.instances.values())

    def load_state(self, state: State) -> list[str]:
        """Give the components here their state; returns what could not be restored."""
        lost = []
        for instance in self.instances.values():
            lost += load_component_state(instance.msrl, state)
            instance.version = -1  # older than any: the next region that acts gets the learner's weights
            instance.marks = [tensor._version for tensor in instance.weights]
            if instance.msrl.replica is not None:
                instance.msrl.replica.renew()
            if instance.msrl._learner is not None and self.publishes:
                self.board.write(instance.weights, instance.msrl.version)
        return lost

    def put(self, target: InstanceKey, values: tuple[Any, ...]) -> tuple[int, ...]:
        """Put objects into an instance's store, as if it had made them; their keys."""
        return tuple(map(self.instances[target].store.keep, values))

    def objects(self, source: InstanceKey, keys: tuple[int, ...]) -> tuple[Any, ...]:
        """Objects of an instance, themselves: to be copied by whoever sends them on."""
        return tuple(own(self.instances[source].store.objects[key]) for key in keys)
