"""The coordinator: executes the graph.

State, all of it:
    graph       what may run and what may cross; every region call and every crossing is looked up in it
    engine      hosts the instances: one per logical actor for per-actor regions, one for the rest
    shelves     what stays in each instance and the driver has a handle to
    version     how often the learner has learned; actors get its weights when they have older ones
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
from fdg.graph import DRIVER, Graph, Region
from fdg.msrl import MSRL, PHASES
from fdg.runtime import trace
from fdg.runtime.engine import Engine
from fdg.runtime.instance import From, Here, InstanceKey, Kept, Out, Reply, Task, learned, modes
from fdg.runtime.values import (
    ATOMS,
    UNBOUND,
    Handle,
    Home,
    Return,
    Shelf,
    Tail,
    Unbound,
    Varying,
    copied,
    join,
    nbytes,
    reach,
    transparent,
)


class Count:
    """Frames and finished episodes of one actor's environments, as its reports tell them."""

    def __init__(self) -> None:
        self.frames = 0
        self.episodes: list[tuple[float, int]] = []

    def drain_episodes(self) -> list[tuple[float, int]]:
        episodes, self.episodes = self.episodes, []
        return episodes


class Coordinator:
    """Runs a graph's regions on an engine's instances."""

    def __init__(self, graph: Graph, engine: Engine, keys: list[InstanceKey], actors: int) -> None:
        self.graph, self.engine, self.actors = graph, engine, actors
        self.shelves = {key: self.shelf(key) for key in keys}
        self.home = Home()
        """Objects that fragments made and the driver has taken over."""
        self.calls: Counter[str] = Counter()
        self.counts = [Count() for _ in range(actors)]
        self.phases = dict.fromkeys(PHASES, 0.0)
        self.turn: int | None = None
        self.watch: Callable[[Any, Any], None] | None = None
        """Gets each edge on which something crosses between the driver and a fragment, and the value."""
        self.version = 0
        self.compiled = 0
        """Updates of the learner that compiled code made."""
        self.learners_draw = False
        """Whether one of several learners was seen to draw random numbers in `learn`."""
        self.known: dict[InstanceKey, int] = {}
        """The version of the weights that each instance has."""
        self.learner = next((name for name, part in graph.fragments.items() if "learner" in part.components), "")
        self.weight_bytes = 0
        self.environments = next((name for name, part in graph.fragments.items() if "env" in part.components), "")
        self.regions = {(region.fragment, region.name): region for region in graph.regions()}
        self.sent = {(edge.source, edge.value) for edge in graph.edges if DRIVER not in (edge.source, edge.target)}

    def shelf(self, key: InstanceKey) -> Shelf:
        return Shelf(key[0], lambda keys: self.engine.fetch(key, keys))

    # one region call -------------------------------------------------------------------------------------------------

    def call(self, fragment: str, name: str, arguments: dict[str, Any]) -> Any:
        region = self.regions.get((fragment, name))
        if region is None:
            raise GraphError(
                f"the driver calls {fragment}.{name}, which is not in the graph (regions: {self.names(fragment)})"
            )
        self.calls[f"{fragment}.{name}"] += 1
        inputs = {port.name: arguments[argument(port.name)] for port in region.inputs}
        company = set(region.company)
        if region.per != "actor":
            return self.run(region, [((fragment, "one", 0), inputs, set(inputs))], company)[0]
        indices = range(self.actors) if self.turn is None else [self.turn]
        own = {name for name, value in inputs.items() if isinstance(value, Varying)}
        alone = len(indices) == 1
        if alone:
            varying, lend = set(), set(inputs)
        else:
            # What all actors change alike must not change under those that have not begun yet.
            self.take(*(inputs[name] for name in region.restores if name not in own))
            # A number cannot be changed in place: one that all actors got is still one number.
            kept = {p.name for p in region.outputs if not p.bound and p.name not in own and plain(inputs[p.name])}
            varying = {port.name for port in region.outputs if port.varying} - kept
            # A global object that becomes varying here is nobody's any more.
            lend = set(inputs) - (varying - own)
            company &= lend
        calls = [
            (
                (fragment, "actor", index),
                {name: value[index] if name in own else value for name, value in inputs.items()},
                lend if index == indices[0] else lend & own,
            )
            for index in indices
        ]
        results = self.run(region, calls, company)
        if alone or not region.outputs:
            return results[0]
        if len(region.outputs) == 1:
            results = [(result,) for result in results]
        # What is global is the first actor's: it is the same for all.
        joined = tuple(
            Varying(values) if port.name in varying else values[0]
            for port, values in zip(region.outputs, zip(*results, strict=True), strict=True)
        )
        return joined[0] if len(joined) == 1 else joined

    def names(self, fragment: str) -> str:
        return ", ".join(name for owner, name in self.regions if owner == fragment) or "none"

    def run(
        self, region: Region, calls: list[tuple[InstanceKey, dict[str, Any], set[str]]], company: set[str]
    ) -> list[Any]:
        """Run a region on some instances: what each gets, and of what the driver's own objects come back changed.

        `company` are inputs that the region does not look at, and that stay where they are.
        """
        start = perf_counter()
        with trace.span(trace.DRIVER_ROW, trace.label(region) if trace.on() else "", "region"):
            if company and region.per == "actor":
                for key, inputs, _ in calls:
                    self.take(*self.with_company(region, self.shelves[key], inputs, company))
            tasks = [self.task(region, key, inputs, lend, company) for key, inputs, lend in calls]
            try:
                replies = self.engine.call(tasks)
            except Exception as error:
                self.version = learned(error)[0] or self.version
                raise
            self.account(tasks, replies, perf_counter() - start)
            return [
                self.finish(region, self.shelves[key], inputs, task, reply)
                for (key, inputs, _), task, reply in zip(calls, tasks, replies, strict=True)
            ]

    def with_company(self, region: Region, shelf: Shelf, inputs: dict[str, Any], company: set[str]) -> list[Handle]:
        """Objects that the region may change and that are with another instance, as is company of them: all of these.

        Objects in different places have no parts in common.
        """
        handles = {name: inputs[name] for name in region.restores if isinstance(inputs[name], Handle)}
        beside = {handle.shelf for name, handle in handles.items() if name in company} - {shelf, self.home}
        beside &= {handle.shelf for name, handle in handles.items() if name not in company}
        return [handle for handle in handles.values() if handle.shelf in beside]

    def apart(self, region: Region, shelf: Shelf, inputs: dict[str, Any], company: set[str]) -> set[str]:
        """The company that stays where it is and does not enter.

        At the driver a change of one object is a change of all that share parts with it, since it is made in place;
        unless an object that may be changed hides what it consists of. What the instance has enters at no cost.
        """
        if not company or self.with_company(region, shelf, inputs, company):
            return set()
        changed = self.parts_of(inputs, set(region.restores) - company - set(region.appends))
        if not all(map(transparent, changed.values())):
            return set()
        return {name for name in company if not (isinstance(inputs[name], Handle) and inputs[name].shelf is shelf)}

    def tails(self, region: Region, inputs: dict[str, Any], lend: set[str], entering: set[str]) -> dict[str, list[Any]]:
        """Lists of the driver's that a region only appends to, and to which no other input leads: it gets empty ones."""
        lists = {name: self.own_object(inputs[name]) for name in region.appends if name in lend}
        lists = {name: value for name, value in lists.items() if type(value) is list}
        others = self.parts_of(inputs, entering - set(lists)) if lists else {}
        if not all(map(transparent, others.values())):
            return {}
        empty: dict[int, list[Any]] = {}  # one for all names of a list
        return {name: empty.setdefault(id(value), []) for name, value in lists.items() if id(value) not in others}

    def own_object(self, value: Any) -> Any:
        """A value, or the driver's object that a handle stands for."""
        return value.read() if isinstance(value, Handle) and value.at_driver else value

    def parts_of(self, inputs: dict[str, Any], names: set[str]) -> dict[int, Any]:
        """The driver's objects that some inputs consist of."""
        found: dict[int, Any] = {}
        for name in names:
            values = inputs[name] if isinstance(inputs[name], Varying) else [inputs[name]]
            for value in values:
                if self.is_drivers(value):
                    reach(self.own_object(value), found)
        return found

    def task(self, region: Region, key: InstanceKey, inputs: dict[str, Any], lend: set[str], company: set[str]) -> Task:
        """What an instance is asked to do."""
        lent: dict[int, Any] = {}
        apart = self.apart(region, self.shelves[key], inputs, company)
        may_return = lend = lend - apart
        values = {name: UNBOUND if name in apart else value for name, value in inputs.items()}
        values.update(self.tails(region, inputs, lend, set(inputs) - apart))
        brought: dict[int, dict[int, int]] = {}
        for value in values.values():
            self.note_foreign(self.shelves[key], value, brought)
        entering = {
            argument(name): self.enter(key, name, value, lent if name in lend else {}, brought)
            for name, value in values.items()
        }
        if not lent:
            lend = set()
        # Objects that share parts live in one place: where one of them is the driver's, all become the driver's.
        here = any(self.is_drivers(inputs[name]) for name in region.restores if name in lend)
        restores = []
        for name in region.restores:
            given = inputs[name]
            if name not in may_return or given is UNBOUND or isinstance(given, Varying):
                continue
            if isinstance(given, Handle) and not given.at_driver:
                if here or given.shelf is not self.shelves[key]:
                    restores.append((argument(name), here))
            else:
                restores.append((argument(name), True))
        returning = {name for name, wanted in restores if wanted}
        outputs = tuple(
            Out(
                port.name,
                "apart" if port.name in apart else port.how,
                port.plain,
                any(
                    (name in lend and self.is_drivers(inputs[name])) or argument(name) in returning
                    for name in region.shares.get(port.name, ())
                ),
                (region.fragment, port.name) in self.sent,
            )
            for port in region.outputs
        )
        shelf = self.shelves[key]
        shelf.epoch += 1
        return Task(
            key,
            region.name,
            entering,
            outputs,
            tuple(restores),
            list(lent.values()),
            bool(lent),
            self.weights_for(key, region),
            shelf.take_released(),
            modes(),
        )

    def note_foreign(self, shelf: Shelf, value: Any, brought: dict[int, dict[int, int]]) -> None:
        """Objects that have to be brought from other instances: those of one source come in one message."""
        if isinstance(value, Varying):
            for item in value:
                self.note_foreign(shelf, item, brought)
        elif isinstance(value, Handle) and not value.at_driver and value.shelf is not shelf:
            keys = brought.setdefault(id(value.shelf), {})
            keys.setdefault(value.key, len(keys))

    def enter(self, key: InstanceKey, name: str, value: Any, lent: dict[int, Any], brought: dict[int, Any]) -> Any:
        """A value on its way into an instance: resident already, or over an edge."""
        if value is UNBOUND:
            return value
        if isinstance(value, Varying):
            return Varying(self.enter(key, name, item, lent, brought) for item in value)
        if isinstance(value, Handle) and not value.at_driver:
            if value.shelf is self.shelves[key]:
                return Here(value.key)
            self.edge(value.shelf.owner, key[0], name)
            source = next(found for found, shelf in self.shelves.items() if shelf is value.shelf)
            keys = brought[id(value.shelf)]
            return From(source, tuple(keys), keys[value.key])
        if isinstance(value, Handle):
            value = value.read()
        self.cross(DRIVER, key[0], name, value)
        reach(value, lent)
        return value

    def finish(self, region: Region, shelf: Shelf, given: dict[str, Any], task: Task, reply: Reply) -> Any:
        """Take back what a region left: the driver's objects change as their copies did, handles move."""
        for port in region.inputs:
            if argument(port.name) in reply.bytes:
                self.count(region.fragment, port.name, given[port.name], reply.bytes[argument(port.name)])
        tails = {id(task.inputs[argument(name)]): self.own_object(given[name]) for name in region.appends}
        back = Return(
            (Tail(tails[id(old)]) if tails.get(id(old), old) is not old else old, new)
            for old, new in zip(task.lent, reply.lent, strict=False)
        )
        own = back.value if reply.lent else _itself
        for name in region.restores:
            inside = argument(name)
            if inside in reply.restored:
                value = own(reply.restored[inside])
                self.cross(shelf.owner, DRIVER, name, reply.restored[inside])
                if isinstance(given[name], Handle) and not given[name].at_driver:
                    given[name].move(self.home.keep(value))
            elif inside in reply.moved:
                given[name].move(shelf.handle(reply.moved[inside]))
        outputs: list[Any] = []
        for out, port, value in zip(task.outputs, region.outputs, reply.outputs, strict=True):
            if out.how == "apart":
                outputs.append(given[port.name])
            elif isinstance(value, Kept):
                handle = shelf.handle(value.key)
                if value.copy is not UNBOUND:
                    self.cross(shelf.owner, DRIVER, port.name, value.copy)
                    handle.cached = (shelf.epoch, value.copy)
                outputs.append(handle)
            elif value is UNBOUND:
                outputs.append(value)
            else:
                if value is not reply.restored.get(argument(port.name), UNBOUND):  # counted above
                    self.cross(shelf.owner, DRIVER, port.name, value)
                outputs.append(own(value))
        return outputs[0] if len(outputs) == 1 else tuple(outputs) or None

    def take(self, *values: Any) -> Any:
        """Bring objects to the driver: the objects, and all handles to them, are the driver's from now on."""
        home = self.home
        shelves: dict[Shelf, list[Handle]] = {}
        for value in values:
            if isinstance(value, Handle) and value.shelf is not home:
                shelves.setdefault(value.shelf, []).append(value)
        for shelf, handles in shelves.items():
            keys = tuple(dict.fromkeys(handle.key for handle in handles))
            values_by_key = dict(zip(keys, shelf.fetch(keys), strict=True))
            for handle in handles:
                if handle.shelf is shelf:
                    handle.move(home.keep(values_by_key[handle.key]))
        taken = [value.read() if isinstance(value, Handle) else value for value in values]
        return taken[0] if len(taken) == 1 else tuple(taken)

    def is_drivers(self, value: Any) -> bool:
        """Whether a value is an object that lives at the driver."""
        if isinstance(value, Handle):
            return value.at_driver
        return not isinstance(value, (*ATOMS, Varying)) and value is not UNBOUND

    def account(self, tasks: list[Task], replies: list[Reply], seconds: float) -> None:
        """Count frames, episodes and time. Places work side by side: what counts is the one that took longest."""
        places: dict[int, Counter[str]] = {}
        for task, reply in zip(tasks, replies, strict=True):
            report = reply.report
            places.setdefault(self.engine.place(task.instance), Counter()).update(report["phases"])
            if "frames" in report:
                count = self.counts[task.instance[2]]
                count.frames = report["frames"]
                count.episodes += report["episodes"]
            if task.instance[:2] == (self.learner, "one"):
                self.version = report["version"]
                self.compiled = report.get("compiled", 0)
            self.learners_draw = self.learners_draw or report.get("draws", False)
            if report.get("reduced"):
                edge = self.graph.edge(self.learner, self.learner, "gradients")
                if edge is None:
                    raise GraphError(
                        f"the graph has no edge {self.learner} → {self.learner} for `gradients`, which its replicas need"
                    )
                edge.bytes += report["reduced"]
        longest = max(places.values(), key=lambda phases: sum(phases.values()))
        for phase, spent in longest.items():
            self.phases[phase] += spent
        if self.engine.name != "inprocess":
            self.phases["sync"] += max(seconds - sum(longest.values()), 0.0)

    # edges -----------------------------------------------------------------------------------------------------------

    def edge(self, source: str, target: str, name: str) -> Any:
        """The edge that carries a value; without an edge nothing crosses."""
        if source == target:
            return None
        edge = self.graph.edge(source, target, name)
        if edge is None:
            raise GraphError(
                f"the graph has no edge {source} → {target} for `{name}`, which the program needs; "
                f"edges there are: {self.edges_of(source, target)}"
            )
        return edge

    def cross(self, source: str, target: str, name: str, value: Any) -> None:
        """Count a crossing on its edge."""
        edge = self.edge(source, target, name)
        if edge is not None:
            edge.bytes += nbytes(value)
            if self.watch is not None:
                self.watch(edge, value)

    def count(self, target: str, name: str, given: Any, size: int) -> None:
        """Count what an instance got from others."""
        owners = {
            item.shelf.owner for item in (given if isinstance(given, Varying) else [given]) if isinstance(item, Handle)
        }
        for owner in owners - {DRIVER}:
            edge = self.graph.edge(owner, target, name) if owner == target else self.edge(owner, target, name)
            if edge is not None:
                edge.bytes += size // len(owners)

    def edges_of(self, source: str, target: str) -> str:
        found = [edge.value for edge in self.graph.edges if (edge.source, edge.target) == (source, target)]
        return ", ".join(found) or "none"

    # checkpoints -----------------------------------------------------------------------------------------------------

    def fetched(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values with copies of what handles stand for; what is one object stays one."""
        wanted: dict[Shelf, dict[int, Any]] = {}

        def note(value: Any) -> None:
            if isinstance(value, Varying):
                for item in value:
                    note(item)
            elif isinstance(value, Handle):
                wanted.setdefault(value.shelf, {})[value.key] = None

        def found(value: Any) -> Any:
            if isinstance(value, Varying):
                return Varying(found(item) for item in value)
            return wanted[value.shelf][value.key] if isinstance(value, Handle) else value

        for value in values.values():
            note(value)
        for shelf, keys in wanted.items():
            keys.update(zip(keys, shelf.fetch(tuple(keys)), strict=True))
        return {name: found(value) for name, value in values.items()}

    def settled(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values of a checkpoint, each where this graph has it: with a fragment, behind a handle, or at the driver."""
        places: dict[InstanceKey, list[tuple[str, int]]] = {}
        settled = {name: Varying(value) if isinstance(value, Varying) else value for name, value in values.items()}
        for name, value in values.items():
            items = value if isinstance(value, Varying) else [value]
            for index, item in enumerate(items):
                key = self.owner_of(name, index, isinstance(value, Varying))
                if key is not None and not isinstance(item, ATOMS) and item is not UNBOUND:
                    places.setdefault(key, []).append((name, index))
        for key, names in places.items():
            objects = tuple(values[n][i] if isinstance(values[n], Varying) else values[n] for n, i in names)
            for (name, index), stored in zip(names, self.engine.put(key, objects), strict=True):
                handle = self.shelves[key].handle(stored)
                if isinstance(settled[name], Varying):
                    settled[name][index] = handle
                else:
                    settled[name] = handle
        return settled

    def owner_of(self, name: str, index: int, varying: bool) -> InstanceKey | None:
        """The instance from which all who use a variable can get it; None for the driver."""
        users = [region for region in self.graph.regions() if any(port.name == name for port in region.inputs)]
        if all(self.graph.edge(DRIVER, region.fragment, name) is not None for region in users):
            return None
        for owner in users:
            others = {region.fragment for region in users} - {owner.fragment}
            if all(self.graph.edge(owner.fragment, other, name) is not None for other in others):
                per_actor = owner.per == "actor" and (varying or self.actors == 1)
                return (owner.fragment, "actor", index) if per_actor else (owner.fragment, "one", 0)
        return None

    def weights_for(self, key: InstanceKey, region: Region) -> int | None:
        """The version of the weights that a region must see: an actor's are brought up to date if they are older."""
        if "agent_act" not in region.calls or not self.learner:
            return None
        if self.known.get(key, 0) != self.version and self.weight_bytes:
            edge = self.edge(self.learner, key[0], "weights")
            if edge is not None:
                edge.bytes += self.weight_bytes
            self.known[key] = self.version
        return self.version


def _itself(value: Any) -> Any:
    return value


def plain(value: Any) -> bool:
    """Whether a value is no object that anyone could change."""
    return isinstance(value, (Unbound, *ATOMS))


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

    def each_actor(self, function: Callable[..., Any], outputs: int, alike: tuple[int, ...] = (), **inputs: Any) -> Any:
        """Run a per-actor statement at the driver, once per actor, in actor order; `alike`: outputs that are global."""
        coordinator = self._coordinator
        if coordinator.turn is not None:  # called from within one actor's turn: its values are plain already
            return function(**inputs)
        results: list[Any] = []
        memos: list[dict[Any, Any]] = []
        for index in range(coordinator.actors):
            memo: dict[Any, Any] = {}
            memos.append(memo)
            own = {
                name: value[index] if isinstance(value, Varying) else copied(self.fetch(value), memo)
                for name, value in inputs.items()
            }
            coordinator.turn = index
            try:
                results.append(function(**own))
            finally:
                coordinator.turn = None
        if not outputs:
            return None
        columns = [results] if outputs == 1 else list(zip(*results, strict=True))
        # What is global is the first actor's, and the driver's own object again: it is the same for all.
        back = Return(pair for key, pair in memos[0].items() if isinstance(key, int))
        joined = [back.value(each[0]) if at in alike else Varying(each) for at, each in enumerate(columns)]
        return joined[0] if outputs == 1 else tuple(joined)

    def per_actor(self, values: dict[str, Any]) -> Any:
        """Give each actor its own of some global objects; what is one object stays one."""
        coordinator = self._coordinator
        wanted = {name: value for name, value in values.items() if not isinstance(value, Varying) and not plain(value)}
        if wanted and coordinator.turn is None:
            taken = coordinator.take(*wanted.values())
            objects = taken if len(wanted) > 1 else (taken,)
            values = values | {name: Varying() for name in wanted}
            for index in range(coordinator.actors):
                key = (coordinator.environments, "actor", index)
                for name, item in zip(wanted, objects, strict=True):
                    coordinator.cross(DRIVER, coordinator.environments, name, item)
                for name, stored in zip(wanted, coordinator.engine.put(key, objects), strict=True):
                    values[name].append(coordinator.shelves[key].handle(stored))
        results = tuple(values.values())
        return results[0] if len(results) == 1 else results

    def fetch(self, value: Any) -> Any:
        """A copy to read of what a handle stands for; anything else as it is."""
        if isinstance(value, Varying):
            return Varying(self.fetch(item) for item in value)
        return value.read() if isinstance(value, Handle) else value

    def take(self, *values: Any) -> Any:
        """Bring objects to the driver, which is about to change them: all their names now mean the driver's objects."""
        return self._coordinator.take(*values)

    def settle(self, *values: Any) -> None:
        """Objects that may share parts move to the driver, unless all the names mean one object."""
        if any(isinstance(value, Varying) for value in values):
            for index in range(self._coordinator.actors):
                self.settle(*(value[index] if isinstance(value, Varying) else value for value in values))
            return
        handles = {id(value): value for value in values if isinstance(value, Handle)}
        if len(handles) > 1:
            self.take(*handles.values())

    def _entries(self, x: Any) -> Any:
        return super()._entries(self.fetch(x))

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
        return copied(value.read(), {}) if value.at_driver else value.read()
    if isinstance(value, Varying):
        items = [global_value(item, envs) for item in value]
        try:
            return join(items, envs)
        except Exception:  # a value of the user's own kind: one per actor
            return items
    if type(value) is tuple:
        return tuple(global_value(item, envs) for item in value)
    return value
