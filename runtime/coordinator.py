"""The coordinator: executes the graph.

State, all of it:
    graph       what may run and what may cross; every region call and every crossing is looked up in it
    instances   (fragment, per, index) -> Instance: one per logical actor for per-actor regions, one for the rest
    calls       how often each region was called
    turn        the actor whose turn it is while the driver runs a per-actor statement, else None

The driver (generated code) calls regions through `self.msrl.<fragment>.<region>(…)`. A value that an edge of the graph
does not carry does not cross: the run fails and names the edge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any

from fdg.compiler.emit import argument
from fdg.compiler.operations import OPERATIONS
from fdg.errors import GraphError
from fdg.graph import DRIVER, Graph, Port, Region
from fdg.msrl import MSRL
from fdg.runtime.inprocess import Instance
from fdg.runtime.values import ATOMS, UNBOUND, Handle, Return, Store, Varying, copied, join, nbytes

InstanceKey = tuple[str, str, int]


class Coordinator:
    """Runs a graph's regions on an engine's instances."""

    def __init__(self, graph: Graph, instances: dict[InstanceKey, Instance], actors: int) -> None:
        self.graph, self.instances, self.actors = graph, instances, actors
        self.calls: Counter[str] = Counter()
        self.turn: int | None = None
        self.home = Store(DRIVER)
        """Objects that fragments made and the driver has taken over."""
        self.sync_seconds = 0.0
        self.regions = {(region.fragment, region.name): region for region in graph.regions()}
        self.learner = next((i for i in instances.values() if i.msrl._learner is not None), None)

    # one region call -------------------------------------------------------------------------------------------------

    def call(self, fragment: str, name: str, arguments: dict[str, Any]) -> Any:
        region = self.regions.get((fragment, name))
        if region is None:
            raise GraphError(
                f"the driver calls {fragment}.{name}, which is not in the graph (regions: {self.names(fragment)})"
            )
        self.calls[f"{fragment}.{name}"] += 1
        inputs = {port.name: arguments[argument(port.name)] for port in region.inputs}
        if region.per != "actor":
            return self.call_one(region, inputs)
        indices = range(self.actors) if self.turn is None else [self.turn]
        results = [self.call_actor(region, inputs, index) for index in indices]
        if self.turn is not None or self.actors == 1:
            return results[0]
        if not region.outputs:
            return None
        if len(region.outputs) == 1:
            results = [(result,) for result in results]
        joined = tuple(
            Varying(values) if port.varying else values[0]
            for port, values in zip(region.outputs, zip(*results, strict=True), strict=True)
        )
        return joined[0] if len(joined) == 1 else joined

    def names(self, fragment: str) -> str:
        return ", ".join(name for owner, name in self.regions if owner == fragment) or "none"

    def call_one(self, region: Region, inputs: dict[str, Any]) -> Any:
        instance = self.instances[region.fragment, "one", 0]
        return self.run(instance, region, inputs)

    def call_actor(self, region: Region, inputs: dict[str, Any], index: int) -> Any:
        instance = self.instances[region.fragment, "actor", index]
        if "agent_act" in region.calls:
            self.sync(instance)
        own = {name: value[index] if isinstance(value, Varying) else value for name, value in inputs.items()}
        return self.run(instance, region, own)

    def run(self, instance: Instance, region: Region, inputs: dict[str, Any]) -> Any:
        lent: dict[int, Any] = {}
        others: dict[int, Any] = {}
        resolved = {argument(name): self.enter(instance, name, value, lent, others) for name, value in inputs.items()}
        instance.store.epoch += 1
        result = instance.call(region.name, resolved)
        results = (result,) if len(region.outputs) == 1 else result or ()
        # An object that several actors got a copy of is nobody's own any more.
        back = Return(lent if self.turn is not None or region.per != "actor" or self.actors == 1 else {})
        # Objects that share parts live in one place: where one of them is the driver's, all become the driver's.
        here = bool(back.originals) and any(self.is_drivers(inputs[name]) for name in region.restores)
        for name in region.restores:
            self.come_back(instance, name, inputs[name], resolved[argument(name)], back, here)
        outputs = tuple(
            self.leave(instance, port, value, back, [inputs[name] for name in region.shares.get(port.name, ())])
            for port, value in zip(region.outputs, results, strict=True)
        )
        return outputs[0] if len(outputs) == 1 else outputs or None

    def enter(self, instance: Instance, name: str, value: Any, lent: dict[int, Any], others: dict[int, Any]) -> Any:
        """A value on its way into a fragment: resident already, or copied over an edge.

        `lent` remembers the driver's objects and their copies, `others` those of other fragments.
        """
        if value is UNBOUND:
            return value
        if isinstance(value, Varying):
            return Varying(self.enter(instance, name, item, lent, others) for item in value)
        if not isinstance(value, Handle):
            self.cross(DRIVER, instance.fragment, name, value)
            return copied(value, lent)
        if value.store is instance.store:
            return value.value
        self.cross(value.store.owner, instance.fragment, name, value.value)
        return copied(value.value, lent if value.store.owner == DRIVER else others)

    def leave(self, instance: Instance, port: Port, value: Any, back: Return, shared: list[Any]) -> Any:
        if value is UNBOUND:
            return value
        if id(value) in back.originals or (back.originals and any(self.is_drivers(given) for given in shared)):
            # The driver's own object, or one that holds it: it stays the driver's, under all its names.
            self.cross(instance.fragment, DRIVER, port.name, value)
            return back.value(value)
        if port.plain == "yes" or (port.plain == "maybe" and isinstance(value, ATOMS)):
            self.cross(instance.fragment, DRIVER, port.name, value)
            return back.value(value)
        handle = instance.store.keep(value)
        if port.how == "value":
            self.cross(instance.fragment, DRIVER, port.name, value)
            handle.read()
        return handle

    def is_drivers(self, value: Any) -> bool:
        """Whether a value is an object that lives at the driver."""
        if isinstance(value, Handle):
            return value.store.owner == DRIVER
        return not isinstance(value, (*ATOMS, Varying)) and value is not UNBOUND

    def come_back(self, instance: Instance, name: str, given: Any, inside: Any, back: Return, here: bool) -> None:
        """An object that a region may have changed: the driver's changes too; a handle moves to where it is newest."""
        if given is UNBOUND or isinstance(given, Varying):
            return
        if isinstance(given, Handle) and given.store.owner != DRIVER:
            if here:
                self.cross(instance.fragment, DRIVER, name, inside)
                given.move(self.home.keep(back.value(inside)))
            elif given.store is not instance.store:
                given.move(instance.store.keep(inside))
            return
        self.cross(instance.fragment, DRIVER, name, inside)
        back.value(inside)

    def cross(self, source: str, target: str, name: str, value: Any) -> None:
        """Count a crossing on its edge; without an edge nothing crosses."""
        if source == target:
            return
        edge = self.graph.edge(source, target, name)
        if edge is None:
            raise GraphError(
                f"the graph has no edge {source} → {target} for `{name}`, which the program needs; "
                f"edges there are: {self.edges_of(source, target)}"
            )
        edge.bytes += nbytes(value)

    def edges_of(self, source: str, target: str) -> str:
        found = [edge.value for edge in self.graph.edges if (edge.source, edge.target) == (source, target)]
        return ", ".join(found) or "none"

    # weights ---------------------------------------------------------------------------------------------------------

    def sync(self, instance: Instance) -> None:
        """Bring an actor's weights up to date; only if the learner has newer ones."""
        learner = self.learner
        if learner is None or learner.msrl.version == instance.version or not instance.weights:
            return
        start = perf_counter()
        if learner.fragment != instance.fragment:
            self.cross(learner.fragment, instance.fragment, "weights", learner.weights)
        instance.load_weights(learner.weights, learner.msrl.version)
        self.sync_seconds += perf_counter() - start


class Group:
    """A fragment as the driver sees it: its regions are methods."""

    def __init__(self, coordinator: Coordinator, fragment: str) -> None:
        self._coordinator, self._fragment = coordinator, fragment

    def __getattr__(self, region: str) -> Callable[..., Any]:
        return lambda **arguments: self._coordinator.call(self._fragment, region, arguments)


class DriverMSRL(MSRL):
    """`self.msrl` at the driver: fragments by name, and the calls that are the driver's own."""

    def __init__(self, coordinator: Coordinator, **parts: Any) -> None:
        super().__init__(**parts)
        self._coordinator = coordinator
        for name in coordinator.graph.fragments:
            setattr(self, name, Group(coordinator, name))

    def each_actor(self, function: Callable[..., Any], outputs: int, **inputs: Any) -> Any:
        """Run a per-actor statement at the driver, once per actor, in actor order."""
        coordinator = self._coordinator
        if coordinator.turn is not None:  # called from within one actor's turn: its values are plain already
            return function(**{name: self.fetch(value) for name, value in inputs.items()})
        results = []
        for index in range(coordinator.actors):
            memo: dict[int, Any] = {}
            own = {
                name: self.fetch(value[index]) if isinstance(value, Varying) else copied(self.fetch(value), memo)
                for name, value in inputs.items()
            }
            coordinator.turn = index
            try:
                results.append(function(**own))
            finally:
                coordinator.turn = None
        if outputs == 1:
            return Varying(results)
        if not outputs:
            return None
        return tuple(Varying(values) for values in zip(*results, strict=True))

    def fetch(self, value: Any) -> Any:
        """A copy to read of what a handle stands for; anything else as it is."""
        if isinstance(value, Varying):
            return Varying(self.fetch(item) for item in value)
        return value.read() if isinstance(value, Handle) else value

    def take(self, *values: Any) -> Any:
        """Bring objects to the driver, which is about to change them: all their names now mean the driver's objects."""
        memo: dict[Any, Any] = {}
        taken = []
        for value in values:
            if isinstance(value, Handle):
                if value.store is not self._coordinator.home:
                    value.move(self._coordinator.home.keep(copied(value.value, memo)))
                value = value.value
            taken.append(value)
        return taken[0] if len(taken) == 1 else tuple(taken)

    def _global(self, x: Any) -> Any:
        x = self.fetch(x)
        if self._coordinator.actors > 1 and not isinstance(x, Varying):
            return x
        return super()._global(x)


def _not_here(name: str) -> Callable[..., Any]:
    def call(self: DriverMSRL, *args: Any, **kwargs: Any) -> Any:
        raise GraphError(
            f"self.msrl.{name} was called at the driver, by code that the compiler could not see (through `self`, or a "
            f"method, passed on to a function?); call it in `train` or in a method of the trainer"
        )

    return call


for _operation in OPERATIONS.values():
    if _operation.component != "driver":
        setattr(DriverMSRL, _operation.name, _not_here(_operation.name))


def global_value(value: Any, envs: int) -> Any:
    """What is left of a value when the run is over: handles fetched, varying values joined where they can be."""
    if isinstance(value, Handle):
        return copied(value.value, {})
    if isinstance(value, Varying):
        items = [global_value(item, envs) for item in value]
        try:
            return join(items, envs)
        except Exception:  # a value of the user's own kind: one per actor
            return items
    if type(value) is tuple:
        return tuple(global_value(item, envs) for item in value)
    return value
